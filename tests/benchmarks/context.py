"""The command `context`: passes behind long contexts, ours with keys and values in fp32 and in
half, llama.cpp's with and without flash attention, on one GGUF file, in turns."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from benchmarks.child import Side
from benchmarks.measure import estimate, ratio
from benchmarks.options import (
    Command,
    Numbers,
    find_llama,
    option,
    options,
    pin,
    report,
    written_model,
)
from benchmarks.verification import WARM_UP, Turn, take_rounds
from dovetail.launch.console.terminal import print_table, progress_bar
from support.gguf_files import write_gguf

OURS = {"ours, fp32": "fp32", "ours, half": "half", "ours, q8": "q8"}
"""Sides of ours by the type of their keys and values."""
THEIRS = {"llama.cpp": (), "llama.cpp, flash": ("--flash-attention",)}
ROOM, LONGEST = 64, 131072


@click.command(cls=Command)
@option(
    "--context",
    type=click.IntRange(min=1024),
    default=16384,
    help="Cached tokens, of 16 a multiple.",
)
@option("--rows", type=Numbers(), default="1,4,16", help="Rows of the passes.")
@option(
    "--type", "kind", type=click.Choice(("Q8_0", "Q4_0")), default="Q8_0", help="Type of the file."
)
@options("llama_python", "shape", "layers", "pairs", "threads", "clock", "models", "json")
def context(
    context: int,
    rows: tuple[int, ...],
    kind: str,
    llama_python: Path | None,
    pairs: int,
    threads: int,
    clock: str,
    as_json: bool,
    **model: Any,
) -> None:
    """T_V(M) behind so many cached tokens, against llama.cpp's attention on the same GGUF file.

    Our rows form a tree and theirs follow each other; all give logits. Beyond the first 1,024 the
    cached tokens are copies of these, since a prefill of 65,536 takes an hour on two cores.
    """
    python = find_llama(llama_python)
    pin(threads)
    with written_file(kind, **model) as file, ExitStack() as stack:
        sides = {
            **{name: ours(file, context, threads, cache) for name, cache in OURS.items()},
            **{
                name: _theirs(file, kind, context, threads, python, more)
                for name, more in THEIRS.items()
            },
        }
        for side in sides.values():
            stack.enter_context(side)
        turns = [[Turn(side, "verify", count, clock) for side in sides.values()] for count in rows]
        with progress_bar(pairs + WARM_UP, "rounds") as step:
            found = take_rounds(turns, pairs=pairs, step=step)
    told = [
        {
            "rows": count,
            "ms": {
                name: 1e3 * estimate(list(seconds)).median
                for name, seconds in zip(sides, zip(*taken, strict=True), strict=True)
            },
            "ratio": {
                name: ratio(
                    [turn[place] for turn in taken], [min(turn[len(OURS) :]) for turn in taken]
                ).as_json()
                for place, name in enumerate(OURS)
            },
        }
        for count, taken in zip(rows, found, strict=True)
    ]
    result = {"model": file.name, "context": context, "threads": threads, "rows": told}
    report(result, as_json, lambda: show(result))


def ours(file: Path, context: int, threads: int, cache: str) -> Side:
    arguments = ("--weights", "file", "--backend", "kernels", "--cache", cache)
    more = ("--context", str(context), "--threads", str(threads))
    return Side("ours", (str(file), *arguments, *more), threads=threads)


def _theirs(
    file: Path, kind: str, context: int, threads: int, python: Path, more: tuple[str, ...]
) -> Side:
    arguments = ("--capacity", str(context + ROOM), "--context", str(context))
    return Side(
        "llama",
        (str(file.parent), kind, str(file), *arguments, "--threads", str(threads), *more),
        python=str(python),
        threads=threads,
    )


@contextmanager
def written_file(kind: str, **model: Any) -> Iterator[Path]:
    """A random model of that shape as a GGUF file with matrices of a type."""
    with written_model(weights="half", checkpoint="fp16", **model) as folder:
        file = folder.with_name(f"{folder.name}-{kind}.tokens.gguf")
        whole = folder / "model.safetensors"
        if not file.exists():
            shards = [load_file(shard) for shard in sorted(folder.glob("model-*.safetensors"))]
            save_file({n: t for shard in shards for n, t in shard.items()}, whole)
            longest: dict[str, Any] = {"llama.context_length": LONGEST}
            twin = write_gguf(folder, file, lambda *_: GGMLQuantizationType[kind], **longest)
            shutil.rmtree(twin)
            whole.unlink()
        yield file


def show(result: dict[str, Any]) -> None:
    rows = result["rows"]
    names = list(rows[0]["ms"])
    click.echo(
        f"{result['model']}, {result['context']} cached tokens, {result['threads']} thread(s); "
        "milliseconds, and ours over the faster of llama.cpp's two"
    )
    cells = [
        (
            row["rows"],
            *(row["ms"][name] for name in names),
            *(f"{r['median']:.2f} ({r['low']:.2f}-{r['high']:.2f})" for r in row["ratio"].values()),
        )
        for row in rows
    ]
    print_table(("M", *names, *(f"{name}: ratio" for name in OURS)), cells)
