"""Bounds and types that messages share, and the base of all messages."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dovetail.protocol.settings import Frozen

VERSION = (1, 39)
MAX_STRIKES = 8
"""Messages that break the protocol before their sender is ignored; for workers and coordinators
alike."""
MAX_NODES = 1024
MAX_TOKENS = 1 << 20
MAX_SESSIONS = 64
MAX_SPANS = 256
MAX_SEEN_ROUNDS = 256
"""The most rounds in one reply to Look, so that it is within the size limit with trees of
MAX_NODES."""
MAX_SEEN_SPANS = 1024
"""The most spans in one reply to Look, so that a coordinator answers within some milliseconds."""
MAX_SEEN_WORKERS = 64
MAX_CORES = 4096
MAX_MOVES = 64
"""The most fingerprints in one reply."""
MAX_HELD = 2048
"""The most sessions of an earlier coordinator that a worker may still hold."""
MAX_MEMO = 4 << 20
MAX_CURVES = 16
MAX_PASSES = 256
MAX_PAIRS = 64
MAX_FAULTS = 64
MAX_DECISIONS = 64
MAX_TEXT = 4 << 20
MAX_TURNS = 1024
MAX_STOPS = 16
MAX_ENDS = 64
MAX_LAYERS = 1 << 12
MAX_TAPS = 8
MAX_WIDTH = 1 << 16
MAX_ROW = 1 << 17
"""The most numbers per row of features; 256 rows of a prompt, or a path of 128 nodes, then fit into
an array."""
MAX_GRAMMAR = 1 << 20  # characters of a grammar
MAX_RELAXED = 64
MAX_TOP = 20
"""The most alternatives of a token that a client may request."""
MAX_SCORED = 4096
"""The most prompt tokens whose log-probabilities are sent in one message."""
MAX_CANDIDATES = 128
"""The most tokens from which the children of a node are drawn; MAX_SESSIONS trees of MAX_NODES rows
then fit into one message with their probabilities."""
Count = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Nanoseconds = Annotated[int, Field(ge=0, le=(1 << 63) - 1)]
Token = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
Tokens = Annotated[tuple[Token, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
NodeTokens = Annotated[tuple[Token, ...], Field(max_length=MAX_NODES, fail_fast=True)]
NodeParents = Annotated[
    tuple[Annotated[int, Field(ge=-1, lt=MAX_NODES)], ...],
    Field(max_length=MAX_NODES, fail_fast=True),
]
Nodes = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=MAX_NODES)], ...],
    Field(max_length=MAX_NODES, fail_fast=True),
]
Rows = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Floats = Annotated[tuple[float, ...], Field(max_length=MAX_NODES + 1, fail_fast=True)]
Ends = Annotated[tuple[Token, ...], Field(max_length=MAX_ENDS, fail_fast=True)]
Name = Annotated[str, Field(max_length=512)]
Label = Annotated[str, Field(max_length=120)]
"""Short enough for a whole fingerprint to be a Name."""
Text = Annotated[str, Field(max_length=MAX_TEXT)]
SpanField = tuple[Annotated[str, Field(max_length=64)], Nanoseconds, Nanoseconds]
"""Name (see `spans.NAMES`), start on the clock of the process that measured it, and duration."""
SpanFields = Annotated[tuple[SpanField, ...], Field(max_length=MAX_SPANS, fail_fast=True)]
BesideField = tuple[Count | None, Count | None, SpanField]
"""Session and round, if it belongs to one, and the span."""
BesideFields = Annotated[tuple[BesideField, ...], Field(max_length=MAX_SPANS, fail_fast=True)]
Role = Literal["draft", "target", "client"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Version = tuple[Annotated[int, Field(ge=0, le=65535)], Annotated[int, Field(ge=0, le=65535)]]


class TokenLogprobs(Frozen):
    """The log-probability of a token in the target's own distribution: log softmax of its logits
    before any processor, natural logarithm."""

    logprob: Annotated[float, Field(le=0.0)]
    top: Annotated[
        tuple[tuple[Token, Annotated[float, Field(le=0.0)]], ...],
        Field(max_length=MAX_TOP, fail_fast=True),
    ] = ()
    """The most likely tokens at this position, best first, ties by ascending id."""


Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
ScoredTokens = Annotated[tuple[TokenLogprobs, ...], Field(max_length=MAX_SCORED, fail_fast=True)]


class ThoughtBudget(Frozen):
    """How long the thought with which a reply begins may be."""

    tokens: Count
    """Tokens after which `close` must follow."""
    open: Annotated[str, Field(min_length=1, max_length=256)]
    close: Annotated[str, Field(min_length=1, max_length=256)]
    begun: bool = False
    """Whether the prompt ends with `open`."""


class Constraint(Frozen):
    """A grammar that a reply follows, and the budget of its thought (`protocol/grammar.py`)."""

    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR)]
    """Empty: any reply."""
    thoughts: ThoughtBudget | None = None
    engine: Name
    """The library that defines what the grammar allows, with its version: only targets with the
    same `Hello.grammars` serve the request."""
    kind: Name = ""
    """What the client requested, such as json_schema."""
    relaxed: Annotated[tuple[Name, ...], Field(max_length=MAX_RELAXED, fail_fast=True)] = ()
    """What the client requested and the grammar does not enforce."""


class Message(Frozen):
    """A message of any kind, with the incarnation of its sender."""

    ARRAYS: ClassVar[tuple[str, ...]] = ()
    """The fields sent as raw frames after the body, in this order."""
    epoch: Count


class AboutSession(Message):
    session: Count
    round: Count
