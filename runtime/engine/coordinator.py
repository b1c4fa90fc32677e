"""The coordinator: routes messages between clients, sessions and workers.

A message is decoded and becomes an event of a session, and the resulting actions are carried out
before the next message: commands to workers first, then messages to clients. `worker_events.py`
handles workers' answers, `client_requests.py` clients' requests, `sending.py` commands to workers,
and `outgoing.py` sends everything. Decisions are made elsewhere: in `session.py` (one request),
`scheduler.py` (turns), `registry.py` (admission), `prefix_cache.py` (reuse of ended sessions),
`placement.py` (which workers serve a session), `moving.py` (how it changes them). Nothing here
handles tensors or model files. A peer that breaks the protocol is counted and refused; no message
makes `pump` raise. Workers found to be gone are removed once the message is handled. Clock, threads
and timers are arguments: `loop.py` provides real ones."""

import gc
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from dovetail.protocol.codec import EVENT, INBOUND, REQUEST
from dovetail.protocol.errors import DecodeError, OverError, StaleError
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import (
    Drain,
    Event,
    Loading,
    Message,
    Reported,
    Supervised,
    Verified,
)
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.protocol.settings.values import byte_count
from dovetail.runtime.engine.acts import Acts, EngineState, Outcome
from dovetail.runtime.engine.claims import Claims
from dovetail.runtime.engine.client_requests import ClientRequests, observe
from dovetail.runtime.engine.faults import aside, one_line, reraise_exits
from dovetail.runtime.engine.outgoing import Later, Outgoing
from dovetail.runtime.engine.peers import Peers
from dovetail.runtime.engine.running import Census, RunningRequest
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.engine.sessions import Sessions
from dovetail.runtime.engine.shared import Shared, WaitingRequest
from dovetail.runtime.engine.starting import Starting
from dovetail.runtime.engine.status import Status
from dovetail.runtime.engine.stored import MessageRecorder, ReplyStore
from dovetail.runtime.engine.worker_events import WorkerEvents
from dovetail.runtime.fleet.draft_failures import FailingDrafts
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.queue import FairQueue
from dovetail.runtime.fleet.records import PairRecords
from dovetail.runtime.fleet.registry import Registry, ServiceState
from dovetail.runtime.moves.moving import MOST_LOOKED_AT, Moving
from dovetail.runtime.moves.reading_ahead import ReadingAhead
from dovetail.runtime.moves.rebalancing import Rebalancing
from dovetail.runtime.moves.replacement import Changes
from dovetail.runtime.session.lookup_memory import LookupMemory
from dovetail.runtime.telemetry.event_log import EventLog
from dovetail.runtime.telemetry.metrics import Dropped, Tally

log = logging.getLogger("dovetail.coordinator")
P = ParamSpec("P")
T = TypeVar("T")

DEFAULTS = CoordinatorSettings()
KEEP_EVERY_NS = 60 * 10**9  # how often what pairs have learned is saved

Elsewhere = Callable[[Callable[[], Outcome], Callable[[Outcome], None]], None]
"""Runs a slow function in another thread and passes on its outcome."""


