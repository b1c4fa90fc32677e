"""The state of the coordinator, in the answers to Status and Look."""

from typing import Annotated, Literal

from pydantic import Field

from dovetail.protocol.calibration import RowsSeconds
from dovetail.protocol.messages.parts import (
    MAX_CORES,
    MAX_DECISIONS,
    MAX_ENDS,
    MAX_FAULTS,
    MAX_NODES,
    MAX_PAIRS,
    MAX_SEEN_ROUNDS,
    MAX_SEEN_SPANS,
    MAX_SEEN_WORKERS,
    MAX_SESSIONS,
    Count,
    FinishReason,
    Label,
    Message,
    Name,
    Nanoseconds,
    Role,
)
from dovetail.protocol.messages.registration import LoadingState
from dovetail.protocol.messages.rounds import RoundRecord, SeenSpan
from dovetail.protocol.settings import Frozen

SHOWN_KEYS = 4
"""The most API keys named in a sentence about the queue."""


class SeenRound(Frozen):
    """A round that has ended."""

    number: Count
    """A serial number among all events, rounds and spans alike."""
    session: Count
    draft: Name = ""
    """The worker that drafts for the session; empty: none."""
    target: Name
    at_ns: Nanoseconds
    """When its verdict was handled, on the coordinator's clock."""
    readable: bool = True
    """True if the record has the tokens; otherwise they and the bonus are zeros."""
    record: RoundRecord


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
    """The memory nodes that it is bound to, such as 0 or 0-1; empty: none."""
    busy_ns: Nanoseconds
    """Nanoseconds spent working, according to its last Probed."""
    at_ns: Nanoseconds
    """The time of that Probed, on the coordinator's clock."""
    clock_bound_ns: Nanoseconds | None = None
    """The error bound of its clock's offset; None: not measured yet."""
    waiting: Literal["", "draft", "target", "coordinator", "no work"] = ""
    """What it waits for; empty: it is working."""


class Seen(Message):
    """Events since a number, oldest first, as many as fit into a message."""

    type: Literal["seen"] = "seen"
    request: Count
    at_ns: Nanoseconds
    """Now, on the coordinator's clock."""
    next: Count
    """The number to use in the next Look."""
    missed: Count = 0
    """Rounds and spans since then that have already been discarded."""
    more: bool = False
    """True if more events did not fit."""
    workers: Annotated[tuple[SeenWorker, ...], Field(max_length=MAX_SEEN_WORKERS, fail_fast=True)]
    rounds: Annotated[tuple[SeenRound, ...], Field(max_length=MAX_SEEN_ROUNDS, fail_fast=True)] = ()
    spans: Annotated[tuple[SeenSpan, ...], Field(max_length=MAX_SEEN_SPANS, fail_fast=True)] = ()


class WorkerState(Frozen):
    """One worker in `status`."""

    name: Name
    roles: Annotated[tuple[Role, ...], Field(max_length=3, fail_fast=True)]
    model: Name
    device: Name
    threads: Count
    binding: Name = ""
    kernels: Name = ""
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
    weights: Name = ""
    """The type of its weights; empty if it has none."""
    standby: bool = False
    """True if the worker gets no sessions until it is promoted."""
    swapped_in: bool = False
    """True if the worker started on standby and was promoted."""
    leaving: bool = False
    """True if the worker gets no more sessions, and is dismissed once the last one has ended."""
    stuck: bool = False
    """True if an answer of the worker, or any sign of life, is overdue."""
    sent_bytes: Count = 0
    """Bytes sent to it since it registered; `received_bytes`: received from it."""
    received_bytes: Count = 0
    bytes_per_round: float | None = None
    """Recent bytes per round, order and answer together; None before its first round."""
    feature_bytes: Count = 0
    """Bytes per token of its target's hidden states that are sent to a draft; 0: none."""
    t_v: RowsSeconds | None = None
    """The cost model's seconds of a target's passes at their usual speed, also for numbers of rows
    that have not occurred yet; None before its first pass as a target."""
    token_s: float | None = None
    """Recent seconds per token of its sessions, as a target; None before its first round."""
    rows: float = 1.0
    """Recent rows per session in a pass of the target."""
    row_s: float | None = None
    """Recent seconds that a prompt row adds to its passes; None before its first one."""
    sharing: float = 1.0
    """Recent number of sessions sharing a pass of the target."""
    ends: Annotated[tuple[Label, ...], Field(max_length=MAX_ENDS, fail_fast=True)] = ()
    """The spellings of the tokens that end a target's reply."""
    grammars: Name = ""
    """The library by which it masks the tokens of constrained replies; empty: it does not."""
    blocks: Count = 0
    """Stored blocks of prompts; `damaged_blocks`: those whose files were damaged and deleted."""
    damaged_blocks: Count = 0


