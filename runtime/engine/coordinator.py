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
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import ParamSpec, TypeVar

from dovetail.protocol.codec import EVENT, INBOUND, REQUEST, encode
from dovetail.protocol.errors import DecodeError, ProtocolError, RequestError, StaleError
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import (
    MAX_DECISIONS,
    MAX_FAULTS,
    MAX_PAIRS,
    MAX_STRIKES,
    Close,
    Drain,
    Emitted,
    Event,
    Failed,
    Fault,
    Finished,
    Hello,
    Loading,
    Message,
    Observe,
    Probe,
    PromptScored,
    Recorded,
    Reported,
    Role,
    Submit,
    Supervised,
    Totals,
    Welcome,
)
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.control.controller import Plan
from dovetail.runtime.engine.client_requests import Intake, refusal
from dovetail.runtime.engine.draft_failures import FailingDrafts, note_failure
from dovetail.runtime.engine.effects import (
    Break,
    Effects,
    Fail,
    Follow,
    Forget,
    Lose,
    Say,
    Send,
)
from dovetail.runtime.engine.faults import as_raised, reraise_exits, told
from dovetail.runtime.engine.outgoing import Later, Post
from dovetail.runtime.engine.requests import attempt
from dovetail.runtime.engine.running import Census, Live
from dovetail.runtime.engine.sending import Dispatch
from dovetail.runtime.engine.session import (
    Action,
    Ask,
    Emit,
    Finish,
    NextRound,
    Note,
    Request,
    Score,
    State,
)
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

MAX_STRUCK_PEERS = 4096
WORKER_ROLES: tuple[Role, ...] = ("target", "draft")
DRAINED = (
    "the {role} worker was drained by an operator and is not started again: `dovetail swap --role "
    "{role}` starts another one"
)
MAX_REASONS = 64
MAX_WORDS = 512
"""Characters of a reason or a decision; the names in it are a worker's own."""
DEFAULTS = CoordinatorSettings()

