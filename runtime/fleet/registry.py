"""Who is here: the workers and clients that said Hello, and on what terms a newcomer is let in.

Checks what only the coordinator can: protocol versions, that a key may play the role, that a draft
with a vocabulary shares that of its target, that a draft which reads hidden states of its target
finds them there. Knows no sockets; a refusal is a `RequestError` whose code and text go back to the
peer.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import (
    VERSION,
    Hello,
    Limits,
    LoadingState,
    Message,
    Probed,
    Role,
    VocabularyFacts,
    WorkerState,
)
from dovetail.protocol.spans import ClockOffset
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_differences
from dovetail.runtime.control.costs import Average, RowCosts
from dovetail.runtime.engine.outbox import Outbox
from dovetail.runtime.engine.scheduler import Turns
from dovetail.runtime.fleet.liveness import Liveness
from dovetail.runtime.fleet.prefix_cache import Shelf
from dovetail.runtime.text.tokenizer import TextCodec

MAX_WORKERS = 64
LATE_TRIPS = 16
"""Probes that a worker's round trip is the least of."""
LOADING_NS = 60 * 10**9
"""Who says for so long no more how far its model is loaded has gone, or is not heard of before it
introduces itself."""
MAX_CLIENTS = 960
"""However many there are, a worker that was lost finds its place free."""


@dataclass(frozen=True)
class Language:
    """What a worker with a tokenizer reads and writes."""

    facts: VocabularyFacts
    vocabulary: Mapping[int, str]
    text: TextCodec


@dataclass
class Traffic:
    """What goes over the link of one worker."""

    sent_bytes: int = 0
    received_bytes: int = 0
    round_bytes: Average = field(default_factory=Average)
    """Of a session's order and its answer."""
    _order_bytes: int = 0

    def ordered(self, size: int) -> None:
        """A message of this size asks for what a round needs."""
        self._order_bytes = size

    def answered(self, size: int, rounds: int) -> None:
        """And the answer, which is about so many rounds, has this one."""
        self.round_bytes.add((self._order_bytes + size) / rounds)


@dataclass
class Worker:
    """A registered draft or target worker."""

    peer: bytes
    hello: Hello
    limits: Limits
    language: Language | None
    """None: a draft that has no vocabulary of its own, such as a head of its target's, or none at
    all. A target has one."""
    turns: Turns
    registered_ns: int
    clock: ClockOffset = field(default_factory=ClockOffset)
    probed: Probed | None = None
    round_trip_ns: int | None = None
    """The least of the last ones, `trips`: a worker answers a probe when it has done what it
    computes."""
    trips: deque[int] = field(default_factory=lambda: deque(maxlen=LATE_TRIPS))
    awaiting_probe: bool = False
    liveness: Liveness = field(default_factory=Liveness)
    stuck: bool = False
    """It owes an answer for too long; it gets no sessions until it has given it."""
    silent: bool = False
    """The worker has not responded for too long, and gets no sessions until it does."""
    standby: bool = False
    """It gets no sessions until it is put in place."""
    leaving: bool = False
    """It gets no more sessions, and is let go when those that it has are over or elsewhere."""
    sessions: int = 0
    shelf: Shelf = field(default_factory=lambda: Shelf(0))
    """The ended sessions that it keeps."""
    verifying: RowCosts = field(default_factory=RowCosts)
    """What its passes as a target cost, by rows; `drafting`: as a draft."""
    drafting: RowCosts = field(default_factory=RowCosts)
    passing: tuple[int, float] | None = None
    """Rows, and mean committed length of the sessions, of the pass that it computes as a target."""
    traffic: Traffic = field(default_factory=Traffic)
    prompts: int = 0
    """Prompts, and logs, that it was given to read."""
    held_until_ns: int | None = None
    """Up to when a pass waits for proposals that are nearly there; None: none does."""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def model(self) -> str:
        """What it computes with, in words."""
        return self.hello.model or self.hello.name

    @property
    def process(self) -> tuple[str, int]:
        """Where it runs, and its number there."""
        return self.hello.host, self.hello.pid

    @property
    def facts(self) -> VocabularyFacts:
        """Of a target."""
        assert self.language is not None
        return self.language.facts

    @property
    def text(self) -> TextCodec:
        """Of a target."""
        assert self.language is not None
        return self.language.text

    def plays(self, role: str) -> bool:
        return role in self.hello.roles

    @property
    def available(self) -> bool:
        """Whether it may be given sessions."""
        return self.serves and not (self.stuck or self.silent)

    @property
    def serves(self) -> bool:
        """Whether it is one of those that sessions are for."""
        return not (self.standby or self.leaving)

    @property
    def hop_s(self) -> float:
        """What a message there and its answer take, as far as is known."""
        return (self.round_trip_ns or 0) / 1e9

    @property
    def whereabouts(self) -> str:
        """In words."""
        return f"{self.name} (pid {self.hello.pid} on {self.hello.host})"

    def reads_as(self, other: "Worker") -> bool:
        """Whether two targets have the same vocabulary: a token of one is the same token to the
        other."""
        return (self.facts.digest, self.facts.size) == (other.facts.digest, other.facts.size)

    def state(self, now_ns: int) -> WorkerState:
        hello, probed = self.hello, self.probed
        return WorkerState(
            name=hello.name,
            roles=hello.roles,
            model=hello.model,
            device=hello.device,
            threads=hello.threads,
            binding=hello.binding,
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
            inflation=hello.inflation,
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
        )