class PairState(Frozen):
    """Measured costs of a draft and a target that work together, and derived rates."""

    draft: Name
    target: Name
    speculating: bool
    """True if any running session drafts or, without running sessions, if the last one did."""
    rounds: Count
    hit_rate: float | None
    gamma: float | None
    """Recent number of verified nodes per round."""
    tokens_per_s: float | None
    """The recent rate of one session."""
    alone_tokens_per_s: float | None
    """The rate that the target alone would reach."""
    predicted_tokens_per_s: float | None
    hops_us: float | None
    """The time of a round's messages, without computation."""
    t_v: RowsSeconds | None
    """The target's pass over rows, at recent context lengths."""
    t_d: RowsSeconds | None
    """The draft's pass over rows."""
    undrafted: Name = ""
    """How many running sessions are decoded without a draft, and why; empty if there are none."""


Lack = Literal["room", "key", "beginning"]
"""Why a request is queued: there is no room on a target, its key has reached its limit
(`key_sessions`), or a prompt with the same beginning is being prefilled."""
LACKS: dict[Lack, str] = {
    "room": "for room on a target",
    "key": "for other requests of its key to end (coordinator.key_sessions)",
    "beginning": "for a prompt with the same beginning to be read",
}


class KeyWaits(Frozen):
    """The requests of one API key in the queue: their number, the longest wait, and its reason."""

    key: Name
    """The first digits of the digest of the key; empty: requests without a key."""
    length: Count
    longest_s: Annotated[float, Field(ge=0.0)]
    lacks: Lack = "room"
    """Why the longest waiting request waits."""


class Totals(Frozen):
    """Counters since the coordinator started, and a few gauges."""

    prompt_tokens: Count = 0
    reused_tokens: Count = 0
    """Prompt tokens that were reused from caches."""
    completion_tokens: Count = 0
    drafts: Count = 0
    """Rounds verified with a tree."""
    drafted_tokens: Count = 0
    """Nodes verified."""
    accepted_tokens: Count = 0
    accepted_per_depth: Annotated[
        tuple[Count, ...], Field(max_length=MAX_NODES, fail_fast=True)
    ] = ()
    """How many rounds accepted a node at depth 1, 2, ..."""
    reasons: Annotated[
        tuple[tuple[FinishReason, Count], ...], Field(max_length=4, fail_fast=True)
    ] = ()
    """Numbers of requests by finish reason."""
    refused_requests: Count = 0
    """Requests that were rejected before decoding: they were invalid, or there was no room."""
    opening: Count = 0
    """Sessions whose prompt has not been prefilled yet."""
    waiting: Count = 0
    """Sessions whose target was lost and that wait for another."""
    moves: Count = 0
    """How often a session moved to another target."""
    rebalanced: Count = 0
    """Moves of running sessions to a target that is faster for them; `moves` includes them."""
    let_go: Count = 0
    """Clients whose requests were ended because they stopped reading."""
    queue: Annotated[tuple[KeyWaits, ...], Field(max_length=MAX_SESSIONS, fail_fast=True)] = ()
    """The queue by API key, the longest wait first; at most 64 keys."""
    queued: Count = 0
    """Requests in the queue, of all keys."""
    kept: Count = 0
    """Ended sessions whose caches are held."""
    occupied: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Open sessions as a share of those that the targets can hold."""
    draft_failures: Count = 0
    """How often a draft failed at a command or gave an invalid answer, and its session continued
    without it."""

    @property
    def queue_words(self) -> str:
        """Return a sentence with the number, waiting time, reason and keys of queued requests;
        empty if there are none."""
        said = f"queued requests: {self.queued}"
        if self.queue:
            first = self.queue[0]
            said += f", the first has waited {first.longest_s:.1f} s {LACKS[first.lacks]}"
        keys = ", ".join(f"{own.key} {own.length}" for own in self.queue[:SHOWN_KEYS] if own.key)
        keys += ", ..." if keys and len(self.queue) > SHOWN_KEYS else ""
        return (f"{said}; by key: {keys}" if keys else said) if self.queued else ""


class Fault(Frozen):
    """A part of the service that does not work, although requests may be served without it."""

    part: Name
    """Such as "draft worker" for the worker named draft."""
    why: Name
    since_s: Annotated[float, Field(ge=0.0)]
    """How long it has not worked."""
    retry_s: Annotated[float, Field(ge=0.0)] | None = None
    """Seconds until the part is restarted; None: it has been, or will not be."""
    restarts: bool = False
    """True if the supervisor restarts the part, or has restarted it."""

    @property
    def words(self) -> str:
        """Return the fault in words."""
        retry = "" if self.retry_s is None else f"; it is restarted in {self.retry_s:.1f} s"
        return f"the {self.part} has not been working for {self.since_s:.1f} s: {self.why}{retry}"


class ProcessState(Frozen):
    """The process of the coordinator or of an HTTP API."""

    name: Literal["coordinator", "http"]
    host: Name
    pid: Count
    cpu_s: float | None = None
    """CPU time in seconds; `rss_mb`: resident memory in 10^6 bytes. None if the process is not on
    the coordinator's machine."""
    rss_mb: float | None = None


