"""Who is here: the workers and clients that said Hello, and on what terms a newcomer is let in.

Checks what only the coordinator can: protocol versions, that a key may play the role, that a draft with a vocabulary shares that of its target, that a
draft which reads hidden states of its target finds them there. Knows no sockets; a refusal is a `RequestError` whose code and text go back to the peer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dovetail.protocol.errors import CheckpointError, RequestError
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import VERSION, Hello, Limits, Probed, Role, VocabularyFacts, WorkerState
from dovetail.protocol.spans import ClockOffset
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_differences
from dovetail.runtime.costs import RowCosts
from dovetail.runtime.kept import Shelf
from dovetail.runtime.outbox import Outbox
from dovetail.runtime.scheduler import Turns
from dovetail.runtime.text import TextCodec

MAX_WORKERS = 64
MAX_PEERS = 1024


@dataclass(frozen=True)
class Language:
    """What a worker with a tokenizer reads and writes."""

    facts: VocabularyFacts
    vocabulary: Mapping[int, str]
    text: TextCodec


@dataclass
class Worker:
    """A registered draft or target worker."""

    peer: bytes
    hello: Hello
    limits: Limits
    language: Language | None
    """None: a draft that has no vocabulary of its own, such as a head of its target's, or none at all. A target has one."""
    turns: Turns
    registered_ns: int
    clock: ClockOffset = field(default_factory=ClockOffset)
    probed: Probed | None = None
    round_trip_ns: int | None = None
    awaiting_probe: bool = False
    stuck: bool = False
    """It owes an answer for too long; it gets no new sessions until it has given it."""
    sessions: int = 0
    shelf: Shelf = field(default_factory=lambda: Shelf(0))
    """The ended sessions that it keeps."""
    verifying: RowCosts = field(default_factory=RowCosts)
    """What its passes as a target cost, by rows; `drafting`: as a draft."""
    drafting: RowCosts = field(default_factory=RowCosts)
    passing: tuple[int, float] | None = None
    """Rows, and mean committed length of the sessions, of the pass that it computes as a target."""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def model(self) -> str:
        """What it computes with, in words."""
        return self.hello.model or self.hello.name

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
            busy_share=min(1.0, probed.busy_ns / max(1, now_ns - self.registered_ns)) if probed else 0.0,
            round_trip_us=None if self.round_trip_ns is None else self.round_trip_ns / 1000,
            clock_offset_us=self.clock.offset_ns / 1000 if self.clock.known else None,
            clock_bound_us=self.clock.bound_ns / 1000 if self.clock.known else None,
            rss_mb=probed.rss_bytes / 1e6 if probed else 0.0,
            stale=probed.stale if probed else 0,
            inflation=hello.inflation,
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


