"""The command `observed`: whether the spans of a round add up to it, and what recording them costs.

A session's rounds follow each other without a pause: from one verdict to the next the coordinator
handles, the session waits for a worker, a message is on its way, a worker works. `Sum` adds these
up by their durations, wherever the clocks of other machines put them, and sets them beside the time
between the two verdicts; on one machine their union covers it as well, so that nothing is counted
twice in place of a gap. What recording costs is the processor time of recording, sending and
keeping one span, as measured here, times the spans of a round.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.duels import settings_of
from benchmarks.figures import ADDS_UP, RECORDING
from benchmarks.measure import Estimate, estimate
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.processes.stack import start_stack, wait_until_ready
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.codec import EVENT, encode
from dovetail.protocol.messages import Drafted, SeenRound, SeenSpan
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.runtime.client import Client
from dovetail.runtime.telemetry.event_log import OURS, EventLog
from support.inflated import models_at

BETWEEN = ("handle", "queue", "link", "lost")
"""The parts of a round beside the work that it waits for."""
WORK = {"draft": ("draft",), "target": ("verify", "commit")}
"""The spans of a worker that a round waits for, by the role in which it does them; others lie
within them or beside them."""
TIMES = 2000
"""Spans that are recorded for what one costs."""


@dataclass(frozen=True)
class Sum:
    """A round: nanoseconds from the verdict before it to its own, and of each kind of span
    within."""

    wall_ns: int
    parts: Mapping[str, int]
    covered_ns: int
    """Nanoseconds of the round that these spans cover, as far as the clocks of all processes are
    one."""
    spans: int
    """The number of spans of any kind that were recorded of the round."""

    @property
    def explained(self) -> float:
        """The sum of the parts over the round."""
        return sum(self.parts.values()) / self.wall_ns


def sums(rounds: Sequence[SeenRound], spans: Sequence[SeenSpan]) -> list[Sum]:
    """Every round that follows another one of its session; spans of passes that several sessions
    share belong to none, and so does such a round."""
    about: dict[tuple[int | None, int | None], list[SeenSpan]] = {}
    for seen in spans:
        about.setdefault((seen.session, seen.round), []).append(seen)
    found = []
    for number in dict.fromkeys(seen.session for seen in rounds):
        for before, this in pairwise(seen for seen in rounds if seen.session == number):
            its = about.get((number, this.record.round), [])
            told = [
                seen
                for seen in its
                if seen.span[0]
                in (BETWEEN if seen.process == OURS else (*WORK["draft"], *WORK["target"]))
            ]
            parts = Counter[str]()
            for seen in told:
                parts[seen.span[0]] += seen.span[2]
            if parts["verify"] and this.record.round == before.record.round + 1:
                found.append(
                    Sum(
                        this.at_ns - before.at_ns,
                        parts,
                        overlap(told, before.at_ns, this.at_ns),
                        len(its),
                    )
                )
    return found


def overlap(spans: Iterable[SeenSpan], start_ns: int, end_ns: int) -> int:
    """Nanoseconds of an interval that spans cover, overlapping ones once."""
    covered, until = 0, start_ns
    for begin, end in sorted(
        (max(s.span[1], start_ns), min(s.span[1] + s.span[2], end_ns)) for s in spans
    ):
        covered += max(0, end - max(begin, until))
        until = max(until, end)
    return covered


def everything(client: Client, after: int = 0) -> tuple[list[SeenRound], list[SeenSpan], int]:
    """All that there is to be seen behind a number, and what to ask with next."""
    rounds, spans, more = list[SeenRound](), list[SeenSpan](), True
    while more:
        seen = client.look(after, spans=True)
        rounds += seen.rounds
        spans += seen.spans
        after, more = seen.next, seen.more
    return rounds, spans, after


def watched(client: Client, submit: Callable[[], int]) -> tuple[list[SeenRound], list[SeenSpan]]:
    """The rounds and the spans of one request, while all of them are recorded."""
    *_, after = everything(client)
    client.complete(submit())
    rounds, spans, _ = everything(client, after)
    return rounds, spans


# -- what recording costs --------------------------------------------------------------------------


def cost_of_a_workers_span() -> float:
    """Nanoseconds of the processor: measured, encoded, decoded and kept."""
    spans = Spans()
    event = Drafted(
        epoch=1, session=1, round=1, tokens=(1,), parents=(-1,), scores=(-1.0,), grown=1, hit=False
    )
    several = event.model_copy(update={"spans": (("level", time.monotonic_ns(), 1_000_000),) * 32})

    def record() -> None:
        with spans.measure("level"):
            pass

    travel = _cpu_ns(lambda: EVENT.decode(encode(several))) - _cpu_ns(
        lambda: EVENT.decode(encode(event))
    )
    return _cpu_ns(record) + travel / 32


def cost_of_our_span() -> float:
    """Return the nanoseconds that a span of the coordinator takes, which is only kept."""
    observing = EventLog()
    return _cpu_ns(lambda: observing.add_ours((("handle", 1, 2),), 3, 4))


def _cpu_ns(do: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    for _ in range(TIMES):
        do()
    return (time.thread_time_ns() - began) / TIMES


# -- the command -----------------------------------------------------------------------------------


@click.command(cls=Command)
@option(
    "--draft",
    default="small",
    help="Folder of a draft or head, or a kind that comes with the program.",
)
@option("--weights", default="fp32", help="Weights of the target.")
@option(
    "--inflate", default="512MiB", help="Size to which the target is inflated; empty: as it is."
)
@option("--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width.")
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts.",
)
@option("--limit", type=click.IntRange(min=1), default=8, help="Prompts taken.")
@option("--max-tokens", type=click.IntRange(min=8), default=96, help="Tokens of a reply.")
@options("json")
def observed(
    draft: str,
    weights: str,
    inflate: str,
    tree: Sequence[int],
    prompts: Path,
    limit: int,
    max_tokens: int,
    as_json: bool,
) -> None:
    """The sum of a round's spans over the round, spans a round, and the processor time that
    recording them takes of it; all spans, fine ones too."""
    gamma, depth, width = tree
    wanted = TreeSettings(policy="dynamic", insist=True, gamma=gamma, depth=depth, width=width)
    configuration = settings_of({"target.weights": weights, **models_at(inflate, draft)})
    found: list[list[Sum]] = []
    ours, theirs, coarse = 0, 0, 0
    with Supervisor() as supervisor:
        stack = start_stack(supervisor, configuration)
        wait_until_ready(supervisor, stack)
        with stack.connect() as client:
            for number, prompt in enumerate(read_prompt_set(prompts, limit).prompts, start=1):
                submit = partial(
                    client.submit,
                    turns=prompt.turns[:1],
                    sampling=Sampling(),
                    max_tokens=max_tokens,
                    tree=wanted,
                )
                rounds, spans = watched(client, submit)
                if len(its := sums(rounds, spans)) > 1:
                    found.append(its)
                ours += sum(seen.process == OURS for seen in spans)
                theirs += sum(seen.process != OURS for seen in spans)
                coarse += len(rounds)
                note(f"{prompt.id}: {number} of {limit} prompts")
    row = told(found, ours=ours / coarse, theirs=theirs / coarse)
    report(
        {"settings": {"draft": draft, "weights": weights, "inflate": inflate}, "rows": [row]},
        as_json,
        lambda: show(row),
    )


def told(found: Sequence[Sequence[Sum]], *, ours: float, theirs: float) -> dict[str, Any]:
    """Return the findings over all rounds. `ours`, `theirs`: spans a round of the coordinator and
    of workers."""
    rounds = [one for its in found for one in its]
    explained = estimate(
        [
            sum(sum(one.parts.values()) for one in its) / sum(one.wall_ns for one in its)
            for its in found
        ]
    )
    round_us = sum(one.wall_ns for one in rounds) / len(rounds) / 1e3
    cost_us = (ours * cost_of_our_span() + theirs * cost_of_a_workers_span()) / 1e3
    worst = max(abs(1.0 - one.explained) for one in rounds)
    covered = sum(one.covered_ns for one in rounds) / sum(one.wall_ns for one in rounds)
    return {
        "rounds": len(rounds),
        "round_us": round_us,
        "explained": {
            **explained.as_json(),
            "holds": explained.reaches(1 - ADDS_UP) and explained.holds(1 + ADDS_UP),
        },
        "worst_round": worst,
        "covered": covered,
        "spans": ours + theirs,
        "cost_us": cost_us,
        "cost_share": cost_us / round_us,
        "cost_holds": cost_us / round_us <= RECORDING,
    }


def show(row: Mapping[str, Any]) -> None:
    explained = Estimate(
        row["explained"]["median"], row["explained"]["low"], row["explained"]["high"]
    )
    cells = (
        row["rounds"],
        f"{row['round_us'] / 1e3:.3f}",
        f"{explained} {'yes' if row['explained']['holds'] else 'NO'}",
        f"{row['worst_round']:.2%}",
        f"{row['covered']:.2%}",
        f"{row['spans']:.1f}",
        f"{row['cost_us']:.1f}",
        f"{row['cost_share']:.2%} {'yes' if row['cost_holds'] else 'NO'}",
    )
    print_table(
        (
            "rounds",
            "ms a round",
            "spans / round",
            "worst round",
            "covered",
            "spans a round",
            "us of processor",
            "of a round",
        ),
        [cells],
    )
