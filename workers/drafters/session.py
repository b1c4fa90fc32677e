"""The state of a session whose tree grows, and of the time between its proposals."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from dovetail.protocol.messages import MAX_PASSES
from dovetail.protocol.settings import TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.models.backends.device.ranked import DeviceRanking, Fetched
from dovetail.workers.models.segment import Cache
from dovetail.workers.speculation.growth import Floats, GrowingTree, Ints, Nodes
from dovetail.workers.speculation.policy import Policy
from dovetail.workers.speculation.prices import Chance, Recent
from dovetail.workers.speculation.proposal import FREE, Price, Shape

MAX_TREE_ROWS = 4096
"""Rows that the trees of one session may take at most, four times the nodes that a proposal can
have."""
PROPOSALS_AHEAD = 8
"""A tree that grows ahead has rows for this many proposals."""


@dataclass(frozen=True)
class RankedChildren:
    """The children of nodes as a device has ranked them."""

    nodes: Nodes
    width: int
    best: Fetched

    def of(self, nodes: Nodes, width: int) -> Fetched | None:
        """Return them if they belong to these nodes, with this many of each; else None."""
        same = nodes is self.nodes or np.array_equal(nodes, self.nodes)
        return self.best if same and width == self.width else None


MOST_TRUE = 16
"""The most rows of the log that are computed as a level is, where levels are captured."""

NO_NODES: Nodes = np.zeros(0, np.intp)
THE_ROOT: Nodes = np.array([ROOT], np.intp)


@dataclass
class WaitingTime:
    """The time between a proposal and the next order, in which a tree may grow ahead."""

    ahead: bool = False
    """True if it grows."""
    width: int = 0
    """Nodes expanded a pass, and children that the policies see of a node."""
    children: int = 0
    """Children that are kept of a node."""
    since_ns: int | None = None
    """Time at which this pause began; None: there was no proposal yet."""
    done: bool = False
    """True if there is nothing left that is worth a pass."""
    joined: int = 0
    """Nodes that have joined the pool."""
    passes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_PASSES))
    """(rows, ns) of the last passes."""


@dataclass(kw_only=True)
class GrowingSession:
    """One sequence; `capacity` is the number of tokens that it can come to. Behind the cache's
    committed rows lie those of the tree."""

    log: list[int]
    cache: Cache
    ranking: Ranking
    policy: Policy
    depth: int
    capacity: int
    rows_ahead: int = MAX_TREE_ROWS
    """Rows that the tree may come to by growth ahead."""
    tree: GrowingTree = field(default_factory=GrowingTree)
    offered: list[int] = field(default_factory=list)
    """Pool index of each node of the last proposal."""
    price: Price = FREE
    """The price of a pass in the last order."""
    chance: Chance = field(default_factory=Chance)
    waiting_time: WaitingTime = field(default_factory=WaitingTime)
    waits: Recent = field(default_factory=Recent)
    """The times between a proposal and the next order."""
    ranked: RankedChildren | None = None
    """The children that a device has ranked in the last pass; None: it has ranked none."""

    @property
    def readable(self) -> bool:
        """Return whether the draft can read the whole log."""
        return True

    @property
    def rows(self) -> int:
        """Rows of the log so far."""
        return self.cache.length

    @property
    def missing_rows(self) -> int:
        """Rows of the log that the root's children wait for."""
        return len(self.log) - self.rows

    @property
    def free_rows(self) -> int:
        """Return how many more nodes can have a row."""
        return self.cache.capacity - self.cache.length - self.tree.rows_used

    def ranking_of(self, nodes: Nodes) -> DeviceRanking | None:
        """Return the ranking of the children of `nodes` for a device; None: it is the host's."""
        width = self.waiting_time.children
        return self.ranking.for_device(self.tree, nodes, len(self.log), width)

    def note_ranking(self, nodes: Nodes, best: Fetched | None) -> None:
        """Note the children of `nodes`, if a device has ranked them."""
        width = self.waiting_time.children
        self.ranked = None if best is None else RankedChildren(nodes, width, best)

    def children_of(self, logits: Tensor, nodes: Nodes, width: int) -> tuple[Ints, Floats]:
        """Return the likeliest tokens after `nodes` and their gains [N, K], by a device that has
        ranked them or by logits [N, V]."""
        best = None if self.ranked is None else self.ranked.of(nodes, width)
        return self.ranking.children(logits, self.tree, nodes, len(self.log), width, best)

    def within_reach(self, shape: Shape) -> Shape:
        """`shape` without the levels that the sequence has no place for (the bonus takes one)."""
        return Shape(shape.nodes, min(shape.depth, self.capacity - len(self.log) - 1), shape.width)


def tree_rows(tree: TreeSettings, *, ahead: bool = False) -> int:
    """Return the rows of a tree: what one proposal can expand, and as much again for what
    survives of the last one; several times that where it grows ahead."""
    proposal = max(min(tree.width, tree.most_nodes) * tree.most_levels, tree.most_nodes)
    return min((PROPOSALS_AHEAD if ahead else 2) * proposal, MAX_TREE_ROWS)
