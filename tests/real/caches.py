"""The command `cache`: compares 8-bit with 16-bit keys and values on one model."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch
from torch import Tensor

from benchmarks.child import Side
from benchmarks.context import ours
from benchmarks.large import write_blocks
from benchmarks.measure import estimate, ratio
from benchmarks.models import SHAPES
from benchmarks.options import Numbers
from benchmarks.verification import Turn, take_rounds
from dovetail.launch.console.terminal import print_table
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment

TYPES = ("fp32", "half", "q8")


@click.command("cache")
@click.argument("file")
@click.option("--depth", default=16384, show_default=True, help="Cached tokens, a multiple of 16.")
@click.option("--rows", type=Numbers(), default="1,4,8,16", help="Rows of the passes.")
@click.option("--pairs", default=7, show_default=True, help="Rounds of passes.")
@click.option("--layers", default=2, show_default=True, help="Layers of a shape.")
@click.option("--threads", default=2, show_default=True)
@click.option("--clock", type=click.Choice(("wall", "processor")), default="wall")
@click.option("--text", type=click.Path(exists=True, path_type=Path), help="Text for the logits.")
@click.option("--tokens", default=600, show_default=True, help="Tokens of the text.")
def cache_command(
    file: str,
    depth: int,
    rows: Sequence[int],
    pairs: int,
    layers: int,
    threads: int,
    clock: str,
    text: Path | None,
    tokens: int,
) -> None:
    """Compare keys and values in q8 with half on FILE: memory, logits over a text, T_V at a depth.

    FILE is a GGUF file, or a shape with random weights, such as 7b, for which only times are shown.
    Cached tokens after the first 1,024 are copies of these; the rows of a pass form a tree.
    """
    with tempfile.TemporaryDirectory(prefix="dovetail-real-") as folder:
        if file in SHAPES:
            shape = replace(SHAPES[file], layers=layers)
            file = str(write_blocks(Path(folder) / f"{file}.gguf", shape, 2 * depth))
        if text is not None:
            show_logits(file, text, tokens)
        show_times(Path(file), depth, rows, pairs, threads, clock)


@torch.inference_mode()
def show_logits(file: str, text: Path, count: int) -> None:
    """Print how far logits with each type are from those with half, and the bytes per token."""
    codec = TextCodec(*read_tokenizer(find_folder(file)))
    tokens = codec.encode(text.read_text(encoding="utf-8"))[:count]
    found: dict[str, tuple[Tensor, int]] = {}
    for kind in TYPES:
        model = load_language_model(
            file, weights="file", device="cpu", cache=kind, activations="fp32"
        )  # int8 would add noise of its own
        cache = model.new_cache(len(tokens))
        segment = Segment(cache, 0, len(tokens))
        logits = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), [segment])
        found[kind] = logits.double(), cache.row_bytes
    exact = found["half"][0]
    table = []
    for kind, (logits, size) in found.items():
        moved = logits - exact
        moved -= moved.mean(1, keepdim=True)
        share = moved.norm() / (exact - exact.mean(1, keepdim=True)).norm()
        ours, theirs = logits.log_softmax(1), exact.log_softmax(1)
        kl = (theirs.exp() * (theirs - ours)).sum(1)
        same = (logits.argmax(1) == exact.argmax(1)).double().mean()
        figures = (moved.abs().max(), share, kl.mean(), kl.max())
        table.append([kind, str(size), *(f"{x:.2g}" for x in figures), f"{100 * same:.1f} %"])
    click.echo(f"{Path(file).name}, {len(tokens)} tokens, compared with half")
    names = ("largest change", "relative", "KL, nats", "largest", "same first choice")
    print_table(["cache", "bytes a token", *names], table)


def show_times(
    file: Path, depth: int, rows: Sequence[int], pairs: int, threads: int, clock: str
) -> None:
    """Print milliseconds of alternating passes after `depth` cached tokens."""
    sides: dict[str, Side] = {kind: ours(file, depth, threads, kind) for kind in TYPES[1:]}
    half, codes = sides.values()
    with half, codes:
        turns = [[Turn(side, "verify", count, clock) for side in (half, codes)] for count in rows]
        found = take_rounds(turns, pairs=pairs, step=lambda _: None)
    table = []
    for count, taken in zip(rows, found, strict=True):
        each = [estimate([turn[side] for turn in taken]).median for side in (0, 1)]
        share = ratio([turn[1] for turn in taken], [turn[0] for turn in taken])
        range_ = f"{share.median:.2f} ({share.low:.2f}-{share.high:.2f})"
        table.append([str(count), *(f"{1e3 * seconds:.1f}" for seconds in each), range_])
    click.echo(f"{file.name}, passes after {depth} tokens, {threads} thread(s)")
    print_table(["M", "half, ms", "q8, ms", "q8 over half"], table)
