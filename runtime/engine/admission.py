"""Admits peers, and removes those whose messages break the protocol or whose keys were revoked."""

import logging

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import DecodeError, RequestError, StaleError
from dovetail.protocol.messages import MAX_STRIKES, Engage, Event, Hello, Welcome
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.runtime.engine.claims import Claims
from dovetail.runtime.engine.faults import refusal
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.peers import Worker

log = logging.getLogger("dovetail.coordinator")

MAX_STRUCK_PEERS = 4096
LOST_KEY = "lost its key"


class Admission:
    """Decides which peers are admitted."""

    def __init__(self, shared: Shared, post: Outgoing, claims: Claims) -> None:
        self._hub, self._post, self._service = shared.hub, post, shared.service
        self._registry, self._dropped = shared.registry, shared.dropped
        self._claims, self._journal, self._acts = claims, shared.journal, shared.acts
        self._strikes: dict[bytes, int] = {}

    def strike(self, peer: bytes, error: DecodeError) -> None:
        """Count a message that breaks the protocol; after too many the peer is ignored. A client
        gets a failure for its request, unless one of that number is running. A worker that owes an
        answer is ignored at once: if this was the answer, its session would wait in vain."""
        self._dropped.refused += 1
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
            text = f"{error}: is the coordinator's version that of this client?"
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
                self._acts.worker_lost(worker, "broke the protocol")
            if client is not None:
                self._acts.client_lost(client)

    def newcomer(self, peer: bytes, message: Event | ClientRequest, now_ns: int) -> None:
        """Register a peer that sent Hello, if it fits the registered ones."""
        if self._strikes.get(peer, 0) >= MAX_STRIKES:
            self._dropped.refused += 1
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
        journal = self._journal is not None and not self._journal.failed
        welcome = Welcome(epoch=self._service.epoch, keeps=keeps, journal=journal)
        reached = self._post.reaches(peer, welcome)
        if isinstance(admitted, Worker):
            self._let_in(admitted)
        elif not reached:  # it left before this coordinator started, and is not probed
            self._acts.client_lost(admitted)

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
                self._acts.worker_lost(misfit, "does not fit the target")
        for warning in self._registry.warnings(worker):
            log.warning("%s", warning)
        if hello.standby and not worker.standby:
            self._acts.send(worker, Engage(epoch=self._service.epoch))
        self._acts.admitted(worker)

    def refuse(self, peer: bytes, error: RequestError) -> None:
        """Send a peer the reason for refusing or ignoring it."""
        self._dropped.refused += 1
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
                self._acts.worker_lost(worker, LOST_KEY)
        for client in list(self._registry.clients.values()):
            key = self._hub.user(client.peer)
            if key is not None and not key.may_be(client.hello.roles):
                self._acts.client_lost(client)
