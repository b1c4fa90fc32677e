"""What a draft is asked for and what it offers. Knows no tensors: a draft without a model speaks of the same."""

from dataclasses import dataclass

from dovetail.protocol.arrays import Array
from dovetail.protocol.tree import TokenTree


@dataclass(frozen=True)
class Shape:
    """What a proposal may be: at most `nodes` nodes and `depth` levels, `width` nodes expanded a level and children considered a node."""

    nodes: int
    depth: int
    width: int


@dataclass(frozen=True)
class Proposal:
    """What is offered for verification, best first; `grown` nodes joined the pool for it, `hit`: its root lay in the pool already."""

    tree: TokenTree
    scores: tuple[float, ...]
    grown: int
    hit: bool
    candidates: Array | None = None
    """int32 [1 + nodes, K]: of what the children of the root and of each node were drawn, where they were drawn at random."""
    probabilities: Array | None = None
    """float32 [1 + nodes, K]."""
