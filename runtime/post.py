"""What the coordinator sends, and to whom: commands to workers at once, to clients in order, as soon as they take it.

Whoever cannot be reached is lost; what that means the coordinator knows.
"""

import logging
from collections.abc import Callable, Sequence

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import LinkError
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import Message
from dovetail.runtime.faults import reraise_exits
from dovetail.runtime.observing import Observing
from dovetail.runtime.registry import ClientPeer, Worker

log = logging.getLogger("dovetail.coordinator")

MAX_BACKLOG = 16384
"""Messages that wait for a client: one that lets more come together is let go."""

Later = Callable[[float, Callable[[], None]], object]
"""Does something after so many seconds."""

Sent = Callable[[Worker | ClientPeer, Message, Sequence[bytes]], None]
"""Hears of what was sent."""


class Post:
    """Encodes and sends."""

    def __init__(
        self,
        hub: Hub,
        observing: Observing,
        later: Later,
        *,
        sent: Sent,
        worker_lost: Callable[[Worker], None],
        client_lost: Callable[[ClientPeer], None],
        unsaid: Callable[[ClientPeer, int | None, BaseException], None],
    ) -> None:
        """`unsaid` hears of a request of which something could not be said; None: it was about none."""
        self._hub, self._observing, self._later = hub, observing, later
        self._sent, self._worker_lost, self._client_lost, self._unsaid = sent, worker_lost, client_lost, unsaid

    def to_worker(self, worker: Worker, message: Message) -> tuple[int, int]:
        """Bytes sent, and since when they are on their way: the worker may begin before we are back from sending. One that cannot be reached is lost."""
        began_ns = self._observing.began_ns
        frames = encode(message)
        began_ns = self._observing.finely("encode", began_ns, message)
        left_ns = self._observing.now_ns()
        try:
            self._hub.send(worker.peer, frames)
        except LinkError as error:
            log.debug("%s", error)
            self._worker_lost(worker)
            return 0, left_ns
        self._observing.finely("send", began_ns, message)
        self._sent(worker, message, frames)
        size = sum(map(len, frames))
        worker.traffic.sent_bytes += size
        return size, left_ns

    def to_client(self, client: ClientPeer, message: Message) -> None:
        """Send to a client, in order, now or soon; what we have asked for ourselves is heard at once."""
        if client.hear is not None:
            client.hear(message)
            return
        client.outbox.add(message)
        if len(client.outbox) > MAX_BACKLOG:
            log.warning("client %s (pid %d) reads nothing and is let go", client.hello.name, client.hello.pid)
            self._client_lost(client)
        elif client.outbox.due(self._observing.now_ns()):
            self.flush(client)
        elif client.outbox.remind():
            self._later(client.outbox.patience_ns / 1e9, lambda: self.flush(client))

    def flush(self, client: ClientPeer) -> None:
        """Send what waits for a client. What cannot be put into a message concerns the request that it is about, and nobody else."""
        while True:
            try:
                client.outbox.send(lambda message: self._deliver(client, message), self._observing.now_ns())
            except LinkError as error:
                log.info("client %s (pid %d) cannot be told any more: %s", client.hello.name, client.hello.pid, error)
                self._client_lost(client)
            except BaseException as error:
                reraise_exits(error)
                self._unsaid(client, client.outbox.drop(), error)
                continue
            return

    def _deliver(self, client: ClientPeer, message: Message) -> None:
        began_ns = self._observing.began_ns
        frames = encode(message)
        began_ns = self._observing.finely("encode", began_ns, message)
        self._hub.send(client.peer, frames)
        self._observing.finely("send", began_ns, message)
        self._sent(client, message, frames)

    def to_peer(self, peer: bytes, message: Message) -> bool:
        """Whether a message to somebody who may not be registered was sent."""
        try:
            self._hub.send(peer, encode(message))
        except LinkError as error:
            log.debug("a reply to peer %s was not delivered: %s", peer.hex()[:12], error)
            return False
        return True
