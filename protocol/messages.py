"""Every message between two processes, typed, versioned and bounded.

Three dialects share one envelope. A *command* goes from the coordinator to a worker (imperatives),
an *event* from a worker to the coordinator (participles); a *request* goes from a client to the
coordinator, a *reply* back. Every message carries `epoch`, the incarnation of its sender, drawn at
random when the process starts. Commands about a session carry `session, round, prefix` - prefix is
the number of committed tokens they assume - and events `session, round`, so that what is late,
duplicate or stale is recognised, counted and changes nothing. Token ids are int32, times
nanoseconds.

Knows the shape of what is said, not who says it over which wire (`links.py`) nor how it becomes
bytes (`codec.py`).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dovetail.protocol.arrays import ITEM_BYTES, Array
from dovetail.protocol.profile import ContextCurve, RowsSeconds
from dovetail.protocol.settings import Frozen, Sampling, TreeSettings
from dovetail.protocol.tree import TokenTree

VERSION = (1, 12)

MAX_STRIKES = 8
"""Messages that break the protocol until their sender is no longer listened to, a worker by its
coordinator and a coordinator by its worker alike."""
MAX_NODES = 1024
MAX_TOKENS = 1 << 20
MAX_SESSIONS = 64
MAX_SPANS = 256
MAX_SEEN_ROUNDS = 256
"""The most rounds of one reply to Look, so that with trees of MAX_NODES it is a message that may
travel."""
MAX_SEEN_SPANS = 1024
"""The most spans of one reply to Look; few enough that a coordinator answers within some
milliseconds."""
MAX_SEEN_WORKERS = 64
MAX_CORES = 4096
MAX_MOVES = 64
"""Fingerprints that one reply may name."""
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
"""Numbers of a row of features: so that 256 rows of a prompt, or a path of 128 nodes, are an array
that may travel."""
MAX_TOP = 20
"""Alternatives of a token that a client may ask for."""
MAX_SCORED = 4096
"""Tokens of a prompt whose log-probabilities travel together."""
MAX_CANDIDATES = 128
"""Tokens that the children of a node are drawn from: so that those of MAX_SESSIONS trees of
MAX_NODES rows and their probabilities travel together."""

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
Floats = Annotated[tuple[float, ...], Field(max_length=MAX_NODES + 1, fail_fast=True)]
Ends = Annotated[tuple[Token, ...], Field(max_length=MAX_ENDS, fail_fast=True)]
Name = Annotated[str, Field(max_length=512)]
Label = Annotated[str, Field(max_length=120)]
"""Short enough that a whole fingerprint is a Name."""
Text = Annotated[str, Field(max_length=MAX_TEXT)]
SpanField = tuple[Annotated[str, Field(max_length=64)], Nanoseconds, Nanoseconds]
"""Name, see `spans.NAMES`; start on the clock of the process that measured it; duration."""
SpanFields = Annotated[tuple[SpanField, ...], Field(max_length=MAX_SPANS, fail_fast=True)]
BesideField = tuple[Count | None, Count | None, SpanField]
"""Session and round, as far as it is about one, and the span."""
BesideFields = Annotated[tuple[BesideField, ...], Field(max_length=MAX_SPANS, fail_fast=True)]
Role = Literal["draft", "target", "client"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
Version = tuple[Annotated[int, Field(ge=0, le=65535)], Annotated[int, Field(ge=0, le=65535)]]


class TokenLogprobs(Frozen):
    """The log-probability of a token by the target's own distribution: log softmax of its logits
    before any processor, natural logarithm."""

    logprob: Annotated[float, Field(le=0.0)]
    top: Annotated[
        tuple[tuple[Token, Annotated[float, Field(le=0.0)]], ...],
        Field(max_length=MAX_TOP, fail_fast=True),
    ] = ()
    """The likeliest tokens there, best first, of equals the lowest id first."""


Top = Annotated[int, Field(ge=0, le=MAX_TOP)]
ScoredTokens = Annotated[tuple[TokenLogprobs, ...], Field(max_length=MAX_SCORED, fail_fast=True)]


class Message(Frozen):
    """A message of any kind, with the incarnation of its sender."""

    ARRAYS: ClassVar[tuple[str, ...]] = ()
    """The fields that travel as raw frames behind the body, in this order."""
    epoch: Count


class AboutSession(Message):
    session: Count
    round: Count


# -- registration ----------------------------------------------------------------------------------


class Fingerprint(Frozen):
    """The bounds of "the same output": two target workers of equal fingerprint compute the same
    bytes for the same tokens."""

    checkpoint: Label
    """SHA-256 of the weights and the configuration, with the inflation if there is one."""
    weights: Label
    kernels: Label
    """The family of kernels that computes: library, instruction set, thread count - all that can
    change a rounding."""
    split: Label = ""
    prefill: Label = "local"

    def __str__(self) -> str:
        return "/".join(
            (self.checkpoint[:16], self.weights, self.kernels, self.split or "whole", self.prefill)
        )


class Limits(Frozen):
    """The most that a worker can hold."""

    context: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Longest sequence in tokens, drafted nodes not counted."""
    nodes: Annotated[int, Field(ge=0, le=MAX_NODES)] = MAX_NODES
    sessions: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    kept: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Tokens of sessions that have ended whose rows it is willing to hold in all; 0: it keeps
    none."""


class VocabularyFacts(Frozen):
    """Facts that a worker knows of its vocabulary; the tokenizer file itself travels beside it."""

    digest: Name
    """SHA-256 over the sorted (id, token) pairs, see `vocabulary.py`."""
    size: Annotated[int, Field(ge=1, le=1 << 24)]
    """Rows of the embedding: ids at and beyond it do not exist."""
    end: Ends = ()
    """Ids that end a reply."""
    begin: Token | None = None
    template: Annotated[str, Field(max_length=1 << 18)] = ""
    """The chat template (Jinja), empty if there is none."""


class States(Frozen):
    """The hidden states that a target has and a draft may read."""

    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    """Decoder layers of the checkpoint; those of an inflation are not among them."""
    checkpoint: Label = ""
    """SHA-256 of the checkpoint without inflation, which leaves these states as they are."""


class Reads(Frozen):
    """The features that a draft reads of its target: a row for each token that is committed."""

    taps: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=MAX_LAYERS)], ...],
        Field(max_length=MAX_TAPS, fail_fast=True),
    ] = ()
    """None: the last hidden state, after the final norm. Else the residual streams that enter these
    decoder layers, side by side in this order."""
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """The width of the target's hidden state."""
    dtype: Literal["float16", "bfloat16"]
    vocabulary_size: Annotated[int, Field(ge=1, le=1 << 24)]
    """Rows of the target's embedding."""
    trained_for: Label = ""
    """The `States.checkpoint` of the target that the draft was trained for, if it is known."""

    @property
    def row(self) -> int:
        """Numbers of a row."""
        return self.width * max(1, len(self.taps))

    @property
    def row_bytes(self) -> int:
        """Bytes that travel for each token."""
        return self.row * ITEM_BYTES[self.dtype]

    @model_validator(mode="after")
    def _fits(self) -> "Reads":
        if self.row > MAX_ROW:
            raise ValueError(f"a row of {self.row} features is beyond the limit of {MAX_ROW}")
        return self


