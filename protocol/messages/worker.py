"""Commands from the coordinator to a worker, and the events that answer them."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dovetail.protocol.arrays import Array
from dovetail.protocol.experts import Experts
from dovetail.protocol.messages.parts import (
    MAX_NODES,
    MAX_SESSIONS,
    MAX_TOKENS,
    AboutSession,
    BesideFields,
    Constraint,
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
from dovetail.protocol.messages.registration import Reads
from dovetail.protocol.prefixes import NAME_BYTES
from dovetail.protocol.settings import Frozen, Sampling, TreeSettings, plain
from dovetail.protocol.tree import TokenTree

MAX_NAMES = 1024  # most names in a message
AHEAD = bytes(16)  # the key of a session that only prefills the log of one that will move here


class ReadItem(Frozen):
    """A chunk of a log to be read."""

    session: Count
    round: Count
    """The round of the Open or Refeed."""
    start: Count
    """Rows of the log that have been read so far, those of a base included."""
    rows: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """The most additional rows to read."""


class Read(Message):
    """Read another chunk of the log of an Open or a Refeed whose `read` did not cover all of it."""

    type: Literal["read"] = "read"
    item: ReadItem


class Reading(AboutSession):
    """A chunk of a log has been read, and rows are left. Answers an Open, a Refeed, a Read and each
    of the `reads` of a Verify. The last chunk is answered by Opened or Refed instead."""

    type: Literal["reading"] = "reading"
    round: Count = 0
    done: Count
    """Rows of the log that have been read so far, those of a base included."""
    spans: SpanFields = ()


class Open(AboutSession):
    """Start a session: prefill the prompt. Sent to both workers.

    `round` is 0 for a new session. If the session was begun elsewhere, the prompt is its token log,
    and `round` is the one completed by the next token. Messages about the opening carry this round;
    the next command has the next one."""

    type: Literal["open"] = "open"
    round: Count = 0
    key: Annotated[bytes, Field(min_length=16, max_length=16)]
    """The key of the noise. Zeros: the session only prefills a log ahead of a move. If it is kept,
    it keeps all its memory for the session that moves here."""
    prompt: Annotated[tuple[Token, ...], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
    capacity: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """The greatest length of this sequence, including the prompt."""
    vocabulary_size: Annotated[int, Field(ge=1, le=1 << 24)]
    """The size of the target's vocabulary: a draft never proposes an id at or above it."""
    end: Ends = ()
    """Ids that end the reply, which `Sampling.min_tokens` holds back."""
    sampling: Annotated[Sampling, AfterValidator(plain)]
    constraint: Constraint | None = None
    """The grammar of the reply: a target masks what it does not allow, after the processors that
    look back and before temperature. A draft that does the same proposes more that is accepted."""
    tree: TreeSettings
    features: Reads | None = None
    """The features that the session's draft reads: the target must send them for every token that
    it commits."""
    base: Count | None = None
    """A session whose log begins like the prompt. Unless `shared`, it was closed and kept, and this
    session takes over its cache."""
    shared: bool = False
    """True if the base, open or kept, stays as it is and this session shares its first rows. Only
    for a worker with `shares` in its limits."""
    kept: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """The number of prompt tokens, fewer than all, whose rows come from the base; without a base,
    from stored blocks. Features, if any, start at this position. A draft's row that depends on
    features also depends on the next token, so it comes from the base as well."""
    scope: Annotated[bytes, Field(max_length=NAME_BYTES)] = b""
    """Only sessions of the same scope may reuse blocks of this session's rows. Empty: none are
    stored."""
    logprobs: Top | None = None
    """To the target: send TokenLogprobs with each committed token, with this many alternatives.
    None: do not."""
    scored: bool = False
    """To the target: send Scored of the prompt, with as many alternatives. There is no base
    then."""
    replied: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """The number of tokens at the end of the prompt, fewer than all, that belong to a reply begun
    elsewhere: processors of the reply begin with them."""
    features_from: Count | None = None
    """To the target, if features are requested: skip positions before this one. None: start at
    `kept`."""
    read: Rows | None = None
    """Prompt rows to read with this command; Read and Verify request the others. None: all. Only
    for a worker with `prompt_rows` in its limits."""

    @model_validator(mode="after")
    def _replies_to_something(self) -> "Open":
        if self.replied >= len(self.prompt):
            raise ValueError(
                f"{self.replied} tokens of a prompt of {len(self.prompt)} cannot belong to the "
                "reply"
            )
        return self


class Prefilled(AboutSession):
    """The target has read a part of a prompt whose features the draft needs, or a part of the log
    for a Refeed, with the round of that. The parts are sent in order, all of them before Opened or
    Refed."""

    ARRAYS = ("features",)
    type: Literal["prefilled"] = "prefilled"
    round: Count = 0
    start: Count
    """Position of the first row."""
    features: Array
    """[n, row] in the requested type."""


class Refeed(AboutSession):
    """Recompute the features of committed tokens for a draft that joins later, without changing the
    session: positions `start` to `prefix` - 2, since the last committed token has no row yet. Later
    verdicts include features, too."""

    type: Literal["refeed"] = "refeed"
    start: Count
    prefix: Count
    """Committed length."""
    features: Reads
    """The features that the draft reads."""
    read: Rows | None = None
    """Rows to read with this command, as for Open. A Verify of the session before all have been
    read cancels the rest."""


class Refed(AboutSession):
    """All Prefilled of a Refeed have been sent."""

    type: Literal["refed"] = "refed"
    spans: SpanFields = ()


