"""Sends commands to workers at once, and messages to clients in order, as soon as they accept them.
Reports peers that cannot be reached."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import LinkError, PeerBusy
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import Failed, Message
from dovetail.runtime.engine.acts import Acts
from dovetail.runtime.engine.faults import aside, reraise_exits
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.telemetry.event_log import EventLog

log = logging.getLogger("dovetail.coordinator")

MAX_BYTES_WAITING = 64 << 20
"""Bytes of messages queued for a client; one that falls further behind is disconnected."""
MAX_FAREWELLS = 64
"""Maximum number of removed clients with an undelivered farewell; the oldest are dropped."""

Later = Callable[[float, Callable[[], None]], object]  # calls a function after this many seconds

Sent = Callable[[Worker | ClientPeer, Message, Sequence[bytes]], None]
"""Called with each sent message."""


class Outgoing:
    """Encodes and sends."""

    def __init__(
        self, hub: Hub, observing: EventLog, acts: Acts, later: Later, *, sent: Sent
    ) -> None:
        """`later` calls a function after some seconds; `sent` is called with each sent message."""
        self._hub, self._observing, self._acts = hub, observing, acts
        self.later, self.now_ns, self._sent = later, observing.now_ns, sent
        self._farewells: dict[bytes, deque[Message]] = {}
        """By address: last messages for clients that do not read."""

    def to_worker(self, worker: Worker, message: Message) -> tuple[int, int]:
        """Send to a worker. Return the bytes sent and the time before sending: the worker may start
        before the call returns. A worker that cannot be reached is lost."""
        try:
            size, left_ns = self._transmit(worker, message)
        except LinkError as error:
            log.debug("%s", error)
            self._acts.unreachable(worker)
            return 0, self.now_ns()
        worker.traffic.sent_bytes += size
        return size, left_ns

    def _transmit(self, peer: Worker | ClientPeer, message: Message) -> tuple[int, int]:
        """Encode and send; return the bytes sent and the time before sending."""
        observing = self._observing
        began_ns = observing.now_ns() if observing.fine else 0
        frames = encode(message)
        left_ns = observing.now_ns()
        if observing.fine:
            observing.finely("encode", began_ns, message)
        self._hub.send(peer.peer, frames)
        if observing.fine:
            observing.finely("send", left_ns, message)
        self._sent(peer, message, frames)
        return sum(map(len, frames)), left_ns

    def to_client(self, client: ClientPeer, message: Message) -> None:
        """Send to a client, in order, now or soon; internal requests are answered at once."""
        if client.hear is not None:
            client.hear(message)
            return
        client.outbox.add(message)
        if client.outbox.bytes > MAX_BYTES_WAITING:
            self._acts.client_not_reading(client)
        elif client.outbox.due(self.now_ns()):
            self.flush(client)
        elif client.outbox.remind():
            self.later(client.outbox.patience_ns / 1e9, lambda: self.flush(client))

    def reply(self, client: ClientPeer, message: Message) -> None:
        """Send a client an answer or a refusal."""
        if isinstance(message, Failed):
            self.refuse(client, message)
        else:
            self.to_client(client, message)

    def refuse(self, client: ClientPeer, told: Failed) -> None:
        """Send a client the failure of a request. If that fails too, waiting messages of this
        request are dropped, and the failure is sent before the others or, if the queue is full, as
        soon as the client reads."""
        if not aside(self.to_client, client, told) and client.hear is None:
            if told.session is not None:
                client.outbox.forget(told.session)
            aside(self._tell_directly, client, told)

    def _tell_directly(self, client: ClientPeer, told: Failed) -> None:
        try:
            self._hub.send(client.peer, encode(told))
        except PeerBusy:
            client.outbox.add(told)
        except LinkError as error:
            log.debug("a refusal to client %s was not delivered: %s", client.hello.name, error)

    def flush(self, client: ClientPeer) -> None:
        """Send a client's waiting messages. A failure to encode affects one request."""
        while True:
            try:
                client.outbox.send(partial(self._transmit, client), self.now_ns())
            except LinkError as error:
                log.info(
                    "client %s (pid %d) can no longer be reached: %s",
                    client.hello.name,
                    client.hello.pid,
                    error,
                )
                self._acts.client_lost(client)
            except BaseException as error:
                reraise_exits(error)
                self._acts.encode_failed(client, client.outbox.drop(), error)
                continue
            return

    def see_off(self, peer: bytes, words: Sequence[Message]) -> None:
        """Queue farewell messages for a client that is not reading."""
        self._farewells[peer] = deque(words)
        while len(self._farewells) > MAX_FAREWELLS:
            del self._farewells[next(iter(self._farewells))]

    def bid_farewell(self) -> None:
        """Send the farewell messages to removed clients that read again."""
        for peer, words in [*self._farewells.items()]:
            try:
                while words:
                    self._hub.send(peer, encode(words[0]))
                    words.popleft()
            except PeerBusy:
                continue
            except LinkError as error:
                log.debug("%s", error)
            del self._farewells[peer]

    def reaches(self, peer: bytes, message: Message) -> bool:
        """Send a message to a peer that may not be registered; return whether the peer is still
        connected, even if its queue is full and the message is lost."""
        try:
            self._hub.send(peer, encode(message))
        except PeerBusy:
            return True
        except LinkError as error:
            log.debug("peer %s is no longer connected: %s", peer.hex()[:12], error)
            return False
        return True
