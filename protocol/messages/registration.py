"""The messages with which a worker or a client registers, and a worker's description of itself."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dovetail.protocol.arrays import ITEM_BYTES, Array
from dovetail.protocol.calibration import ContextCurve, ExpertCosts
from dovetail.protocol.messages.parts import (
    MAX_CORES,
    MAX_CURVES,
    MAX_HELD,
    MAX_LAYERS,
    MAX_NODES,
    MAX_ROW,
    MAX_SESSIONS,
    MAX_TAPS,
    MAX_TOKENS,
    MAX_WIDTH,
    VERSION,
    Count,
    Ends,
    Label,
    Message,
    Name,
    Role,
    Token,
    Version,
)
from dovetail.protocol.settings import Frozen


class Fingerprint(Frozen):
    """The bounds of "the same output": two target workers of equal fingerprint compute the same
    bytes for the same tokens."""

    checkpoint: Label
    """SHA-256 of the weights and the configuration."""
    weights: Label
    kernels: Label
    """The family of kernels that computes: library, instruction set, thread count - all that can
    change a rounding."""
    split: Label = ""
    prefill: Label = "local"
    cache: Label = "fp32"
    """The type of keys and values."""

    def __str__(self) -> str:
        parts = (self.weights, self.kernels, self.split or "whole", self.prefill, self.cache)
        return "/".join((self.checkpoint[:16], *parts))


class Limits(Frozen):
    """The most that a worker can hold."""

    context: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Longest sequence in tokens, drafted nodes not counted."""
    nodes: Annotated[int, Field(ge=0, le=MAX_NODES)] = MAX_NODES
    sessions: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    kept: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Tokens of sessions that have ended whose rows it is willing to hold in all; 0: it keeps
    none."""
    prompt_rows: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Rows of a chunk of a prompt where no other session waits; 0: the worker reads prompts whole,
    with Open."""
    shares: bool = False
    """True if a session may begin with the rows of another that stays as it is (`shared` of
    Open)."""
    together: Annotated[int, Field(ge=1, le=MAX_SESSIONS)] = 1
    """The most sessions that a draft serves in shared passes, ordered by Drafts; 1: it takes one
    order at a time."""
    room: Count | None = None
    """Tokens of all sessions together, kept ones included, that fit into the worker's cache. None:
    it does not know."""


class VocabularyFacts(Frozen):
    """Facts about a worker's vocabulary; the tokenizer file itself is sent separately."""

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
    checkpoint: Label = ""
    """SHA-256 of the checkpoint."""


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


class HeldSession(Frozen):
    """A session of an earlier coordinator whose rows a worker still holds, as if it had been closed
    to be kept."""

    session: Count
    rows: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Tokens of its log that have rows."""


class Hello(Message):
    """A process introduces itself; the answer is Welcome or Failed."""

    ARRAYS = ("tokenizer", "table")
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
    kernels: Name = ""
    """The instruction set of its kernels; where they are slow, a colon and the reason follow."""
    fingerprint: Fingerprint | None = None
    limits: Limits | None = None
    vocabulary: VocabularyFacts | None = None
    tokenizer: Array | None = None
    """The bytes of tokenizer.json. Vocabulary and tokenizer are a model's; a draft without a model,
    or with a head of its target's, knows its target's."""
    table: Array | None = None
    """The vocabulary as a packed `TokenTable`, which spells tokens without tokenizer.json; None
    from older workers."""
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
    experts: ExpertCosts | None = None
    """The experts of the target, and their cost as far as its profile file knows it. None: it has
    none, or does not count those that a pass goes through."""
    weights: Name = ""
    """The type of a draft's weights; empty if it has none. A target's is in its fingerprint."""
    standby: bool = False
    """True if the worker gets no sessions until it is put in place, by a Swap."""
    placement: Name = ""
    """The devices of the layers of a target that is spread over several, in words."""
    load_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds from the start of the worker's process until its model was loaded; 0: not
    measured."""
    served: Count | None = None
    """The epoch of the coordinator whose sessions are `held`; None: it holds none."""
    held: Annotated[tuple[HeldSession, ...], Field(max_length=MAX_HELD, fail_fast=True)] = ()
    """Sessions of a lost coordinator, for one that has them in its journal."""


UNCOUNTED = {"reading": "tokenizer", "proving": "model"}
"""What a worker does without counting bytes, and what it does that to."""


class LoadingState(Frozen):
    """The progress of a worker with the weights of its model, before it introduces itself."""

    name: Name
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=3, fail_fast=True)]
    host: Name
    pid: Count
    model: Name
    doing: Literal["reading", "checking", "loading", "proving"]
    """reading: its tokenizer; proving: its model, after loading; neither counts bytes. checking:
    new files are read in full, for their digest and for NaN or infinity, before they are loaded
    with the proof of an earlier start."""
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
        if self.doing in UNCOUNTED:
            return f"the {called} is {self.doing} its {UNCOUNTED[self.doing]}"
        unit, size, digits = ("GB", 1e9, 2) if self.total >= 1e9 else ("MB", 1e6, 1)
        read = f"{self.done / size:.{digits}f} of {self.total / size:.{digits}f} {unit}"
        return f"the {called} is {self.doing} its weights: {read}{rate}{left}"


class Loading(Message):
    """A worker that is not registered yet reports its progress now and then; there is no answer."""

    type: Literal["loading"] = "loading"
    state: LoadingState


class Welcome(Message):
    """The peer is registered under the coordinator's `epoch`, which its commands carry from now
    on."""

    type: Literal["welcome"] = "welcome"
    version: Version = VERSION
    keeps: Annotated[tuple[Count, ...], Field(max_length=MAX_HELD, fail_fast=True)] = ()
    """To a worker: which of the sessions that it holds can be gone on from; it forgets the
    others."""
    journal: bool = False
    """True if requests outlive this coordinator: a client that still waits for one when it is lost
    sends the Submit again to the next."""


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
        "cancelled",
        "no_target",
        "worker_lost",
        "coordinator_lost",
        "ticket",
        "ending",
        "memory",
        "internal",
        "protocol",
        "swap",
    ]
    text: Annotated[str, Field(max_length=4096)]
