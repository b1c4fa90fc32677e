"""Watches the peers: admits them, probes workers and gives up silent ones, and removes clients that
do not read, and peers whose messages break the protocol or whose keys were revoked."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import ParamSpec

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import DecodeError, RequestError, StaleError
from dovetail.protocol.messages import MAX_STRIKES, Drain, Engage, Event, Hello, Probe, Welcome
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.runtime.engine.claims import Claims
from dovetail.runtime.engine.faults import aside, fault, refusal
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.engine.sessions import Sessions
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.engine.status import Status
from dovetail.runtime.fleet.draft_failures import note_failure
from dovetail.runtime.fleet.peers import DEAF, LEAST_S, ClientPeer, Worker

log = logging.getLogger("dovetail.coordinator")
P = ParamSpec("P")

MAX_STRUCK_PEERS = 4096
LOST_KEY = "lost its key"


class Peers:
    """Watches workers and clients."""

    def __init__(
        self,
        shared: Shared,
        post: Outgoing,
        claims: Claims,
        sessions: Sessions,
        dispatch: CommandSender,
        status: Status,
        *,
        decide: Callable[[str, int], None],
    ) -> None:
        """`decide` logs a sentence at a level and keeps it for `status`."""
        self._hub, self._service, self._registry = shared.hub, shared.service, shared.registry
        self._census, self._placement, self._moving = shared.census, shared.placement, shared.moving
        self._changes, self._failing, self._tally = shared.changes, shared.failing, shared.tally
        self._settings, self._now_ns = shared.settings, shared.now_ns
        self._running, self._shared = shared.running, shared
        self._post, self._sessions = post, sessions
        self._dispatch, self._status, self._claims = dispatch, status, claims
        self._decide = decide
        self._gone: deque[tuple[Worker, str]] = deque()
        """Unregistered workers whose sessions have not been handled yet, each with the reason."""
        self._strikes: dict[bytes, int] = {}

    # -- who is admitted ---------------------------------------------------------------------------

    def strike(self, peer: bytes, error: DecodeError) -> None:
        """Count a message that breaks the protocol; after too many the peer is ignored. A client
        gets a failure for its request, unless one of that number is running. A worker that owes an
        answer is ignored at once: if this was the answer, its session would wait in vain."""
        self._shared.dropped.refused += 1
        if len(self._strikes) > MAX_STRUCK_PEERS:
            self._strikes.clear()
        worker = self._registry.workers.get(peer)
        strikes = self._strikes[peer] = self._strikes.get(peer, 0) + 1
        if strikes == 1:
            log.warning("a message of peer %s was dropped: %s", peer.hex()[:12], error)
        client = self._registry.clients.get(peer)
        if (
            client is not None
            and error.request is not None
            and strikes < MAX_STRIKES
            and not self._claims.is_open(client, error.request)
        ):
            text = f"{error}: do this client and the coordinator have the same version?"
            unread = RequestError("protocol", f"the coordinator cannot read this request: {text}")
            self._post.to_client(client, refusal(self._service.epoch, unread, error.request))
        if strikes == MAX_STRIKES or (worker is not None and worker.turns.owed):
            log.warning(
                "peer %s broke the protocol and is ignored from now on (%d)",
                peer.hex()[:12],
                strikes,
            )
            self._strikes[peer] = max(strikes, MAX_STRIKES)
            self._fail(
                peer, "protocol", f"{strikes} messages broke the protocol: {str(error)[:200]}"
            )
            if worker is not None:
                self.worker_lost(worker, "broke the protocol")
            if client is not None:
                self.client_lost(client)

    def newcomer(self, peer: bytes, message: Event | ClientRequest, now_ns: int) -> None:
        """Register a peer that sent Hello, if it fits the registered ones."""
        if self._strikes.get(peer, 0) >= MAX_STRIKES:
            self._shared.dropped.refused += 1
            return
        if not isinstance(message, Hello):
            self._fail(
                peer, "session", "this peer is not registered here: send Hello first, or reconnect"
            )
            raise StaleError("an unregistered peer sent a session command")
        try:
            admitted = self._registry.admit(peer, message, self._hub.user(peer), now_ns)
        except RequestError as error:
            self.refuse(peer, error)
            return
        keeps = self._claims.keep(admitted) if isinstance(admitted, Worker) else ()
        journal = self._shared.journal is not None and not self._shared.journal.failed
        welcome = Welcome(epoch=self._service.epoch, keeps=keeps, journal=journal)
        reached = self._post.reaches(peer, welcome)
        if isinstance(admitted, Worker):
            self._let_in(admitted)
        elif not reached:  # it left before this coordinator started, and is not probed
            self.client_lost(admitted)

    def _let_in(self, worker: Worker) -> None:
        hello = worker.hello
        log.info(
            "%s worker %s registered: %s on %s, %s",
            "/".join(hello.roles),
            hello.name,
            hello.model,
            hello.device,
            hello.fingerprint or "no fingerprint",
        )
        if worker.plays("target"):
            for misfit, reason in self._registry.misfits(worker):
                self.refuse(misfit.peer, reason)
                self.worker_lost(misfit, "does not fit the target")
        for warning in self._registry.warnings(worker):
            log.warning("%s", warning)
        if hello.standby and not worker.standby:
            self._post.to_worker(worker, Engage(epoch=self._service.epoch))
        self.admitted(worker)

    def refuse(self, peer: bytes, error: RequestError) -> None:
        """Send a peer the reason for refusing or ignoring it."""
        self._shared.dropped.refused += 1
        log.warning("refused: %s", error)
        self._post.reaches(peer, refusal(self._service.epoch, error))

    def _fail(self, peer: bytes, code: str, text: str) -> None:
        self._post.reaches(peer, refusal(self._service.epoch, RequestError(code, text)))

    def let_go_if_revoked(self, worker: Worker) -> bool:
        """Notify a worker whose key was revoked or lost its role. Return False if its key is valid,
        or was when it disconnected."""
        key = self._hub.user(worker.peer)
        if key is None or not key.public or key.may_be(worker.hello.roles):
            return False
        revoked = RequestError("session", "the coordinator no longer allows the key of this worker")
        self._hub.turn_away(worker.peer, encode(refusal(self._service.epoch, revoked)))
        return True

    def let_revoked_go(self) -> None:
        """Remove peers whose keys were revoked or lost their roles: their messages no longer
        arrive."""
        for worker in list(self._registry.workers.values()):
            if self.let_go_if_revoked(worker):
                self.worker_lost(worker, LOST_KEY)
        for client in list(self._registry.clients.values()):
            key = self._hub.user(client.peer)
            if key is not None and not key.may_be(client.hello.roles):
                self.client_lost(client)

    # -- who stays ---------------------------------------------------------------------------------

    def admitted(self, worker: Worker) -> None:
        """Probe an admitted worker, and let it serve sessions unless it is on standby."""
        for running in [*self._running.values()]:
            self._sessions.attempt(running, partial(running.heard_of, worker))
        worker.turns.cut = partial(self._dispatch.cut, worker)
        worker.turns.hold = partial(self._dispatch.holds, worker)
        worker.turns.share = partial(self._dispatch.share, worker)
        worker.turns.first = partial(self._dispatch.first, worker)
        self.probe(worker)
        if worker.serves:
            self.join(worker)

    def join(self, worker: Worker) -> None:
        """Let a worker serve sessions from now on."""
        if worker.plays("draft"):
            self._status.draft_there()
        self._service.drained.difference_update(worker.hello.roles)
        self._moving.resettle()

    def worker_lost(self, worker: Worker, why: str = "disconnected") -> None:
        """Remove a worker. Its sessions are handled once the current message is."""
        if self._registry.workers.pop(worker.peer, None) is None:
            return
        level = logging.INFO if self._service.ending else logging.WARNING
        self._decide(f"{'/'.join(worker.hello.roles)} worker {worker.whereabouts} {why}", level)
        if worker.plays("draft") and worker.serves:
            self._status.draft_lost(worker, why)
            for running in self._running.values():
                if running.draft is worker:
                    note_failure(running, worker, f"it {why}", self._now_ns())
        self._failing.forget(worker)
        self._placement.forget(worker)
        self._gone.append((worker, why))

    def part(self) -> None:
        """Continue the sessions of removed workers without them."""
        while self._gone:
            worker, why = self._gone.popleft()
            self._census.forget()
            aside(self._moving.part_with, worker, why)
            aside(self._changes.lost, worker, why)
            aside(self._moving.resettle)

    def unreachable(self, worker: Worker) -> None:
        """Give up a worker to which nothing can be sent: it has disconnected, or its key was
        revoked. In the second case it is notified, since it would wait for ever."""
        revoked = self.let_go_if_revoked(worker)
        self.worker_lost(worker, LOST_KEY if revoked else "disconnected")

    def client_lost(self, client: ClientPeer) -> None:
        """Free the sessions of a client that has gone."""
        self._registry.clients.pop(client.peer, None)
        aside(self._changes.client_lost, client)
        for number in list(client.sessions.values()):
            if (running := self._running.get(number)) is not None:
                self._tally.ended["cancelled"] += 1
                self._sessions.drop(running)

    def client_not_reading(self, client: ClientPeer) -> None:
        """Free the sessions of a client that does not read, and notify it as soon as it reads."""
        words = (
            f"this client has read nothing while {len(client.outbox)} messages waited for it, "
            "and is dropped with its requests: send Hello again"
        )
        name = f"client {client.hello.name} (pid {client.hello.pid})"
        self._decide(f"{name} is not reading and is disconnected", logging.WARNING)
        self._tally.let_go += 1
        requests = sorted(client.outbox.requests | {*client.sessions} | {*client.reading})
        self.client_lost(client)
        dropped, epoch = RequestError("session", words), self._service.epoch
        farewell = [refusal(epoch, dropped, request) for request in (*requests, None)]
        self._post.see_off(client.peer, farewell)

    def look_around(self) -> None:
        """Find out which peers have disconnected, by sending to all of them."""
        if not self._hub.disconnects():
            return
        for worker in list(self._registry.workers.values()):
            aside(self.probe, worker)
        for client in list(self._registry.clients.values()):
            if not self._post.reaches(client.peer, Welcome(epoch=self._service.epoch)):
                self.client_lost(client)

    def probe(self, worker: Worker) -> None:
        """Probe a worker. If sending fails, no answer is expected."""
        now_ns, worker.awaiting_probe = self._now_ns(), True
        worker.liveness.probed(worker.turns.owed, now_ns)
        try:
            self._post.to_worker(worker, Probe(epoch=self._service.epoch, sent_ns=now_ns))
        except BaseException:
            worker.awaiting_probe = False
            raise

    def look_after(self, worker: Worker, since_ns: int) -> None:
        """Probe a worker. Without an answer to the last probe it counts as silent, and eventually
        as lost."""
        if not worker.awaiting_probe:
            self.probe(worker)
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
        """Treat a connected worker as lost: it must drop its sessions and register again."""
        error = RequestError("session", f"this worker {why}: send Hello again")
        self._post.reaches(worker.peer, refusal(self._service.epoch, error))
        self.worker_lost(worker, why)

    def let_go(self, worker: Worker) -> None:
        """Dismiss a worker for good; sessions that it still holds continue without it."""
        self._post.to_worker(worker, Drain(epoch=self._service.epoch, dismissed=True))
        if self._registry.workers.pop(worker.peer, None) is not None:
            log.info("%s worker %s is removed", "/".join(worker.hello.roles), worker.whereabouts)
            self._failing.forget(worker)
            self._placement.forget(worker)
            self._registry.engaged.discard(worker.process)
            self._gone.append((worker, "was removed"))

    def unanswered(self, client: ClientPeer, request: int | None, error: BaseException) -> None:
        """Report an internal error in a client's request; None: it was a query."""
        running = (
            self._running.get(client.sessions.get(request, 0)) if request is not None else None
        )
        if running is not None:
            self._sessions.broken(running, error)
            return
        if request is not None:
            client.reading.pop(request, None)
            client.sessions.pop(request, None)
            for submit in self._claims.give_up(client, request):
                self._claims.let_lie(submit)
            self._tally.ended["error"] += 1
        self._post.refuse(client, refusal(self._service.epoch, fault(error), request))

    def encode_failed(self, client: ClientPeer, request: int | None, error: BaseException) -> None:
        """Fail a request after a message of it could not be encoded."""
        log.error(
            "a message to client %s about request %s could not be sent",
            client.hello.name,
            request,
            exc_info=error,
        )
        self.unanswered(client, request, error)

    def turn_away(self, peer: bytes, error: BaseException) -> None:
        """Refuse a newcomer that could not be admitted because of an internal error."""
        if (worker := self._registry.workers.get(peer)) is not None:
            self.worker_lost(worker, "could not be admitted")
        self._registry.clients.pop(peer, None)
        aside(self.refuse, peer, fault(error))
