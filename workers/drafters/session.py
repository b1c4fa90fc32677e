"""The state of a session whose tree grows, and of the pause between its proposals."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from dovetail.protocol.messages import MAX_PASSES
from dovetail.protocol.settings import TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.ngram import LookupSession
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.models.backends.device.levels import DeviceRanking, Fetched
from dovetail.workers.models.segment import Cache
from dovetail.workers.speculation.growth import Floats, GrowingTree, Ints, Nodes
from dovetail.workers.speculation.policy import Policy
from dovetail.workers.speculation.prices import Chance, Recent
from dovetail.workers.speculation.proposal import FREE, Price, Shape

MAX_TREE_ROWS = 4096
"""The most rows of a session's trees: four times the nodes of the largest proposal."""
PROPOSALS_AHEAD = 8  # a tree that grows ahead has rows for this many proposals


@dataclass(frozen=True)
class RankedChildren:
    """The children of nodes as ranked by a device."""

    nodes: Nodes
    width: int
    best: Fetched

    def of(self, nodes: Nodes, width: int) -> Fetched | None:
        """Return them if they belong to these nodes, with this many of each; else None."""
        same = nodes is self.nodes or np.array_equal(nodes, self.nodes)
        return self.best if same and width == self.width else None


MOST_TRUE = 16
"""The most rows of the log that are computed in a level's fixed shapes, where levels are
captured."""

NO_NODES: Nodes = np.zeros(0, np.intp)
THE_ROOT: Nodes = np.array([ROOT], np.intp)


@dataclass
class WaitingTime:
    """The pause between a proposal and the next order, in which a tree may grow ahead."""

    ahead: bool = False  # True if the tree grows ahead
    width: int = 0  # nodes expanded per pass, and visible children per node
    children: int = 0  # children of a node that are kept
    since_ns: int | None = None  # when this pause began; None: there was no proposal yet
    done: bool = False  # True if nothing is left that is worth a pass
    joined: int = 0  # nodes that have joined the pool
    passes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_PASSES))
    """(rows, ns) of the last passes."""


@dataclass(kw_only=True)
class GrowingSession:
    """One sequence; `capacity` is its maximum number of tokens. In the cache, rows of the tree
    follow the committed rows."""

    log: list[int]
    cache: Cache
    ranking: Ranking
    policy: Policy
    depth: int
    capacity: int
    rows_ahead: int = MAX_TREE_ROWS  # the most rows of the tree with growth ahead
    tree: GrowingTree = field(default_factory=GrowingTree)
    offered: list[int] = field(default_factory=list)  # pool index of each node of the last proposal
    price: Price = FREE  # the price of a pass in the last order
    chance: Chance = field(default_factory=Chance)
    waiting_time: WaitingTime = field(default_factory=WaitingTime)
    waits: Recent = field(default_factory=Recent)
    """The pauses between a proposal and the next order."""
    looked_up: LookupSession | None = None
    """The look-up in its log, whose guesses join the tree; None: they do not."""
    ranked: RankedChildren | None = None
    """The children that a device has ranked in the last pass, if any."""

    @property
    def readable(self) -> bool:
        """Whether the draft can read the whole log."""
        return True

    @property
    def rows(self) -> int:
        """The number of committed rows."""
        return self.cache.length

    @property
    def missing_rows(self) -> int:
        """The number of rows of the log that must be computed before the root's children."""
        return len(self.log) - self.rows

    @property
    def free_rows(self) -> int:
        """The number of further nodes that can get a row."""
        return self.cache.capacity - self.cache.length - self.tree.rows_used

    def ranking_of(self, nodes: Nodes) -> DeviceRanking | None:
        """Return the ranking of the children of `nodes` for a device; None: the host ranks."""
        width = self.waiting_time.children
        return self.ranking.for_device(self.tree, nodes, len(self.log), width)

    def note_ranking(self, nodes: Nodes, best: Fetched | None) -> None:
        """Note the children of `nodes`, if a device has ranked them."""
        width = self.waiting_time.children
        self.ranked = None if best is None else RankedChildren(nodes, width, best)

    def children_of(self, logits: Tensor, nodes: Nodes, width: int) -> tuple[Ints, Floats]:
        """Return ids and gains [N, K] of the likeliest tokens after `nodes`, as ranked by a device
        or from logits [N, V]."""
        best = None if self.ranked is None else self.ranked.of(nodes, width)
        return self.ranking.children(logits, self.tree, nodes, len(self.log), width, best)

    def within_reach(self, shape: Shape) -> Shape:
        """`shape`, limited to the levels for which the sequence has room (the bonus token takes
        one)."""
        return Shape(shape.nodes, min(shape.depth, self.capacity - len(self.log) - 1), shape.width)


def tree_rows(tree: TreeSettings, *, ahead: bool = False) -> int:
    """Return the rows of a tree: those that one proposal can expand, and as many from the last one;
    several times that with growth ahead."""
    proposal = max(min(tree.width, tree.most_nodes) * tree.most_levels, tree.most_nodes)
    return min((PROPOSALS_AHEAD if ahead else 2) * proposal, MAX_TREE_ROWS)
