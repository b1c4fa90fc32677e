"""The order for a draft, and its proposal. Knows no tensors: a draft without a model speaks of the
same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.tree import TokenTree


@dataclass(frozen=True)
class Shape:
    """The bounds of a proposal: at most `nodes` nodes and `depth` levels, `width` nodes expanded a
    level and children considered a node."""

    nodes: int
    depth: int
    width: int


@dataclass(frozen=True)
class Price:
    """The price of growth that a round waits for."""

    rate: float | None = None
    """Tokens that a second is worth; None: whatever the policy asks for is grown."""
    floor: float = 0.0
    """Path probability below which a node would not be verified: it is neither offered nor
    expanded."""


FREE = Price()
SessionCo = TypeVar("SessionCo", covariant=True)


@dataclass(frozen=True)
class Order(Generic[SessionCo]):
    """The order for one session: its root moves down the `accepted` nodes of its last proposal, and
    on over `bonus` and `more`, and a tree of this shape is grown there."""

    session: SessionCo
    accepted: Sequence[int]
    bonus: int
    shape: Shape
    deadline_ns: int | None = None
    """Growth stops at the first pass that ends after it on the clock; None: there is none."""
    more: Sequence[int] = ()
    """Tokens that were committed behind the bonus."""
    price: Price = FREE
    ahead: bool = False
    """True if growth goes on when the proposal has left."""


@dataclass(frozen=True)
class Proposal:
    """The tree that is offered for verification, best first; `grown` nodes joined the pool for it,
    `hit`: its root lay in the pool already."""

    tree: TokenTree
    scores: tuple[float, ...]
    grown: int
    hit: bool
    ahead: int = 0
    """Nodes that joined the pool between the last proposal and the order."""
    wasted: int = 0
    """Nodes dropped when the root moved, neither offered last nor on the way to the new root."""
    passes: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    """(rows, ns) of the passes for it, then of those between the last proposal and the order."""
    entropy: float | None = None
    """The entropy of the tree, in nats, where the policy goes by it."""
    candidates: Array | None = None
    """int32 [1 + nodes, K]: of what the children of the root and of each node were drawn, where
    they were drawn at random."""
    probabilities: Array | None = None
    """float32 [1 + nodes, K]."""
