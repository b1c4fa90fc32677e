"""The command `loading`: how long a model takes to load, the first time and the next, beside one
cold read of its files; how much memory, and in which pages; and how fast its weights are read
then."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from benchmarks.child import Side
from benchmarks.large import write_blocks, write_mixture
from benchmarks.models import SHAPES, model_folder
from benchmarks.options import Command, option, options, pin, report, written_model
from dovetail.launch.console.terminal import print_table

MIXTURE_LAYERS = 6
READ_BYTES = 8 << 20


@click.command(cls=Command)
@option(
    "--weights",
    type=click.Choice(("fp32", "half", "bf16", "int8", "int4", "file")),
    multiple=True,
    default=("fp32", "half", "int8"),
    help="Can be repeated; file: of a GGUF file in the mix of Q4_K_M.",
)
@option(
    "--shape",
    type=click.Choice((*SHAPES, "mixture")),
    default="7b",
    help="Sizes of a layer; mixture: those of Qwen3-30B-A3B, 1.25 GB in bf16.",
)
@option("--small-pages", is_flag=True, help="Without huge pages, to see what they bring.")
@options("backend", "checkpoint", "layers", "models", "threads", "json")
def loading(
    weights: tuple[str, ...],
    backend: str,
    threads: int,
    small_pages: bool,
    as_json: bool,
    **model: Any,
) -> None:
    """The first start of a model, which checks and proves it, and the next one, each in a process
    of its own that has loaded a small model before, after its files have left the page cache.

    Memory counts above what the process held before, anonymous pages and mapped files; the bound is
    1.1 times the packed weights and one shard, of which a safetensors checkpoint has one a layer.
    The last columns are a pass over one row beside a plain read of the packed bytes, taking turns;
    of a mixture, whose pass reads some of its weights, there are none.
    """
    pin(threads)
    found = []
    for kind in weights:
        with (
            written(kind, **model) as (source, files),
            written(kind, **{**model, "layers": 1, "shape": SMALL[model["shape"]]}) as (small, _),
            TemporaryDirectory(prefix="dovetail-benchmark-") as cache,
        ):
            forget(files)
            once = {"read_s": read(files), "file_bytes": sum(f.stat().st_size for f in files)}
            for start in ("first", "next"):
                forget(files)
                arguments = ["--weights", kind, "--backend", backend, "--warm-up", str(small)]
                arguments += ["--threads", str(threads), "--cache", cache]
                arguments += ["--small"] * small_pages
                with Side("loader", (str(source), *arguments), threads=threads) as side:
                    told = side.ask("load")
                if model["shape"] == "mixture":
                    told["pass"] = None
                shard = 0 if kind == "file" else max(file.stat().st_size for file in files)
                bound = 1.1 * (told["packed_bytes"] or told["kept_bytes"]) + shard
                row = {"weights": kind, "start": start, "checkpoint": source.name, **once, **told}
                holds = told["peak_bytes"] <= bound
                found.append({**row, "bound_bytes": bound, "holds": holds})
    report({"rows": found}, as_json, lambda: show(found))


SMALL = {**dict.fromkeys(SHAPES, "small"), "mixture": "small mixture"}
"""The shape of the model that is loaded before one is measured."""


@contextmanager
def written(
    weights: str, *, shape: str, layers: int | None, models: Path | None, checkpoint: str | None
) -> Iterator[tuple[Path, Sequence[Path]]]:
    """A random model of a shape for a type of weights, and its weight files."""
    if weights == "file" and shape in SHAPES:
        sizes = (
            SHAPES[shape] if layers is None else dataclasses.replace(SHAPES[shape], layers=layers)
        )
        with model_folder(models) as folder:
            file = write_blocks(folder / f"{shape}-{sizes.layers}-layers-q4_k_m.gguf", sizes)
            yield file, [file]
    elif shape in SHAPES:
        more: dict[str, Any] = {
            "shape": shape,
            "layers": layers,
            "models": models,
            "checkpoint": checkpoint,
        }
        with written_model(weights=weights, **more) as folder:
            yield folder, sorted(folder.glob("*.safetensors"))
    else:
        count, experts = layers or MIXTURE_LAYERS, 128 if shape == "mixture" else 16
        with model_folder(models) as folder:
            own = write_mixture(
                folder / f"{shape}-{count}-layers".replace(" ", "-"), count, experts
            )
            yield own, sorted(own.glob("*.safetensors"))


def forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        with file.open("rb") as content:
            os.fsync(content.fileno())
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path]) -> float:
    """Return the seconds of one read of files, block by block."""
    began, block = time.perf_counter(), memoryview(bytearray(READ_BYTES))
    for file in files:
        with file.open("rb", buffering=0) as content:
            while content.readinto(block):
                pass
    return time.perf_counter() - began


def show(found: Sequence[Mapping[str, Any]]) -> None:
    cells = []
    for row in found:
        names = ("file", "packed", "kept", "peak", "bound", "huge")
        sizes = (_mib(row[f"{name}_bytes"]) for name in names)
        took = row["pass"]
        cells.append(
            (
                row["weights"],
                row["backend"],
                row["start"],
                *sizes,
                "yes" if row["holds"] else "NO",
                row["wall_s"],
                row["processor_s"],
                row["read_s"],
                f"{row['wall_s'] / row['read_s']:.2f}",
                *(
                    ("-", "-")
                    if took is None
                    else (1e3 * took["row_s"], f"{took['row_s'] / took['read_s']:.2f}")
                ),
            )
        )
    print_table(
        (
            "weights",
            "back end",
            "start",
            *(f"{name} MiB" for name in ("file", "packed", "kept", "peak", "bound", "huge")),
            "holds",
            "s",
            "processor s",
            "cold read s",
            "s/read",
            "T_V(1) ms",
            "/plain read",
        ),
        cells,
    )


def _mib(count: float | None) -> int | None:
    return None if count is None else round(count / 2**20)