class Hello(Message):
    """A process introduces itself; the answer is Welcome or Failed."""

    ARRAYS = ("tokenizer",)
    type: Literal["hello"] = "hello"
    version: Version = VERSION
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=3, fail_fast=True)]
    name: Name
    host: Name
    pid: Count
    model: Name = ""
    device: Name = ""
    threads: Count = 0
    binding: Name = ""
    """To which cores and memory nodes the process is bound, and why to no more: begins with full,
    cores or none."""
    fingerprint: Fingerprint | None = None
    limits: Limits | None = None
    vocabulary: VocabularyFacts | None = None
    tokenizer: Array | None = None
    """The bytes of tokenizer.json. Vocabulary and tokenizer are a model's; a draft without a model,
    or with a head of its target's, knows its target's."""
    states: States | None = None
    """The hidden states that a draft may read of this target; None for a draft."""
    reads: Reads | None = None
    """The features that this draft reads of its target; None if it reads none."""
    cores: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 16)], ...],
        Field(max_length=MAX_CORES, fail_fast=True),
    ] = ()
    """Logical CPUs that the process may use. Two workers of one host that compute on the CPU with a
    core in common share a device."""
    curves: Annotated[tuple[ContextCurve, ...], Field(max_length=MAX_CURVES, fail_fast=True)] = ()
    """T_V of a target or t_D of a draft, over rows at some lengths of the cache, as its machine's
    profile file has them; none if it has not been calibrated."""
    inflation: Name = ""
    """The size to which a target's linears were inflated, as the setting says it; empty: they were
    not."""
    standby: bool = False
    """True if the worker gets no sessions until it is put in place, by a Swap."""
    placement: Name = ""
    """The devices of the layers of a target that is spread over several, in words."""
    load_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds from the start of the worker's process until its model was loaded; 0: not
    measured."""


class LoadingState(Frozen):
    """The progress of a worker with the weights of its model, before it introduces itself."""

    name: Name
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=3, fail_fast=True)]
    host: Name
    pid: Count
    model: Name
    doing: Literal["checking", "loading"]
    """checking: files that are not known yet are read to the end, for their digest and for what is
    no number."""
    done: Count
    """Bytes that are done."""
    total: Count
    bytes_per_s: Annotated[float, Field(ge=0.0)]
    """The mean since this was begun."""

    @property
    def left_s(self) -> float | None:
        """Seconds until this is done, at the rate so far; None: not known yet."""
        return (self.total - self.done) / self.bytes_per_s if self.bytes_per_s >= 1.0 else None

    @property
    def words(self) -> str:
        """Bytes, rate and time left in words."""
        rate = f", {self.bytes_per_s / 1e6:.0f} MB/s" if self.bytes_per_s else ""
        left = (
            ""
            if self.left_s is None
            else f", {round(self.left_s) // 60}:{round(self.left_s) % 60:02} left"
        )
        role = "+".join(self.roles)
        called = role if self.name == role else f"{role} {self.name}"
        unit, size, digits = ("GB", 1e9, 2) if self.total >= 1e9 else ("MB", 1e6, 1)
        read = f"{self.done / size:.{digits}f} of {self.total / size:.{digits}f} {unit}"
        return f"the {called} is {self.doing} its weights: {read}{rate}{left}"


class Loading(Message):
    """A worker that is not registered yet tells its coordinator now and then how far it has got;
    there is no answer."""

    type: Literal["loading"] = "loading"
    state: LoadingState


class Welcome(Message):
    """The peer is registered under the coordinator's `epoch`, which its commands carry from now
    on."""

    type: Literal["welcome"] = "welcome"
    version: Version = VERSION


class Failed(Message):
    """Something asked for was not done. `session` and `round` name it where it was about one; for
    clients `session` is the request."""

    type: Literal["failed"] = "failed"
    session: Count | None = None
    round: Count | None = None
    code: Literal[
        "version",
        "role",
        "vocabulary",
        "settings",
        "prompt_too_long",
        "prefix",
        "session",
        "capacity",
        "no_target",
        "worker_lost",
        "coordinator_lost",
        "ending",
        "memory",
        "internal",
        "protocol",
        "swap",
    ]
    text: Annotated[str, Field(max_length=4096)]


# -- commands and events ---------------------------------------------------------------------------


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
    """A session that was closed to be kept and whose log begins as the prompt does: this one takes
    its cache over, and it is no more."""
    kept: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Tokens of the prompt, fewer than it has, whose rows are the base's. Features, if there are
    any, come from this position on; a row of a draft that reads them was made with the token behind
    it too, so that one is the base's as well."""
    logprobs: Top | None = None
    """To the target: each token that it commits comes with its TokenLogprobs, with so many
    alternatives. None: without."""
    scored: bool = False
    """To the target: it sends Scored of the prompt, with as many alternatives. Then there is no
    base."""
    replied: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """The last so many tokens of the prompt, fewer than it has, are the reply's, which was begun
    elsewhere: what looks at the reply alone begins with them."""
    features_from: Count | None = None
    """To the target, where features are asked for: those of positions before this one are not.
    None: from `kept` on."""

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
    """Compute the features of committed tokens anew, for a draft that has joined later, and leave
    the session as it is: positions `start` to `prefix` - 2, for the last committed token has no row
    yet. Verdicts from now on come with them too."""

    type: Literal["refeed"] = "refeed"
    start: Count
    prefix: Count
    """Committed length."""
    features: Reads
    """The features that the draft reads."""


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


