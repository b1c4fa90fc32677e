"""The interface of a tree policy, and what policies share: the first pass, the nodes that matter,
and `Dynamic`, which others adapt."""

from collections.abc import Iterator
from typing import ClassVar, Protocol

import numpy as np

from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import NO_ROW, GrowingTree, Nodes, best_first
from dovetail.workers.speculation.proposal import Shape


class Policy(Protocol):
    """Grows one session's tree."""

    @property
    def entropy(self) -> float | None:
        """The entropy of the last tree, if the policy uses it (`heterospec.py`); else None."""

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield the nodes that each pass of the model expands, never empty: first the root (-1)
        alone, then nodes whose parents have rows.

        The caller gives them rows and adds their children before it asks for the next pass. It may
        stop at any time, and must if it cannot expand them. With `BestFirst` it may expand only the
        first few nodes; the others are yielded again."""

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return at most `shape.nodes` nodes of at most `shape.depth` levels to offer, best first:
        every prefix is a tree."""


class Dynamic:
    """Expand and rerank."""

    entropy: ClassVar[float | None] = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield one pass a level; nodes left unexpanded on several levels of a surviving tree share
        a pass."""
        yield from root_pass(tree, shape)
        while shape.depth > 1:
            offered = self.select(tree, shape)
            levels = [
                offered[tree.levels[offered] == level][: shape.width]
                for level in range(1, shape.depth)
            ]
            nodes = worthwhile(np.concatenate(levels), offered, tree, shape)
            if not len(nodes):
                return
            yield nodes
            if (tree.rows[nodes] == NO_ROW).all():
                return  # the only pass, and not worth it

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return the best of the pool."""
        return best_first(tree.within(shape.depth), tree.scores, shape.nodes)


def root_pass(tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
    """Yield the first pass, if the root is to be expanded."""
    if shape.nodes > 0 and shape.depth > 0 and not tree.root_expanded:
        yield np.array([ROOT], np.intp)


def worthwhile(nodes: Nodes, offered: Nodes, tree: GrowingTree, shape: Shape) -> Nodes:
    """Return `nodes` without those that have been expanded or cannot matter. A child comes after
    its parent in the order of `offered`, the best nodes so far, so descendants of a node that is
    not among the best `shape.nodes` - 1 are never offered, however far the tree grows."""
    matters = np.zeros(len(tree), np.bool_)
    matters[offered[: max(shape.nodes - 1, 0)]] = True
    left: Nodes = nodes[matters[nodes] & (tree.rows[nodes] == NO_ROW)]
    return left
