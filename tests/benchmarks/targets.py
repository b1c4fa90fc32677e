"""The command `targets`: streams on two target processes behind one draft, over the same streams on
one, and where the time of their rounds goes.

Two stacks stand side by side and take turns, the same prompts in both: one has a target on a core,
the other one a target on that core and one on another. The draft of each may use both cores, and
shares them with the targets; so does the coordinator.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.coupling import PROMPTS
from benchmarks.loads import PLAIN, TREES, Burst, Streams
from benchmarks.measure import Estimate, ratio
from benchmarks.options import Command, Numbers, option, options, pin, report, settings_of
from dovetail.launch.bench.methods import read_prompt_set
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.machine.cores import CoreLayout
from dovetail.launch.machine.topology import Place
from dovetail.launch.processes.stack import POLL_S, begin_stack, wait_until_ready, worker_arguments
from dovetail.launch.processes.supervise import Supervisor
from dovetail.protocol.errors import DovetailError
from dovetail.runtime.client import Client
from support.inflated import models_at

LEAST = 1.7
"""The rate with two targets that is wanted, as a multiple of the rate with one."""
ACCOUNTS = ("prefill_s", "draft_exposed_s", "verify_s", "transport_s", "queue_s", "coordinator_s")


@click.command(cls=Command)
@option("--weights", default="fp32", help="Weights of the targets.")
@option("--draft", default="small", help="Kind or folder of the draft.")
@option("--streams", type=Numbers(), default="8,16,32", help="Loads.")
@option(
    "--methods",
    default=f"{PLAIN},goodput",
    help=f"{PLAIN} (the targets alone), {', '.join(TREES)}.",
)
@option("--inflate", default="256MiB", help="Size to which the targets are inflated.")
@option("--temperature", type=float, default=0.0)
@option(
    "--prompts",
    type=click.Path(dir_okay=False, path_type=Path),
    default=PROMPTS,
    help="File of prompts.",
)
@option("--max-tokens", type=click.IntRange(min=8), default=96, help="Tokens of every reply.")
@option("--repeat", type=click.IntRange(min=1), default=5, help="Pairs at a load.")
@options("json")
def targets(
    weights: str,
    draft: str,
    streams: Sequence[int],
    methods: str,
    inflate: str,
    temperature: float,
    prompts: Path,
    max_tokens: int,
    repeat: int,
    as_json: bool,
) -> None:
    """Tokens a second of streams on two targets, one a core, behind one draft, over one target."""
    cores = pin(2)
    texts = [prompt.turns[0] for prompt in read_prompt_set(prompts, None).prompts]
    values = {"target.weights": weights, **models_at(inflate, draft)}
    rows = []
    with running(values, cores, 1) as one, running(values, cores, 2) as two:
        sides = [Streams(client, texts, max_tokens, temperature) for client in (one, two)]
        for method in methods.split(","):
            for side in sides:
                side.run(method, 2, 0)  # warms up
            for count in streams:
                pairs = [in_turns(sides, method, count, turn) for turn in range(repeat)]
                rows.append(row(method, count, pairs))
                note(f"{method}, {count} streams: {rows[-1]['median']:.2f}")
        moves = two.status().totals.rebalanced
    told = {"weights": weights, "draft": draft, "inflate": inflate, "moves": moves}
    report({**told, "rows": rows}, as_json, lambda: show(rows, moves))


@contextmanager
def running(values: Mapping[str, Any], cores: Sequence[int], count: int) -> Iterator[Client]:
    """A client of a stack with so many targets, one a core, which keeps nothing of ended sessions,
    since both sides read the same prompts again."""
    both, configuration = Place(tuple(cores)), settings_of({"coordinator.reuse": False, **values})
    with Supervisor() as supervisor:
        layout = CoreLayout(Place((cores[0],)), both, both)
        stack = begin_stack(supervisor, configuration, layout=layout)()
        wait_until_ready(supervisor, stack)
        for core in cores[1:count]:
            layout = CoreLayout(Place((core,)), both, both)
            supervisor.start(
                f"target on core {core}",
                worker_arguments(configuration, "target", stack.address, layout),
            )
        with stack.connect() as client:
            while sum("target" in worker.roles for worker in client.status().workers) < count:
                supervisor.check()
                time.sleep(POLL_S)
            yield client


def in_turns(sides: Sequence[Streams], method: str, count: int, turn: int) -> tuple[Burst, Burst]:
    """Run the same streams on both sides, which take turns to go first. `DovetailError` if a reply
    differs."""
    found = {place: sides[place].run(method, count, turn) for place in ((0, 1), (1, 0))[turn % 2]}
    if found[0].replies != found[1].replies:
        raise DovetailError(f"replies of {count} streams differ")
    return found[0], found[1]


def row(method: str, count: int, pairs: Sequence[tuple[Burst, Burst]]) -> dict[str, Any]:
    """Return the figures of a method at a load."""
    ones, twos = zip(*pairs, strict=True)
    found = ratio([burst.rate for burst in twos], [burst.rate for burst in ones])
    ratios = sorted(two.rate / one.rate for one, two in pairs)
    return {
        "method": method,
        "streams": count,
        "one_tokens_per_s": middle([burst.rate for burst in ones]),
        "two_tokens_per_s": middle([burst.rate for burst in twos]),
        **found.as_json(),
        "range": [ratios[0], ratios[-1]],
        "one": account(ones),
        "two": account(twos),
        "holds": found.median >= LEAST,
    }


def middle(rates: Sequence[float]) -> float:
    return sorted(rates)[len(rates) // 2]


def account(bursts: Sequence[Burst]) -> dict[str, float]:
    """Return where the time of the streams goes, as shares of all of it, and what rounds were."""
    results = [result for burst in bursts for result in burst.results]
    wall_s = sum(result.wall_s for result in results)
    shares = {name: sum(getattr(r, name) for r in results) / wall_s for name in ACCOUNTS}
    rounds = sum(result.rounds for result in results)
    tokens = sum(result.completion_tokens - 1 for result in results)
    drafted = 1.0 - sum(result.plain_rounds for result in results) / max(1, rounds)
    pass_ms = 1e3 * sum(result.verify_s for result in results) / max(1, rounds)
    return {**shares, "pass_ms": pass_ms, "tau": tokens / max(1, rounds), "drafted": drafted}


def show(rows: Sequence[Mapping[str, Any]], moves: int) -> None:
    headings = ("method", "streams", "one tokens/s", "two tokens/s", "two / one (95 %)", "range")
    accounts = ("drafted", "verify", "queue", "transport", "coordinator", "pass ms")
    print_table((*headings, *accounts, f">= {LEAST}"), [_line(row) for row in rows])
    note(f"sessions that moved from one target to the other: {moves}")


def _line(row: Mapping[str, Any]) -> Sequence[object]:
    low, high = row["range"]
    sides = row["one"], row["two"]
    names = ("drafted", "verify_s", "queue_s", "transport_s", "coordinator_s")
    return (
        row["method"],
        row["streams"],
        f"{row['one_tokens_per_s']:.1f}",
        f"{row['two_tokens_per_s']:.1f}",
        str(Estimate(row["median"], row["low"], row["high"])),
        f"{low:.2f}-{high:.2f}",
        *(", ".join(f"{side[name]:.0%}" for side in sides) for name in names),
        ", ".join(f"{side['pass_ms']:.1f}" for side in sides),
        "yes" if row["holds"] else "NO",
    )