class Draft(AboutSession):
    """The verdict on the last proposal and the order for the next: `accepted` are node indices of
    the last Drafted, `bonus` follows them."""

    ARRAYS = ("features",)
    type: Literal["draft"] = "draft"
    prefix: Count
    """Committed length including `accepted` and `bonus`."""
    accepted: Nodes
    bonus: Token
    more: Tokens = ()
    """Tokens that were committed behind the bonus in rounds in which nothing was drafted; `round`
    has moved on by as many rounds as that took."""
    max_nodes: Annotated[int, Field(ge=0, le=MAX_NODES)]
    max_depth: Annotated[int, Field(ge=1, le=MAX_NODES)]
    max_width: Annotated[int, Field(ge=1, le=MAX_NODES)]
    deadline_ms: Annotated[float, Field(gt=0.0, le=3.6e6)] | None = None
    """Growth stops at the first level that ends after it; none: no deadline."""
    rate: Annotated[float, Field(ge=0.0, le=1e9)] | None = None
    """Tokens that a second is worth to the session: growth whose expected gain is below this price
    of its time is not waited for. None: whatever the policy asks for is grown."""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """A node less likely than this to be accepted would not be verified: it need not be offered,
    and nothing is grown below it."""
    ahead: bool = False
    """True if growth goes on while the proposal is verified, until the next command."""
    features: Array | None = None
    """[1 + accepted + more, row] for a draft that reads its target: of the last root and the
    accepted nodes, and of the tokens before the last of bonus and `more`. None in round 1, before
    which the prompt was fed."""


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
    """Nodes that joined the tree between the order and this proposal."""
    hit: bool
    """True if the root lay in the tree that was there already."""
    ahead: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Nodes that had joined the tree between the last proposal and the order."""
    wasted: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Nodes, neither offered nor below the new root, that were dropped when the root moved."""
    passes: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], Nanoseconds], ...],
        Field(max_length=MAX_PASSES, fail_fast=True),
    ] = ()
    """(rows, duration) of the draft's passes between the order and this proposal, and of the last
    ones before it."""
    entropy: Annotated[float, Field(ge=0.0, le=1e6)] | None = None
    """Cumulative top-K entropy, in nats, of the path whose last token is the surest, where the
    policy asks for it (HeteroSpec, section 4.1)."""
    spans: SpanFields = ()
    beside: BesideFields = ()
    """Spans of what this worker did beside its commands since it last said so: growth ahead,
    messages."""
    candidates: Array | None = None
    """int32 [1 + nodes, K <= MAX_CANDIDATES], where acceptance is "rejection": the tokens among
    which the children of the root (row 0) and of node i (row i + 1) were drawn, without replacement
    and siblings in the order of their nodes."""
    probabilities: Array | None = None
    """float32 [1 + nodes, K] of the candidates. Rows of nodes without children, and places behind
    the last candidate, are 0."""

    @property
    def tree(self) -> TokenTree:
        return TokenTree(self.tokens, self.parents)


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
    """Verdicts of one pass; those whose features differ in type or width come in messages of their
    own."""

    ARRAYS = ("features",)
    type: Literal["verified"] = "verified"
    items: Annotated[
        tuple[VerifiedItem, ...], Field(min_length=1, max_length=MAX_SESSIONS, fail_fast=True)
    ]
    spans: SpanFields = ()
    beside: BesideFields = ()
    """Spans of what this worker did beside its commands, as in Drafted."""
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
    """Say how you are; times the round trip and aligns the clocks."""

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
    """Spans of what this worker did beside its commands, as in Drafted."""


