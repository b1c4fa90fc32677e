"""Commands of the coordinator to a worker, and the events that answer them."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dovetail.protocol.arrays import Array
from dovetail.protocol.experts import Experts
from dovetail.protocol.messages.parts import (
    MAX_NODES,
    MAX_SESSIONS,
    MAX_TOKENS,
    AboutSession,
    BesideFields,
    Count,
    Ends,
    Floats,
    Message,
    Name,
    Nanoseconds,
    NodeParents,
    Nodes,
    NodeTokens,
    Rows,
    ScoredTokens,
    SpanFields,
    Token,
    TokenLogprobs,
    Top,
)
from dovetail.protocol.messages.reading import ReadItem
from dovetail.protocol.messages.registration import Reads
from dovetail.protocol.settings import Frozen, Sampling, TreeSettings
from dovetail.protocol.tree import TokenTree


class Open(AboutSession):
    """Start a session: prefill the prompt. To both workers.

    `round` is 0; where the session was begun elsewhere the prompt is its token log, and the round
    is the one that the next token ends. The next command is about the round behind it, and what
    belongs to the opening carries this one.
    """

    type: Literal["open"] = "open"
    round: Count = 0
    key: Annotated[bytes, Field(min_length=16, max_length=16)]
    prompt: Annotated[tuple[Token, ...], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
    capacity: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Longest this sequence can become, prompt included."""
    vocabulary_size: Annotated[int, Field(ge=1, le=1 << 24)]
    """The size of the target's vocabulary: a draft never proposes an id at or beyond it."""
    end: Ends = ()
    """Ids that end the reply; what `Sampling.min_tokens` holds back."""
    sampling: Sampling
    tree: TreeSettings
    features: Reads | None = None
    """The features that the session's draft reads: the target is to send them of every token that
    it commits."""
    base: Count | None = None
    """A session whose log begins like the prompt. Unless it is `shared`, it was closed to be kept,
    and it is gone once this session has taken over its cache."""
    shared: bool = False
    """True if the base, open or kept, stays as it is and this session begins with the same rows.
    Only for a worker whose limits have `shares`."""
    kept: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Tokens of the prompt, fewer than it has, whose rows are the base's. Features, if there are
    any, come from this position on; a row of a draft that reads them was made with the token behind
    it too, so that one is the base's as well."""
    logprobs: Top | None = None
    """To the target: each token that it commits comes with its TokenLogprobs, with this many
    alternatives. None: without."""
    scored: bool = False
    """To the target: it sends Scored of the prompt, with as many alternatives. Then there is no
    base."""
    replied: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """The number of last tokens of the prompt, fewer than all, that belong to the reply, which was
    begun elsewhere: processors of the reply begin with them."""
    features_from: Count | None = None
    """To the target, where features are asked for: those of positions before this one are not.
    None: from `kept` on."""
    read: Rows | None = None
    """Rows of the prompt that are read with this command; Read and Verify ask for the others. None:
    all. Only for a worker whose limits have `prompt_rows`."""

    @model_validator(mode="after")
    def _replies_to_something(self) -> "Open":
        if self.replied >= len(self.prompt):
            raise ValueError(
                f"{self.replied} tokens of a prompt of {len(self.prompt)} are said to be the "
                "reply's"
            )
        return self


class Prefilled(AboutSession):
    """The target has read a part of the prompt, which the draft reads features of; the parts come
    in order, and all of them before Opened. Or a part of the log, for a Refeed, whose round it
    carries; then all of them come before Refed."""

    ARRAYS = ("features",)
    type: Literal["prefilled"] = "prefilled"
    round: Count = 0
    start: Count
    """Position of the first row."""
    features: Array
    """[n, row] in the type that was asked for."""


class Refeed(AboutSession):
    """Recompute the features of committed tokens, for a draft that has joined later, without
    changing the session: positions `start` to `prefix` - 2, for the last committed token has no row
    yet. Verdicts from now on come with them too."""

    type: Literal["refeed"] = "refeed"
    start: Count
    prefix: Count
    """Committed length."""
    features: Reads
    """The features that the draft reads."""
    read: Rows | None = None
    """Rows that are read with this command, as for Open. A Verify of the session before all have
    been read gives up the rest."""


class Refed(AboutSession):
    """All Prefilled of a Refeed have been sent."""

    type: Literal["refed"] = "refed"
    spans: SpanFields = ()


