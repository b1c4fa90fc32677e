"""The command `rounds`: where the time of a round goes, and whether its parts add up to it.

Two clocks: the parts are what coordinator and workers measured (`messages.RoundRecord`); the round
is what somebody outside sees, from one record's arrival to the next one's. What two workers and the
wire between them need - drafting that is waited for, pass, transport - is what a round could not do
without: tokens over that is the rate that there could be.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.duels import ring, settings_of
from benchmarks.figures import ACCOUNTED, ADDS_UP
from benchmarks.measure import Estimate, estimate
from benchmarks.options import Command, Numbers, option, options, report
from dovetail.launch.bench.contenders import Ours, Task
from dovetail.launch.bench.methods import NONE, read_prompt_set, tree_of
from dovetail.launch.bench.turns import prepare
from dovetail.launch.console.terminal import note, print_table
from dovetail.protocol.messages import RoundRecord
from support.inflated import models_at

PARTS = ("draft_ns", "verify_ns", "transport_ns", "queue_ns", "coordinator_ns")
NEEDED = ("draft_ns", "verify_ns", "transport_ns")


@click.command(cls=Command)
@option(
    "--draft",
    default="small",
    help="Folder of a draft or head, or a kind that comes with the program.",
)
@option("--target", default="", help="Folder of the target.  [default: the embedded one]")
@option("--weights", default="fp32", help="Weights of the target.")
@option(
    "--inflate", default="512MiB", help="Size to which the target is inflated; empty: as it is."
)
@option(
    "--policy",
    "policies",
    multiple=True,
    default=("dynamic", "goodput"),
    help="Policy of the tree; can be repeated.",
)
@option("--tree", type=Numbers(3), default="15,8,10", help="gamma, depth, width.")
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts.",
)
@option("--limit", type=click.IntRange(min=1), default=20, help="Prompts taken.")
@option("--max-tokens", type=click.IntRange(min=8), default=128, help="Tokens of a reply.")
@option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="Temperature of the sampling.",
)
@options("json")
def rounds(
    policies: Sequence[str],
    prompts: Path,
    limit: int,
    temperature: float,
    as_json: bool,
    **settings: Any,
) -> None:
    """Milliseconds of each part of a round, their sum over the round, and the rate over the one
    that the parts allow."""
    gamma, depth, width = settings["tree"]
    target = {
        "target.model": settings["target"],
        "target.weights": settings["weights"],
    }
    shape = {
        "tree.gamma": gamma,
        "tree.depth": depth,
        "tree.width": width,
        "sampling.max_tokens": settings["max_tokens"],
    }
    inflate = "" if settings["target"] else settings["inflate"]
    base = settings_of({**target, **shape, **models_at(inflate, settings["draft"])})
    seen: dict[str, list[Waterfall]] = {policy: [] for policy in policies}
    with ring(base, {policy: tree_of(policy) for policy in policies}) as found:
        alone = found[NONE]
        assert isinstance(alone, Ours)
        for number, prompt in enumerate(read_prompt_set(prompts, limit).prompts):
            task = prepare(alone.connection, alone.method, prompt, temperature, 0)
            for policy in policies:
                contender = found[policy]
                assert isinstance(contender, Ours)
                seen[policy] += watch(contender, task, temperature)
            note(f"{prompt.id}: {number + 1} of {limit} prompts at most")
    rows = [{"policy": policy, **told(falls)} for policy, falls in seen.items() if falls]
    report({"settings": settings, "rows": rows}, as_json, lambda: show(rows))


@dataclass(frozen=True)
class Waterfall:
    """The rounds of a reply but the first: seconds seen from outside, and those of each part."""

    rounds: int
    tokens: int
    seconds: float
    parts: Mapping[str, float]

    @classmethod
    def of(cls, arrivals_ns: Sequence[int], records: Sequence[RoundRecord]) -> "Waterfall":
        """Return the waterfall of a reply from its records, two at least, and when each of them
        arrived: the first one's arrival begins the second round."""
        later = records[1:]
        parts = {part: sum(getattr(record, part) for record in later) / 1e9 for part in PARTS}
        return cls(
            len(later),
            sum(len(record.accepted) + 1 for record in later),
            (arrivals_ns[-1] - arrivals_ns[0]) / 1e9,
            parts,
        )

    @property
    def explained(self) -> float:
        """The sum of the parts over the time seen from outside."""
        return sum(self.parts.values()) / self.seconds

    @property
    def reached(self) -> float:
        """The rate over tau / the time of what a round cannot do without."""
        return sum(self.parts[part] for part in NEEDED) / self.seconds


def watch(contender: Ours, task: Task, temperature: float) -> list[Waterfall]:
    """The rounds of one reply; nothing where it has only one."""
    arrivals: list[int] = []
    records: list[RoundRecord] = []

    def record(one: RoundRecord) -> None:
        arrivals.append(time.monotonic_ns())
        records.append(one)

    contender.decode(task, temperature, 0, record)
    return [Waterfall.of(arrivals, records)] if len(records) > 1 else []


def told(falls: Sequence[Waterfall]) -> dict[str, Any]:
    """Means over all rounds, and the two figures as medians over replies."""
    count = sum(fall.rounds for fall in falls)
    explained, reached = (
        estimate([fall.explained for fall in falls]),
        estimate([fall.reached for fall in falls]),
    )
    return {
        "replies": len(falls),
        "rounds": count,
        "tau": sum(fall.tokens for fall in falls) / count,
        "round_ms": 1e3 * sum(fall.seconds for fall in falls) / count,
        **{
            part.replace("_ns", "_ms"): 1e3 * sum(fall.parts[part] for fall in falls) / count
            for part in PARTS
        },
        "explained": {
            **explained.as_json(),
            "holds": explained.reaches(1 - ADDS_UP) and explained.holds(1 + ADDS_UP),
        },
        "reached": {**reached.as_json(), "holds": reached.reaches(ACCOUNTED)},
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    parts = [part.replace("_ns", "_ms") for part in PARTS]
    titles = [part.removesuffix("_ms") for part in parts]
    cells = []
    for row in rows:
        times = [f"{row[part]:.3f} ({row[part] / row['round_ms']:.0%})" for part in parts]
        cells.append(
            (
                row["policy"],
                row["rounds"],
                f"{row['tau']:.2f}",
                f"{row['round_ms']:.3f}",
                *times,
                _cell(row["explained"]),
                _cell(row["reached"]),
            )
        )
    print_table(
        ("policy", "rounds", "tau", "ms a round", *titles, "parts / round", "rate / parts' rate"),
        cells,
    )


def _cell(figure: Mapping[str, Any]) -> str:
    found = Estimate(figure["median"], figure["low"], figure["high"])
    return f"{found} {'yes' if figure['holds'] else 'NO'}"
