"""The command `loads`: streams that run at once, with a draft over the target alone, at every load
and where the load changes.

Real processes, a client of the coordinator. Every repetition decodes the same prompts with every
method in turns, as long replies for all; a rate is that of all streams together, from the first
token of the first of them to the end of the last. The same stack serves all of it, so that what
speculation has learned at one load is there at the next one.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.measure import Estimate, ratio
from benchmarks.options import Command, Numbers, option, options, report, settings_of
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.processes.stack import begin_stack, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Emitted, Failed, Finished, Result
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.client import Client
from support.inflated import models_at

LEAST = 0.97
"""The rate over that of plain decoding of the same streams, at any load; at least."""
PLAIN = "plain"
TREES = {
    "goodput": TreeSettings(policy="goodput", gamma=15, depth=8, width=4),
    "fixed": TreeSettings(policy="dynamic", gamma=15, depth=8, width=4),
}
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Burst:
    """Streams that ran at once."""

    rate: float
    """Tokens a second of all of them."""
    results: tuple[Result, ...]
    replies: tuple[tuple[int, ...], ...] = ()
    """The tokens of each stream."""

    @property
    def drafted(self) -> float:
        """The share of the rounds in which nodes were verified."""
        rounds = sum(result.rounds for result in self.results)
        return 1.0 - sum(result.plain_rounds for result in self.results) / max(1, rounds)

    @property
    def tau(self) -> float:
        """Tokens a round."""
        return sum(r.completion_tokens - 1 for r in self.results) / max(
            1, sum(r.rounds for r in self.results)
        )


class Streams:
    """Has prompts answered at once, with one method."""

    def __init__(
        self, client: Client, prompts: Sequence[str], tokens: int, temperature: float
    ) -> None:
        self._client, self._prompts, self._tokens = client, prompts, tokens
        self._sampling = Sampling(temperature=temperature)

    def run(self, method: str, count: int, turn: int) -> Burst:
        """Run so many streams; the turn says with which prompts."""
        asked = [self._submit(method, count * turn + number) for number in range(count)]
        began_s, found = None, dict[int, Result]()
        told: dict[int, list[int]] = {request: [] for request in asked}
        while len(found) < count:
            match reply := self._client.receive(PATIENCE_S):
                case Emitted():
                    began_s = began_s or time.perf_counter()
                    told[reply.request] += reply.tokens
                case Finished():
                    if (failure := reply.result.draft_failure) is not None:
                        raise UserError(f"the draft failed at {count} streams: {failure.error}")
                    found[reply.request] = reply.result
                case Failed() | None:
                    raise UserError(
                        f"{method} at {count} streams failed: "
                        f"{reply.text if reply else 'nothing came'}"
                    )
        seconds = time.perf_counter() - (began_s or 0.0)
        results = tuple(found[request] for request in asked)
        rate = sum(result.completion_tokens - 1 for result in results) / seconds
        return Burst(rate, results, tuple(tuple(told[request]) for request in asked))

    def _submit(self, method: str, number: int) -> int:
        return self._client.submit(
            turns=[self._prompts[number % len(self._prompts)]],
            sampling=self._sampling,
            max_tokens=self._tokens,
            seed=number,
            end=(),
            tree=TREES.get(method),
            speculate=method != PLAIN,
        )


@click.command(cls=Command)
@option("--weights", default="fp32,half,int8", help="Weights of the target, one stack each.")
@option("--drafts", default="small,dovetail", help="Kinds or folders of drafts, one stack each.")
@option("--streams", type=Numbers(), default="1,2,4,8", help="Loads.")
@option("--methods", default=",".join(TREES), help=f"Beside {PLAIN}: {', '.join(TREES)}.")
@option(
    "--inflate", default="256MiB", help="Size to which the target is inflated; empty: as it is."
)
@option("--temperature", type=float, default=0.0)
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts.",
)
@option("--max-tokens", type=click.IntRange(min=8), default=64, help="Tokens of every reply.")
@option(
    "--repeat",
    type=click.IntRange(min=1),
    default=5,
    help="Times that the methods take turns at a load.",
)
@options("json")
def loads(
    weights: str,
    drafts: str,
    streams: Sequence[int],
    methods: str,
    inflate: str,
    temperature: float,
    prompts: Path,
    max_tokens: int,
    repeat: int,
    as_json: bool,
) -> None:
    """Tokens a second of 1, 2, 4, 8 streams over plain decoding of the same, after each other and
    where one load follows another."""
    texts = [prompt.turns[0] for prompt in read_prompt_set(prompts, None).prompts]
    rows = []
    for kind in weights.split(","):
        for draft in drafts.split(","):
            with running(kind, draft, inflate) as client:
                found = Streams(client, texts, max_tokens, temperature)
                for row in measured(found, methods.split(","), streams, repeat):
                    rows.append({"weights": kind, "draft": draft, **row})
                    note(f"{kind} {draft}: {row['load']} {row['method']} {row['median']:.2f}")
    report({"inflate": inflate, "rows": rows}, as_json, lambda: show(rows))


@contextmanager
def running(weights: str, draft: str, inflate: str) -> Iterator[Client]:
    """A client of a stack that keeps nothing of ended sessions, since every method reads the same
    prompts."""
    values: dict[str, Any] = {
        "target.weights": weights,
        "coordinator.reuse": False,
        **models_at(inflate, draft),
    }
    with Supervisor() as supervisor:
        stack = begin_stack(supervisor, settings_of(values))()
        wait_until_ready(supervisor, stack)
        with stack.connect() as client:
            yield client


def measured(
    streams: Streams, methods: Sequence[str], counts: Sequence[int], repeat: int
) -> Iterator[dict[str, Any]]:
    """A row for every load and method, then those of loads that follow another one."""
    for method in (PLAIN, *methods):
        streams.run(method, 1, 0)  # warms up
    for count in counts:
        pairs = [
            in_turns(streams, (PLAIN, *methods), turn, lambda _: None, count)
            for turn in range(repeat)
        ]
        for method in methods:
            yield row(f"{count}", method, [(pair[PLAIN], pair[method]) for pair in pairs])
    most = max(counts)
    for before, count in ((most, 1), (1, most)) if most > 1 else ():
        for method in methods:
            lead = partial(led_by, streams, before, repeat)
            pairs = [
                in_turns(streams, (PLAIN, method), turn, lead, count) for turn in range(repeat)
            ]
            yield row(
                f"{count} after {before}", method, [(pair[PLAIN], pair[method]) for pair in pairs]
            )


def led_by(streams: Streams, count: int, turn: int, method: str) -> None:
    """Run so many streams before those that are measured; without a draft there is no need to."""
    if method != PLAIN:
        streams.run(method, count, turn)


def in_turns(
    streams: Streams, methods: Sequence[str], turn: int, lead: Callable[[str], object], count: int
) -> dict[str, Burst]:
    """Run the same prompts with each method, beginning with another one in every turn; `lead` goes
    before each."""
    found = {}
    for place in range(len(methods)):
        method = methods[(place + turn) % len(methods)]
        lead(method)
        found[method] = streams.run(method, count, turn)
    return found


def row(load: str, method: str, pairs: Sequence[tuple[Burst, Burst]]) -> dict[str, Any]:
    """Return the row of a method at a load."""
    found = ratio([ours.rate for _, ours in pairs], [plain.rate for plain, _ in pairs])
    middle = sorted(pairs, key=lambda pair: pair[1].rate)[len(pairs) // 2]
    return {
        "load": load,
        "method": method,
        "plain_tokens_per_s": middle[0].rate,
        "tokens_per_s": middle[1].rate,
        **found.as_json(),
        "least_drafted": min(ours.drafted for _, ours in pairs),
        "drafted": sum(ours.drafted for _, ours in pairs) / len(pairs),
        "tau": sum(ours.tau for _, ours in pairs) / len(pairs),
        "holds": found.median >= LEAST,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    headings = (
        "weights",
        "draft",
        "streams",
        "method",
        "plain tokens/s",
        "tokens/s",
        "/ plain (95 %)",
        "drafted",
        "tau",
        f">= {LEAST}",
    )
    print_table(headings, [_line(row) for row in rows])


def _line(row: Mapping[str, Any]) -> Sequence[object]:
    found = Estimate(row["median"], row["low"], row["high"])
    rates = (f"{row['plain_tokens_per_s']:.1f}", f"{row['tokens_per_s']:.1f}")
    drafted = f"{row['drafted']:.0%} ({row['least_drafted']:.0%} at least)"
    return (
        row["weights"],
        row["draft"],
        row["load"],
        row["method"],
        *rates,
        str(found),
        drafted,
        f"{row['tau']:.2f}",
        "yes" if row["holds"] else "NO",
    )
