"""The command `loading`: how much memory a model takes while it is loaded and afterwards, with each
type of weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from benchmarks.child import Side
from benchmarks.options import Command, option, options, pin, report, written_model
from dovetail.launch.console.terminal import print_table


@click.command(cls=Command)
@option(
    "--weights",
    type=click.Choice(("fp32", "half", "bf16", "int8")),
    multiple=True,
    default=("fp32", "half", "int8"),
    help="Can be repeated.",
)
@options("backend", "checkpoint", "shape", "layers", "models", "json")
def loading(weights: tuple[str, ...], backend: str, as_json: bool, **model: Any) -> None:
    """Packed size and peak memory while a model is loaded, in a process of its own; the checkpoint
    has a shard for every layer.

    The bound is 1.15 times the packed size and one shard. Resident memory counts, mapped files too,
    above what the process held before.
    """
    pin(1)
    found = []
    for kind in weights:
        with (
            written_model(weights=kind, **model) as folder,
            written_model(weights=kind, **{**model, "shape": "small", "layers": 1}) as small,
        ):
            shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
            with Side(
                "loader",
                (str(folder), "--weights", kind, "--backend", backend, "--warm-up", str(small)),
            ) as side:
                told = side.ask("load")
            size = told["packed_bytes"] or told["kept_bytes"]
            bound = 1.15 * size + shard
            found.append(
                {
                    "weights": kind,
                    **told,
                    "checkpoint": folder.name,
                    "shard_bytes": shard,
                    "bound_bytes": bound,
                    "holds": told["peak_bytes"] <= bound,
                }
            )

    report({"rows": found}, as_json, lambda: show(found))


def show(found: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for row in found:
        sizes = (
            _mib(row[f"{name}_bytes"]) for name in ("packed", "kept", "shard", "peak", "bound")
        )
        cells.append(
            (
                row["weights"],
                row["backend"],
                row["checkpoint"],
                *sizes,
                row["seconds"],
                "yes" if row["holds"] else "NO",
            )
        )
    print_table(
        (
            "weights",
            "back end",
            "checkpoint",
            "packed MiB",
            "kept MiB",
            "shard MiB",
            "peak MiB",
            "bound MiB",
            "s",
            "holds",
        ),
        cells,
    )


def _mib(count: float | None) -> int | None:
    return None if count is None else round(count / 2**20)
