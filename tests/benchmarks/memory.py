"""The command `memory`: what a target takes that is placed under limits, beside what its placement
counted.

The CPU stands for the device where there is none, and its memory is that of the host: what is
counted of both together is what may be taken.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.child import Side
from benchmarks.options import Command, option, options, pin, report, written_model
from dovetail.launch.console.terminal import print_table

LIBRARIES = 32 << 20
"""Bytes that libraries may take of the host's memory beside a target that a GPU computes, for a
moment: functions that are loaded when they are needed, and buffers that copies pass through."""
LIMITS: Sequence[Mapping[str, Any]] = (
    {"layers": None, "resident": None},
    {"layers": 1, "resident": None},
    {"layers": None, "resident": 0},
    {"layers": 2, "resident": 1},
)
"""The limits to try: all layers, the last one, none kept, one of two kept; those of --vram
follow."""


@click.command("memory", cls=Command)
@option(
    "--vram",
    multiple=True,
    default=("600MB", "900MB"),
    help="Limits of the device's memory; can be repeated.",
)
@option(
    "--device", default="cpu", help="Where the target's layers are computed; cpu stands for a GPU."
)
@option("--weights", type=click.Choice(("fp32", "half", "int8")), default="half")
@options("checkpoint", "shape", "layers", "models", "json")
def memory(vram: tuple[str, ...], device: str, weights: str, as_json: bool, **model: Any) -> None:
    """Peak memory of a target under limits: one process each loads it, reads a prompt of 4,096
    tokens less a tree and verifies trees of 288 nodes."""
    pin(1)
    with (
        written_model(weights=weights, **model) as folder,
        written_model(weights=weights, **{**model, "shape": "small", "layers": 1}) as small,
    ):
        asked = [{**limit, "vram": "auto"} for limit in LIMITS] + [
            {"layers": None, "resident": None, "vram": size} for size in vram
        ]
        found = [{**limit, **measured(folder, small, weights, device, limit)} for limit in asked]
    report({"rows": found}, as_json, lambda: show(found))


def measured(
    folder: Path,
    small: Path,
    weights: str,
    device: str,
    limit: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what one target takes, beside what its placement counted."""
    with Side(
        "placed",
        (
            str(folder),
            "--warm-up",
            str(small),
            "--weights",
            weights,
            "--device",
            device,
        ),
    ) as side:
        told = side.ask("place", **limit)
    counted = told["host_bytes"] + (told["device_bytes"] if device == "cpu" else LIBRARIES)
    kept = told["peak_bytes"] <= counted and (told["reserved_bytes"] or 0) <= told["device_bytes"]
    return {**told, "counted_bytes": counted, "share": told["peak_bytes"] / counted, "holds": kept}


def show(found: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for row in found:
        sizes = (
            _mb(row[f"{name}_bytes"]) for name in ("device", "host", "loaded", "peak", "reserved")
        )
        cells.append(
            (
                row["vram"],
                row["placement"],
                *sizes,
                f"{row['share']:.2f}",
                "yes" if row["holds"] else "NO",
            )
        )
    print_table(
        (
            "vram",
            "placement",
            "device MB",
            "host MB",
            "loaded MB",
            "peak MB",
            "on GPU MB",
            "peak/counted",
            "holds",
        ),
        cells,
    )


def _mb(count: float | None) -> int | None:
    return None if count is None else round(count / 1e6)
