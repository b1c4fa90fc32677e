"""The command `shards`: passes of one target over shards, over the cores of the first of them, and
over all cores undivided."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import click

from benchmarks.child import Side
from benchmarks.measure import estimate, ratio
from benchmarks.options import BEHIND, Command, Numbers, option, options, report, written_model
from benchmarks.verification import Turn
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.launch.machine.cores import parse_place

OVER_ONE_NODE, OVER_UNDIVIDED = 1.8, 0.95
"""How many times as fast as over the first shard alone, and as over the same cores undivided, a
pass over two shards should at least be."""
PLACES = ("shards", "one", "undivided")
REPETITIONS = 3
"""Passes of a side in each turn; the fastest counts, since other work may disturb one."""


@click.command(cls=Command)
@option("--cores", default="0/1", help="Cores of each shard, such as 0-3/4-7.")
@option("--memory-nodes", default="", help="The memory node of each shard, such as 0,1.")
@option("--rows", type=Numbers(), default="1,4,16", help="Rows behind 512 cached tokens.")
@options("weights", "checkpoint", "shape", "layers", "pairs", "models", "json")
def shards(
    cores: str,
    memory_nodes: str,
    rows: tuple[int, ...],
    weights: str,
    pairs: int,
    as_json: bool,
    **model: Any,
) -> None:
    """Passes of a target that is spread over shards, which stand for memory nodes: how many times
    as fast as on the cores of the first shard alone, and as on all cores undivided.

    Each of the three is a process of its own, bound to its cores and to the memory nodes named.
    """
    spread = parse_place(cores, memory_nodes)
    first, every = cores.split("/")[0], ",".join(cores.split("/"))
    nodes = [str(node) for node in spread.nodes]
    where = ((cores, memory_nodes), (first, "".join(nodes[:1])), (every, ",".join(nodes)))
    places = dict(zip(PLACES, where, strict=True))
    with ExitStack() as open_sides, written_model(weights=weights, **model) as folder:
        sides = {
            name: open_sides.enter_context(_side(str(folder), weights, *place))
            for name, place in places.items()
        }
        turns = {(name, n): Turn(sides[name], "verify", n, "wall") for n in rows for name in places}
        taken: dict[tuple[str, int], list[float]] = {turn: [] for turn in turns}
        with progress_bar(pairs + 1, "rounds") as step:
            for number in range(-1, pairs):
                for key, turn in turns.items():
                    seconds = min(turn() for _ in range(REPETITIONS))
                    if number >= 0:
                        taken[key].append(seconds)
                step("warming up" if number < 0 else "")
        told = {name: side.hello["engine"] for name, side in sides.items()}
    found = [Found(count, {name: taken[name, count] for name in places}) for count in rows]
    result = {"cores": cores, **told, "rows": [one.as_json() for one in found]}
    report(result, as_json, lambda: _show(cores, told["shards"], found))


def _side(folder: str, weights: str, cores: str, nodes: str) -> Side:
    """Our engine in a place."""
    threads = len(parse_place(cores, nodes).cores)
    where = (f"--cores={cores}", f"--memory-nodes={nodes}", f"--threads={threads}")
    what = (f"--weights={weights}", "--backend=kernels", f"--context={BEHIND}")
    return Side("ours", (folder, *what, *where), threads=threads)


class Found:
    """Seconds of passes over so many rows in each place, round by round."""

    def __init__(self, rows: int, seconds: Mapping[str, Sequence[float]]) -> None:
        self.rows, self.seconds = rows, seconds
        self.bounds = (
            ("one", ratio(seconds["one"], seconds["shards"]), OVER_ONE_NODE),
            ("undivided", ratio(seconds["undivided"], seconds["shards"]), OVER_UNDIVIDED),
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "seconds": {name: estimate(taken).as_json() for name, taken in self.seconds.items()},
            **{
                f"over_{name}": {**found.as_json(), "least": least, "holds": found.reaches(least)}
                for name, found, least in self.bounds
            },
        }


def _show(cores: str, engine: str, found: Sequence[Found]) -> None:
    click.echo(f"{engine}, shards on cores {cores}: how many times as fast as other ways")
    print_table(
        ("rows", "shards ms", "one ms", "undivided ms", "over", "ratio (95 %)", "least", "holds"),
        [
            (
                one.rows,
                *(1e3 * estimate(one.seconds[name]).median for name in PLACES),
                name,
                str(times),
                f"{least:g}",
                "yes" if times.reaches(least) else "no",
            )
            for one in found
            for name, times, least in one.bounds
        ],
    )