class Observe(Message):
    """Record fine spans from now on, or no more."""

    type: Literal["observe"] = "observe"
    fine: bool


class Engage(Message):
    """To a worker that introduced itself on standby: it is in place, and is so when it introduces
    itself anew."""

    type: Literal["engage"] = "engage"


class Drain(Message):
    """No more work will come: end."""

    type: Literal["drain"] = "drain"


# -- requests and replies --------------------------------------------------------------------------


class Submit(Message):
    """A client wants a completion of one of: token ids, plain text, or chat turns (user first,
    alternating)."""

    type: Literal["submit"] = "submit"
    request: Count
    tokens: Tokens | None = None
    text: Text | None = None
    turns: Annotated[tuple[Text, ...], Field(max_length=MAX_TURNS, fail_fast=True)] | None = None
    sampling: Sampling
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    """0: the prompt is read, and nothing is committed."""
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...],
        Field(max_length=MAX_STOPS, fail_fast=True),
    ] = ()
    seed: Count | None = None
    sample: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    """Which of several replies to the same prompt: each has noise of its own."""
    owner: Name = ""
    """Whose it is, as the sender tells its users apart: what is kept of an ended session is for its
    owner's requests alone."""
    end: Ends | None = None
    """Ids that end the reply; None: the target's."""
    vocabulary: Name = ""
    """Digest of the vocabulary that `tokens` are of; the request fails where the target's is
    another. Empty: not checked."""
    logprobs: Top | None = None
    """Each token comes with its TokenLogprobs, with so many alternatives. None: without."""
    scored: bool = False
    """True: those of the prompt come first, as PromptScored; `logprobs` must be given."""
    tree: TreeSettings
    speculate: bool = True
    """False: the target alone, even where a draft worker is there."""
    trace: bool = False
    """True: the result comes with the spans of all processes."""
    record: bool = False
    """True: every round comes as a Recorded."""
    ahead: bool | None = None
    """True if the draft goes on growing while the target verifies; None: where the two share no
    device, or where measuring says that it pays."""