@dataclass
class ClientPeer:
    """A registered client and the sessions of its requests."""

    peer: bytes
    hello: Hello
    sessions: dict[int, int] = field(default_factory=dict)
    reading: dict[int, bool] = field(default_factory=dict)
    """Requests whose prompts are being read, and whether they are still wanted."""
    outbox: Outbox = field(default_factory=Outbox)
    hear: Callable[[Message], None] | None = None
    """Of a client that is no peer, but ourselves: what it is told goes there."""


class Registry:
    """The peers that are here now, by their address on the hub."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.workers: dict[bytes, Worker] = {}
        self.clients: dict[bytes, ClientPeer] = {}
        self._loading: dict[bytes, tuple[LoadingState, int]] = {}
        """By peer: what a worker that is not registered yet has said, and when."""

    def hear_loading(
        self, peer: bytes, state: LoadingState, key: PeerKey | None, now_ns: int
    ) -> None:
        """Note how far a worker has got that loads its model; one that may not play its role, or is
        one too many, is not noted."""
        if "client" in state.roles or (key is not None and not key.may_be(state.roles)):
            return
        self._loading = {
            other: told
            for other, told in self._loading.items()
            if (told[0].host, told[0].name) != (state.host, state.name)
        }
        if len(self._loading) < MAX_WORKERS:
            self._loading[peer] = (state, now_ns)

    def loading(self, now_ns: int) -> tuple[LoadingState, ...]:
        """Return how far those have got that load their models, but for those that have said
        nothing for long, or are registered by now."""
        here = {worker.process for worker in self.workers.values()}
        told = [state for state, at_ns in self._loading.values() if now_ns - at_ns < LOADING_NS]
        return tuple(state for state in told if (state.host, state.pid) not in here)

    def admit(
        self, peer: bytes, hello: Hello, key: PeerKey | None, now_ns: int
    ) -> Worker | ClientPeer:
        """Register a newcomer; `RequestError` says why not."""
        if (
            hello.version != VERSION
            # a sender would have to leave out what an older minor does not know, and nobody does
            # yet
        ):
            raise RequestError(
                "version",
                f"{hello.name} speaks protocol {_dotted(hello.version)}, this coordinator "
                f"{_dotted(VERSION)}: run the same release of dovetail on both",
            )
        if key is not None and not key.may_be(hello.roles):
            raise RequestError(
                "role",
                f"the key {key.name!r} may be {', '.join(key.roles)}, not "
                f"{', '.join(hello.roles)}: use the key made for that role",
            )
        mates, most = (
            (self.clients, MAX_CLIENTS)
            if hello.roles == ("client",)
            else (self.workers, MAX_WORKERS)
        )
        if len(mates) >= most:
            raise RequestError(
                "capacity",
                f"{len(self.workers)} workers and {len(self.clients)} clients are registered, "
                "as many as there may be: end some",
            )
        if hello.roles == ("client",):
            self.clients[peer] = ClientPeer(peer, hello)
            return self.clients[peer]
        worker = self._worker(peer, hello, now_ns)
        for target in self._others(worker, "target"):
            _check_fit(worker, target)
        if worker.standby or (
            worker.plays("target")
            and any(other.plays("target") and other.serves for other in self.workers.values())
        ):
            self.check_place(worker)  # the drafts that are there have their target
        self.workers[peer] = worker
        self._loading.pop(peer, None)
        return worker

    def of_epoch(self, epoch: int) -> Worker | None:
        """The worker of this incarnation."""
        return next(
            (worker for worker in self.workers.values() if worker.hello.epoch == epoch), None
        )

    def check_place(self, newcomer: Worker) -> None:
        """Passes a worker that can be put in place beside all that are; else `RequestError` names
        what differs."""
        for target in self._others(newcomer, "target"):
            _check_fit(newcomer, target)
        for draft in self._others(newcomer, "draft"):
            _check_fit(draft, newcomer)

    def misfits(self, target: Worker) -> list[tuple[Worker, RequestError]]:
        """The draft workers that came before this target and do not fit it."""
        misfits = []
        for worker in self._others(target, "draft"):
            try:
                _check_fit(worker, target)
            except RequestError as refusal:
                misfits.append((worker, refusal))
        return misfits

    def warnings(self, worker: Worker) -> list[str]:
        """What is to be said of this worker together with those that were there: heads that were
        trained for another checkpoint work, but guess badly."""
        pairs = [(worker, target) for target in self._others(worker, "target")] + [
            (draft, worker) for draft in self._others(worker, "draft")
        ]
        told = [
            _other_checkpoint(draft, target)
            for draft, target in pairs
            if _is_stranger(draft, target)
        ]
        return [
            *told,
            *filter(None, [self.medley() if worker.plays("target") and worker.serves else ""]),
        ]

    def medley(self) -> str:
        """In words, that targets of different checkpoints serve; empty: all are of the same."""
        serving = [
            worker for worker in self.workers.values() if worker.plays("target") and worker.serves
        ]
        if (
            len(
                {
                    worker.hello.fingerprint.checkpoint
                    for worker in serving
                    if worker.hello.fingerprint is not None
                }
            )
            < 2
        ):
            return ""
        return (
            "targets of different models serve, and a request gets any of them: "
            f"{', '.join(f'{worker.name} has {worker.model}' for worker in serving)}"
        )

    def pick(self, role: str) -> Worker | None:
        """The available worker of a role that holds the fewest sessions."""
        return min(
            (w for w in self.workers.values() if w.plays(role) and w.available),
            key=lambda w: w.sessions,
            default=None,
        )

    def _worker(self, peer: bytes, hello: Hello, now_ns: int) -> Worker:
        if "client" in hello.roles:
            raise RequestError("role", "a client cannot be a worker as well")
        if hello.limits is None:
            raise RequestError(
                "protocol", f"the worker {hello.name} introduced itself without limits"
            )
        if "target" in hello.roles and hello.fingerprint is None:
            raise RequestError(
                "protocol",
                f"the target worker {hello.name} introduced itself without a fingerprint",
            )
        worker = Worker(
            peer,
            hello,
            hello.limits,
            _language(hello),
            Turns(self._epoch),
            now_ns,
            standby=hello.standby,
            shelf=Shelf(hello.limits.kept),
        )
        if "target" in hello.roles:
            worker.verifying = RowCosts(hello.curves)
        else:
            worker.drafting = RowCosts(hello.curves)
        return worker

    def _others(self, worker: Worker, role: Role) -> list[Worker]:
        """The workers of a role that serve and whose partner this one is."""
        partner = "draft" if role == "target" else "target"
        return [
            other
            for other in self.workers.values()
            if other.plays(role) and other.serves and worker.plays(partner)
        ]


def _check_fit(draft: Worker, target: Worker) -> None:
    """Passes a draft that can guess for this target; else `RequestError` names what differs."""
    if (
        draft.language is not None
        and target.language is not None
        and draft.language.vocabulary != target.language.vocabulary
    ):
        named = "; ".join(
            vocabulary_differences(target.language.vocabulary, draft.language.vocabulary)
        )
        raise RequestError(
            "vocabulary",
            f"the draft {draft.model} does not share the vocabulary of the target "
            f"{target.model}: {named}. Choose a draft of the same model family.",
        )
    reads, states = draft.hello.reads, target.hello.states
    if reads is None:
        return
    if (
        states is None
        or (reads.width, reads.vocabulary_size) != (states.width, target.facts.size)
        or max(reads.taps, default=0) >= states.layers
    ):
        before = f" before layers {', '.join(map(str, reads.taps))}" if reads.taps else ""
        wanted = (
            f"hidden states of width {reads.width}{before} and a vocabulary of "
            f"{reads.vocabulary_size}"
        )
        has = (
            "shows none"
            if states is None
            else f"has width {states.width}, {states.layers} layers and a vocabulary of "
            f"{target.facts.size}"
        )
        text = (
            f"the draft head {draft.model} reads {wanted}; the target {target.model} {has}. "
            "Choose a head that was made for this target."
        )
        raise RequestError("settings", text)


def _is_stranger(draft: Worker, target: Worker) -> bool:
    reads, states = draft.hello.reads, target.hello.states
    return (
        reads is not None
        and states is not None
        and bool(reads.trained_for and states.checkpoint)
        and reads.trained_for != states.checkpoint
    )


def _other_checkpoint(draft: Worker, target: Worker) -> str:
    assert draft.hello.reads is not None
    assert target.hello.states is not None
    return (
        f"the draft head {draft.model} was trained for the checkpoint "
        f"{draft.hello.reads.trained_for[:16]}, the target {target.model} is "
        f"{target.hello.states.checkpoint[:16]}: the output is the same, but fewer of its "
        "guesses may be right"
    )


def _language(hello: Hello) -> Language | None:
    if hello.roles == ("draft",) and hello.vocabulary is None and hello.tokenizer is None:
        return None
    if hello.vocabulary is None or hello.tokenizer is None:
        raise RequestError(
            "protocol",
            f"the worker {hello.name} introduced itself without vocabulary and tokenizer",
        )
    try:
        return Language(
            hello.vocabulary,
            read_vocabulary(hello.tokenizer.data),
            TextCodec(hello.tokenizer.data, hello.vocabulary),
        )
    except CheckpointError as error:
        raise RequestError("vocabulary", f"{hello.model or hello.name}: {error}") from None
    except RequestError as error:
        raise RequestError(error.code, f"{hello.model or hello.name}: {error}") from None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
