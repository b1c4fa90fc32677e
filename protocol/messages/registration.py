"""The messages with which a worker or a client registers, and a worker's description of itself."""

from importlib.metadata import version
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
from dovetail.protocol.prefixes import NAME_BYTES
from dovetail.protocol.settings import Frozen


def grammar_engine() -> str:
    """Return the library of `protocol/grammar.py` with its version, without importing it."""
    return f"llguidance {version('llguidance')}"


class Fingerprint(Frozen):
    """Defines "the same output": two target workers with equal fingerprints compute the same bytes
    for the same tokens."""

    checkpoint: Label
    """SHA-256 of the weights and the configuration."""
    weights: Label
    kernels: Label
    """The family of kernels: library, instruction set, thread count - everything that can change
    rounding."""
    split: Label = ""
    prefill: Label = "local"
    cache: Label = "fp32"
    """The type of keys and values."""

    def __str__(self) -> str:
        parts = (self.weights, self.kernels, self.split or "whole", self.prefill, self.cache)
        return "/".join((self.checkpoint[:16], *parts))


class Limits(Frozen):
    """The capacity of a worker."""

    context: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """The longest sequence in tokens, without drafted nodes."""
    nodes: Annotated[int, Field(ge=0, le=MAX_NODES)] = MAX_NODES
    sessions: Annotated[int, Field(ge=1, le=1 << 16)] = 64
    kept: Annotated[int, Field(ge=0, le=(1 << 63) - 1)] = 0
    """Total tokens of ended sessions that it keeps cached; 0: none."""
    prompt_rows: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    """Rows per chunk of a prompt while no other session waits; 0: the worker prefills prompts
    whole, with Open."""
    shares: bool = False
    """True if a session can share the first rows of another, which stays unchanged (`shared` of
    Open)."""
    together: Annotated[int, Field(ge=1, le=MAX_SESSIONS)] = 1
    """The most sessions that a draft serves in shared passes, ordered by Drafts; 1: it takes one
    order at a time."""
    levels: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    """The levels of a tree that a pass of a draft predicts."""
    room: Count | None = None
    """Tokens of all sessions, kept ones included, that fit into the worker's cache. None:
    unknown."""


class VocabularyFacts(Frozen):
    """Facts about a worker's vocabulary; the tokenizer file itself is sent separately."""

    digest: Name
    """SHA-256 over the sorted (id, token) pairs, see `vocabulary.py`."""
    size: Annotated[int, Field(ge=1, le=1 << 24)]
    """Rows of the embedding; ids are below this."""
    end: Ends = ()
    """Ids that end a reply."""
    begin: Token | None = None
    template: Annotated[str, Field(max_length=1 << 18)] = ""
    """The chat template (Jinja), empty if there is none."""


class States(Frozen):
    """The hidden states that a target offers to drafts."""

    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    checkpoint: Label = ""
    """SHA-256 of the checkpoint."""


class Reads(Frozen):
    """The features that a draft reads from its target: one row per committed token."""

    taps: Annotated[
        tuple[Annotated[int, Field(ge=0, le=MAX_LAYERS)], ...],
        Field(max_length=MAX_TAPS, fail_fast=True),
    ] = ()
    """Empty: the last hidden state, after the final norm. Else the residual streams entering these
    decoder layers, concatenated in this order; the number of layers: the one entering the final
    norm."""
    width: Annotated[int, Field(ge=1, le=MAX_WIDTH)]
    """The width of the target's hidden state."""
    dtype: Literal["float16", "bfloat16"]
    vocabulary_size: Annotated[int, Field(ge=1, le=1 << 24)]
    """Rows of the target's embedding."""
    trained_for: Label = ""
    """The `States.checkpoint` of the target that the draft was trained for, if known."""

    @property
    def row(self) -> int:
        """Numbers per row."""
        return self.width * max(1, len(self.taps))

    @property
    def row_bytes(self) -> int:
        """Bytes sent per token."""
        return self.row * ITEM_BYTES[self.dtype]

    @model_validator(mode="after")
    def _fits(self) -> "Reads":
        if self.row > MAX_ROW:
            raise ValueError(f"a row of {self.row} features is beyond the limit of {MAX_ROW}")
        return self


class HeldSession(Frozen):
    """A session of an earlier coordinator whose cache a worker still holds, as if it had been
    closed and kept."""

    session: Count
    rows: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    """Tokens of its log that are cached."""