def _at_once(work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
    done(work())


def _now(_seconds: float, action: Callable[[], None]) -> None:
    action()


class Coordinator:
    """The coordinator without its loop: `pump` handles arrived messages, `tick` whatever is due."""

    def __init__(
        self,
        hub: Hub,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        defer: Elsewhere = _at_once,
        later: Later = _now,
        settings: CoordinatorSettings = DEFAULTS,
        recorder: MessageRecorder | None = None,
        journal: ReplyStore | None = None,
        records: PairRecords | None = None,
    ) -> None:
        self._hub, self.now_ns, self._defer = hub, clock_ns, defer
        self._settings, self._recorder, self._journal = settings, recorder, journal
        self.epoch = secrets.randbits(62)
        if journal is not None:
            journal.begin(self.epoch)
        self.service = ServiceState(self.epoch, supervised_ns=clock_ns())
        self.registry = Registry(self.epoch)
        self._ticked_ns = self._kept_ns = clock_ns()
        self._running: dict[int, RunningRequest] = {}
        self._census, self._acts = Census(self._running), Acts()
        self._dropped, self._observing = Dropped(), EventLog(clock_ns)
        self._placement = Placement(
            self.registry,
            self.epoch,
            self._running,
            reuse=settings.reuse,
            say=partial(self.decide, level=logging.DEBUG),
            sessions=journal.sessions if journal is not None else 0,
            records=records,
        )
        state = EngineState(
            hub,
            self._acts,
            settings,
            self.service,
            self._running,
            self._census,
            self.registry,
            self._placement,
            FailingDrafts(),
            self._observing,
            Tally(),
            self._dropped,
            clock_ns,
            LookupMemory(size) if (size := byte_count(settings.lookup_memory)) else None,
        )
        self._moving = Moving(state)
        ahead = ReadingAhead(state, self._moving)
        self._changes = Changes(state, self._moving, ahead)
        self._rebalancing = Rebalancing(state, self._moving, ahead)
        queue = FairQueue[WaitingRequest](settings.queue, settings.key_queue)
        self._shared = Shared(
            **vars(state),
            moving=self._moving,
            changes=self._changes,
            queue=queue,
            notes=deque(),
            journal=journal,
        )
        self._open_rooms(later)

    def _open_rooms(self, later: Later) -> None:
        """Make the parts that receive and the parts that send messages."""
        shared = self._shared
        claims = self._claims = Claims(shared)
        post = self._post = Outgoing(self._hub, self._observing, self._acts, later, sent=self._sent)
        self._dispatch = CommandSender(shared, post)
        self._sessions = Sessions(shared, self._dispatch, post, begun=self._begun)
        self._answers = WorkerEvents(shared)
        self._starting = Starting(shared, claims)
        self._intake = ClientRequests(shared, claims, self._starting, self.report)
        self._status = Status(shared, self._sessions.attempt, self._starting.lacks)
        self._peers = Peers(
            shared,
            post,
            claims,
            self._sessions,
            self._dispatch,
            self._status,
            decide=self.decide,
        )
        self._bind()

    def _bind(self) -> None:
        """Give the deciding parts access to the acting ones."""
        acts, sessions, peers, post = self._acts, self._sessions, self._peers, self._post
        acts.start, acts.perform, acts.cancel = sessions.start, sessions.perform, sessions.cancel
        acts.drop, acts.fail, acts.broken = sessions.drop, sessions.fail, sessions.broken
        acts.forget_on, acts.free = sessions.forget_on, self._dispatch.next
        acts.join, acts.let_go = peers.join, peers.let_go
        acts.lose, acts.unreachable = peers.lose, peers.unreachable
        acts.unanswered, acts.encode_failed = peers.unanswered, peers.encode_failed
        acts.client_lost, acts.client_not_reading = peers.client_lost, peers.client_not_reading
        acts.send, acts.reply = post.to_worker, post.reply
        acts.defer, acts.decide = self._read_elsewhere, self.decide

    # -- what arrives ------------------------------------------------------------------------------

    def pump(self) -> None:
        """Handle every message that has arrived. Garbage is collected only once the workers have
        their commands."""
        while (arrived := self._hub.receive()) is not None:
            peer, frames = arrived
            gc.disable()
            self._receive(peer, frames, self.now_ns())
        if self._recorder is not None:
            self._record(lambda recorder: recorder.settle())

    def _receive(self, peer: bytes, frames: Sequence[bytes], now_ns: int) -> None:
        """Handle one message; an error affects only the session or request that it is about."""
        worker, client = self.registry.workers.get(peer), self.registry.clients.get(peer)
        try:
            message = (EVENT if worker else REQUEST if client else INBOUND).decode(frames)
        except DecodeError as error:
            aside(self._peers.strike, peer, error)
            self._conclude()
            return
        if self._recorder is not None and (known := worker or client) is not None:
            self._record(lambda recorder: recorder.received(known, message, frames))
        try:
            if self._observing.fine:
                self._observing.finely("receive", now_ns, message)
            if isinstance(message, Loading):
                if worker is None:
                    self.registry.hear_loading(peer, message.state, self._hub.user(peer), now_ns)
            elif worker is not None:
                self._answered(worker, message, now_ns, sum(map(len, frames)))  # type: ignore[arg-type]
            elif client is not None:
                self._intake.take(client, message, now_ns)  # type: ignore[arg-type]
            else:
                aside(self._post.bid_farewell)
                self._peers.newcomer(peer, message, now_ns)
        except StaleError as error:
            self._dropped.stale += not isinstance(error, OverError)
        except BaseException as error:
            reraise_exits(error)
            log.exception("%r of peer %s could not be handled", message.type, peer.hex()[:12])
            if client is not None:
                self._peers.unanswered(client, getattr(message, "request", None), error)
            elif worker is None:
                self._peers.turn_away(peer, error)
        self._step_change(now_ns)
        self._conclude()

    def _answered(self, worker: Worker, event: Event, now_ns: int, size: int) -> None:
        """Handle a worker's answer; then send its next command."""
        try:
            if isinstance(event, Verified) and len(event.items) > 1:
                with self._dispatch.gathering():
                    self._answers.take(worker, event, now_ns, size)
            else:
                self._answers.take(worker, event, now_ns, size)
        finally:
            self._dispatch.next(worker)

    # -- faults of our own -------------------------------------------------------------------------

    def _step_change(self, now_ns: int) -> None:
        """Advance the current replacement of a worker, if any; an internal error ends it."""
        if self._changes.under_way:
            try:
                self._changes.step(now_ns)
            except BaseException as error:
                reraise_exits(error)
                log.exception("the change of workers is abandoned")
                aside(self._changes.break_off, one_line(error))
        if self._rebalancing.under_way:
            self._rebalance(partial(self._rebalancing.step, changing=self._changes.under_way))

    def _rebalance(self, handle: Callable[[], None]) -> None:
        """Advance moves of sessions to better targets; an internal error ends the current one."""
        try:
            handle()
        except BaseException as error:
            reraise_exits(error)
            log.exception("the move of a session is abandoned")
            aside(self._rebalancing.break_off)

    def _record(self, note: Callable[[MessageRecorder], None]) -> None:
        """Record something. A recorder that fails is not used again, so that sessions are
        unaffected."""
        if self._recorder is None:
            return
        try:
            note(self._recorder)
        except BaseException as error:
            reraise_exits(error)
            log.exception("recording has stopped")
            self.decide(f"recording has stopped because the recorder failed: {one_line(error)}")
            self._recorder = None

    # -- due and deferred work ---------------------------------------------------------------------

    def tick(self) -> None:
        """Do whatever is due: probe workers, give up on late drafts and waiting sessions, retry
        undelivered replies."""
        aside(self._peers.let_revoked_go)
        aside(self._post.bid_farewell)
        now_ns, self._ticked_ns, before_ns = self.now_ns(), self.now_ns(), self._ticked_ns
        for worker in list(self.registry.workers.values()):
            aside(self._peers.look_after, worker, now_ns - before_ns)
        aside(observe, self._observing, self.registry, self.epoch, self._post.to_worker)
        self._step_change(self.now_ns())
        aside(self._moving.tick)
        if not self._changes.under_way:
            self._rebalance(self._rebalancing.look)
        self._conclude()
        for running in [*self._running.values()]:
            self._sessions.attempt(running, running.check_asked)
        for client in [client for client in self.registry.clients.values() if client.outbox]:
            aside(self._post.flush, client)
        aside(self._intake.relieve)
        if self._shared.memory is not None:
            self._shared.memory.step()
        self._record(lambda recorder: recorder.tick(self._running))
        if self._journal is not None:
            aside(self._journal.tick)
        if self._ticked_ns - self._kept_ns >= KEEP_EVERY_NS:
            self._kept_ns = self._ticked_ns
            aside(self._placement.keep)

    def decide(self, words: str, level: int = logging.INFO) -> None:
        """Log a decision, and keep it for `status`."""
        log.log(level, "%s", words)
        self._status.decided(words)

    def _read_elsewhere(self, work: Callable[[], Outcome], then: Callable[[Outcome], None]) -> None:
        def done(outcome: Outcome) -> None:
            then(outcome)
            self._conclude()

        self._defer(work, done)

    def _conclude(self) -> None:
        """Do the work deferred until workers have their commands: remove workers that have gone,
        give free capacity to waiting sessions and then to requests, do the bookkeeping, and send to
        clients."""
        self._peers.part()
        if self._moving.waits:
            aside(self._moving.resettle, MOST_LOOKED_AT)
        if len(self._claims):
            aside(self._intake.claim)
        if len(self._shared.queue):
            aside(self._starting.admit)
        gc.enable()
        self._shared.keep_books()
        self._sessions.settle()
        self._census.forget()

    # -- state -------------------------------------------------------------------------------------

    def _begun(self, running: RunningRequest) -> None:
        if not running.trial:
            self._record(lambda recorder: recorder.begin(running))

    def _sent(self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]) -> None:
        if self._recorder is not None:
            self._record(lambda recorder: recorder.sent(peer, message, frames))

    def look_around(self) -> None:
        """Find out which peers have disconnected, by sending to all of them."""
        self._peers.look_around()
        self._conclude()

    @property
    def ending(self) -> bool:
        """Whether the service is ending, so that nothing new begins."""
        return self.service.ending

    def report(self) -> Reported:
        """Return the answer to Status."""
        return self._status.report()

    @property
    def requests(self) -> Collection[RunningRequest]:
        """All sessions, including trials."""
        return self._running.values()

    @property
    def idle(self) -> bool:
        return not self._running and not len(self._shared.queue)

    def supervised(self, report: Supervised) -> None:
        """Handle the supervisor's report of the other parts."""
        self.service.supervised, self.service.supervised_ns = report, self.now_ns()
        if report.ending:
            self.service.given_up, self.service.ending = report.ending, True
            self._moving.resettle()
            self._conclude()

    def end(self) -> None:
        """Cancel whatever still runs, save what was learned, and dismiss the workers."""
        self.service.ending = True
        aside(self._placement.keep)
        for running in list(self._running.values()):
            self._sessions.cancel(running)
        for worker in list(self.registry.workers.values()):
            aside(self._post.to_worker, worker, Drain(epoch=self.epoch))
        self._conclude()
