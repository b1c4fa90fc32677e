"""The command `fleet`: one and two real replicas under Poisson arrivals at several loads, beside
what `dovetail simulate fleet` expects of the same requests, by a profile that was measured just
before.

A replica is the embedded target alone on a core of its own; the client and the coordinator share
these cores. The profile holds the tokens a second of a session beside 0, 1, ... others, and what a
request takes before its first token.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import click
import numpy as np

from benchmarks.coupling import PROMPTS
from benchmarks.loads import PLAIN, Streams
from benchmarks.options import Command, Numbers, option, options, pin, report
from benchmarks.targets import running
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.simulation.fleet.arrivals import Requests
from dovetail.launch.simulation.fleet.layout import Kind, Plan
from dovetail.launch.simulation.fleet.profile import Profile, of_rates
from dovetail.launch.simulation.fleet.results import play_load
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Emitted, Finished, Result
from dovetail.runtime.client import Client

TOLERANCE = 0.1
FIGURES = ("tokens_per_s", "first_p50", "first_p90", "latency_p50", "latency_p90", "latency_p99")
PATIENCE_S = 60.0
LEAST_TOKENS, MOST_TOKENS = 24, 96
"""Tokens of replies are spread evenly between these."""
PROMPT = 24.0
"""Tokens of a shipped prompt, about."""
LONE, LONE_TOKENS = 12, 16
"""Requests that are asked one after the other, and their tokens."""


@dataclass
class Asked:
    """A request as it went."""

    at_s: float
    first_s: float = 0.0
    done_s: float = 0.0
    prompt: int = 0
    tokens: int = 0
    read_s: float = 0.0
    """Seconds of its prompt; `token_s`: of each token after the first."""
    token_s: float = 0.0


@click.command(cls=Command)
@option("--inflate", default="128MiB", help="Size to which the targets are inflated.")
@option("--replicas", type=Numbers(), default="1,2", help="Targets, one a core.")
@option("--loads", default="0.3,0.5,0.7", help="Shares of what the profile can answer.")
@option(
    "--seconds", type=click.IntRange(min=5), default=20, help="Seconds of requests at each load."
)
@option("--sessions", type=Numbers(), default="1,2,4,8", help="Sessions of the profile.")
@option("--seed", type=int, default=1)
@options("json")
def fleet(
    inflate: str,
    replicas: Sequence[int],
    loads: str,
    seconds: int,
    sessions: Sequence[int],
    seed: int,
    as_json: bool,
) -> None:
    """Throughput and latencies of real replicas beside those that are simulated; exit code 1 if a
    figure is off by more than a tenth."""
    cores = pin(2)
    texts = [prompt.turns[0] for prompt in read_prompt_set(PROMPTS, None).prompts]
    values = {"target.inflate": inflate, "draft.kind": "none", "target.threads": 1}
    rows = []
    for count in replicas:
        with running(values, cores, count) as client:
            before = measured(client, texts, count, sessions)
            reals = [
                (load, asked(client, texts, drawn(before[0], count, load, seconds, seed)))
                for load in map(float, loads.split(","))
            ]
            profile, shared = mean(before, measured(client, texts, count, sessions))
        for load, real in reals:
            rows.append(beside(profile, shared, load, real, count))
            note(f"{count} at {load:g}: off by at most {worst(rows[-1]):.0%}")
    report({"inflate": inflate, "rows": rows}, as_json, lambda: show(rows))
    raise SystemExit(0 if all(worst(row) <= TOLERANCE for row in rows) else 1)


def measured(
    client: Client, texts: Sequence[str], count: int, sessions: Sequence[int]
) -> tuple[Profile, float]:
    """Measure the profile of one of `count` replicas while all of them are equally busy; and by how
    much that is slower than while the others are idle."""
    streams = Streams(client, texts, MOST_TOKENS, 0.0)
    streams.run(PLAIN, count, 0)  # warms up
    rates = {}
    for number in sessions:
        bursts = [streams.run(PLAIN, number * count, turn) for turn in range(3)]
        results = [result for burst in bursts for result in burst.results]
        rates[number] = 1.0 / float(np.mean([*map(token_s, results)]))
    lone = [Asked(0.3 * number, tokens=LONE_TOKENS) for number in range(LONE)]
    asked(client, texts, lone)
    read_s = sum(one.read_s for one in lone) / sum(one.prompt for one in lone)
    first_s = median(one.first_s - one.at_s - one.read_s for one in lone)
    one_s = float(np.mean([one.token_s for one in lone]))
    beside = max(1.0, 1.0 / (rates[1] * one_s)) if count > 1 else 1.0
    alone = {number: rate * beside for number, rate in rates.items()}
    profile = of_rates(alone, tau=1.0, host_s=0.0, read_s=read_s, first_s=first_s)
    note(
        f"a session has {', '.join(f'{rate:.1f}' for rate in rates.values())} tokens/s beside "
        f"{', '.join(str(n - 1) for n in rates)} others; a token of a prompt takes "
        f"{1e3 * read_s:.2f} ms, a request {1e3 * first_s:.1f} ms more"
    )
    return profile, beside


def mean(*found: tuple[Profile, float]) -> tuple[Profile, float]:
    """Return the mean of what was measured before and after a load: the machine is not always as
    fast."""
    profiles, shared = zip(*found, strict=True)
    rates = tuple(map(fmean, zip(*(profile.rates for profile in profiles), strict=True)))
    one = Profile(
        rates,
        rates,
        0.0,
        fmean(profile.read_s for profile in profiles),
        fmean(profile.first_s for profile in profiles),
    )
    return one, fmean(shared)


def token_s(result: Result) -> float:
    """Return the seconds of a token after the first."""
    return (result.wall_s - result.time_to_first_token_s) / (result.completion_tokens - 1)


def drawn(profile: Profile, count: int, load: float, seconds: int, seed: int) -> list[Asked]:
    """Draw requests that come at a share of the most that the replicas could answer."""
    random = np.random.default_rng(seed)
    rate = load * count * profile.requests_per_s(PROMPT, (LEAST_TOKENS + MOST_TOKENS) / 2)
    at_s = np.cumsum(random.exponential(1.0 / rate, int(rate * seconds)))
    tokens = random.integers(LEAST_TOKENS, MOST_TOKENS + 1, len(at_s))
    return [Asked(float(at), tokens=int(n)) for at, n in zip(at_s, tokens, strict=True)]


def asked(client: Client, texts: Sequence[str], requests: Sequence[Asked]) -> Sequence[Asked]:
    """Ask them at their times, and note when they were answered."""
    by_number: dict[int, Asked] = {}
    left, began_s = list(requests), time.perf_counter()
    open_ = len(left)
    while open_:
        now_s = time.perf_counter() - began_s
        while left and left[0].at_s <= now_s:
            one = left.pop(0)
            one.at_s = now_s
            number = client.submit(
                turns=[texts[len(by_number) % len(texts)]],
                max_tokens=one.tokens,
                seed=len(by_number),
                end=(),
                speculate=False,
            )
            by_number[number] = one
        until_s = max(0.0, left[0].at_s - now_s) if left else PATIENCE_S
        reply = client.receive(until_s)
        now_s = time.perf_counter() - began_s
        match reply:
            case Emitted() if not by_number[reply.request].first_s:
                by_number[reply.request].first_s = now_s
            case Finished():
                one = by_number[reply.request]
                one.done_s, one.prompt = now_s, reply.result.prompt_tokens
                one.tokens, open_ = reply.result.completion_tokens, open_ - 1
                one.read_s, one.token_s = reply.result.prefill_s, token_s(reply.result)
            case Emitted():
                pass
            case None if left:
                pass
            case _:
                raise UserError(f"a request failed: {reply}")
    return requests


def beside(
    profile: Profile, shared: float, load: float, real: Sequence[Asked], count: int
) -> dict[str, Any]:
    """Play the same requests, and return both sides."""
    requests = Requests(
        np.array([one.at_s for one in real]),
        np.array([one.prompt for one in real]),
        np.array([one.tokens for one in real]),
        np.zeros(len(real), int),
    )
    kind = Kind("core", count, profile, profile, 0.0, 0.0, per_node=count, beside=shared)
    plan = Plan(count, 1, 1 << 16, 1 << 16, 0.0, 0.0, (1.0, 1.0))
    played = play_load([kind], plan, requests, load=load, seconds=1.0).played
    simulated = [Asked(s.asked_s, s.first_s, at_s, s.prompt, s.reply) for s, at_s in played.done]
    return {
        "replicas": count,
        "load": load,
        "profile": asdict(profile),
        "trace": [asdict(one) for one in real],
        "beside": shared,
        "requests": len(real),
        "measured": figures(real),
        "simulated": figures(simulated),
    }


def figures(requests: Sequence[Asked]) -> dict[str, float]:
    first = np.array([one.first_s - one.at_s for one in requests])
    whole = np.array([one.done_s - one.at_s for one in requests])
    span_s = max(one.done_s for one in requests) - min(one.at_s for one in requests)
    return {
        "tokens_per_s": sum(one.tokens for one in requests) / span_s,
        **{f"first_p{p}": float(np.percentile(first, p)) for p in (50, 90)},
        **{f"latency_p{p}": float(np.percentile(whole, p)) for p in (50, 90, 99)},
    }


def off(row: Mapping[str, Any], name: str) -> float:
    return float(row["simulated"][name] / row["measured"][name] - 1.0)


def worst(row: Mapping[str, Any]) -> float:
    return max(abs(off(row, name)) for name in FIGURES)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print measured, simulated, and by how much that is off."""
    lines = [
        (
            row["replicas"],
            row["load"],
            row["requests"],
            *(
                f"{row['measured'][name]:.3g} {row['simulated'][name]:.3g} {off(row, name):+.1%}"
                for name in FIGURES
            ),
            "yes" if worst(row) <= TOLERANCE else "NO",
        )
        for row in rows
    ]
    print_table(("replicas", "load", "requests", *FIGURES, f"within {TOLERANCE:.0%}"), lines)
