"""The order for a draft, and its proposal. Without tensors, so that a draft without a model can use
it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.lookup import Matches
from dovetail.protocol.tree import TokenTree


@dataclass(frozen=True)
class Shape:
    """The bounds of a proposal: at most `nodes` nodes and `depth` levels; `width` nodes expanded
    per level, and children considered per node."""

    nodes: int
    depth: int
    width: int


@dataclass(frozen=True)
class Price:
    """The price of growth for which a round waits."""

    rate: float | None = None
    """The value of a second in tokens; None: growth follows the policy alone."""
    floor: float = 0.0
    """Path probability below which a node would not be verified: it is neither offered nor
    expanded."""


FREE = Price()
SessionCo = TypeVar("SessionCo", covariant=True)


@dataclass(frozen=True)
class Order(Generic[SessionCo]):
    """The order for one session: move its root along the `accepted` nodes of its last proposal,
    `bonus` and `more`, and grow a tree of this shape there."""

    session: SessionCo
    accepted: Sequence[int]
    bonus: int
    shape: Shape
    deadline_ns: int | None = None
    """Growth stops after the first pass that ends past this time; None: no deadline."""
    more: Sequence[int] = ()  # tokens committed after the bonus
    price: Price = FREE
    ahead: bool = False  # True if growth continues after the proposal was sent
    recalled: Matches = ()  # occurrences of the log's last tokens in earlier texts


@dataclass(frozen=True)
class Proposal:
    """The tree offered for verification, best first. `grown`: nodes that joined the pool for it;
    `hit`: its root was in the pool already."""

    tree: TokenTree
    scores: tuple[float, ...]
    grown: int
    hit: bool
    ahead: int = 0  # nodes that joined the pool between the last proposal and the order
    wasted: int = 0
    """Nodes dropped when the root moved that were neither in the last proposal nor on the path to
    the new root."""
    passes: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """(rows, ns) of the passes for it, then of those between the last proposal and the order."""
    entropy: float | None = None  # the entropy of the tree, in nats, if the policy uses it
    candidates: Array | None = None
    """int32 [1 + nodes, K]: the tokens from which the children of the root and of each node were
    drawn, under rejection sampling."""
    probabilities: Array | None = None  # their probabilities, float32 [1 + nodes, K]