class Cancel(Message):
    type: Literal["cancel"] = "cancel"
    request: Count


class Status(Message):
    """A client asks for the coordinator's state."""

    type: Literal["status"] = "status"


class Look(Message):
    """A client asks what has happened since it last asked: answered by Seen. What a coordinator
    holds of it is bounded; whoever wants to see asks often.

    A client on another machine gets the tokens of its own requests alone.
    """

    type: Literal["look"] = "look"
    request: Count
    after: Count = 0
    """The `next` of the last Seen; 0: whatever is still there."""
    spans: bool = False
    """Spans too; and have the workers record fine ones until nobody has asked so for some
    seconds."""


class Describe(Message):
    """A client asks what the target is, so that it can read and write its tokens itself."""

    type: Literal["describe"] = "describe"


class Stop(Message):
    """A client asks the coordinator to finish what runs, drain its workers and end."""

    type: Literal["stop"] = "stop"


class Swap(Message):
    """A client asks for a worker on standby to be tried and put in place, and for another one to be
    let go, whose sessions move over where they can.

    The workers are named by their epochs. Answered by Progressed*, and Swapped or Failed.
    """

    type: Literal["swap"] = "swap"
    request: Count
    newcomer: Count
    old: Count | None = None
    """The worker in whose place it comes; None: it comes beside those that are there."""


class Dismiss(Message):
    """A client asks for a worker, named by its epoch, to be let go: answered by Progressed*, and
    Dismissed or Failed."""

    type: Literal["dismiss"] = "dismiss"
    request: Count
    worker: Count
    last: bool = False
    """True: also where there is no other target, so that requests are refused from then on."""


