"""The interface of a tree policy, and what policies share: the first pass, the nodes that matter,
and the policy that others adapt."""

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
        """The entropy of the last tree, where the policy goes by it (`heterospec.py`); else
        None."""

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield what each pass of the model expands, none empty: the root, -1, by itself and
        first, then nodes whose parents have rows.

        The caller gives them rows and adds their children before it asks for the next pass. It may
        stop at any time, and has to where it cannot expand what it is given. Of what `BestFirst`
        gives it may also expand some nodes only, the first at least: the others come again.
        """

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return what to offer, at most `shape.nodes` nodes of at most `shape.depth` levels, best
        first: every prefix is a tree."""


class Dynamic:
    """Expand and rerank."""

    entropy: ClassVar[float | None] = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """One pass a level; what a tree that was there already lacks on several levels goes in
        one."""
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
                return  # that was the only one, and it is not worth it

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """The best of the pool."""
        return best_first(tree.within(shape.depth), tree.scores, shape.nodes)


def root_pass(tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
    """The first pass, if there is anything to be had from it."""
    if shape.nodes > 0 and shape.depth > 0 and not tree.root_expanded:
        yield np.array([ROOT], np.intp)


def worthwhile(nodes: Nodes, offered: Nodes, tree: GrowingTree, shape: Shape) -> Nodes:
    """`nodes` less those that have been expanded, less those that cannot matter.

    A child comes after its parent in the order of `offered`, the best nodes so far, so what is
    below a node that is not among the best `shape.nodes` - 1 is never offered, however far the tree
    grows.
    """
    matters = np.zeros(len(tree), np.bool_)
    matters[offered[: max(shape.nodes - 1, 0)]] = True
    left: Nodes = nodes[matters[nodes] & (tree.rows[nodes] == NO_ROW)]
    return left