class Scored(AboutSession):
    """The target's log-probabilities of tokens of the prompt, each after those before it; the parts
    come in order, and all of them before Opened."""

    type: Literal["scored"] = "scored"
    round: Count = 0
    start: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Position of the first of them; nothing is before the token at position 0."""
    logprobs: ScoredTokens


class Feed(AboutSession):
    """Features that the target's Prefilled brought, for the draft: after Open, in the order of
    positions."""

    ARRAYS = ("features",)
    type: Literal["feed"] = "feed"
    round: Count = 0
    start: Count
    features: Array


class Fed(AboutSession):
    """The draft has read the features of a Feed."""

    type: Literal["fed"] = "fed"
    round: Count = 0
    start: Count
    """The `start` of the Feed that this answers."""
    spans: SpanFields = ()


class Opened(AboutSession):
    """The prompt is in the cache. `bonus` is the first token (target only), `margin` its distance
    to the runner-up."""

    type: Literal["opened"] = "opened"
    round: Count = 0
    bonus: Token | None = None
    margin: float | None = None
    logprobs: TokenLogprobs | None = None
    """The log-probabilities of the bonus, where they were asked for."""
    spans: SpanFields = ()
    placement: Name = ""
    """The devices of the target's layers, in words, as in its Hello; for a target that is whole,
    its device."""
    read_by: Name = ""
    """The device that read the prompt; empty: those that compute the model."""


class VerifyItem(Frozen):
    session: Count
    round: Count
    prefix: Count
    """Committed length; its last token is the root, whose row is computed in this pass."""
    tokens: NodeTokens
    parents: NodeParents
    hold: bool = False
    """True if the features of this verdict, where the session's draft reads any, are held by the
    target. They come with the next verdict that is not to be held."""

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents)


class Verify(Message):
    """Score the trees of several sessions in one pass over the weights, and commit."""

    ARRAYS = ("candidates", "probabilities")
    type: Literal["verify"] = "verify"
    items: Annotated[
        tuple[VerifyItem, ...], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
    candidates: Array | None = None
    """int32 [sum of 1 + nodes, K]: those of the items' Drafted, one below the other; none of the
    items has any, or all have as many."""
    probabilities: Array | None = None
    """float32, the same shape."""
    reads: Annotated[tuple[ReadItem, ...], Field(max_length=MAX_SESSIONS, fail_fast=True)] = ()
    """Chunks of the logs of other sessions, which the same pass reads; they are answered after the
    verdicts."""


class VerifiedItem(Frozen):
    session: Count
    round: Count
    accepted: Nodes
    """A path of nodes from below the root, each equal to the target's own choice."""
    bonus: Token
    """The target's choice after the last accepted node."""
    margins: Floats
    """For each accepted token and the bonus, the distance of the target's choice to its
    runner-up."""
    logprobs: Annotated[
        tuple[TokenLogprobs, ...], Field(max_length=MAX_NODES + 1, fail_fast=True)
    ] = ()
    """The log-probabilities of each accepted token and the bonus, where they were asked for."""
    held: Count = 0
    """Rows of features that had been held and come with this verdict, before those of its root."""


class Verified(Message):
    """Verdicts of one pass; those whose features differ in type or width come in separate
    messages."""

    ARRAYS = ("features",)
    type: Literal["verified"] = "verified"
    items: Annotated[
        tuple[VerifiedItem, ...], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
    experts: Experts = 0
    """Experts that the pass went through, each counted once in every layer; 0: the target has none,
    or does not count them."""
    spans: SpanFields = ()
    beside: BesideFields = ()
    """Spans of this worker's work outside of commands, as in Drafted."""
    features: Array | None = None
    """[sum of held + 1 + accepted, row], where they were asked for: of each item's positions that
    had been held, its root and accepted nodes, one below the other."""


class Close(Message):
    """End a session: forget it and free what it holds, or keep its cache for an Open that names it
    as its base. One that is kept can be closed again."""

    type: Literal["close"] = "close"
    session: Count
    keep: bool = False


class Closed(Message):
    type: Literal["closed"] = "closed"
    session: Count


class Probe(Message):
    """Request a Probed; measures the round trip and aligns the clocks."""

    type: Literal["probe"] = "probe"
    sent_ns: Nanoseconds


class Probed(Message):
    type: Literal["probed"] = "probed"
    sent_ns: Nanoseconds
    """The probe's."""
    clock_ns: Nanoseconds
    """The worker's monotonic clock."""
    busy_ns: Nanoseconds
    """Time spent on commands, growth ahead and other work ahead of time since the worker
    registered."""
    stale: Count
    """Late, duplicate and stale commands that were dropped."""
    sessions: Count
    rss_bytes: Count
    busy: bool = False
    """True: it answers in the midst of a command, whose answer is still to come; else everything
    that was asked before the probe has been answered."""
    beside: BesideFields = ()
    """Spans of this worker's work outside of commands, as in Drafted."""


class Observe(Message):
    """Record fine spans from now on, or no more."""

    type: Literal["observe"] = "observe"
    fine: bool


class Engage(Message):
    """To a worker that registered on standby: it is in place, also when it registers again."""

    type: Literal["engage"] = "engage"


class Drain(Message):
    """No more work will come: end."""

    type: Literal["drain"] = "drain"
    dismissed: bool = False
    """True: an operator drained or replaced this worker, so it must not be restarted; False: the
    coordinator ends."""