class Emitted(Message):
    """Tokens that were committed for a request, and the text that they complete: not more of it
    than will stay, so without the beginning of a stop string."""

    type: Literal["emitted"] = "emitted"
    request: Count
    tokens: Tokens
    drafted: Annotated[tuple[bool, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """For each token, True if the draft had proposed it."""
    text: Text
    logprobs: Annotated[
        tuple[TokenLogprobs, ...], Field(max_length=MAX_TOKENS, fail_fast=True)
    ] = ()
    """The log-probabilities of each token, where they were asked for."""


class PromptScored(Message):
    """The target's log-probabilities of tokens of the prompt, where those were asked for: in order,
    before the first Emitted."""

    type: Literal["prompt_scored"] = "prompt_scored"
    request: Count
    start: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Position of the first of them."""
    logprobs: ScoredTokens


class Progressed(Message):
    """The progress of a Swap or Dismiss, in words."""

    type: Literal["progressed"] = "progressed"
    request: Count
    text: Name


class Swapped(Message):
    """The newcomer is in place, and the other one has been let go."""

    type: Literal["swapped"] = "swapped"
    request: Count
    moved: Count
    """Sessions that went over; `stayed`: that ended where they were."""
    stayed: Count
    longest_pause_s: float
    """The longest that any client of a session waited for its next token meanwhile."""


class Dismissed(Message):
    """The worker has been let go. Its fields are those of Swapped."""

    type: Literal["dismissed"] = "dismissed"
    request: Count
    moved: Count
    stayed: Count
    longest_pause_s: float


class Described(Message):
    """The target that a request would be decoded with."""

    ARRAYS = ("tokenizer",)
    type: Literal["described"] = "described"
    model: Name
    fingerprint: Name
    limits: Limits
    vocabulary: VocabularyFacts
    tokenizer: Array
    """The bytes of tokenizer.json."""


class RoundRecord(Frozen):
    """The record of a round: what was offered, what of it was verified, the verdict, and where the
    time went."""

    round: Count
    prefix: Count
    """Committed tokens before it; the last one is the root."""
    tokens: NodeTokens
    parents: NodeParents
    """The whole of what was offered, best first; the first `verified` nodes went to the target."""
    scores: Annotated[tuple[float, ...], Field(max_length=MAX_NODES, fail_fast=True)]
    verified: Count
    accepted: Nodes
    bonus: Token
    committed: Count | None = None
    """Tokens that it added to the reply, where that ended within its path; None: all of the path,
    and the bonus."""
    entropy: float | None = None
    hit: bool = False
    grown: Count = 0
    ahead: Count = 0
    wasted: Count = 0
    passes: Annotated[
        tuple[tuple[Annotated[int, Field(ge=1, le=MAX_TOKENS)], Nanoseconds], ...],
        Field(max_length=MAX_PASSES, fail_fast=True),
    ] = ()
    draft_ns: Nanoseconds = 0
    """Drafting that the round waited for."""
    verify_ns: Nanoseconds = 0
    transport_ns: Nanoseconds = 0
    queue_ns: Nanoseconds = 0
    coordinator_ns: Nanoseconds = 0

    @property
    def brought(self) -> int:
        """Tokens that it added to the reply."""
        return len(self.accepted) + 1 if self.committed is None else self.committed


class SeenRound(Frozen):
    """A round that has ended."""

    number: Count
    """Among all that has happened, rounds and spans alike."""
    session: Count
    draft: Name = ""
    """The worker that drafts for the session; empty: none does."""
    target: Name
    at_ns: Nanoseconds
    """When its verdict was handled, on the coordinator's clock."""
    readable: bool = True
    """True if its tokens are told; else zeros stand in the record for them and for the bonus."""
    record: RoundRecord


class SeenSpan(Frozen):
    """A stretch of time in which a process did one thing."""

    process: Name
    device: Name = ""
    session: Count | None = None
    """None: it was about none, or about several."""
    round: Count | None = None
    shared: Annotated[
        tuple[tuple[Count, Count], ...], Field(max_length=MAX_SESSIONS, fail_fast=True)
    ] = ()
    """Session and round of each, where it was about several."""
    span: SpanField
    """On the coordinator's clock, which that of another machine is aligned with as well as its
    `clock_bound_ns` says."""


class SeenWorker(Frozen):
    """A worker's present state."""

    name: Name
    worker_epoch: Count
    roles: Annotated[tuple[Role, ...], Field(max_length=3, fail_fast=True)]
    host: Name = ""
    device: Name
    cores: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 16)], ...],
        Field(max_length=MAX_CORES, fail_fast=True),
    ] = ()
    node: Name = ""
    """The memory nodes that it is bound to, such as 0 or 0-1; empty: to none."""
    busy_ns: Nanoseconds
    """Nanoseconds that it has worked, as it last said (Probed)."""
    at_ns: Nanoseconds
    """When that was, on the coordinator's clock."""
    clock_bound_ns: Nanoseconds | None = None
    """The most by which what is said of its clock is wrong; None: it has not been asked yet."""
    waiting: Literal["", "draft", "target", "coordinator", "no work"] = ""
    """The part that it waits for; empty: it works."""


class Seen(Message):
    """Events since a number, oldest first, as many as one message may hold."""

    type: Literal["seen"] = "seen"
    request: Count
    at_ns: Nanoseconds
    """Now, on the coordinator's clock."""
    next: Count
    """The number to ask with next time."""
    missed: Count = 0
    """Rounds and spans that had happened since and are not there any more."""
    more: bool = False
    """True if there is more that did not fit."""
    workers: Annotated[tuple[SeenWorker, ...], Field(max_length=MAX_SEEN_WORKERS, fail_fast=True)]
    rounds: Annotated[tuple[SeenRound, ...], Field(max_length=MAX_SEEN_ROUNDS, fail_fast=True)] = ()
    spans: Annotated[tuple[SeenSpan, ...], Field(max_length=MAX_SEEN_SPANS, fail_fast=True)] = ()


class Recorded(Message):
    """A round of a request that asked for records, after the Emitted of its tokens."""

    type: Literal["recorded"] = "recorded"
    request: Count
    record: RoundRecord


class DraftFailure(Frozen):
    """The first failure of a request's draft; whatever was drafted behind it, no token is
    another."""

    draft: Name
    """Name of the worker."""
    error: Name
    round: Count
    """The round in which it failed; 0: before the first."""
    after_s: Annotated[float, Field(ge=0.0)]
    """Since the request came."""