class Supervised(Frozen):
    """A supervisor's report to its coordinator: a line of JSON on standard input after each
    change."""

    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS, fail_fast=True)] = ()
    """Faults of the supervised parts."""
    ending: Name = ""
    """Why the service ends: a part that it needs is lost for good. Empty: it does not end."""
    drained: Annotated[tuple[Role, ...], Field(max_length=2, fail_fast=True)] = ()
    """Roles whose worker was drained, so that it is not restarted."""


class JournalState(Frozen):
    """The journal of a coordinator."""

    folder: Name
    bytes: Count
    """The size of its files."""
    replies: Count
    """Known replies: running ones, and those that have ended recently."""
    write_us: float | None = None
    """Recent microseconds that the coordinator waits for a write; None: there was no write."""
    sync_ms: float | None = None
    """Milliseconds until written data is on disk, in a separate thread; None: not measured."""
    failed: Name = ""
    """Why the journal has stopped writing; empty: it has not."""


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
    """Unexpected events that were dropped: duplicates, those of other incarnations, and late ones,
    except for sessions that have ended."""
    refused: Count
    """Peers and messages that broke the protocol."""
    degraded: bool
    reasons: Annotated[tuple[Name, ...], Field(max_length=64, fail_fast=True)]
    """Sentences about what is degraded, and other notes."""
    faults: Annotated[tuple[Fault, ...], Field(max_length=MAX_FAULTS, fail_fast=True)] = ()
    """Faults of parts; the reasons include them."""
    loading: Annotated[tuple[LoadingState, ...], Field(max_length=256, fail_fast=True)] = ()
    """Workers that are not registered yet."""
    processes: Annotated[tuple[ProcessState, ...], Field(max_length=64, fail_fast=True)] = ()
    """The coordinator first, then HTTP APIs."""
    pairs: Annotated[tuple[PairState, ...], Field(max_length=MAX_PAIRS, fail_fast=True)] = ()
    decisions: Annotated[tuple[Name, ...], Field(max_length=MAX_DECISIONS, fail_fast=True)] = ()
    """The last changes of the speculation settings in effect, oldest first, each with its
    reason."""
    totals: Totals = Totals()
    drained: Annotated[tuple[Role, ...], Field(max_length=2, fail_fast=True)] = ()
    """Roles without a worker since an operator drained the last one."""
    journal: JournalState | None = None
    """None: requests end with this coordinator."""
