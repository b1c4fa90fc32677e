"""The coordinator: routes messages between clients, sessions and workers.

A message arrives, is decoded, becomes an event of a session, and the actions that follow are
carried out before the next is looked at: first what a worker waits for, then what a client reads.
What workers answer goes through `worker_events.py`, what clients ask through `client_requests.py`,
what workers are asked through `sending.py`, and all of it out through `outgoing.py`. Decisions live
elsewhere - in `session.py` (one request), `scheduler.py` (turns), `registry.py` (who is let in),
`prefix_cache.py` (what of an ended session a new one goes on from), `placement.py` (which workers
serve a session), `moving.py` (how it gets others) - and nothing here touches a tensor or a model
file. A peer that breaks the protocol is counted and refused; no message can raise out of `pump`.
Workers that turn out to be gone while something is handled are parted with behind it. Time, and
what is done elsewhere or later, are handed in: `loop.py` runs it for real.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from dovetail.protocol.codec import EVENT, INBOUND, REQUEST
from dovetail.protocol.errors import DecodeError, RequestError, StaleError
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import (
    Close,
    Drain,
    Event,
    Failed,
    Loading,
    Message,
    Probe,
    Reported,
    Supervised,
    Welcome,
)
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine.admission import LOST_KEY, Admission
from dovetail.runtime.engine.client_requests import Intake, observe, refusal
from dovetail.runtime.engine.draft_failures import FailingDrafts, note_failure
from dovetail.runtime.engine.effects import (
    Abandon,
    Admitted,
    Break,
    Cancel,
    ClientGone,
    Defer,
    Drained,
    Effect,
    Effects,
    End,
    Fail,
    Follow,
    Forget,
    Gone,
    Join,
    LetGo,
    Lose,
    Say,
    Send,
    Start,
    Tell,
    Unanswered,
)
from dovetail.runtime.engine.faults import as_raised, reraise_exits, told
from dovetail.runtime.engine.outgoing import Later, Post
from dovetail.runtime.engine.replies import Replies
from dovetail.runtime.engine.running import Census, Live
from dovetail.runtime.engine.sending import Dispatch
from dovetail.runtime.engine.service import Service
from dovetail.runtime.engine.session import (
    Action,
    Ask,
    Finish,
    NextRound,
    Request,
    State,
)
from dovetail.runtime.engine.status import Status
from dovetail.runtime.engine.worker_events import Answers
from dovetail.runtime.fleet.liveness import DEAF, LEAST_S
from dovetail.runtime.fleet.moving import Moving
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.registry import ClientPeer, Registry, Worker
from dovetail.runtime.fleet.replacement import Changes
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.telemetry.event_log import Observing
from dovetail.runtime.telemetry.metrics import Dropped, Tally

log = logging.getLogger("dovetail.coordinator")
P = ParamSpec("P")
T = TypeVar("T")

DEFAULTS = CoordinatorSettings()

Elsewhere = Callable[
    [Callable[[], Request | RequestError], Callable[[Request | RequestError], None]], None
]
"""Does a piece of work that takes long, elsewhere, and hands its outcome back."""


def _at_once(
    work: Callable[[], Request | RequestError], done: Callable[[Request | RequestError], None]
) -> None:
    done(work())


def _now(_seconds: float, action: Callable[[], None]) -> None:
    action()


def _fault(error: BaseException) -> RequestError:
    """What a client is told of a fault of ours; the log has the rest."""
    return RequestError(
        "internal", f"the coordinator failed at this request ({told(error)}); its log says where"
    )


class Coordinator:
    """Everything but the loop: `pump` handles what has arrived, `tick` what is due."""

    def __init__(
        self,
        hub: Hub,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        defer: Elsewhere = _at_once,
        later: Later = _now,
        settings: CoordinatorSettings = DEFAULTS,
        recorder: Recorder | None = None,
    ) -> None:
        self._hub, self.now_ns, self._defer = hub, clock_ns, defer
        self._settings, self._recorder = settings, recorder
        self.epoch = secrets.randbits(62)
        self.service = Service(self.epoch, supervised_ns=clock_ns())
        self.registry = Registry(self.epoch)
        self._ticked_ns = clock_ns()
        self._live: dict[int, Live] = {}
        self._census = Census(self._live)
        self._gone: deque[tuple[Worker, str]] = deque()
        """Workers that are no longer registered and whose sessions have not been seen to, each with
        what became of it."""
        self._tally, self._dropped = Tally(), Dropped()
        self._failing, self._observing = FailingDrafts(), Observing(clock_ns)
        self._placement = Placement(
            self.registry, self.epoch, reuse=settings.reuse, say=self.decide
        )
        self._open_rooms(later)

    def _open_rooms(self, later: Later) -> None:
        """Make the parts that decide, and those that send."""
        settings, live, registry = self._settings, self._live, self.registry
        self._moving = Moving(
            self.service, live, registry, self._placement, self._failing, settings, self.now_ns
        )
        self._changes = Changes(
            self.epoch, live, registry, self._placement, self._moving, self.now_ns
        )
        self._post = Post(
            self._hub,
            self._observing,
            later,
            sent=self._sent,
            worker_lost=self._unreachable,
            client_lost=self._client_lost,
            client_deaf=self._client_deaf,
            unsaid=self._unsaid,
        )
        self._admission = Admission(self._hub, self._post, self.service, registry, self._dropped)
        self._replies = Replies(
            self.epoch,
            self._post,
            self._failing,
            self._changes,
            self._observing,
            self._tally,
            self.now_ns,
        )
        self._dispatch = Dispatch(
            self._post,
            live,
            self._census,
            registry,
            reuse=settings.reuse,
            broken=self.broken,
        )
        self._answers = Answers(
            self.epoch,
            live,
            self._census,
            registry,
            self._moving,
            self._failing,
            self._changes,
            self._observing,
            self._dropped,
        )
        self._status = Status(
            self._hub,
            self.service,
            live,
            registry,
            self._placement,
            self._failing,
            self._moving,
            self._changes,
            self._tally,
            self._dropped,
            clock_ns=self.now_ns,
            attempt=self.attempt,
        )
        self._intake = Intake(
            self.service,
            live,
            registry,
            self._placement,
            self._moving,
            self._changes,
            self._observing,
            self._tally,
            user=lambda client: self._hub.user(client.peer),
            report=self.report,
        )

    # -- what arrives ------------------------------------------------------------------------------

    def pump(self) -> None:
        """Handle every message that has arrived."""
        while (arrived := self._hub.receive()) is not None:
            peer, frames = arrived
            self._receive(peer, frames, self.now_ns())
        self._record(lambda recorder: recorder.settle())

    def _receive(self, peer: bytes, frames: Sequence[bytes], now_ns: int) -> None:
        """Handle one message; whatever goes wrong with it concerns the session or the request that
        it is about, and nobody else."""
        self._census.forget()
        worker, client = self.registry.workers.get(peer), self.registry.clients.get(peer)
        try:
            message = (EVENT if worker else REQUEST if client else INBOUND).decode(frames)
        except DecodeError as error:
            self.carry_out(self._admission.strike(peer, error))
            self.part()
            return
        if (known := worker or client) is not None:
            self._record(lambda recorder: recorder.received(known, message, frames))
        try:
            self._observing.finely("receive", now_ns, message)
            if isinstance(message, Loading):
                if worker is None:
                    self.registry.hear_loading(peer, message.state, self._hub.user(peer), now_ns)
            elif worker is not None:
                self._answered(worker, message, now_ns, sum(map(len, frames)))  # type: ignore[arg-type]
            elif client is not None:
                self.carry_out(self._intake.take(client, message, now_ns))  # type: ignore[arg-type]
            else:
                self._aside(self._post.bid_farewell)
                self.carry_out(self._admission.newcomer(peer, message, now_ns))
        except StaleError:
            self._dropped.stale += 1
        except BaseException as error:
            reraise_exits(error)
            log.exception(
                "a message %r of peer %s could not be handled", message.type, peer.hex()[:12]
            )
            if client is not None:
                self.unanswered(client, getattr(message, "request", None), error)
            elif worker is None:
                self._turn_away(peer, error)
        self._step_change(now_ns)
        self.part()

    def _answered(self, worker: Worker, event: Event, now_ns: int, size: int) -> None:
        """Handle what a worker answers; then it is free for what waits."""
        try:
            self.carry_out(self._answers.take(worker, event, now_ns, size))
        finally:
            self._dispatch.next(worker)

    # -- faults of our own -------------------------------------------------------------------------

    def broken(self, live: Live, error: BaseException) -> None:
        """Our own fault about one session: it ends with one error, and nobody else notices."""
        reraise_exits(error)
        error = as_raised(error)
        log.error(
            "session %d ends for a fault of the coordinator's", live.session.number, exc_info=error
        )
        self._aside(self.fail, live, _fault(error))

    def attempt(self, live: Live, action: Callable[[], object]) -> None:
        """Do something about one session; whatever goes wrong ends it, and nothing else."""
        try:
            action()
        except BaseException as error:
            self.broken(live, error)

    def unanswered(self, client: ClientPeer, request: int | None, error: BaseException) -> None:
        """What a client asks for could not be done, for our own fault; None: it was a question."""
        live = self._live.get(client.sessions.get(request, 0)) if request is not None else None
        if live is not None:
            self.broken(live, error)
            return
        if request is not None:
            client.reading.pop(request, None)
            client.sessions.pop(request, None)
            self._tally.ended["error"] += 1
        self._aside(self._post.to_client, client, refusal(self.epoch, _fault(error), request))

    def _unsaid(self, client: ClientPeer, request: int | None, error: BaseException) -> None:
        """Something could not be put into a message to a client."""
        log.error(
            "client %s could not be told something of request %s",
            client.hello.name,
            request,
            exc_info=error,
        )
        self.unanswered(client, request, error)

    def _turn_away(self, peer: bytes, error: BaseException) -> None:
        """A newcomer could not be let in."""
        if (worker := self.registry.workers.get(peer)) is not None:
            self._worker_lost(worker, "could not be let in")
        self.registry.clients.pop(peer, None)
        self._aside(self._admission.refuse, peer, _fault(error))

    def _step_change(self, now_ns: int) -> None:
        """See how the change of workers gets on that is under way, if one is; a fault of ours ends
        it."""
        if not self._changes.under_way:
            return
        try:
            self.carry_out(self._changes.step(now_ns))
        except BaseException as error:
            reraise_exits(error)
            log.exception("the change of workers is broken off")
            self._handle(self._changes.break_off, told(error))

    def _aside(self, action: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
        """Do what is about no session; what goes wrong is told, and the rest goes on."""
        try:
            action(*arguments, **named)
        except BaseException as error:
            reraise_exits(error)
            log.exception("%s failed", getattr(action, "__qualname__", "something"))

    def _handle(
        self, handler: Callable[P, Effects[None]], *arguments: P.args, **named: P.kwargs
    ) -> None:
        """Have something handled that is about no session, and carry out what follows."""
        self._aside(lambda: self.carry_out(handler(*arguments, **named)))

    def _record(self, note: Callable[[Recorder], None]) -> None:
        """Have something recorded. A recorder that fails is not asked again: no session is to
        suffer from it."""
        if self._recorder is None:
            return
        try:
            note(self._recorder)
        except BaseException as error:
            reraise_exits(error)
            log.exception("nothing is recorded any more")
            self.decide(f"nothing is recorded any more, since the recorder failed: {told(error)}")
            self._recorder = None

    def _admitted(self, worker: Worker) -> None:
        """A worker was let in: it is probed, and may serve sessions unless it is on standby."""
        for live in [*self._live.values()]:
            self.attempt(live, partial(live.heard_of, worker))
        worker.turns.cut = partial(self._dispatch.cut, worker)
        worker.turns.hold = partial(self._dispatch.holds, worker)
        self._probe(worker)
        if worker.serves:
            self._join(worker)

    def _join(self, worker: Worker) -> None:
        """A worker is there for sessions from now on."""
        if worker.plays("draft"):
            self._status.draft_there()
        self.service.drained.difference_update(worker.hello.roles)
        self.carry_out(self._moving.resettle())

    def plan(self, live: Live) -> Plan | None:
        """How to draft for a session's next round."""
        if live.draft is None:
            return None
        session, controller = live.session, live.controller
        load = self._census.load(live)
        if not self._dispatch.can_draft(live, load):
            return controller.plan(session.length, load=load, ready=False)
        self._dispatch.resume(live)
        ready = not live.draft.turns.busy_with(session.number)
        live.joining &= not ready
        worth_waiting = session.round == 1 and controller.awaits_draft(
            session.length, session.new_tokens
        )
        began_ns = self._observing.began_ns
        free = load.alone or live.draft is live.target or not live.draft.turns.reading
        plan = controller.plan(
            session.length,
            load=load,
            ready=(ready or worth_waiting) and free,
            patient=not live.joining,
        )
        self._observing.finely("plan", began_ns, session)
        return plan

    # -- what follows ------------------------------------------------------------------------------

    def start(self, live: Live) -> None:
        """A session begins."""
        self._live[live.session.number] = live
        self._census.forget()
        for worker in live.workers:
            worker.sessions += 1
        self.attempt(live, lambda: self._start(live))

    def _start(self, live: Live) -> None:
        self._observing.begin(live.session, trace=live.trace)
        live.observing = self._observing
        self.carry_out(observe(self._observing, self.registry, self.epoch))
        if not live.trial:
            self._record(lambda recorder: recorder.begin(live))
        self.perform(live, live.give(live.session.begin))

    def perform(self, live: Live, actions: Sequence[Action]) -> None:
        """Carry out what a session decided; nothing is raised."""
        self.attempt(live, lambda: self._perform(live, actions))

    def _perform(self, live: Live, actions: Sequence[Action]) -> None:
        """Workers before the client, so that they begin; at the end the client before the
        workers."""
        live.tell_round()
        if actions and isinstance(actions[-1], NextRound):
            actions = [*actions[:-1], *self._next_round(live)]
        asks = [a for a in actions if isinstance(a, Ask)]
        ended = live.session.state is State.DONE
        if not ended:
            self._dispatch.ask(live, asks)
            if not live.sent and not live.queued:
                live.waits(self.now_ns())
        for action in actions:
            if live.session.number not in self._live:
                break
            self._replies.tell(live, action)
            if isinstance(action, Finish):
                self._forget(live)
        if ended:
            self._dispatch.ask(live, asks)

    def _next_round(self, live: Live) -> Sequence[Action]:
        """Begin a session's next round, with another draft if there is one that it should get."""
        joining = self.carry_out(self._moving.seek(live))
        plan = self.plan(live) if joining is None and live.session.may_draft else None
        return live.give(live.session.next_round, plan, joining)

    def carry_out(self, effects: Effects[T]) -> T:
        """Carry out effects one after the other and return their outcome. What goes wrong with one
        is raised where it was yielded."""
        raised: BaseException | None = None
        while True:
            try:
                effect = next(effects) if raised is None else effects.throw(raised)
            except StopIteration as end:
                outcome: T = end.value
                return outcome
            try:
                raised = None
                self._carry_out(effect)
            except BaseException as error:
                raised = error

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Follow():
                self.perform(effect.live, effect.actions)
            case Say():
                self.decide(effect.words)
            case Send():
                self._post.to_worker(effect.worker, effect.message)
            case Tell():
                self._post.to_client(effect.client, effect.message)
            case Start():
                self.start(effect.live)
            case Cancel():
                self.cancel(effect.live)
            case Fail():
                self.fail(effect.live, effect.error)
            case Break():
                self.broken(effect.live, effect.error)
            case Abandon():
                self._drop(effect.live)
            case Forget():
                self.attempt(effect.live, partial(self._close_on, effect.worker, effect.live))
            case Lose():
                self.lose(effect.worker, effect.why)
            case LetGo():
                self._let_go(effect.worker)
            case Admitted():
                self._admitted(effect.worker)
            case Join():
                self._join(effect.worker)
            case Gone():
                self._worker_lost(effect.worker, effect.why)
            case Drained():
                self.service.drained.update(effect.worker.hello.roles)
            case ClientGone():
                self._client_lost(effect.client)
            case Defer():
                self._defer(effect.work, partial(self._resume, effect))
            case Unanswered():
                self.unanswered(effect.client, effect.request, effect.error)
            case End():
                self.service.ending = True

    def _resume(self, deferred: Defer, outcome: Request | RequestError) -> None:
        """Go on with what was read elsewhere."""
        self._census.forget()
        self.carry_out(deferred.then(outcome))
        self.part()

    def fail(self, live: Live, error: RequestError) -> None:
        """End a request with an error; both workers forget it. Nothing happens to one that has
        ended."""
        if self._live.get(live.session.number) is not live:
            return
        self._tally.ended["error"] += not live.trial
        self._aside(self._post.to_client, live.client, refusal(self.epoch, error, live.request))
        self._drop(live)

    def _drop(self, live: Live) -> None:
        """Nobody waits for a session any more: it is over here and on its workers, whatever state
        it was in."""
        self._aside(self._forget, live)
        self._aside(live.give, live.session.abandon)
        for role in ("target", "draft"):
            self._aside(self._dispatch.end, live, role)

    def _forget(self, live: Live) -> None:
        if self._live.pop(live.session.number, None) is None:
            return
        self._census.forget()
        live.client.sessions.pop(live.request, None)
        for worker in live.workers:
            worker.sessions -= 1
        self._observing.traced(live.session.number)

    def cancel(self, live: Live) -> None:
        """A session ends as far as it has come."""

        def end() -> None:
            live.interrupted(self.now_ns())
            self.perform(live, live.give(live.session.cancel))

        self.attempt(live, end)

    # -- peers that go -----------------------------------------------------------------------------

    def _worker_lost(self, worker: Worker, why: str = "disconnected") -> None:
        """It is spoken to no more; its sessions are seen to when what is being handled has been."""
        if self.registry.workers.pop(worker.peer, None) is None:
            return
        level = logging.INFO if self.service.ending else logging.WARNING
        log.log(level, "%s worker %s %s", "/".join(worker.hello.roles), worker.whereabouts, why)
        if worker.plays("draft") and worker.serves:
            self._status.draft_lost(worker, why)
            for live in self._live.values():
                if live.draft is worker:
                    note_failure(live, worker, f"it {why}", self.now_ns())
        self._failing.forget(worker)
        self._placement.forget(worker)
        self._gone.append((worker, why))

    def part(self) -> None:
        """Have the sessions of workers that have gone do without them."""
        while self._gone:
            worker, why = self._gone.popleft()
            self._census.forget()
            self._handle(self._moving.part_with, worker, why)
            self._handle(self._changes.lost, worker, why)
            self._handle(self._moving.resettle)

    def _unreachable(self, worker: Worker) -> None:
        """Give up a worker to which nothing can be sent: it has disconnected, or its key was
        revoked and it would wait for ever unless it is told."""
        revoked = self._admission.let_go_if_revoked(worker)
        self._worker_lost(worker, LOST_KEY if revoked else "disconnected")

    def _client_lost(self, client: ClientPeer) -> None:
        """Nobody reads what this client asked for: free its sessions."""
        self.registry.clients.pop(client.peer, None)
        self._handle(self._changes.client_lost, client)
        for number in list(client.sessions.values()):
            if (live := self._live.get(number)) is not None:
                self._tally.ended["cancelled"] += 1
                self._drop(live)

    def _client_deaf(self, client: ClientPeer) -> None:
        """A client reads nothing: free its sessions, and tell it as soon as it reads."""
        words = (
            f"this client has read nothing while {len(client.outbox)} messages waited for "
            "it, and is let go with its requests: say Hello anew"
        )
        log.warning(
            "client %s (pid %d) reads nothing and is disconnected",
            client.hello.name,
            client.hello.pid,
        )
        self.decide(
            f"client {client.hello.name} (pid {client.hello.pid}) reads nothing and is disconnected"
        )
        self._tally.let_go += 1
        requests = sorted(client.outbox.requests | {*client.sessions} | {*client.reading})
        self._client_lost(client)
        farewell = [
            Failed(epoch=self.epoch, session=request, code="session", text=words)
            for request in requests
        ]
        self._post.see_off(
            client.peer, [*farewell, Failed(epoch=self.epoch, code="session", text=words)]
        )

    def tick(self) -> None:
        """What is due: probes to workers that have answered the last one, drafts that are too late,
        sessions that have waited, replies that clients have not taken."""
        self._census.forget()
        self._handle(self._admission.let_revoked_go)
        self._aside(self._post.bid_farewell)
        now_ns, self._ticked_ns, before_ns = self.now_ns(), self.now_ns(), self._ticked_ns
        for worker in list(self.registry.workers.values()):
            self._aside(self._look_after, worker, now_ns - before_ns)
        self._handle(observe, self._observing, self.registry, self.epoch)
        self._step_change(self.now_ns())
        self._handle(self._moving.tick)
        self.part()
        for live in [*self._live.values()]:
            self.attempt(live, live.check_asked)
        for client in [client for client in self.registry.clients.values() if client.outbox]:
            self._aside(self._post.flush, client)
        self._record(lambda recorder: recorder.tick(self._live))

    def look_around(self) -> None:
        """Somebody disconnected: find out who, by speaking to everybody."""
        if not self._hub.disconnects():
            return
        for worker in list(self.registry.workers.values()):
            self._probe(worker)
        for client in list(self.registry.clients.values()):
            if not self._post.to_peer(client.peer, Welcome(epoch=self.epoch)):
                self._client_lost(client)
        self.part()

    def _probe(self, worker: Worker) -> None:
        now_ns, worker.awaiting_probe = self.now_ns(), True
        worker.liveness.probed(worker.turns.owed, now_ns)
        self._post.to_worker(worker, Probe(epoch=self.epoch, sent_ns=now_ns))

    def _look_after(self, worker: Worker, since_ns: int) -> None:
        """Ask a worker how it is; one that has not answered the last time is silent, and in the end
        lost."""
        if not worker.awaiting_probe:
            self._probe(worker)
            return
        worker.liveness.missed(since_ns)
        silent_s, stuck_s = worker.liveness.silent_ns / 1e9, max(LEAST_S, self._settings.stuck_s)
        if silent_s > DEAF * stuck_s:
            self.lose(worker, f"has not responded for {silent_s:.0f} s")
        elif silent_s > stuck_s and not worker.silent:
            worker.silent = True
            log.warning(
                "%s has not responded for %.0f s: it gets no more sessions until it does",
                worker.whereabouts,
                silent_s,
            )

    def lose(self, worker: Worker, why: str) -> None:
        """Take a worker for lost that is there: it is told to forget what it holds and to come
        anew."""
        self.decide(f"{worker.whereabouts} {why}: it is taken for lost")
        self._post.to_peer(
            worker.peer,
            Failed(epoch=self.epoch, code="session", text=f"this worker {why}: say Hello anew"),
        )
        self._worker_lost(worker, why)

    def _close_on(self, worker: Worker, live: Live) -> None:
        if worker.peer in self.registry.workers:
            self._dispatch.forget(worker, Close(epoch=self.epoch, session=live.session.number))

    def _let_go(self, worker: Worker) -> None:
        """Have a worker end; sessions that it still holds go on without it."""
        self._post.to_worker(worker, Drain(epoch=self.epoch))
        if self.registry.workers.pop(worker.peer, None) is not None:
            log.info("%s worker %s is let go", "/".join(worker.hello.roles), worker.whereabouts)
            self._failing.forget(worker)
            self._placement.forget(worker)
            self._gone.append((worker, "was let go"))

    def decide(self, words: str) -> None:
        """Tell and keep a change of how is speculated."""
        log.info("%s", words)
        self._status.decided(words)

    # -- state -------------------------------------------------------------------------------------

    def _sent(self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]) -> None:
        self._record(lambda recorder: recorder.sent(peer, message, frames))

    @property
    def ending(self) -> bool:
        """Whether nothing begins any more."""
        return self.service.ending

    def report(self) -> Reported:
        """Return the answer to Status."""
        return self._status.report()

    @property
    def lives(self) -> Collection[Live]:
        """All sessions, trials too."""
        return self._live.values()

    @property
    def idle(self) -> bool:
        return not self._live

    def supervised(self, told: Supervised) -> None:
        """Heed what whoever started us says of the other parts."""
        self.service.supervised, self.service.supervised_ns = told, self.now_ns()
        if told.ending:
            self.service.given_up, self.service.ending = told.ending, True
            self.carry_out(self._moving.resettle())

    def end(self) -> None:
        """Cancel what still runs and send the workers home."""
        self.service.ending = True
        for live in list(self._live.values()):
            self.cancel(live)
        for worker in list(self.registry.workers.values()):
            self._aside(self._post.to_worker, worker, Drain(epoch=self.epoch))
        self.part()
