"""Peers: registered workers and clients, with the coordinator's records of them. Pure."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import NamedTuple

from dovetail.protocol.messages import (
    Constraint,
    Hello,
    Limits,
    Message,
    Probed,
    VocabularyFacts,
    WorkerState,
)
from dovetail.protocol.spans import ClockOffset
from dovetail.protocol.vocabulary import TokenTable
from dovetail.runtime.costs.passes import RowCosts
from dovetail.runtime.costs.reading import ReadingCosts
from dovetail.runtime.costs.rounds import Average
from dovetail.runtime.fleet.block_index import BlockIndex
from dovetail.runtime.fleet.outbox import Outbox
from dovetail.runtime.fleet.prefix_cache import PrefixCache
from dovetail.runtime.fleet.scheduler import Owed, Turns
from dovetail.runtime.text.tokenizer import Spelling, TextCodec

MOST_STEP_NS = 1_000_000_000
"""The most silence counted between two checks, since the coordinator may have been stopped."""
LEAST_S = 5.0  # the least silence of a lost worker; a busy one reports after some seconds
DEAF = 6  # multiple of `coordinator.stuck_s` after which a silent worker is lost


@dataclass
class Liveness:
    """Whether a worker executes its commands, judged by its answers to probes. It executes one
    command after the other, and messages keep their order both ways. So if it answers a probe
    between two commands, it has answered everything sent before: an answer owed both when the probe
    was sent and now is lost. An answer during a command only shows that it is computing."""

    owed: Mapping[int, Owed] = field(default_factory=dict)
    """The answers it owed when the last probe was sent."""
    sent_ns: int = -1  # time of that probe; -1 before the first
    silent_ns: int = 0  # its silence since the probe; 0 again with its next message

    def probed(self, owed: Mapping[int, Owed], now_ns: int) -> None:
        """Note that a probe is sent."""
        self.owed, self.sent_ns = dict(owed), now_ns

    def missed(self, since_ns: int) -> None:
        """Note at a check that the probe is unanswered."""
        self.silent_ns += min(since_ns, MOST_STEP_NS)

    def has_forgotten(self, answer: Probed, owed: Mapping[int, Owed]) -> bool:
        """Return whether an answer owed since before the last probe is lost."""
        if answer.busy or answer.sent_ns != self.sent_ns:
            return False
        return any(owed.get(session) is asked for session, asked in self.owed.items())


LATE_TRIPS = 16  # last probes, of which the fastest gives a worker's round trip


@dataclass(frozen=True)
class Language:
    """The vocabulary and the tokenizer of a worker."""

    facts: VocabularyFacts
    table: TokenTable
    spelling: Spelling
    tokenizer: bytes
    _reading: Lock = field(default_factory=Lock, compare=False)

    def text(self) -> TextCodec:
        """Return the tokenizer. The first call may take seconds: not for event loops."""
        with self._reading:
            return self._codec

    @cached_property
    def _codec(self) -> TextCodec:
        return TextCodec(self.tokenizer, self.facts, self.table)


@dataclass
class Traffic:
    """The bytes sent over the link of one worker."""

    sent_bytes: int = 0
    received_bytes: int = 0
    round_bytes: Average = field(default_factory=Average)
    """Bytes of a session's order and its answer."""
    order_bytes: int = 0  # size of the last command of a round

    def answered(self, size: int, rounds: int) -> None:
        """Count a command and its answer, of this total size and for this many rounds."""
        self.round_bytes.add(size / rounds)


class Pass(NamedTuple):
    """The rows of a pass of a target."""

    rows: int  # roots and nodes that it verifies
    context: float  # the mean committed length of the sessions that it verifies
    read: int = 0  # rows of logs that it also reads


TOLD_ROWS = (1, 2, 4, 8, 16, 32, 64)  # rows for which `status` reports the time of a target's pass