class Hello(Message):
    """A process introduces itself; answered by Welcome or Failed."""

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
    """The cores and memory nodes to which the process is bound, and why others are left out; begins
    with full, cores or none."""
    kernels: Name = ""
    """The instruction set of its kernels; if they are slow, followed by a colon and the reason."""
    fingerprint: Fingerprint | None = None
    limits: Limits | None = None
    vocabulary: VocabularyFacts | None = None
    tokenizer: Array | None = None
    """The bytes of tokenizer.json. Vocabulary and tokenizer come from the model; a draft without a
    model, or with a head for its target, uses its target's."""
    table: Array | None = None
    """The vocabulary as a packed `TokenTable`, which decodes tokens without tokenizer.json; None
    from older workers."""
    states: States | None = None
    """The hidden states that a draft may read from this target; None for a draft."""
    reads: Reads | None = None
    """The features that this draft reads from its target; None if it reads none."""
    grammars: Name = ""
    """The library by which it masks tokens, with its version; empty: it does not. A target without
    it is not sent constrained requests; such a draft proposes unmasked tokens."""
    looks_up: bool = False
    """True if this draft proposes only what `protocol/lookup.py` finds in the log: without a match
    it need not be asked."""
    cores: Annotated[
        tuple[Annotated[int, Field(ge=0, lt=1 << 16)], ...],
        Field(max_length=MAX_CORES, fail_fast=True),
    ] = ()
    """Logical CPUs that the process may use. Two workers on one host that compute on the CPU and
    have a core in common share a device."""
    curves: Annotated[tuple[ContextCurve, ...], Field(max_length=MAX_CURVES, fail_fast=True)] = ()
    """T_V of a target or t_D of a draft over rows, at some cache lengths, from the machine's
    profile file; empty if it has not been calibrated."""
    experts: ExpertCosts | None = None
    """The target's experts, and their measured cost if the profile file has it. None: it has no
    experts, or does not count those that a pass uses."""
    weights: Name = ""
    """The type of a draft's weights; empty if it has none. A target's type is in its
    fingerprint."""
    standby: bool = False
    """True if the worker gets no sessions until a Swap promotes it."""
    placement: Name = ""
    """The devices of the layers of a target that is spread over several, in words."""
    load_s: Annotated[float, Field(ge=0.0)] = 0.0
    """Seconds from the start of the worker's process until its model was loaded; 0: not
    measured."""
    blocks: Annotated[bytes, Field(max_length=NAME_BYTES)] = b""
    """The hash of what its rows depend on besides tokens, from which the names of its stored blocks
    begin; empty: it stores none."""
    snapshots: bool = False
    """True: a session can only begin with blocks up to one whose name it reports, since it has
    states; the rows of blocks have other names."""
    served: Count | None = None
    """The epoch of the coordinator whose sessions are `held`; None: it holds none."""
    held: Annotated[tuple[HeldSession, ...], Field(max_length=MAX_HELD, fail_fast=True)] = ()
    """Sessions of a lost coordinator, offered to a new one that has them in its journal."""


UNCOUNTED = {"reading": "tokenizer", "proving": "model"}
"""Steps of loading for which bytes are not counted, and their objects."""


class LoadingState(Frozen):
    """How far a worker has loaded its model, before it registers."""

    name: Name
    roles: Annotated[tuple[Role, ...], Field(min_length=1, max_length=3, fail_fast=True)]
    host: Name
    pid: Count
    model: Name
    doing: Literal["reading", "checking", "loading", "proving"]
    """reading: the tokenizer; proving: the model, after loading; bytes are counted for neither.
    checking: new files are read in full, for their digest and to find NaN or infinity, before they
    are loaded with the proof of an earlier start."""
    done: Count
    """Bytes done so far."""
    total: Count
    bytes_per_s: Annotated[float, Field(ge=0.0)]
    """The mean since this step began."""

    @property
    def left_s(self) -> float | None:
        """Seconds left at the rate so far; None: not known yet."""
        return (self.total - self.done) / self.bytes_per_s if self.bytes_per_s >= 1.0 else None

    @property
    def words(self) -> str:
        """Progress, rate and time left in words."""
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
    """A worker reports its progress from time to time before it registers; not answered."""

    type: Literal["loading"] = "loading"
    state: LoadingState


class Welcome(Message):
    """The peer is registered under the coordinator's `epoch`, which its commands carry from now
    on."""

    type: Literal["welcome"] = "welcome"
    version: Version = VERSION
    keeps: Annotated[tuple[Count, ...], Field(max_length=MAX_HELD, fail_fast=True)] = ()
    """To a worker: the held sessions that it must keep; it drops the others."""
    journal: bool = False
    """True if requests outlive this coordinator: if it is lost, a waiting client sends its Submit
    again to the next one."""


class Failed(Message):
    """A request or command was not carried out. `session` and `round` are set if it concerned one;
    for clients `session` is the request."""

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
        "constraint",
    ]
    text: Annotated[str, Field(max_length=4096)]
