"""The command `rest`: the share of a pass on the kernels that is not spent in linears."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from benchmarks.figures import REST
from benchmarks.measure import Estimate, estimate
from benchmarks.options import (
    Command,
    Numbers,
    option,
    options,
    our_side,
    pin,
    report,
    verdict,
    written_model,
)
from benchmarks.verification import WARM_UP, Turn, take_rounds
from dovetail.launch.console.terminal import print_table, progress_bar


@click.command(cls=Command)
@option(
    "--rows",
    type=Numbers(),
    default="1,2,4,8,16",
    help="Rows of the passes behind 512 cached tokens.",
)
@options("weights", "checkpoint", "shape", "layers", "pairs", "threads", "clock", "models", "json")
def rest(
    rows: tuple[int, ...],
    weights: str,
    pairs: int,
    threads: int,
    clock: str,
    as_json: bool,
    **model: Any,
) -> None:
    """The share of T_V on the kernels that is no linear: attention, norms, rotary, and Python.

    A whole pass and the products of the same matrices alone take turns in one process.
    """
    cores = pin(threads)
    with (
        written_model(weights=weights, **model) as folder,
        our_side(folder, weights, "kernels", threads) as side,
        progress_bar(pairs + WARM_UP, "rounds") as step,
    ):
        turns = [[Turn(side, do, count, clock) for do in ("verify", "linears")] for count in rows]
        measured = take_rounds(turns, pairs=pairs, step=step)
    told = {"ours": side.hello, "model": folder.name, "cores": cores, "clock": clock}
    found = [Share(count, tuple(seconds)) for count, seconds in zip(rows, measured, strict=True)]
    report(
        {**told, "rows": [share.as_json() for share in found]}, as_json, lambda: show(told, found)
    )


@dataclass(frozen=True)
class Share:
    """Seconds of whole passes of so many rows, and of their linears alone."""

    rows: int
    seconds: tuple[tuple[float, ...], ...]

    @property
    def rest(self) -> Estimate:
        """The share of a pass that is not spent in linears."""
        return estimate([1 - linears / whole for whole, linears in self.seconds])

    def as_json(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "share": self.rest.as_json(),
            "figure": REST,
            "holds": self.rest.holds(REST),
        }


def show(told: Mapping[str, Any], found: Sequence[Share]) -> None:
    click.echo(
        f"{told['ours']['engine']} {told['ours']['kernels']}, {told['model']}, "
        f"{len(told['cores'])} core(s), {told['clock']} time"
    )
    cells = []
    for share in found:
        milliseconds = [1e3 * estimate(side).median for side in zip(*share.seconds, strict=True)]
        cells.append((share.rows, *milliseconds, str(share.rest), *verdict(share.rest, REST)))
    print_table(
        ("rows", "pass ms", "linears ms", "share of the rest (95 %)", "figure", "holds"), cells
    )