@dataclass(eq=False)
class Worker:
    """A registered draft or target worker."""

    peer: bytes
    hello: Hello
    limits: Limits
    language: Language | None
    """None for a draft without its own vocabulary, such as a head. A target always has one."""
    turns: Turns
    registered_ns: int
    clock: ClockOffset = field(default_factory=ClockOffset)
    probed: Probed | None = None
    round_trip_ns: int | None = None
    """The least of `trips`: a worker answers a probe only after its computation."""
    trips: deque[int] = field(default_factory=lambda: deque(maxlen=LATE_TRIPS))
    awaiting_probe: bool = False
    liveness: Liveness = field(default_factory=Liveness)
    stuck: bool = False
    """The worker has owed an answer for too long, and gets no sessions until it has answered."""
    silent: bool = False
    """The worker has not responded for too long, and gets no sessions until it does."""
    standby: bool = False  # the worker gets no sessions until it is promoted
    leaving: bool = False
    """The worker gets no more sessions, and is dismissed when its sessions have ended or moved."""
    sessions: int = 0
    shelf: PrefixCache = field(default_factory=lambda: PrefixCache(0))
    """The ended sessions that it keeps."""
    blocks: BlockIndex = field(default_factory=BlockIndex)
    """The blocks of prompts that it stores."""
    verifying: RowCosts = field(default_factory=RowCosts)
    """The cost of its passes as a target, by rows; `drafting`: as a draft."""
    drafting: RowCosts = field(default_factory=RowCosts)
    reading: ReadingCosts = field(default_factory=ReadingCosts)
    """The cost of prefill, by rows of logs."""
    read_ns: dict[str, int] = field(default_factory=dict)
    """By owner: when the prefill of one of their logs last ended, if recently."""
    round_s: Average = field(default_factory=Average)
    """Seconds of a round of its sessions, as a target, without prefill."""
    tokens: Average = field(default_factory=Average)
    """Tokens of these rounds, and `rows`: the rows of each in its pass."""
    rows: Average = field(default_factory=Average)
    passing: Pass | None = None  # the pass that it computes as a target
    context: float = 0.0  # the mean context of its last pass, in tokens
    sharing: Average = field(default_factory=Average)
    """Sessions per pass in `round_s`, each pass weighted by its sessions."""
    alone_rows: int = 0  # rows of the chunk that it now prefills in a separate pass; 0: none
    traffic: Traffic = field(default_factory=Traffic)
    prompts: int = 0  # prompts and logs sent to it for prefill
    held_until_ns: int | None = None
    """Until when a pass waits for almost ready proposals, if one does."""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def model(self) -> str:
        """The name of its model, or its own."""
        return self.hello.model or self.hello.name

    @property
    def process(self) -> tuple[str, int]:
        """The host that it runs on, and its process id there."""
        return self.hello.host, self.hello.pid

    @property
    def facts(self) -> VocabularyFacts:
        """Facts about a target's vocabulary."""
        assert self.language is not None
        return self.language.facts

    def text(self) -> TextCodec:
        """Return the tokenizer of a target (see `Language.text`)."""
        assert self.language is not None
        return self.language.text()

    @property
    def spelling(self) -> Spelling:
        """The detokenizer of a target's vocabulary."""
        assert self.language is not None
        return self.language.spelling

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The spellings of the tokens that end a reply; empty for a draft."""
        if self.language is None:
            return ()
        return tuple(self.spelling.token(end)[:120] for end in self.facts.end)

    def plays(self, role: str) -> bool:
        return role in self.hello.roles

    @property
    def available(self) -> bool:
        """Whether it may get sessions."""
        return not (self.standby or self.leaving or self.stuck or self.silent)

    @property
    def serves(self) -> bool:
        """Whether it is neither on standby nor leaving."""
        return not (self.standby or self.leaving)

    @property
    def hop_s(self) -> float:
        """The seconds of a round trip, as far as known."""
        return (self.round_trip_ns or 0) / 1e9

    @property
    def whereabouts(self) -> str:
        """Its name, process and host in words."""
        return f"{self.name} (pid {self.hello.pid} on {self.hello.host})"

    def reads_as(self, other: "Worker") -> bool:
        """Return whether two targets have the same vocabulary."""
        return (self.facts.digest, self.facts.size) == (other.facts.digest, other.facts.size)

    def obeys(self, constraint: Constraint | None) -> bool:
        """Return whether, as a target, it makes replies follow a grammar."""
        return constraint is None or constraint.engine == self.hello.grammars

    def had_round(self, seconds: float, tokens: int, rows: int) -> None:
        """Learn from a round of one of its sessions, as a target, without prefill."""
        self.round_s.add(seconds)
        self.tokens.add(tokens)
        self.rows.add(rows)

    def state(self, now_ns: int) -> WorkerState:
        """Return its figures, as shown by `dovetail status`."""
        hello, probed = self.hello, self.probed
        return WorkerState(
            name=hello.name,
            roles=hello.roles,
            model=hello.model,
            device=hello.device,
            threads=hello.threads,
            binding=hello.binding,
            kernels=hello.kernels,
            fingerprint=str(hello.fingerprint or ""),
            host=hello.host,
            pid=hello.pid,
            worker_epoch=hello.epoch,
            sessions=self.sessions,
            busy_share=min(1.0, probed.busy_ns / max(1, now_ns - self.registered_ns))
            if probed
            else 0.0,
            round_trip_us=None if self.round_trip_ns is None else self.round_trip_ns / 1000,
            clock_offset_us=self.clock.offset_ns / 1000 if self.clock.known else None,
            clock_bound_us=self.clock.bound_ns / 1000 if self.clock.known else None,
            rss_mb=probed.rss_bytes / 1e6 if probed else 0.0,
            stale=probed.stale if probed else 0,
            weights=hello.fingerprint.weights if hello.fingerprint else hello.weights,
            placement=hello.placement,
            standby=self.standby,
            swapped_in=hello.standby and not self.standby,
            leaving=self.leaving,
            stuck=self.stuck or self.silent,
            sent_bytes=self.traffic.sent_bytes,
            received_bytes=self.traffic.received_bytes,
            bytes_per_round=self.traffic.round_bytes.value
            if self.traffic.round_bytes.known
            else None,
            feature_bytes=hello.reads.row_bytes if hello.reads is not None else 0,
            t_v=self.verifying.usual(TOLD_ROWS, self.context),
            token_s=self.round_s.value / self.tokens.value if self.tokens.value else None,
            rows=max(1.0, self.rows.value),
            row_s=self.reading.row_s or None,
            sharing=max(1.0, self.sharing.value),
            ends=self.ends,
            grammars=hello.grammars,
            blocks=len(self.blocks),
            damaged_blocks=self.blocks.damaged,
        )


@dataclass(eq=False)
class ClientPeer:
    """A registered client and the sessions of its requests."""

    peer: bytes
    hello: Hello
    sessions: dict[int, int] = field(default_factory=dict)
    reading: dict[int, bool] = field(default_factory=dict)
    """Requests that are being tokenized, and whether they are still wanted."""
    reading_bytes: int = 0  # approximate bytes of these requests in memory
    outbox: Outbox = field(default_factory=Outbox)
    hear: Callable[[Message], None] | None = None
    """Receives the messages if the client is the coordinator itself."""