class Result(Frozen):
    """One request's result: the fields of `--json`. Seconds, except where the name says otherwise;
    shares 0..1."""

    text: Text
    token_ids: Tokens
    prompt_tokens: Count
    completion_tokens: Count
    finish_reason: FinishReason
    seed: Count
    fingerprint: Name
    rounds: Count
    tau: float | None
    accepted_tokens: Count
    drafted_tokens: Count
    grown_nodes: Count
    acceptance_rate: float | None
    accepted_per_position: Floats
    hit_rate: float | None
    wall_s: float
    time_to_first_token_s: float
    tokens_per_s: float
    prefill_s: float
    draft_exposed_s: float
    verify_s: float
    transport_s: float
    queue_s: float
    coordinator_s: float
    unaccounted_s: float
    bytes_per_round: float
    ahead_nodes: Count = 0
    """Nodes grown while the target verified."""
    wasted_nodes: Count = 0
    """Nodes that were neither offered nor kept when the root moved."""
    verified_rows: Count = 0
    """Rows of all passes of the target, roots included."""
    plain_rounds: Count = 0
    """Rounds that were verified without a tree."""
    control_rounds: Count = 0
    """Rounds without a draft, among the plain ones, that were made to measure the target's pass
    over a single row."""
    predicted_tokens_per_s: float | None = None
    """The rate that the cost model expected of these rounds before each began; None where it knows
    too little."""
    reused_tokens: Count = 0
    """Prompt tokens that the target had read in an earlier session, and did not read again."""
    moves: Count = 0
    """Times that the session went on on another target."""
    fingerprints: Annotated[tuple[Name, ...], Field(max_length=MAX_MOVES, fail_fast=True)] = ()
    """The fingerprints of the targets that served it, in order, where they were not all the same;
    `fingerprint` is the last one's."""
    placement: Name = ""
    """Which of the target's layers were where, in words, of the last one that served it; a device's
    name: all of them there."""
    prefill: Name = "local"
    """Who read the prompt: local, those that compute the model; or a device through which the
    weights streamed."""
    draft_failure: DraftFailure | None = None
    """None: its draft never failed."""


class Finished(Message):
    type: Literal["finished"] = "finished"
    request: Count
    result: Result
    margins: Annotated[tuple[float, ...], Field(max_length=MAX_TOKENS, fail_fast=True)]
    """For every completion token, the distance of the target's choice to its runner-up."""
    spans: Annotated[tuple[SeenSpan, ...], Field(max_length=1 << 16, fail_fast=True)] = ()
    """Spans of all processes, if the request asked for a trace."""


class WorkerState(Frozen):
    """One worker in `status`."""

    name: Name
    roles: Annotated[tuple[Role, ...], Field(max_length=3, fail_fast=True)]
    model: Name
    device: Name
    threads: Count
    binding: Name = ""
    placement: Name = ""
    """The devices of the layers of a target that is spread over several, in words."""
    fingerprint: Name
    host: Name
    pid: Count
    worker_epoch: Count
    sessions: Count
    busy_share: float
    """Busy time over wall time since it registered."""
    round_trip_us: float | None
    clock_offset_us: float | None
    clock_bound_us: float | None
    rss_mb: float
    stale: Count
    inflation: Name = ""
    standby: bool = False
    """It gets no sessions until it is put in place."""
    swapped_in: bool = False
    """It came on standby and was put in place."""
    leaving: bool = False
    """It gets no more sessions, and is let go when the last one is done with."""
    stuck: bool = False
    """The worker has owed an answer, or has not responded, for too long."""
    sent_bytes: Count = 0
    """To it, since it registered; `received_bytes`: from it."""
    received_bytes: Count = 0
    bytes_per_round: float | None = None
    """Bytes of a round's order and its answer, both ways, lately; None: it has had none."""
    feature_bytes: Count = 0
    """Bytes of its target's hidden states that a draft is sent for each token; 0: none."""


class PairState(Frozen):
    """Measured costs of a draft and a target that work together, and what follows from them."""

    draft: Name
    target: Name
    speculating: bool
    """False: at present it does not pay, or nobody has asked."""
    rounds: Count
    hit_rate: float | None
    gamma: float | None
    """Nodes verified a round, lately."""
    tokens_per_s: float | None
    """The rate of one session, lately."""
    alone_tokens_per_s: float | None
    """The rate that the target alone would have."""
    predicted_tokens_per_s: float | None
    hops_us: float | None
    """The time that the messages of a round take beside the work."""
    t_v: RowsSeconds | None
    """The target's pass over rows, at the context of late."""
    t_d: RowsSeconds | None
    """The draft's pass over rows."""


