"""The models that are measured, in the shapes of real ones, and the tree that is verified. Needs no
torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail.protocol.tree import TokenTree

VOCABULARY = 512
"""Small, so that the head costs next to nothing: llama.cpp's own benchmark computes it for one row,
a verification for all."""
CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; `layers` is how many of them are built, enough for the matrices to be
    far larger than the caches of a processor."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int


SHAPES = {
    "7b": Shape(hidden=4096, intermediate=11008, heads=32, kv_heads=32, layers=3),
    "1b": Shape(hidden=2048, intermediate=8192, heads=32, kv_heads=8, layers=4),
    "small": Shape(hidden=512, intermediate=1408, heads=8, kv_heads=4, layers=4),
}
"""Llama-2-7B, Llama-3.2-1B, and one for a try of seconds."""


@contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    """Yield the folder that models are written to: the one given, kept for the next run, or one
    that goes with this run."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
    else:
        with TemporaryDirectory(prefix="dovetail-benchmark-") as folder:
            yield Path(folder)


def draw_tree(nodes: int, *, seed: int = 0) -> TokenTree:
    """A tree that branches as drafts do: each node hangs on one of the last few, so that it is a
    few levels deep for 16 nodes."""
    chance = random.Random(seed)
    parents = tuple(chance.randrange(max(-1, node - 5), node) for node in range(nodes))
    return TokenTree(tokens=tuple(token_row(nodes)), parents=parents)


def token_row(count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return the tokens of a text, the same for every engine."""
    return [(7 * i + 3) % vocabulary for i in range(count)]