class Scored(AboutSession):
    """The target's log-probabilities of prompt tokens, each given those before it; the parts are
    sent in order, all of them before Opened."""

    type: Literal["scored"] = "scored"
    round: Count = 0
    start: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Position of the first token, at least 1: the token at position 0 has no predecessor."""
    logprobs: ScoredTokens


class Feed(AboutSession):
    """Features from the target's Prefilled, for the draft: after Open, in order of position."""

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
    """The prompt is cached. `bonus` is the first token (target only), `margin` its margin over the
    runner-up."""

    type: Literal["opened"] = "opened"
    round: Count = 0
    bonus: Token | None = None
    margin: float | None = None
    logprobs: TokenLogprobs | None = None
    """The log-probabilities of the bonus, if requested."""
    spans: SpanFields = ()
    placement: Name = ""
    """The devices of the target's layers, in words, as in its Hello; for a target on one device,
    that device."""
    restored: Literal["", "memory", "disk"] = ""
    """Where the rows of stored blocks came from: disk if any block was read from there; empty:
    there were none."""
    read_by: Name = ""
    """The device that prefilled the prompt; empty: those that hold the model."""


class VerifyItem(Frozen):
    session: Count
    round: Count
    prefix: Count
    """Committed length; the last token is the root, whose row is computed in this pass."""
    tokens: NodeTokens
    parents: NodeParents
    hold: bool = False
    """True: the target holds back any features of this verdict, and sends them with the next
    verdict without `hold`."""

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents)


class Verify(Message):
    """Verify the trees of several sessions in one pass over the weights, and commit."""

    ARRAYS = ("candidates", "probabilities")
    type: Literal["verify"] = "verify"
    items: Annotated[
        tuple[VerifyItem, ...], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
    candidates: Array | None = None
    """int32 [sum of 1 + nodes, K]: the candidates of the items' Drafted, concatenated; all items
    have them with the same K, or none does."""
    probabilities: Array | None = None
    """float32, the same shape."""
    reads: Annotated[tuple[ReadItem, ...], Field(max_length=MAX_SESSIONS, fail_fast=True)] = ()
    """Chunks of the logs of other sessions to read in the same pass; they are answered after the
    verdicts."""


class VerifiedItem(Frozen):
    session: Count
    round: Count
    accepted: Nodes
    """A path of nodes from a child of the root downwards, each equal to the target's own choice."""
    bonus: Token
    """The target's choice after the last accepted node."""
    margins: Floats
    """For each accepted token and the bonus, the margin of the target's choice over its
    runner-up."""
    logprobs: Annotated[
        tuple[TokenLogprobs, ...], Field(max_length=MAX_NODES + 1, fail_fast=True)
    ] = ()
    """The log-probabilities of each accepted token and the bonus, if requested."""
    held: Count = 0
    """Rows of features that were held back and are sent with this verdict, before those of its
    root."""


class Verified(Message):
    """Verdicts of one pass; those whose features differ in type or width are sent in separate
    messages."""

    ARRAYS = ("features",)
    type: Literal["verified"] = "verified"
    items: Annotated[
        tuple[VerifiedItem, ...], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
    experts: Experts = 0
    """Distinct experts that the pass used, summed over layers; 0: the target has none, or does not
    count them."""
    spans: SpanFields = ()
    beside: BesideFields = ()
    """Spans of background work, as in Drafted."""
    features: Array | None = None
    """[sum of held + 1 + accepted, row], if requested: for each item the held positions, its root
    and accepted nodes, concatenated."""


class Close(Message):
    """End a session: forget it and free its memory, or keep its cache for an Open that names it as
    base. A kept session can be closed again."""

    type: Literal["close"] = "close"
    session: Count
    keep: bool = False


class Closed(Message):
    type: Literal["closed"] = "closed"
    session: Count


class Blocks(Message):
    """A worker has stored blocks of rows, or no longer has them. Not answered."""

    type: Literal["blocks"] = "blocks"
    names: Annotated[bytes, Field(max_length=MAX_NAMES * NAME_BYTES)]
    """The names of the blocks (`prefixes.py`), 32 bytes each."""
    stored: bool
    """False: they are gone."""
    damaged: Count = 0
    """The files of blocks that were damaged and have been deleted since the worker started."""

    @field_validator("names")
    @classmethod
    def _whole(cls, value: bytes) -> bytes:
        if len(value) % NAME_BYTES:
            raise ValueError(f"{len(value)} bytes are not names of {NAME_BYTES} bytes each")
        return value


class Probe(Message):
    """Request a Probed, to measure the round trip and align the clocks."""

    type: Literal["probe"] = "probe"
    sent_ns: Nanoseconds


class Probed(Message):
    type: Literal["probed"] = "probed"
    sent_ns: Nanoseconds
    """As in the Probe."""
    clock_ns: Nanoseconds
    """The worker's monotonic clock."""
    busy_ns: Nanoseconds
    """Time spent on commands and background work since the worker registered."""
    stale: Count
    """Late, duplicate and stale commands that were dropped."""
    sessions: Count
    rss_bytes: Count
    busy: bool = False
    """True: it answers during a command, which is not answered yet; False: everything requested
    before the probe has been answered."""
    beside: BesideFields = ()
    """Spans of background work, as in Drafted."""


class Observe(Message):
    """Start or stop recording fine spans."""

    type: Literal["observe"] = "observe"
    fine: bool


class Engage(Message):
    """To a worker that registered on standby: it is promoted, also for later registrations."""

    type: Literal["engage"] = "engage"


class Drain(Message):
    """Finish: no more work will come."""

    type: Literal["drain"] = "drain"
    dismissed: bool = False
    """True: an operator drained or replaced this worker, so it must not be restarted; False: the
    coordinator ends."""