Defer = Callable[
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
        defer: Defer = _at_once,
        later: Later = _now,
        settings: CoordinatorSettings = DEFAULTS,
        recorder: Recorder | None = None,
    ) -> None:
        self._hub, self.now_ns, self._defer = hub, clock_ns, defer
        self.epoch = secrets.randbits(62)
        self.registry = Registry(self.epoch)
        self._recorder = recorder
        self._placement = Placement(
            self.registry, self.epoch, reuse=settings.reuse, say=self.decide
        )
        self.ending = False
        self._live: dict[int, Live] = {}
        self._census = Census(self._live)
        self._strikes: dict[bytes, int] = {}
        self._settings = settings
        self._began_ns = self._ticked_ns = clock_ns()
        self._tally = Tally()
        self._dropped = Dropped()
        self._rounds = self._round_tokens = 0
        self._lost_drafts: dict[str, tuple[str, int]] = {}
        """By the names of those that were lost and that no other draft has replaced: what became of
        them, and when."""
        self._drained: set[Role] = set()
        """Roles of which an operator drained a worker, until the next one registers."""
        self._supervised, self._supervised_ns = Supervised(), clock_ns()
        self._gone: deque[tuple[Worker, str]] = deque()
        """Workers that are no longer registered and whose sessions have not been seen to, each with
        what became of it."""
        self._decisions: deque[str] = deque(maxlen=MAX_DECISIONS)
        self._observing = Observing(clock_ns)
        self._failing = FailingDrafts()
        self._moving = Moving(
            self._live, self.registry, self._placement, self._failing, settings, clock_ns
        )
        self._changes = Changes(self, self.registry, self._placement)
        self._post = Post(
            hub,
            self._observing,
            later,
            sent=self._sent,
            worker_lost=self._unreachable,
            client_lost=self._client_lost,
            client_deaf=self._client_deaf,
            unsaid=self._unsaid,
        )
        self._dispatch = Dispatch(
            self, self._post, self._live, self._census, self.registry, reuse=settings.reuse
        )
        self._answers = Answers(
            self.epoch,
            self._live,
            self._census,
            self.registry,
            self._moving,
            self._failing,
            self._changes,
            self._observing,
            self._dropped,
        )
        self._intake = Intake(
            self,
            self._live,
            self.registry,
            self._placement,
            self._moving,
            self._changes,
            self._observing,
            self._tally,
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
            self._strike(peer, error)
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
                self._intake.take(client, message, now_ns)  # type: ignore[arg-type]
            else:
                self._newcomer(peer, message, now_ns)
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
        self._aside(self.tell, client, refusal(self.epoch, _fault(error), request))

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
        self._aside(self._refuse, peer, _fault(error))

    def _step_change(self, now_ns: int) -> None:
        """See how the change of workers gets on that is under way, if one is; a fault of ours ends
        it."""
        if not self._changes.under_way:
            return
        try:
            self._changes.step(now_ns)
        except BaseException as error:
            reraise_exits(error)
            log.exception("the change of workers is broken off")
            self._aside(self._changes.break_off, told(error))

    def _aside(self, action: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> None:
        """Do what is about no session; what goes wrong is told, and the rest goes on."""
        try:
            action(*arguments, **named)
        except BaseException as error:
            reraise_exits(error)
            log.exception("%s failed", getattr(action, "__qualname__", "something"))

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

    def _strike(self, peer: bytes, error: ProtocolError) -> None:
        """Count a message that breaks the protocol; a peer that goes on is no longer listened to.

        Nor is a worker that owes an answer: this may have been it, and its session would wait for
        it in vain.
        """
        self._dropped.refused += 1
        if len(self._strikes) > MAX_STRUCK_PEERS:
            self._strikes.clear()
        worker = self.registry.workers.get(peer)
        strikes = self._strikes[peer] = self._strikes.get(peer, 0) + 1
        if strikes == 1:
            log.warning("a message of peer %s was dropped: %s", peer.hex()[:12], error)
        if strikes == MAX_STRIKES or (worker is not None and worker.turns.owed):
            log.warning(
                "peer %s broke the protocol and is no longer listened to (%d)",
                peer.hex()[:12],
                strikes,
            )
            self._strikes[peer] = max(strikes, MAX_STRIKES)
            self._post.to_peer(
                peer,
                Failed(
                    epoch=self.epoch,
                    code="protocol",
                    text=f"{strikes} messages broke the protocol: {str(error)[:200]}",
                ),
            )
            if worker is not None:
                self._worker_lost(worker, "broke the protocol")
            if (client := self.registry.clients.get(peer)) is not None:
                self._client_lost(client)

    def _newcomer(self, peer: bytes, message: Event | ClientRequest, now_ns: int) -> None:
        self._aside(self._post.bid_farewell)
        if self._strikes.get(peer, 0) >= MAX_STRIKES:
            self._dropped.refused += 1
            return
        if not isinstance(message, Hello):
            self._post.to_peer(
                peer,
                Failed(
                    epoch=self.epoch,
                    code="session",
                    text="this peer is not registered here: say Hello first, or connect anew",
                ),
            )
            raise StaleError("a peer that is not registered spoke of sessions")
        try:
            admitted = self.registry.admit(peer, message, self._hub.user(peer), now_ns)
        except RequestError as error:
            self._refuse(peer, error)
            return
        self._post.to_peer(peer, Welcome(epoch=self.epoch))
        if isinstance(admitted, Worker):
            log.info(
                "%s worker %s registered: %s on %s, %s",
                "/".join(message.roles),
                message.name,
                message.model,
                message.device,
                message.fingerprint or "no fingerprint",
            )
            if admitted.plays("target"):
                for misfit, reason in self.registry.misfits(admitted):
                    self._refuse(misfit.peer, reason)
                    self._worker_lost(misfit, "does not fit the target")
            for warning in self.registry.warnings(admitted):
                log.warning("%s", warning)
            for live in [*self._live.values()]:
                self.attempt(live, partial(live.heard_of, admitted))
            admitted.turns.cut = partial(self._dispatch.cut, admitted)
            admitted.turns.hold = partial(self._dispatch.holds, admitted)
            self._probe(admitted)
            if admitted.serves:
                self.joined(admitted)

    def joined(self, worker: Worker) -> None:
        """A worker is there for sessions from now on."""
        if worker.plays("draft"):
            self._lost_drafts.clear()
        self._drained.difference_update(worker.hello.roles)
        self.carry_out(self._moving.resettle())

    def drained(self, worker: Worker) -> None:
        """Remember that an operator drained a worker, so that it is not started again."""
        self._drained.update(worker.hello.roles)

    def _unplayed(self) -> tuple[Role, ...]:
        """Return the roles that nobody plays since an operator drained their last worker, as we
        know and as whoever started us says."""
        return tuple(
            role
            for role in WORKER_ROLES
            if role in {*self._drained, *self._supervised.drained}
            and not any(worker.plays(role) for worker in self.registry.workers.values())
        )

    def _refuse(self, peer: bytes, error: RequestError) -> None:
        self._dropped.refused += 1
        log.warning("refused: %s", error)
        self._post.to_peer(peer, refusal(self.epoch, error))

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
        self.observe()
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
            if isinstance(action, Emit):
                self._emit(live, action)
            elif isinstance(action, Score):
                self._post.to_client(
                    live.client,
                    PromptScored(
                        epoch=self.epoch,
                        request=live.request,
                        start=action.start,
                        logprobs=action.logprobs,
                    ),
                )
            elif isinstance(action, Note):
                self._post.to_client(
                    live.client,
                    Recorded(epoch=self.epoch, request=live.request, record=action.record),
                )
            elif isinstance(action, Finish):
                self._finish(live, action)
        if ended:
            self._dispatch.ask(live, asks)

    def _next_round(self, live: Live) -> Sequence[Action]:
        """Begin a session's next round, with another draft if there is one that it should get."""
        joining = self.carry_out(self._moving.seek(live))
        plan = self.plan(live) if joining is None and live.session.may_draft else None
        return live.give(live.session.next_round, plan, joining)

    def carry_out(self, effects: Effects[T]) -> T:
        """Carry out effects one after the other and return their outcome. A fault of the
        coordinator's in one session ends that session alone."""
        while True:
            try:
                effect = next(effects)
            except StopIteration as end:
                outcome: T = end.value
                return outcome
            match effect:
                case Follow():
                    self.perform(effect.live, effect.actions)
                case Forget():
                    self.attempt(effect.live, partial(self._close_on, effect.worker, effect.live))
                case Fail():
                    self.fail(effect.live, effect.error)
                case Break():
                    self.broken(effect.live, effect.error)
                case Say():
                    self.decide(effect.words)
                case Lose():
                    self.lose(effect.worker, effect.why)
                case Send():
                    self.send_to(effect.worker, effect.message)

    def _emit(self, live: Live, emit: Emit) -> None:
        if live.told_ns is not None and not live.trial:
            self._changes.paused(live.mark_ns - live.told_ns)
        live.told_ns = live.mark_ns
        drafted = tuple(place < emit.drafted for place in range(len(emit.tokens)))
        self._post.to_client(
            live.client,
            Emitted(
                epoch=self.epoch,
                request=live.request,
                tokens=emit.tokens,
                drafted=drafted,
                text=emit.text,
                logprobs=emit.logprobs,
            ),
        )

    def _finish(self, live: Live, finish: Finish) -> None:
        now_ns = self.now_ns()
        live.over(now_ns)
        result = live.session.result(now_ns, finish.reason)
        controls = min(
            live.controller.controls, result.plain_rounds
        )  # the last one may have been cut short
        result = result.model_copy(
            update={
                "predicted_tokens_per_s": live.controller.predicted_tokens_per_s,
                "control_rounds": controls,
                "draft_failure": live.draft_failure,
            }
        )
        if not live.trial:
            self._failing.drafted(live, result.rounds - result.plain_rounds)
            self._tally.ended[finish.reason] += 1
            self._rounds += result.rounds
            self._round_tokens += max(0, result.completion_tokens - 1) if result.rounds else 0
        spans = self._observing.traced(live.session.number)
        self._post.to_client(
            live.client,
            Finished(
                epoch=self.epoch,
                request=live.request,
                result=result,
                margins=tuple(live.session.margins),
                spans=spans,
            ),
        )
        self._forget(live)

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
        level = logging.INFO if self.ending else logging.WARNING
        log.log(level, "%s worker %s %s", "/".join(worker.hello.roles), worker.whereabouts, why)
        if worker.plays("draft") and worker.serves:
            self._lost_drafts[worker.name] = why, self.now_ns()
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
            self._aside(self.carry_out, self._moving.part_with(worker, why))
            self._aside(self._changes.lost, worker, why)
            self._aside(self.carry_out, self._moving.resettle())

    def _unreachable(self, worker: Worker) -> None:
        """Give up a worker to which nothing can be sent: it has disconnected, or its key was
        revoked and it would wait for ever unless it is told."""
        if not self._let_go_if_revoked(worker):
            self._worker_lost(worker)

    def _let_go_if_revoked(self, worker: Worker) -> bool:
        """Tell a worker whose key was revoked, or may no longer play its role, and let it go; False
        if its key is good."""
        key = self._hub.user(worker.peer)
        if key is None or key.may_be(worker.hello.roles):
            return False
        farewell = Failed(
            epoch=self.epoch,
            code="session",
            text="the coordinator does not allow the key of this worker any more",
        )
        self._hub.turn_away(worker.peer, encode(farewell))
        self._worker_lost(worker, "lost its key")
        return True

    def _let_revoked_go(self) -> None:
        """What a peer says whose key was revoked, or may no longer play its role, does not arrive
        any more: nobody is to wait for it."""
        for worker in list(self.registry.workers.values()):
            self._let_go_if_revoked(worker)
        for client in list(self.registry.clients.values()):
            if (key := self._hub.user(client.peer)) is not None and not key.may_be(
                client.hello.roles
            ):
                self._client_lost(client)

    def _client_lost(self, client: ClientPeer) -> None:
        """Nobody reads what this client asked for: free its sessions."""
        self.registry.clients.pop(client.peer, None)
        self._aside(self._changes.client_lost, client)
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
        self._aside(self._let_revoked_go)
        self._aside(self._post.bid_farewell)
        now_ns, self._ticked_ns, before_ns = self.now_ns(), self.now_ns(), self._ticked_ns
        for worker in list(self.registry.workers.values()):
            self._aside(self._look_after, worker, now_ns - before_ns)
        self._aside(self.observe)
        self._step_change(self.now_ns())
        self._aside(self.carry_out, self._moving.tick())
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

    # -- what sessions that move, and changes of workers, ask for ----------------------------------

    @property
    def lives(self) -> Collection[Live]:
        return self._live.values()

    def _close_on(self, worker: Worker, live: Live) -> None:
        if worker.peer in self.registry.workers:
            self._dispatch.forget(worker, Close(epoch=self.epoch, session=live.session.number))

    def refuge(self, live: Live) -> Worker | None:
        return self._moving.refuge(live)

    def move(self, live: Live, target: Worker) -> None:
        self.carry_out(self._moving.move(live, target))

    def change_draft(self, live: Live) -> None:
        self.carry_out(self._moving.change_draft(live))

    def try_out(
        self, submit: Submit, target: Worker, draft: Worker | None, hear: Callable[[Message], None]
    ) -> Live:
        """Run a request for ourselves, on these workers and no others; `RequestError` if it cannot
        be read."""
        request, now_ns = attempt(submit, target), self.now_ns()
        if isinstance(request, RequestError):
            raise request
        ours = ClientPeer(
            b"",
            Hello(epoch=self.epoch, roles=("client",), name="trial", host="", pid=os.getpid()),
            hear=hear,
        )
        live = self._placement.try_out(ours, submit, target, draft, request, now_ns)
        self.start(live)
        return live

    def abandon(self, live: Live) -> None:
        """Forget a session that nobody waits for."""
        self._drop(live)

    def user(self, client: ClientPeer) -> PeerKey | None:
        return self._hub.user(client.peer)

    def defer(
        self,
        work: Callable[[], Request | RequestError],
        done: Callable[[Request | RequestError], None],
    ) -> None:
        self._defer(work, done)

    def send_to(self, worker: Worker, message: Message) -> None:
        self._post.to_worker(worker, message)

    def let_go(self, worker: Worker) -> None:
        """Have a worker end; sessions that it still holds go on without it."""
        self._post.to_worker(worker, Drain(epoch=self.epoch))
        if self.registry.workers.pop(worker.peer, None) is not None:
            log.info("%s worker %s is let go", "/".join(worker.hello.roles), worker.whereabouts)
            self._failing.forget(worker)
            self._placement.forget(worker)
            self._gone.append((worker, "was let go"))

    def tell(self, client: ClientPeer, message: Message) -> None:
        self._post.to_client(client, message)

    def observe(self) -> None:
        """Have the workers record what is looked for."""
        for worker, fine in self._observing.orders(self.registry.workers.values()):
            self._post.to_worker(worker, Observe(epoch=self.epoch, fine=fine))

    def decide(self, words: str) -> None:
        """Tell and keep a change of how is speculated."""
        log.info("%s", words)
        self._decisions.append(words[:MAX_WORDS])

    # -- state -------------------------------------------------------------------------------------

    def _sent(self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]) -> None:
        self._record(lambda recorder: recorder.sent(peer, message, frames))

    @property
    def given_up(self) -> str:
        """Why whoever started us ends the service: what is missing does not come back. Empty: it
        does not end it."""
        return self._moving.given_up

    @property
    def idle(self) -> bool:
        return not self._live

    def supervised(self, told: Supervised) -> None:
        """Heed what whoever started us says of the other parts."""
        self._supervised, self._supervised_ns = told, self.now_ns()
        if told.ending:
            self._moving.given_up, self.ending = told.ending, True
            self.carry_out(self._moving.resettle())

    def _faults(self, now_ns: int) -> tuple[Fault, ...]:
        """The parts that do not do their work, as we know and as whoever started us says, who knows
        more."""
        told_s = (now_ns - self._supervised_ns) / 1e9
        told = [
            fault.model_copy(
                update={
                    "since_s": fault.since_s + told_s,
                    "retry_s": None if fault.retry_s is None else max(0.0, fault.retry_s - told_s),
                }
            )
            for fault in self._supervised.faults
        ]
        lost = self._lost_drafts.items() if self.registry.pick("draft") is None else ()
        ours = [
            Fault(part=f"{name} worker"[-MAX_WORDS:], why=why, since_s=(now_ns - at_ns) / 1e9)
            for name, (why, at_ns) in lost
        ]
        ours += self._failing.faults(now_ns)
        known = {fault.part for fault in told}
        return tuple([*told, *(fault for fault in ours if fault.part not in known)][:MAX_FAULTS])

    def report(self) -> Reported:
        """The answer to Status."""
        now_ns = self.now_ns()
        faults = self._faults(now_ns)
        reasons = [self.given_up] if self.given_up else []
        silent = [worker for worker in self.registry.workers.values() if worker.silent]
        reasons += [
            f"{worker.whereabouts} has not responded for {worker.liveness.silent_ns / 1e9:.0f} s"[
                -MAX_WORDS:
            ]
            for worker in silent
        ]
        if self.registry.pick("target") is None and not any(
            worker.plays("target") for worker in silent
        ):
            reasons.append("no target worker is registered")
        if self._lost_drafts and self.registry.pick("draft") is None:
            reasons.append("a draft worker was lost: sessions decode with the target alone")
        loading = self.registry.loading(now_ns)
        reasons += [fault.words[:MAX_WORDS] for fault in faults]
        reasons += [words[:MAX_WORDS] for words in self._moving.words()]
        degraded = bool(reasons)
        drained = self._unplayed()
        reasons += [DRAINED.format(role=role) for role in drained]
        reasons += [state.words[:MAX_WORDS] for state in loading]
        reasons += [self._changes.words[:MAX_WORDS]] if self._changes.under_way else []
        reasons += [medley[:MAX_WORDS]] if (medley := self.registry.medley()) else []
        offs: list[str] = []
        for live in [*self._live.values()]:
            self.attempt(live, lambda live=live: offs.append(live.controller.off))  # type: ignore[misc]
        reasons += [off[:MAX_WORDS] for off in offs if off]
        return Reported(
            epoch=self.epoch,
            address=self._hub.address,
            pid=os.getpid(),
            uptime_s=(now_ns - self._began_ns) / 1e9,
            workers=tuple(w.state(now_ns) for w in self.registry.workers.values()),
            sessions=len(self._live),
            finished=self._tally.ended["stop"] + self._tally.ended["length"],
            failed=self._tally.ended["error"],
            cancelled=self._tally.ended["cancelled"],
            rounds=self._rounds,
            tau=self._round_tokens / self._rounds if self._rounds else None,
            stale=self._dropped.stale,
            refused=self._dropped.refused + self._hub.refused(),
            degraded=degraded,
            reasons=tuple(reasons[:MAX_REASONS]),
            faults=faults,
            loading=loading,
            pairs=tuple(self._placement.states()[:MAX_PAIRS]),
            decisions=tuple(self._decisions),
            totals=self._totals(),
            drained=drained,
        )

    def _totals(self) -> Totals:
        targets = [
            worker
            for worker in self.registry.workers.values()
            if worker.plays("target") and not worker.standby
        ]
        room = sum(target.limits.sessions for target in targets)
        return self._tally.totals(
            draft_failures=self._failing.count,
            opening=sum(
                live.session.state is State.OPENING and not live.session.tokens
                for live in self._live.values()
            ),
            waiting=sum(live.loss is not None for live in self._live.values()),
            kept=sum(len(target.shelf) for target in targets),
            occupied=min(1.0, sum(target.sessions for target in targets) / max(1, room)),
        )

    def end(self) -> None:
        """Cancel what still runs and send the workers home."""
        self.ending = True
        for live in list(self._live.values()):
            self.cancel(live)
        for worker in list(self.registry.workers.values()):
            self._aside(self._post.to_worker, worker, Drain(epoch=self.epoch))
        self.part()
