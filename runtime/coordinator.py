"""The coordinator: routes messages between clients, sessions and workers.

A message arrives, is decoded, becomes an event of a session, and the actions that follow are carried out before the next is looked at: first what a worker
waits for, then what a client reads. Decisions live elsewhere - in `session.py` (one request), `scheduler.py` (turns), `registry.py` (who is let in),
`kept.py` (what of an ended session a new one goes on from), `placement.py` (which workers serve a session), `moving.py` (how it gets others) - and
nothing here touches a tensor or a model file. A peer that breaks the protocol is counted and refused; no message can raise out of `pump`. Workers that turn
out to be gone while something is handled are parted with behind it. Time, and what is done elsewhere or later, are handed in: `loop.py` runs it for real.
"""

import itertools
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Literal

from dovetail.protocol.arrays import Array
from dovetail.protocol.codec import EVENT, INBOUND, REQUEST, encode
from dovetail.protocol.errors import DecodeError, LinkError, ProtocolError, RequestError, StaleError
from dovetail.protocol.keys import OPERATOR
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import (
    MAX_DECISIONS,
    MAX_PAIRS,
    MAX_STRIKES,
    Cancel,
    Close,
    Closed,
    Describe,
    Described,
    Dismiss,
    Draft,
    Drafted,
    Drain,
    Emitted,
    Event,
    Failed,
    Fed,
    Feed,
    Finished,
    Hello,
    Look,
    Message,
    Observe,
    Open,
    Opened,
    Prefilled,
    Probe,
    Probed,
    PromptScored,
    Recorded,
    Refed,
    Reported,
    Scored,
    Seen,
    Status,
    Stop,
    Submit,
    Swap,
    Totals,
    Verified,
    VerifiedItem,
    Verify,
    VerifyItem,
    Welcome,
)
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.changes import Changes
from dovetail.runtime.live import Live, waits
from dovetail.runtime.metrics import RoundTimes, Tally, extent_ns
from dovetail.runtime.moving import Moving
from dovetail.runtime.observing import Observing
from dovetail.runtime.pilot import Plan, Round
from dovetail.runtime.placement import Placement
from dovetail.runtime.policies import cut
from dovetail.runtime.recording import Recorder
from dovetail.runtime.registry import ClientPeer, Registry, Worker
from dovetail.runtime.requests import attempt
from dovetail.runtime.scheduler import Owed
from dovetail.runtime.session import MAX_HELD_BYTES, Action, Ask, Emit, Finish, Note, Request, Score, State

log = logging.getLogger("dovetail.coordinator")

MAX_STRUCK_PEERS = 4096
MAX_BACKLOG = 16384
MAX_READING = 1024
"""Prompts of a client that wait to be read: each is held in memory until it has been."""
MAX_REASONS = 64
MAX_WORDS = 512
"""Characters of a reason or a decision; the names in it are a worker's own."""
DEFAULTS = CoordinatorSettings()

Defer = Callable[[Callable[[], Request | RequestError], Callable[[Request | RequestError], None]], None]
"""Does a piece of work that takes long, elsewhere, and hands its outcome back."""


def _at_once(work: Callable[[], Request | RequestError], done: Callable[[Request | RequestError], None]) -> None:
    done(work())


Later = Callable[[float, Callable[[], None]], object]
"""Does something after so many seconds."""