class Totals(Frozen):
    """Counters since the coordinator began, and a few gauges."""

    prompt_tokens: Count = 0
    reused_tokens: Count = 0
    """Tokens of the prompts that were not read again."""
    completion_tokens: Count = 0
    drafts: Count = 0
    """Rounds that were verified with a tree."""
    drafted_tokens: Count = 0
    """Nodes verified."""
    accepted_tokens: Count = 0
    accepted_per_depth: Annotated[
        tuple[Count, ...], Field(max_length=MAX_NODES, fail_fast=True)
    ] = ()
    """Rounds that accepted a node at depth 1, 2, ..."""
    reasons: Annotated[
        tuple[tuple[FinishReason, Count], ...], Field(max_length=4, fail_fast=True)
    ] = ()
    """Numbers of requests by how they ended."""
    refused_requests: Count = 0
    """Requests that were turned down before anything was decoded: what they asked for is not
    possible, or there was no room for them."""
    opening: Count = 0
    """Sessions whose prompt has not been read yet."""
    waiting: Count = 0
    """Sessions whose target was lost, and that wait for another."""
    moves: Count = 0
    """Times that a session went on on another target."""
    let_go: Count = 0
    """Clients whose requests were ended because they read nothing."""
    kept: Count = 0
    """Sessions that have ended and whose caches are held."""
    occupied: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the sessions that the targets can hold which are open."""
    draft_failures: Count = 0
    """Times that a draft could not do what was asked of it, or answered what cannot be, and its
    session went on without."""


class Fault(Frozen):
    """A part that does not do its work, though requests may be served without it."""

    part: Name
    """Such as "draft worker", for the worker of the name draft."""
    why: Name
    since_s: Annotated[float, Field(ge=0.0)]
    """For so long."""
    retry_s: Annotated[float, Field(ge=0.0)] | None = None
    """It is started again in so long; None: that has been done, or nobody does it."""

    @property
    def words(self) -> str:
        """Return the fault in words."""
        retry = "" if self.retry_s is None else f"; it is restarted in {self.retry_s:.1f} s"
        return f"the {self.part} has not been working for {self.since_s:.1f} s: {self.why}{retry}"


class Supervised(Frozen):
    """The words of a supervisor to its coordinator, a line of JSON on its standard input, whenever
    they change."""

    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS, fail_fast=True)] = ()
    """The faults of the parts that it looks after."""
    ending: Name = ""
    """Why the service ends: a part that it needs is lost for good. Empty: it does not."""
    drained: Annotated[tuple[Role, ...], Field(max_length=2, fail_fast=True)] = ()
    """Roles whose worker was drained, so that it is not started again."""


class Reported(Message):
    """The coordinator's state: the fields of `dovetail status --json`."""

    type: Literal["reported"] = "reported"
    address: Name
    pid: Count
    uptime_s: float
    workers: Annotated[tuple[WorkerState, ...], Field(max_length=256, fail_fast=True)]
    sessions: Count
    finished: Count
    failed: Count
    cancelled: Count
    rounds: Count
    tau: float | None
    stale: Count
    """Late, duplicate and stale events that were dropped."""
    refused: Count
    """Peers and messages that broke the protocol."""
    degraded: bool
    reasons: Annotated[tuple[Name, ...], Field(max_length=64, fail_fast=True)]
    """Sentences that say what is degraded, and what else there is to say."""
    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS, fail_fast=True)] = ()
    """Faults of parts, which are among the reasons."""
    loading: Annotated[tuple[LoadingState, ...], Field(max_length=256, fail_fast=True)] = ()
    """Workers that are not registered yet."""
    pairs: Annotated[tuple[PairState, ...], Field(max_length=MAX_PAIRS, fail_fast=True)] = ()
    decisions: Annotated[tuple[Name, ...], Field(max_length=MAX_DECISIONS, fail_fast=True)] = ()
    """The last changes of how is speculated, oldest first, each with its reason."""
    totals: Totals = Totals()
    drained: Annotated[tuple[Role, ...], Field(max_length=2, fail_fast=True)] = ()
    """Roles that nobody plays since an operator drained their last worker."""


Command = (
    Welcome
    | Open
    | Feed
    | Refeed
    | Draft
    | Verify
    | Close
    | Probe
    | Observe
    | Engage
    | Drain
    | Failed
)
Event = (
    Hello
    | Loading
    | Prefilled
    | Refed
    | Scored
    | Opened
    | Fed
    | Drafted
    | Verified
    | Closed
    | Probed
    | Failed
)
Request = Hello | Submit | Cancel | Status | Describe | Look | Swap | Dismiss | Stop
Reply = (
    Welcome
    | Emitted
    | PromptScored
    | Recorded
    | Finished
    | Reported
    | Described
    | Seen
    | Progressed
    | Swapped
    | Dismissed
    | Failed
)
