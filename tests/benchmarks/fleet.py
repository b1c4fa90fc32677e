"""The command `fleet`: one and two real replicas under Poisson arrivals at several loads, beside
what `python tests/simulation fleet` expects of the same requests.

A replica is the embedded target alone on a core of its own; the client and the coordinator share
these cores. Rounds cost in the simulation what they cost in the run, as their records say, since
the machine is not as fast from one second to the next; what reading so many rows costs is measured
by requests that come alone between the loads. The same requests come several times, so that it is
known by how much two real runs differ.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import permutations
from statistics import fmean, median
from typing import Any

import click
import numpy as np

from benchmarks.coupling import PROMPTS
from benchmarks.options import Command, Numbers, option, options, pin, report
from benchmarks.targets import running
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.console.terminal import note, print_table
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Emitted, Finished, Recorded, Result, RoundRecord
from dovetail.runtime.client import Client
from simulation.fleet.arrivals import Requests
from simulation.fleet.layout import Kind, Plan
from simulation.fleet.profile import Profile, of_rounds
from simulation.fleet.results import play_load
from support.inflated import models_at

TOLERANCE = 0.1
FIGURES = ("tokens_per_s", "first_p50", "first_p90", "latency_p50", "latency_p90", "latency_p99")
PATIENCE_S = 60.0
LEAST_TOKENS, MOST_TOKENS = 24, 96
"""Tokens of replies are spread evenly between these."""
PROMPT, REPLY = 24.0, (LEAST_TOKENS + MOST_TOKENS) / 2
"""Tokens of a shipped prompt, about, and of a reply."""
BURST = 8
"""Streams of a replica by which it is known how many requests it can answer."""
LONE_WORDS, LONE_TOKENS = (1, 4, 8, 12, 18, 26, 36, 50) * 2, 8
"""Words of the prompts of requests that come alone, and the tokens of each reply."""
APART_S = 2.0
"""Simulated seconds from one of these to the next."""
MOST = 64
"""Sessions that a replica has room for; more do not come."""
ROUND = ("verify_ns", "transport_ns", "queue_ns", "coordinator_ns")
"""The parts of a round without a draft."""
FEW = 5
"""Rounds of so many sessions below which nothing is said of them."""


@dataclass
class Asked:
    """A request as it went, in seconds since the first one might have come."""

    at_s: float
    first_s: float = 0.0
    done_s: float = 0.0
    prompt: int = 0
    tokens: int = 0
    text: str = ""
    result: Result = field(init=False)
    rounds: list[tuple[float, RoundRecord]] = field(default_factory=list)
    """With the time at which each was told."""


@dataclass(frozen=True)
class Costs:
    """Seconds of requests that come alone."""

    round_s: float
    passes_s: Mapping[int, float]
    """Seconds of passes by their rows."""
    begin_s: float
    """Before the first token, beside reading."""

    @classmethod
    def of(cls, lone: Sequence["Asked"]) -> "Costs":
        results = [one.result for one in lone]
        round_s = fmean((one.done_s - one.first_s) / (one.tokens - 1) for one in lone)
        first_row_s = fmean(result.verify_s / result.rounds for result in results)
        read = {one.prompt: list[float]() for one in lone}
        for one in lone:
            read[one.prompt].append(one.result.prefill_s)
        passes_s = {1: first_row_s, **{rows: fmean(each) for rows, each in read.items()}}
        before_s = fmean(one.first_s - one.at_s - one.result.prefill_s for one in lone)
        return cls(round_s, passes_s, before_s - (round_s - first_row_s))

    def profile(
        self, rounds_s: Mapping[int, float], *, most: int = MOST, spread: float = 0.0
    ) -> Profile:
        """Return the profile of a replica whose rounds took so long by its sessions; its passes are
        taken to be as much slower than those of lone requests as rounds of the fewest sessions."""
        pace = rounds_s[min(rounds_s)] / self.round_s
        return of_rounds(
            rounds_s,
            {rows: pace * seconds for rows, seconds in self.passes_s.items()},
            most=most,
            open_s=pace * (self.round_s - self.passes_s[1]),
            spread=spread,
        )


@dataclass(frozen=True)
class Pair:
    """The figures of a load and of its simulation, and the rounds that this went by."""

    requests: int
    rounds_s: Mapping[int, float]
    spread: float
    measured: Mapping[str, float]
    simulated: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """A load as it went, behind some requests that came alone."""

    lone: Sequence[Asked]
    load: Sequence[Asked]
    rounds_s: Mapping[int, float]
    """The mean seconds of a round of the load by the sessions of a replica."""
    spread: float
    """The variance of these seconds with as many sessions, over the square of their mean."""

    def pair(self, costs: Costs, count: int) -> Pair:
        """Play the same requests on `count` replicas, and return the figures of both sides."""
        every, profile = [*self.lone, *self.load], costs.profile(self.rounds_s, spread=self.spread)
        lone_s = APART_S * np.arange(len(self.lone))
        load_s = APART_S * len(self.lone) + np.array([one.at_s for one in self.load])
        requests = Requests(
            np.concatenate([lone_s, load_s]),
            np.array([one.prompt for one in every]),
            np.array([one.tokens for one in every]),
            np.zeros(len(every), int),
        )
        kind = Kind("core", count, profile, profile, 0.0, 0.0)
        plan = Plan(count, 1, 1 << 16, 1 << 16, 0.0, 0.0, (1.0, 1.0), begin_s=costs.begin_s)
        played = play_load([kind], plan, requests, load=1.0, seconds=1.0).played
        simulated = [
            Asked(one.asked_s, one.first_s, at_s, one.prompt, one.reply)
            for one, at_s in played.done
            if one.number >= len(self.lone)
        ]
        return Pair(
            len(self.load), self.rounds_s, self.spread, figures(self.load), figures(simulated)
        )


@click.command(cls=Command)
@option("--inflate", default="128MiB", help="Size to which the targets are inflated.")
@option("--replicas", type=Numbers(), default="1,2", help="Targets, one a core.")
@option("--loads", default="0.3,0.5,0.7", help="Shares of what the replicas can answer.")
@option(
    "--seconds", type=click.IntRange(min=5), default=10, help="Seconds of requests at each load."
)
@option("--turns", type=click.IntRange(min=2), default=3, help="Times that loads take turns.")
@option("--seed", type=int, default=1)
@options("json")
def fleet(
    inflate: str,
    replicas: Sequence[int],
    loads: str,
    seconds: int,
    turns: int,
    seed: int,
    as_json: bool,
) -> None:
    """Throughput and latencies of real replicas beside those that are simulated; exit code 1 if a
    figure is off by more than a tenth."""
    cores = pin(2)
    texts = [prompt.turns[0] for prompt in read_prompt_set(PROMPTS, None).prompts]
    values = {**models_at(inflate, "none"), "target.threads": 1}
    shares, rows = [*map(float, loads.split(","))], []
    for count in replicas:
        found: dict[float, list[Run]] = {load: [] for load in shares}
        with running(values, cores, count) as client:
            runs = Runs(client, texts)
            burst = runs.run([Asked(0.0, tokens=MOST_TOKENS) for _ in range(BURST * count)])
            full = Costs.of(burst.lone).profile(burst.rounds_s, most=BURST)
            most = count * full.requests_per_s(PROMPT, REPLY)
            for _ in range(turns):
                for load in shares:
                    found[load].append(runs.run(drawn(load * most, seconds, seed)))
        costs = Costs.of([one for its in found.values() for run in its for one in run.lone])
        for load, its in found.items():
            rows.append(row(count, load, [run.pair(costs, count) for run in its]))
            rows[-1]["costs"] = asdict(costs)
            note(f"{count} at {load:g}: off by at most {worst(rows[-1]):.0%}")
    holds = all(worst(row) <= TOLERANCE for row in rows)
    report({"inflate": inflate, "rows": rows, "holds": holds}, as_json, lambda: show(rows))
    raise SystemExit(not holds)


def drawn(rate: float, seconds: int, seed: int) -> list[Asked]:
    """Draw requests, at least one, that come at a rate a second."""
    random = np.random.default_rng(seed)
    at_s = np.cumsum(random.exponential(1.0 / rate, max(1, int(rate * seconds))))
    tokens = random.integers(LEAST_TOKENS, MOST_TOKENS + 1, len(at_s))
    return [Asked(float(at), tokens=int(n)) for at, n in zip(at_s, tokens, strict=True)]


class Runs:
    """Has requests answered at their times."""

    def __init__(self, client: Client, texts: Sequence[str]) -> None:
        self._client, self._texts = client, texts
        self._words = " ".join(texts).split()

    def run(self, load: Sequence[Asked]) -> Run:
        """Have requests answered, behind some that come alone."""
        lone = [
            Asked(0.0, tokens=LONE_TOKENS, text=" ".join(self._words[:words]))
            for words in LONE_WORDS
        ]
        for one in lone:
            self._ask([one])
        for number, one in enumerate(load):
            one.text = self._texts[number % len(self._texts)]
        self._ask(load)
        return Run(lone, load, *mean_rounds(load))

    def _ask(self, requests: Sequence[Asked]) -> None:
        """Ask requests at their times, and note when they were answered."""
        by_number: dict[int, Asked] = {}
        left, began_s = list(requests), time.perf_counter()
        open_ = len(left)
        while open_:
            now_s = time.perf_counter() - began_s
            while left and left[0].at_s <= now_s:
                one = left.pop(0)
                one.at_s = now_s
                by_number[self._submit(len(by_number), one)] = one
            until_s = max(0.0, left[0].at_s - now_s) if left else PATIENCE_S
            reply = self._client.receive(until_s)
            now_s = time.perf_counter() - began_s
            match reply:
                case Emitted():
                    one = by_number[reply.request]
                    one.first_s = one.first_s or now_s
                case Finished(result=result):
                    one, open_ = by_number[reply.request], open_ - 1
                    one.done_s, one.result = now_s, result
                    one.prompt, one.tokens = result.prompt_tokens, result.completion_tokens
                case Recorded():
                    by_number[reply.request].rounds.append((now_s, reply.record))
                case None if left:
                    pass
                case _:
                    raise UserError(f"a request failed: {reply}")

    def _submit(self, number: int, one: Asked) -> int:
        return self._client.submit(
            turns=[one.text],
            max_tokens=one.tokens,
            seed=number,
            end=(),
            speculate=False,
            record=True,
        )


def mean_rounds(requests: Sequence[Asked]) -> tuple[Mapping[int, float], float]:
    """Return the mean seconds of a round by the sessions of a replica, as far as it read no prompt
    meanwhile, and the variance over the square of the mean: sessions whose pass took as many
    nanoseconds shared it."""
    passes: dict[int, list[tuple[int, float, float]]] = {}
    for number, one in enumerate(requests):
        for told_s, record in one.rounds:
            took_s = sum(getattr(record, part) for part in ROUND) / 1e9
            passes.setdefault(record.verify_ns, []).append((number, told_s, took_s))
    beside = [{number for number, *_ in passes[one.rounds[0][1].verify_ns]} for one in requests]
    found: dict[int, list[float]] = {}
    for shared in passes.values():
        there = {number for number, *_ in shared}
        until_s, took_s = max(told_s for _, told_s, _ in shared), fmean(s for *_, s in shared)
        reads = any(
            one.at_s < until_s and until_s - took_s < one.first_s and not there.isdisjoint(others)
            for one, others in zip(requests, beside, strict=True)
        )
        if not reads:
            found.setdefault(len(there), []).append(took_s)
    known = {number: each for number, each in found.items() if len(each) >= FEW}
    means = {number: fmean(each) for number, each in known.items()}
    spread = fmean((s / means[number] - 1.0) ** 2 for number, each in known.items() for s in each)
    return means, spread


def figures(requests: Sequence[Asked]) -> dict[str, float]:
    first = np.array([one.first_s - one.at_s for one in requests])
    whole = np.array([one.done_s - one.at_s for one in requests])
    span_s = max(one.done_s for one in requests) - min(one.at_s for one in requests)
    return {
        "tokens_per_s": sum(one.tokens for one in requests) / span_s,
        **{f"first_p{p}": float(np.percentile(first, p)) for p in (50, 90)},
        **{f"latency_p{p}": float(np.percentile(whole, p)) for p in (50, 90, 99)},
    }


def row(count: int, load: float, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return what came of a load: the medians of the turns, and by how much two turns with the same
    requests differ."""
    return {
        "replicas": count,
        "load": load,
        "requests": pairs[0].requests,
        "measured": {name: median(one.measured[name] for one in pairs) for name in FIGURES},
        "off": {
            name: median(one.simulated[name] / one.measured[name] - 1.0 for one in pairs)
            for name in FIGURES
        },
        "apart": {
            name: median(
                abs(one.measured[name] / other.measured[name] - 1.0)
                for one, other in permutations(pairs, 2)
            )
            for name in FIGURES
        },
        "pairs": [asdict(one) for one in pairs],
    }


def worst(row: Mapping[str, Any]) -> float:
    return max(map(abs, row["off"].values()))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what was measured, by how much it was simulated otherwise, and by how much two
    measurements differ."""
    lines = [
        (
            row["replicas"],
            row["load"],
            row["requests"],
            *(
                f"{row['measured'][name]:.3g} {row['off'][name]:+.1%} ({row['apart'][name]:.1%})"
                for name in FIGURES
            ),
            "yes" if worst(row) <= TOLERANCE else "NO",
        )
        for row in rows
    ]
    print_table(("replicas", "load", "requests", *FIGURES, f"within {TOLERANCE:.0%}"), lines)