class Registry:
    """The peers that are here now, by their address on the hub."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.workers: dict[bytes, Worker] = {}
        self.clients: dict[bytes, ClientPeer] = {}

    def admit(self, peer: bytes, hello: Hello, key: PeerKey | None, now_ns: int) -> Worker | ClientPeer:
        """Register a newcomer; `RequestError` says why not."""
        if hello.version != VERSION:  # a sender would have to leave out what an older minor does not know, and nobody does yet
            raise RequestError(
                "version",
                f"{hello.name} speaks protocol {_dotted(hello.version)}, this coordinator {_dotted(VERSION)}: run the same release of dovetail on both",
            )
        if key is not None and not set(hello.roles) <= set(key.roles):
            raise RequestError("role", f"the key {key.name!r} may be {', '.join(key.roles)}, not {', '.join(hello.roles)}: use the key made for that role")
        if len(self.workers) + len(self.clients) >= MAX_PEERS or (hello.roles != ("client",) and len(self.workers) >= MAX_WORKERS):
            raise RequestError("capacity", f"{len(self.workers)} workers and {len(self.clients)} clients are registered, as many as there may be: end some")
        if hello.roles == ("client",):
            self.clients[peer] = ClientPeer(peer, hello)
            return self.clients[peer]
        worker = self._worker(peer, hello, now_ns)
        for target in self._others(worker, "target"):
            _check_fit(worker, target)
        self.workers[peer] = worker
        return worker

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
        """What is to be said of this worker together with those that were there: heads that were trained for another checkpoint work, but guess badly."""
        pairs = [(worker, target) for target in self._others(worker, "target")] + [(draft, worker) for draft in self._others(worker, "draft")]
        return [_other_checkpoint(draft, target) for draft, target in pairs if _is_stranger(draft, target)]

    def pick(self, role: str) -> Worker | None:
        """The worker of a role that holds the fewest sessions and is not stuck."""
        return min((w for w in self.workers.values() if w.plays(role) and not w.stuck), key=lambda w: w.sessions, default=None)

    def _worker(self, peer: bytes, hello: Hello, now_ns: int) -> Worker:
        if "client" in hello.roles:
            raise RequestError("role", "a client cannot be a worker as well")
        if hello.limits is None:
            raise RequestError("protocol", f"the worker {hello.name} introduced itself without limits")
        if "target" in hello.roles and hello.fingerprint is None:
            raise RequestError("protocol", f"the target worker {hello.name} introduced itself without a fingerprint")
        worker = Worker(peer, hello, hello.limits, _language(hello), Turns(self._epoch), now_ns, shelf=Shelf(hello.limits.kept))
        if "target" in hello.roles:
            worker.verifying = RowCosts(hello.curves)
        else:
            worker.drafting = RowCosts(hello.curves)
        return worker

    def _others(self, worker: Worker, role: Role) -> list[Worker]:
        """The workers of a role whose partner this one is."""
        partner = "draft" if role == "target" else "target"
        return [other for other in self.workers.values() if other.plays(role) and worker.plays(partner)]


def _check_fit(draft: Worker, target: Worker) -> None:
    """Passes a draft that can guess for this target; else `RequestError` names what differs."""
    if draft.language is not None and target.language is not None and draft.language.vocabulary != target.language.vocabulary:
        named = "; ".join(vocabulary_differences(target.language.vocabulary, draft.language.vocabulary))
        raise RequestError(
            "vocabulary",
            f"the draft {draft.model} does not share the vocabulary of the target {target.model}: {named}. Choose a draft of the same model family.",
        )
    reads, states = draft.hello.reads, target.hello.states
    if reads is None:
        return
    if states is None or (reads.width, reads.vocabulary_size) != (states.width, target.facts.size) or max(reads.taps, default=0) >= states.layers:
        before = f" before layers {', '.join(map(str, reads.taps))}" if reads.taps else ""
        wanted = f"hidden states of width {reads.width}{before} and a vocabulary of {reads.vocabulary_size}"
        has = "shows none" if states is None else f"has width {states.width}, {states.layers} layers and a vocabulary of {target.facts.size}"
        text = f"the draft head {draft.model} reads {wanted}; the target {target.model} {has}. Choose a head that was made for this target."
        raise RequestError("settings", text)


def _is_stranger(draft: Worker, target: Worker) -> bool:
    reads, states = draft.hello.reads, target.hello.states
    return reads is not None and states is not None and bool(reads.trained_for and states.checkpoint) and reads.trained_for != states.checkpoint


def _other_checkpoint(draft: Worker, target: Worker) -> str:
    assert draft.hello.reads is not None
    assert target.hello.states is not None
    return (
        f"the draft head {draft.model} was trained for the checkpoint {draft.hello.reads.trained_for[:16]}, the target {target.model} is "
        f"{target.hello.states.checkpoint[:16]}: the output is the same, but fewer of its guesses may be right"
    )


def _language(hello: Hello) -> Language | None:
    if hello.roles == ("draft",) and hello.vocabulary is None and hello.tokenizer is None:
        return None
    if hello.vocabulary is None or hello.tokenizer is None:
        raise RequestError("protocol", f"the worker {hello.name} introduced itself without vocabulary and tokenizer")
    try:
        return Language(hello.vocabulary, read_vocabulary(hello.tokenizer.data), TextCodec(hello.tokenizer.data, hello.vocabulary))
    except CheckpointError as error:
        raise RequestError("vocabulary", f"{hello.model or hello.name}: {error}") from None
    except RequestError as error:
        raise RequestError(error.code, f"{hello.model or hello.name}: {error}") from None


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