def _now(_seconds: float, action: Callable[[], None]) -> None:
    action()


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
        self._hub, self._now, self._defer, self._later = hub, clock_ns, defer, later
        self.epoch = secrets.randbits(62)
        self.registry = Registry(self.epoch)
        self._reuse, self._recorder = settings.reuse, recorder
        self._placement = Placement(self.registry, self.epoch, reuse=settings.reuse, say=self._decide)
        self.ending = False
        self._live: dict[int, Live] = {}
        self._strikes: dict[bytes, int] = {}
        self._began_ns = clock_ns()
        self._tally = Tally()
        self._stale = self._refused = 0
        self._rounds = self._round_tokens = 0
        self._lost_draft = False
        self._gone: deque[tuple[Worker, str]] = deque()
        """Workers that are no longer registered and whose sessions have not been seen to, each with what became of it."""
        self._decisions: deque[str] = deque(maxlen=MAX_DECISIONS)
        self._observing = Observing(clock_ns)
        self._moving = Moving(self, self.registry, self._placement, settings)
        self._changes = Changes(self, self.registry, self._placement)

    # -- what arrives ---------------------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Handle every message that has arrived."""
        while (arrived := self._hub.receive()) is not None:
            peer, frames = arrived
            self._receive(peer, frames, self._now())
        if self._recorder is not None:
            self._recorder.settle()

    def _receive(self, peer: bytes, frames: Sequence[bytes], now_ns: int) -> None:
        """Handle one message; whatever goes wrong with it concerns the sessions that it is about, and nobody else."""
        worker, client = self.registry.workers.get(peer), self.registry.clients.get(peer)
        try:
            message = (EVENT if worker else REQUEST if client else INBOUND).decode(frames)
        except DecodeError as error:
            self._strike(peer, error)
            self._part()
            return
        self._observing.finely("receive", now_ns, message)
        if self._recorder is not None and (known := worker or client) is not None:
            self._recorder.received(known, message, frames)
        try:
            if worker is not None:
                self._event(worker, message, now_ns, sum(map(len, frames)))  # type: ignore[arg-type]
            elif client is not None:
                self._request(client, message, now_ns)  # type: ignore[arg-type]
            else:
                self._newcomer(peer, message, now_ns)
        except StaleError:
            self._stale += 1
        except Exception as error:
            log.exception("a message %r of peer %s could not be handled", message.type, peer.hex()[:12])
            self._contain(message, client, error)
        if self._changes.under_way:
            self._changes.step(now_ns)
        self._part()

    def _contain(self, message: Event | ClientRequest, client: ClientPeer | None, error: Exception) -> None:
        """Our own fault: end the sessions that the message is about, so that nobody waits for them."""
        numbers = [item.session for item in message.items] if isinstance(message, Verified) else [getattr(message, "session", None)]
        if client is not None:
            numbers = [client.sessions.get(getattr(message, "request", -1))]
        for number in numbers:
            if (live := self._live.get(number or -1)) is not None:
                self._fail(live, RequestError("internal", f"the coordinator failed: {type(error).__name__}: {str(error)[:300]}"))

    def _strike(self, peer: bytes, error: ProtocolError) -> None:
        """Count a message that breaks the protocol; a peer that goes on is no longer listened to.

        Nor is a worker that owes an answer: this may have been it, and its session would wait for it in vain.
        """
        self._refused += 1
        if len(self._strikes) > MAX_STRUCK_PEERS:
            self._strikes.clear()
        worker = self.registry.workers.get(peer)
        strikes = self._strikes[peer] = self._strikes.get(peer, 0) + 1
        if strikes == 1:
            log.warning("a message of peer %s was dropped: %s", peer.hex()[:12], error)
        if strikes == MAX_STRIKES or (worker is not None and worker.turns.owed):
            log.warning("peer %s broke the protocol and is no longer listened to (%d)", peer.hex()[:12], strikes)
            self._strikes[peer] = max(strikes, MAX_STRIKES)
            self._send(peer, Failed(epoch=self.epoch, code="protocol", text=f"{strikes} messages broke the protocol: {str(error)[:200]}"))
            if worker is not None:
                self._worker_lost(worker, "broke the protocol")
            if (client := self.registry.clients.get(peer)) is not None:
                self._client_lost(client)

    def _newcomer(self, peer: bytes, message: Event | ClientRequest, now_ns: int) -> None:
        if self._strikes.get(peer, 0) >= MAX_STRIKES:
            self._refused += 1
            return
        if not isinstance(message, Hello):
            self._send(peer, Failed(epoch=self.epoch, code="session", text="this peer is not registered here: say Hello first, or connect anew"))
            raise StaleError("a peer that is not registered spoke of sessions")
        try:
            admitted = self.registry.admit(peer, message, self._hub.user(peer), now_ns)
        except RequestError as refusal:
            self._refuse(peer, refusal)
            return
        self._send(peer, Welcome(epoch=self.epoch))
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
            for live in self._live.values():
                live.heard_of(admitted)
            admitted.turns.cut = partial(self._cut, admitted)
            self._probe(admitted)
            if admitted.serves:
                self.joined(admitted)

    def joined(self, worker: Worker) -> None:
        """A worker is there for sessions from now on."""
        self._lost_draft &= not worker.plays("draft")
        self._moving.resettle()

    def _refuse(self, peer: bytes, refusal: RequestError) -> None:
        self._refused += 1
        log.warning("refused: %s", refusal)
        self._send(peer, _refusal(self.epoch, refusal))

    # -- events of workers ----------------------------------------------------------------------------------------------------------------------

    def _event(self, worker: Worker, event: Event, now_ns: int, size: int) -> None:
        if event.epoch != worker.hello.epoch:
            raise StaleError(f"an event of another incarnation of {worker.name}")
        worker.traffic.received_bytes += size
        try:
            self._take(worker, event, now_ns, size)
        finally:
            self._dispatch(worker)

    def _take(self, worker: Worker, event: Event, now_ns: int, size: int) -> None:
        self._observing.event(worker, event)
        match event:
            case Drafted():
                self._drafted(worker, event, now_ns, size)
            case Verified():
                self._verified(worker, event, now_ns, size)
            case Opened():
                self._opened(worker, event, now_ns, size)
            case Prefilled():
                self._prefilled(worker, event, size)
            case Scored():
                self._scored(worker, event, size)
            case Fed():
                self._fed(worker, event, now_ns, size)
            case Refed():
                self._refed(worker, event, size)
            case Probed():
                self._probed(worker, event, now_ns)
            case Failed():
                self._worker_failed(worker, event)
            case Closed():
                pass
            case Hello():
                raise StaleError(f"{worker.name} said Hello again")

    def _opened(self, worker: Worker, event: Opened, now_ns: int, size: int) -> None:
        live = self._answer(worker, event.session, Owed(Opened, event.round), "target", "draft")
        if worker is not live.target:
            live.draft_read(now_ns)
            return
        if event.bonus is not None and event.bonus >= worker.facts.size:
            self._fail(live, RequestError("internal", f"the target worker {worker.name} chose token {event.bonus}, beyond its vocabulary"))
            return
        live.answered(worker, now_ns, size, event.spans)
        live.losses.clear()
        if not live.session.round:
            live.target_read(now_ns)
        if live.draft is not None and not live.session.complete:
            self._go_on_alone(live, worker, "fewer features than were asked for")
        times = live.round_ended() if live.session.round else None
        self._believe(live, lambda: live.session.opened(event, now_ns, times))

    def _prefilled(self, worker: Worker, event: Prefilled, size: int) -> None:
        """Features of a part of a prompt; the answer to Open is still owed."""
        live = self._live.get(event.session)
        if live is None or live.target is not worker:
            raise StaleError(f"session {event.session} reads nothing of {worker.name}")
        actions = self._sensible(live, worker, lambda: live.session.prefilled(event))
        live.passed_on(size)
        self._perform(live, actions)

    def _scored(self, worker: Worker, event: Scored, size: int) -> None:
        """What the target thinks of a part of a prompt; the answer to Open is still owed."""
        live = self._live.get(event.session)
        if live is None or live.target is not worker:
            raise StaleError(f"session {event.session} asks {worker.name} nothing")
        live.passed_on(size)
        self._believe(live, lambda: live.session.scored(event))

    def _believe(self, live: Live, handle: Callable[[], list[Action]]) -> None:
        """Do what follows from the word of a session's target; one that makes no sense ends the request."""
        try:
            actions = handle()
        except StaleError:
            raise
        except ProtocolError as error:
            self._refused += 1
            self._fail(live, RequestError("internal", f"the target worker {live.target.name} sent what cannot be: {error}"))
            return
        self._perform(live, actions)

    def _fed(self, worker: Worker, event: Fed, now_ns: int, size: int) -> None:
        live = self._answer(worker, event.session, Owed(Fed, event.round, event.start), "draft")
        live.passed_on(size)
        live.draft_read(now_ns)

    def _refed(self, worker: Worker, event: Refed, size: int) -> None:
        live = self._answer(worker, event.session, Owed(Refed, event.round), "target")
        live.passed_on(size)
        self._perform(live, self._sensible(live, worker, lambda: live.session.refed(event)))

    def _drafted(self, worker: Worker, event: Drafted, now_ns: int, size: int) -> None:
        live = self._answer(worker, event.session, Owed(Drafted, event.round), "draft")
        if not live.session.wants_proposal(event.round):
            raise StaleError(f"session {event.session} has done without the proposal of round {event.round}")
        worker.traffic.answered(size, 1)
        live.answered(worker, now_ns, size, event.spans)
        self._perform(live, self._sensible(live, worker, lambda: live.session.drafted(event)))

    def _sensible(self, live: Live, worker: Worker, handle: Callable[[], list[Action]]) -> list[Action]:
        """What follows from a message that drafting needs; from one that makes no sense that the session goes on without its draft."""
        try:
            return handle()
        except StaleError:
            raise
        except ProtocolError as error:
            self._go_on_alone(live, worker, error)
            return []

    def _go_on_alone(self, live: Live, worker: Worker, why: object) -> None:
        log.warning("%s sent what cannot be (%s): session %d goes on without its draft", worker.name, why, live.session.number)
        self._refused += 1
        self._moving.drop_draft(live, shun=True)

    def _verified(self, worker: Worker, event: Verified, now_ns: int, size: int) -> None:
        """Handle every verdict of a pass; those that are stale are dropped one by one."""
        self._passed(worker, event, size)
        for item, features in zip(event.items, _shares(event), strict=True):
            try:
                live = self._answer(worker, item.session, Owed(Verified, item.round), "target")
                live.answered(worker, now_ns, size // len(event.items), event.spans)
                times = self._learn(live, item)
                if not live.session.readable(features, len(item.accepted)):
                    self._go_on_alone(live, worker, f"features {features and features.shape} with a path of {len(item.accepted)}")
                self._perform(live, live.session.verified(item, features, times))
                self._relieve(live)
            except StaleError:
                self._stale += 1
            except ProtocolError as error:
                self._refused += 1
                self._fail(live, RequestError("internal", f"the target worker {worker.name} sent no verdict: {error}"))

    def _passed(self, worker: Worker, event: Verified, size: int) -> None:
        """Remember what the pass took that these are the first verdicts of."""
        if worker.passing is not None and any(item.session in worker.turns.owed for item in event.items):
            rows, context = worker.passing
            worker.passing = None
            worker.traffic.answered(size, len(event.items))
            worker.verifying.observe(rows, extent_ns(event.spans) / 1e9, context)

    def _learn(self, live: Live, item: VerifiedItem) -> RoundTimes:
        """A round has ended: what it cost and brought says how the next is drafted."""
        times, session = live.round_ended(), live.session
        done = Round(times, session.length, 1 + len(item.accepted), session.verifying, session.proposal, live.other_rows)
        live.pilot.learn(done)
        return times

    def _relieve(self, live: Live) -> None:
        """A draft that has not been asked for long would have too much to catch up with."""
        if live.session.held_bytes > MAX_HELD_BYTES and live.session.state is not State.DONE:
            self._decide(f"session {live.session.number} gives its draft up: {live.session.held_bytes >> 20} MiB of features wait for it")
            self._moving.drop_draft(live, shun=True)

    def _decide(self, words: str) -> None:
        """Tell and keep a change of how is speculated."""
        log.info("%s", words)
        self._decisions.append(words[:MAX_WORDS])

    def _answer(self, worker: Worker, session: int, answer: Owed, *roles: Literal["draft", "target"]) -> Live:
        """The session that waits for this answer of this worker in one of these roles; `StaleError` if none does, and then it waits on."""
        live = self._live.get(session)
        meant = [live.target if role == "target" else live.draft for role in roles] if live else []
        if live and worker in (live.target, live.draft) and worker not in meant:
            raise StaleError(f"{worker.name} spoke out of its role")
        worker.stuck &= worker.turns.owed.get(session) != answer
        wanted = worker.turns.answered(session, answer)
        if not wanted or live is None or worker not in meant:
            raise StaleError(f"nobody waits for round {answer.round} of session {session} from {worker.name}")
        return live

    def _worker_failed(self, worker: Worker, event: Failed) -> None:
        """A worker could not do what was asked: a draft is done without, a target that does not have the session is to read it anew, and any other word of a
        target's ends the request."""
        if event.session is None:
            log.error("%s: %s", worker.name, event.text)
            return
        live = self._live.get(event.session)
        owed = worker.turns.owed.get(event.session)
        if owed is None or event.round not in (None, owed.round):
            raise StaleError(f"{worker.name} failed in something that was not asked of it")
        if not worker.turns.answered(event.session, owed) or live is None:
            return
        log.warning("%s failed in session %d: %s (%s)", worker.name, event.session, event.text, event.code)
        if owed.type is Opened and self._open_anew(live, worker, event):
            return
        if self._changes.failed(live, worker, event.text):
            if worker is live.target and worker.peer in self.registry.workers:
                self._moving.lose_target(live, "could not do what was asked of it")
                self._moving.resettle()
            return
        if (worker is live.draft and worker is not live.target) or owed.type is Refed:
            self._moving.drop_draft(live, shun=True)
        elif worker is live.target and event.code == "protocol" and live.session.doubtful:
            self._verify_without_tree(live, event.text)
        elif worker is live.target and event.code in ("session", "prefix") and owed.type is Verified:
            self._moving.lose_target(live, "does not have its session any more")
            self._moving.resettle()
        elif worker is live.target:
            self._fail(live, RequestError(event.code, event.text))

    def _open_anew(self, live: Live, worker: Worker, event: Failed) -> bool:
        """Whether a worker reads the whole prompt, since it does not have what its session should have gone on from."""
        role = "target" if worker is live.target else "draft"
        if (base := live.session.base(role)) is None:
            return False
        self._send_to_worker(worker, Close(epoch=self.epoch, session=base.session))
        ordered = live.session.state is not State.OPENING and not live.joining
        if event.code != "prefix" or ordered or (role == "draft" and live.session.brief is not None and live.session.brief.reads is not None):
            return False
        if role == "target":
            live.interrupted(self._now())
        self._perform(live, live.session.base_refused(role))
        return True

    def _verify_without_tree(self, live: Live, why: str) -> None:
        """The target can make nothing of what the draft proposed, such as laws that its nodes cannot have been drawn from; that changed nothing there."""
        if live.draft is not None:
            self._go_on_alone(live, live.draft, why)
        live.interrupted(self._now())
        self._perform(live, live.session.tree_refused())

    def _probed(self, worker: Worker, event: Probed, now_ns: int) -> None:
        worker.awaiting_probe = False
        worker.probed = event
        if event.sent_ns <= now_ns:
            worker.trips.append(now_ns - event.sent_ns)
            worker.round_trip_ns = min(worker.trips)
            worker.clock.add(event.sent_ns, event.clock_ns, now_ns)

    # -- requests of clients --------------------------------------------------------------------------------------------------------------------

    def _request(self, client: ClientPeer, request: ClientRequest, now_ns: int) -> None:
        if request.epoch != client.hello.epoch:
            raise StaleError("a request of another incarnation of a client")
        match request:
            case Submit():
                self._submit(client, request, now_ns)
            case Cancel():
                if (number := client.sessions.get(request.request)) is not None:
                    self._cancel(self._live[number])
                elif request.request in client.reading:
                    client.reading[request.request] = False
            case Status():
                self._tell(client, self.report())
            case Describe():
                self._tell(client, self._describe())
            case Look():
                self._tell(client, self._look(client, request))
            case Swap() | Dismiss():
                self._change(client, request, now_ns)
            case Stop() if self._hub.user(client.peer) is None:
                self.ending = True
            case Stop():
                text = "only a client on the coordinator's own machine may stop it: connect to its ipc address"
                self._tell(client, _refusal(self.epoch, RequestError("role", text)))
            case Hello():
                raise StaleError("a client said Hello again")

    def _look(self, client: ClientPeer, request: Look) -> Seen:
        """The answer to Look: over ipc, and to an operator, the tokens of all requests, else those of the client's own."""
        key = self._hub.user(client.peer)
        own = None if key is None or OPERATOR in key.roles else set(client.sessions.values())
        seen = self._observing.look(request, self.epoch, self.registry.workers.values(), lambda worker: waits(worker, self.lives), own=own)
        self._observe()
        return seen

    def _observe(self) -> None:
        """Have the workers record what is looked for."""
        for worker, fine in self._observing.orders(self.registry.workers.values()):
            self._send_to_worker(worker, Observe(epoch=self.epoch, fine=fine))

    def _change(self, client: ClientPeer, request: Swap | Dismiss, now_ns: int) -> None:
        """Have a worker come or go, if that is possible. Over ipc whoever is let in is the owner; over tcp the key says who may."""
        key = self._hub.user(client.peer)
        try:
            if key is not None and OPERATOR not in key.roles:
                text = f"the key {key.name!r} is none of an operator's: only theirs change workers (`dovetail keygen --name NAME --role operator`)"
                raise RequestError("role", text)
            if self.ending:
                raise RequestError("swap", "the coordinator is ending")
            if isinstance(request, Swap):
                self._changes.swap(client, request, now_ns)
            else:
                self._changes.dismiss(client, request, now_ns)
        except RequestError as refusal:
            self._tell(client, _refusal(self.epoch, refusal, request.request))

    def _target(self) -> Worker | RequestError:
        """The target that a request would be decoded with."""
        target = self._placement.reader()
        if self.ending or target is None:
            text = "the coordinator is ending" if self.ending else "no target worker is registered: start one with `dovetail worker --role target`"
            return RequestError("no_target", text)
        return target

    def _describe(self) -> Described | Failed:
        """The answer to Describe."""
        target = self._target()
        if isinstance(target, RequestError):
            return _refusal(self.epoch, target)
        assert target.hello.tokenizer is not None
        return Described(
            epoch=self.epoch,
            model=target.model,
            fingerprint=str(target.hello.fingerprint),
            limits=target.limits,
            vocabulary=target.facts,
            tokenizer=target.hello.tokenizer,
        )

    def _submit(self, client: ClientPeer, submit: Submit, now_ns: int) -> None:
        """Read the prompt, elsewhere: a long one takes its time."""
        target = self._target()
        if isinstance(target, RequestError):
            self._turn_down(client, submit, target)
        elif len(client.reading) >= MAX_READING:
            text = f"the prompts of {MAX_READING} requests of this client are being read, as many as may be: try again when some have been"
            self._turn_down(client, submit, RequestError("capacity", text))
        elif submit.request in client.sessions or submit.request in client.reading:
            self._turn_down(client, submit, RequestError("protocol", f"request {submit.request} runs already"))
        else:
            client.reading[submit.request] = True
            self._defer(lambda: attempt(submit, target), lambda outcome: self._begin(client, submit, target, outcome, now_ns))

    def _begin(self, client: ClientPeer, submit: Submit, target: Worker, request: Request | RequestError, now_ns: int) -> None:
        """Start the session of a request that has been read, unless client or target have gone meanwhile."""
        if self.registry.clients.get(client.peer) is not client:
            return
        wanted = client.reading.pop(submit.request)
        settled = request if isinstance(request, RequestError) else self._placement.settle(target, request)
        if isinstance(request, RequestError) or isinstance(settled, RequestError):
            assert isinstance(settled, RequestError)
            self._turn_down(client, submit, settled)
            return
        live = self._placement.house(client, submit, settled, request, self._tally, now_ns)
        live.session.plan, live.session.seek = partial(self._plan, live), partial(self._moving.seek, live)
        self._begin_observing(live)
        if self._recorder is not None:
            self._recorder.begin(live)
        self._live[live.session.number] = live
        client.sessions[submit.request] = live.session.number
        for worker in live.workers:
            worker.sessions += 1
        self._perform(live, live.session.begin())
        if settled.peer not in self.registry.workers:
            self._moving.lose_target(live, "has gone")
        if not wanted:
            self._cancel(live)
        self._part()

    def _begin_observing(self, live: Live) -> None:
        """Have whoever looks hear of a session."""
        self._observing.begin(live.session, trace=live.trace)
        live.observing = self._observing
        self._observe()

    def _plan(self, live: Live) -> Plan | None:
        """How to draft for a session's next round."""
        if live.draft is None:
            return None
        session, pilot = live.session, live.pilot
        ready = not live.draft.turns.busy_with(session.number)
        live.joining &= not ready
        worth_waiting = session.round == 1 and pilot.awaits_draft(session.length, session.new_tokens)
        began_ns = self._observing.began_ns
        plan = pilot.plan(session.length, ready=ready or worth_waiting, patient=not live.joining)
        self._observing.finely("plan", began_ns, session)
        return plan

    def _turn_down(self, client: ClientPeer, submit: Submit, error: RequestError) -> None:
        self._tally.ended["error"] += 1
        self._tell(client, _refusal(self.epoch, error, submit.request))

    # -- what follows ---------------------------------------------------------------------------------------------------------------------------

    def _perform(self, live: Live, actions: Sequence[Action]) -> None:
        """Carry out what a session decided: workers before the client, so that they begin; at the end the client before the workers."""
        live.tell_round()
        asks = [a for a in actions if isinstance(a, Ask)]
        ended = live.session.state is State.DONE
        if not ended:
            self._ask_all(live, asks)
            if not live.sent and not live.queued:
                live.waits(self._now())
        for action in actions:
            if live.session.number not in self._live:
                break
            if isinstance(action, Emit):
                self._emit(live, action)
            elif isinstance(action, Score):
                self._tell(live.client, PromptScored(epoch=self.epoch, request=live.request, start=action.start, logprobs=action.logprobs))
            elif isinstance(action, Note):
                self._tell(live.client, Recorded(epoch=self.epoch, request=live.request, record=action.record))
            elif isinstance(action, Finish):
                self._finish(live, action)
        if ended:
            self._ask_all(live, asks)

    def _ask_all(self, live: Live, asks: Sequence[Ask]) -> None:
        for ask in asks:
            self._ask(live, ask)

    def _ask(self, live: Live, ask: Ask) -> None:
        worker = live.target if ask.role == "target" else live.draft
        if worker is None or worker.peer not in self.registry.workers:
            return
        if isinstance(ask.command, Close):
            self._close(live, worker, ask.role, ask.command)
        else:
            worker.turns.ask(live.session.number, ask.command)
            self._dispatch(worker)

    def _close(self, live: Live, worker: Worker, role: str, command: Close) -> None:
        """End a session on a worker, which keeps what it has of it if it can; then others may have to go."""
        idle = not worker.turns.busy_with(live.session.number)
        gone = None
        if command.keep and self._reuse and worker.limits.kept and live.draft is not live.target and not live.trial:
            gone = worker.shelf.add(live.session.kept(role, idle=idle))
        for session in gone or ():
            self._send_to_worker(worker, Close(epoch=self.epoch, session=session))
        self._forget_on(worker, command.model_copy(update={"keep": gone is not None}))

    def _forget_on(self, worker: Worker, command: Close) -> None:
        """A session is over on a worker; what it was to go on from is there for others, if it did not even begin."""
        for dropped in worker.turns.forget(command.session):
            if isinstance(dropped, Open) and dropped.base is not None:
                worker.shelf.give_back(dropped.base)
        self._send_to_worker(worker, command)

    def _dispatch(self, worker: Worker) -> None:
        """Send a worker its next command, if it is there and free and one waits."""
        turn = worker.turns.next() if worker.peer in self.registry.workers else None
        if turn is None:
            return
        message, sessions = turn
        size = self._send_to_worker(worker, message)
        if worker.peer not in self.registry.workers:
            return
        now_ns = self._now()
        if isinstance(message, Open) and message.base is not None:
            worker.shelf.taken(message.base)
        if isinstance(message, Draft | Verify):
            worker.traffic.ordered(size)
        if isinstance(message, Verify):
            self._passing(worker, message)
        for number in sessions:
            live = self._live.get(number)
            if live is not None and isinstance(message, Feed):
                live.passed_on(size)
            elif live is not None and live.awaits(worker, message):
                live.left(now_ns, size // len(sessions))

    def _cut(self, worker: Worker, items: Sequence[VerifyItem]) -> Sequence[int]:
        """How many nodes of each item of a pass are verified: whatever was offered, but where a session's policy leaves that to be decided."""
        counts = [len(item.tokens) for item in items]
        lives = [self._live[item.session] for item in items if item.session in self._live]
        if len(lives) < len(items):
            return counts
        choosing = [place for place, live in enumerate(lives) if live.pilot.cuts and counts[place]]
        context = sum(item.prefix for item in items) / len(items)
        rate = sum(live.pilot.rate(live.session.length) for live in lives)
        if not choosing or not worker.verifying.known or rate <= 0.0:
            return counts
        offers = [lives[place].session.scores for place in choosing]
        seconds = worker.verifying.table(len(items) + sum(counts), context).__getitem__
        fixed, most = sum(1 + count for place, count in enumerate(counts) if place not in choosing), worker.verifying.most_rows
        for place, kept in zip(choosing, cut(offers, rate=rate, seconds=seconds, fixed=fixed, most=most), strict=True):
            counts[place] = kept
        return counts

    def _passing(self, worker: Worker, pass_: Verify) -> None:
        """A pass begins: its sessions know what of theirs is in it, and what it is expected to take."""
        rows = sum(1 + len(item.tokens) for item in pass_.items)
        worker.passing = rows, sum(item.prefix for item in pass_.items) / len(pass_.items)
        for item in pass_.items:
            if (live := self._live.get(item.session)) is not None:
                live.session.sent(len(item.tokens))
                live.other_rows = rows - len(item.tokens)
                live.pilot.sends(item.prefix, live.session.scores, rows)

    def _emit(self, live: Live, emit: Emit) -> None:
        if live.told_ns is not None and not live.trial:
            self._changes.paused(live.mark_ns - live.told_ns)
        live.told_ns = live.mark_ns
        drafted = tuple(place < emit.drafted for place in range(len(emit.tokens)))
        self._tell(live.client, Emitted(epoch=self.epoch, request=live.request, tokens=emit.tokens, drafted=drafted, text=emit.text, logprobs=emit.logprobs))

    def _finish(self, live: Live, finish: Finish) -> None:
        now_ns = self._now()
        live.over(now_ns)
        result = live.session.result(now_ns, finish.reason)
        controls = min(live.pilot.controls, result.plain_rounds)  # the last one may have been cut short
        result = result.model_copy(update={"predicted_tokens_per_s": live.pilot.predicted_tokens_per_s, "control_rounds": controls})
        if not live.trial:
            self._tally.ended[finish.reason] += 1
            self._rounds += result.rounds
            self._round_tokens += max(0, result.completion_tokens - 1) if result.rounds else 0
        spans = self._observing.traced(live.session.number)
        self._tell(live.client, Finished(epoch=self.epoch, request=live.request, result=result, margins=tuple(live.session.margins), spans=spans))
        self._forget(live)

    def _fail(self, live: Live, error: RequestError) -> None:
        """End a request with an error; both workers forget it."""
        self._tally.ended["error"] += not live.trial
        self._tell(live.client, _refusal(self.epoch, error, live.request))
        self._forget(live)
        self._ask_all(live, live.session.abandon())

    def _forget(self, live: Live) -> None:
        if self._live.pop(live.session.number, None) is None:
            return
        live.client.sessions.pop(live.request, None)
        self._observing.traced(live.session.number)
        for worker in live.workers:
            worker.sessions -= 1

    def _cancel(self, live: Live) -> None:
        live.interrupted(self._now())
        self._perform(live, live.session.cancel())

    # -- peers that go --------------------------------------------------------------------------------------------------------------------------

    def _worker_lost(self, worker: Worker, why: str = "has gone") -> None:
        """It is spoken to no more; its sessions are seen to when what is being handled has been."""
        if self.registry.workers.pop(worker.peer, None) is None:
            return
        level = logging.INFO if self.ending else logging.WARNING
        log.log(level, "%s worker %s %s", "/".join(worker.hello.roles), worker.whereabouts, why)
        self._lost_draft |= worker.plays("draft") and worker.serves
        self._placement.forget(worker)
        self._gone.append((worker, why))

    def _part(self) -> None:
        """Have the sessions of workers that have gone do without them."""
        while self._gone:
            worker, why = self._gone.popleft()
            self._moving.part_with(worker, why)
            self._changes.lost(worker, why)
            self._moving.resettle()

    def _let_revoked_go(self) -> None:
        """What a peer says whose key was revoked, or may no longer play its role, does not arrive any more: nobody is to wait for it."""
        for worker in list(self.registry.workers.values()):
            if (key := self._hub.user(worker.peer)) is not None and not key.may_be(worker.hello.roles):
                farewell = Failed(epoch=self.epoch, code="session", text="the coordinator does not allow the key of this worker any more")
                self._hub.turn_away(worker.peer, encode(farewell))
                self._worker_lost(worker, "lost its key")
        for client in list(self.registry.clients.values()):
            if (key := self._hub.user(client.peer)) is not None and not key.may_be(client.hello.roles):
                self._client_lost(client)

    def _client_lost(self, client: ClientPeer) -> None:
        """Nobody reads what this client asked for: free its sessions."""
        self.registry.clients.pop(client.peer, None)
        self._changes.client_lost(client)
        for number in list(client.sessions.values()):
            if (live := self._live.get(number)) is not None:
                self._tally.ended["cancelled"] += 1
                self._forget(live)
                self._ask_all(live, live.session.abandon())

    def tick(self) -> None:
        """What is due: probes to workers that have answered the last one, drafts that are too late, sessions that have waited, replies that clients have not
        taken."""
        self._let_revoked_go()
        for worker in list(self.registry.workers.values()):
            if not worker.awaiting_probe:
                self._probe(worker)
        self._observe()
        self._changes.step(self._now())
        self._moving.tick()
        self._part()
        for client in [client for client in self.registry.clients.values() if client.outbox]:
            self._flush(client)
        if self._recorder is not None:
            self._recorder.tick(self._live)

    def look_around(self) -> None:
        """Somebody disconnected: find out who, by speaking to everybody."""
        if not self._hub.disconnects():
            return
        for worker in list(self.registry.workers.values()):
            self._probe(worker)
        for client in list(self.registry.clients.values()):
            if not self._send(client.peer, Welcome(epoch=self.epoch)):
                self._client_lost(client)
        self._part()

    def _probe(self, worker: Worker) -> None:
        worker.awaiting_probe = True
        self._send_to_worker(worker, Probe(epoch=self.epoch, sent_ns=self._now()))

    # -- what sessions that move, and changes of workers, ask for -------------------------------------------------------------------------------

    @property
    def lives(self) -> Collection[Live]:
        return self._live.values()

    def now_ns(self) -> int:
        return self._now()

    def perform(self, live: Live, actions: Sequence[Action]) -> None:
        self._perform(live, actions)

    def close_on(self, worker: Worker, live: Live) -> None:
        if worker.peer in self.registry.workers:
            self._forget_on(worker, Close(epoch=self.epoch, session=live.session.number))

    def fail(self, live: Live, error: RequestError) -> None:
        self._fail(live, error)

    def refuge(self, live: Live) -> Worker | None:
        return self._moving.refuge(live)

    def move(self, live: Live, target: Worker) -> None:
        self._moving.move(live, target)

    def change_draft(self, live: Live) -> None:
        self._moving.change_draft(live)

    def try_out(self, submit: Submit, target: Worker, draft: Worker | None, hear: Callable[[Message], None]) -> Live:
        """Run a request for ourselves, on these workers and no others; `RequestError` if it cannot be read."""
        request, now_ns = attempt(submit, target), self._now()
        if isinstance(request, RequestError):
            raise request
        ours = ClientPeer(b"", Hello(epoch=self.epoch, roles=("client",), name="trial", host="", pid=os.getpid()), hear=hear)
        live = self._placement.try_out(ours, submit, target, draft, request, now_ns)
        live.session.plan = partial(self._plan, live)
        self._begin_observing(live)
        self._live[live.session.number] = live
        for worker in live.workers:
            worker.sessions += 1
        self._perform(live, live.session.begin())
        return live

    def abandon(self, live: Live) -> None:
        """Forget a session that nobody waits for."""
        self._forget(live)
        self._ask_all(live, live.session.abandon())

    def send_to(self, worker: Worker, message: Message) -> None:
        self._send_to_worker(worker, message)

    def let_go(self, worker: Worker) -> None:
        """Have a worker end; sessions that it still holds go on without it."""
        self._send_to_worker(worker, Drain(epoch=self.epoch))
        if self.registry.workers.pop(worker.peer, None) is not None:
            log.info("%s worker %s is let go", "/".join(worker.hello.roles), worker.whereabouts)
            self._placement.forget(worker)
            self._gone.append((worker, "was let go"))

    def tell(self, client: ClientPeer, message: Message) -> None:
        self._tell(client, message)

    def decide(self, words: str) -> None:
        self._decide(words)

    # -- sending --------------------------------------------------------------------------------------------------------------------------------

    def _send_to_worker(self, worker: Worker, message: Message) -> int:
        """Bytes sent; a worker that cannot be reached is lost."""
        began_ns = self._observing.began_ns
        frames = encode(message)
        began_ns = self._observing.finely("encode", began_ns, message)
        try:
            self._hub.send(worker.peer, frames)
        except LinkError as error:
            log.debug("%s", error)
            self._worker_lost(worker)
            return 0
        self._observing.finely("send", began_ns, message)
        if self._recorder is not None:
            self._recorder.sent(worker, message, frames)
        size = sum(map(len, frames))
        worker.traffic.sent_bytes += size
        return size

    def _tell(self, client: ClientPeer, message: Message) -> None:
        """Send to a client, in order, now or soon; what we have asked for ourselves is heard at once."""
        if client.hear is not None:
            client.hear(message)
            return
        client.outbox.add(message)
        if len(client.outbox) > MAX_BACKLOG:
            log.warning("client %s (pid %d) reads nothing and is let go", client.hello.name, client.hello.pid)
            self._client_lost(client)
        elif client.outbox.due(self._now()):
            self._flush(client)
        elif client.outbox.remind():
            self._later(client.outbox.patience_ns / 1e9, lambda: self._flush(client))

    def _flush(self, client: ClientPeer) -> None:
        try:
            client.outbox.send(lambda message: self._send_to_client(client, message), self._now())
        except (LinkError, ProtocolError) as error:
            log.info("client %s (pid %d) cannot be told any more: %s", client.hello.name, client.hello.pid, error)
            self._client_lost(client)

    def _send_to_client(self, client: ClientPeer, message: Message) -> None:
        began_ns = self._observing.began_ns
        frames = encode(message)
        began_ns = self._observing.finely("encode", began_ns, message)
        self._hub.send(client.peer, frames)
        self._observing.finely("send", began_ns, message)
        if self._recorder is not None:
            self._recorder.sent(client, message, frames)

    def _send(self, peer: bytes, message: Message) -> bool:
        try:
            self._hub.send(peer, encode(message))
        except LinkError as error:
            log.debug("a reply to peer %s was not delivered: %s", peer.hex()[:12], error)
            return False
        return True

    # -- state ----------------------------------------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._live

    def report(self) -> Reported:
        """The answer to Status."""
        now_ns = self._now()
        reasons = [] if self.registry.pick("target") else ["no target worker is registered"]
        if self._lost_draft and self.registry.pick("draft") is None:
            reasons.append("a draft worker was lost: sessions decode with the target alone")
        reasons += [words[:MAX_WORDS] for words in self._moving.words()]
        degraded = bool(reasons)
        reasons += [self._changes.words[:MAX_WORDS]] if self._changes.under_way else []
        reasons += [medley[:MAX_WORDS]] if (medley := self.registry.medley()) else []
        reasons += [off[:MAX_WORDS] for live in self._live.values() if (off := live.pilot.off)]
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
            stale=self._stale,
            refused=self._refused + self._hub.refused(),
            degraded=degraded,
            reasons=tuple(reasons[:MAX_REASONS]),
            pairs=tuple(self._placement.states()[:MAX_PAIRS]),
            decisions=tuple(self._decisions),
            totals=self._totals(),
        )

    def _totals(self) -> Totals:
        targets = [worker for worker in self.registry.workers.values() if worker.plays("target") and not worker.standby]
        room = sum(target.limits.sessions for target in targets)
        return self._tally.totals(
            opening=sum(live.session.state is State.OPENING and not live.session.tokens for live in self._live.values()),
            waiting=sum(live.loss is not None for live in self._live.values()),
            kept=sum(len(target.shelf) for target in targets),
            occupied=min(1.0, sum(target.sessions for target in targets) / max(1, room)),
        )

    def end(self) -> None:
        """Cancel what still runs and send the workers home."""
        self.ending = True
        for live in list(self._live.values()):
            self._cancel(live)
        for worker in list(self.registry.workers.values()):
            self._send_to_worker(worker, Drain(epoch=self.epoch))
        self._part()


def _refusal(epoch: int, error: RequestError, request: int | None = None) -> Failed:
    return Failed.model_validate({"epoch": epoch, "session": request, "code": error.code, "text": str(error)[:4096]})


def _shares(event: Verified) -> list[Array | None]:
    """Each item's rows of the features of a pass; where these are not as many as they should be, none."""
    stops = [*itertools.accumulate(1 + len(item.accepted) for item in event.items)]
    features = event.features
    if features is None or features.shape[:1] != (stops[-1],):
        return [None] * len(event.items)
    return [features.rows(start, stop) for start, stop in itertools.pairwise([0, *stops])]
