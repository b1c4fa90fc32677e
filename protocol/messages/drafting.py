"""Orders for a draft, and its proposals."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Field, model_validator

from dovetail.protocol.arrays import Array, stack
from dovetail.protocol.lookup import OCCURRENCES
from dovetail.protocol.messages.parts import (
    MAX_NODES,
    MAX_PASSES,
    MAX_SESSIONS,
    MAX_TOKENS,
    AboutSession,
    BesideFields,
    Count,
    Message,
    Nanoseconds,
    NodeParents,
    Nodes,
    NodeTokens,
    Rows,
    SpanFields,
    Token,
    Tokens,
)
from dovetail.protocol.tree import TokenTree


class Draft(AboutSession):
    """The verdict on the last proposal, and the order for the next one: `accepted` are node indices
    of the last Drafted; `bonus` follows them."""

    ARRAYS = ("features",)
    type: Literal["draft"] = "draft"
    prefix: Count
    """Committed length including `accepted` and `bonus`."""
    accepted: Nodes
    bonus: Token
    more: Tokens = ()
    """Tokens committed after the bonus in rounds without a draft; `round` has advanced by that many
    rounds."""
    max_nodes: Annotated[int, Field(ge=0, le=MAX_NODES)]
    max_depth: Annotated[int, Field(ge=1, le=MAX_NODES)]
    max_width: Annotated[int, Field(ge=1, le=MAX_NODES)]
    deadline_ms: Annotated[float, Field(gt=0.0, le=3.6e6)] | None = None
    """Growth stops at the first level that ends after it; None: no deadline."""
    rate: Annotated[float, Field(ge=0.0, le=1e9)] | None = None
    """The value of a second to the session, in tokens: no round waits for growth that gains less
    than its time is worth. None: grow everything that the policy asks for."""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """A node whose probability of acceptance is below this would not be verified: it need not be
    offered, and nothing is grown below it."""
    ahead: bool = False
    """True if growth continues while the proposal is verified, until the next command."""
    recalled: Annotated[tuple[NodeTokens, ...], Field(max_length=OCCURRENCES, fail_fast=True)] = ()
    """Occurrences of the log's last tokens in earlier texts of its owner, for a look-up: each the
    number of tokens that match, then those that followed. Empty if no texts are kept."""
    features: Array | None = None
    """[1 + accepted + more, row], for a draft that reads its target: features of the last root and
    the accepted nodes, then of bonus and `more` without the last token. None in round 1, after the
    prompt's features."""


class Drafts(Message):
    """Orders for several sessions at once: the draft computes the levels of their trees in shared
    passes, and answers each like a Draft as soon as its tree is done. Only for a worker with
    `together` above 1 in its limits."""

    ARRAYS = ("features",)
    type: Literal["drafts"] = "drafts"
    orders: Annotated[
        tuple[Draft, ...], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
    """Draft commands of different sessions, without their features."""
    rows: Annotated[tuple[Rows, ...], Field(max_length=MAX_SESSIONS, fail_fast=True)] = ()
    """The number of rows of `features` for each order; empty without features."""
    features: Array | None = None
    """[sum of rows, row]: the features of all orders, concatenated."""

    @model_validator(mode="after")
    def _adds_up(self) -> "Drafts":
        if any(order.features is not None for order in self.orders):
            raise ValueError(
                "a single command has features: put the features of all into one array"
            )
        there = 0 if self.features is None else self.features.shape[0] if self.features.shape else 0
        if (self.rows and len(self.rows) != len(self.orders)) or sum(self.rows) != there:
            raise ValueError(
                f"{len(self.orders)} orders have {list(self.rows)} rows of features, but {there} "
                "came"
            )
        return self

    @classmethod
    def of(cls, orders: Sequence[Draft]) -> "Drafts":
        """Return several orders as one command; all features must have the same type and width."""
        features = [order.features for order in orders]
        some = [array for array in features if array is not None]
        return cls.model_construct(
            epoch=orders[0].epoch,
            orders=tuple(
                order if order.features is None else order.model_copy(update={"features": None})
                for order in orders
            ),
            rows=tuple(0 if array is None else array.shape[0] for array in features)
            if some
            else (),
            features=stack(some) if some else None,
        )

    def split(self) -> Sequence[Draft]:
        """Return the orders, each with its features."""
        if self.features is None:
            return self.orders
        stops = [*accumulate(self.rows)]
        return [
            order.model_copy(update={"features": self.features.rows(stop - count, stop)})
            if count
            else order
            for order, count, stop in zip(self.orders, self.rows, stops, strict=True)
        ]


class Drafted(AboutSession):
    """A proposal: nodes best first, a parent before its children, so that every prefix of the list
    is a tree."""

    ARRAYS = ("candidates", "probabilities")
    type: Literal["drafted"] = "drafted"
    tokens: NodeTokens
    parents: NodeParents
    scores: Annotated[tuple[float, ...], Field(max_length=MAX_NODES, fail_fast=True)]
    """Path log-probabilities (float32 values)."""
    grown: Annotated[int, Field(ge=0, le=1 << 24)]
    """Nodes added to the tree between the order and this proposal."""
    hit: bool
    """True if the new root was a node of the existing tree."""
    ahead: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Nodes added to the tree between the last proposal and the order."""
    wasted: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Nodes dropped without being offered when the root moved."""
    passes: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], Nanoseconds], ...],
        Field(max_length=MAX_PASSES, fail_fast=True),
    ] = ()
    """(rows, duration) of the draft's passes between the order and this proposal, and of the last
    passes before the order."""
    entropy: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Cumulative top-K entropy, in nats, of the path with the most certain last token, if the
    policy needs it (HeteroSpec, section 4.1)."""
    spans: SpanFields = ()
    beside: BesideFields = ()
    """Spans of background work since the worker's last report: growth ahead, messages."""
    candidates: Array | None = None
    """int32 [1 + nodes, K <= MAX_CANDIDATES], if acceptance is "rejection": the tokens from which
    the children of the root (row 0) and of node i (row i + 1) were drawn, without replacement,
    siblings in the order of their nodes."""
    probabilities: Array | None = None
    """float32 [1 + nodes, K] of the candidates. Rows of nodes without children, and entries beyond
    the last candidate, are 0."""

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents)
