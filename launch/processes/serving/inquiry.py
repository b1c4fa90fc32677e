"""Polls a coordinator for its workers without blocking, since the coordinator may be stuck."""

import os
import secrets
import socket
from collections.abc import Callable

from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.errors import DecodeError, LinkClosed, LinkError
from dovetail.protocol.links import Link
from dovetail.protocol.messages import Hello, Message, Reported, Status, Welcome

RETRY_S = 0.2  # between two attempts to connect


class Inquiry:
    """A client of a coordinator; it connects on the first poll, and reconnects when the coordinator
    is lost."""

    def __init__(self, connect: Callable[[], Link]) -> None:
        """`connect` may take a moment, and raises `LinkError` without an answer."""
        self._connect = connect
        self._epoch = secrets.randbits(62)
        self._link: Link | None = None
        self._ask_s = 0.0
        self._registered = self._asked = False

    def news(self, now_s: float, every_s: float) -> Reported | None:
        """Return the coordinator's answer since the last call, or None. It is polled every
        `every_s` seconds."""
        try:
            if self._link is None and not self._open(now_s):
                return None
            found = self._take()
            if self._registered and not self._asked and now_s >= self._ask_s:
                self._send(Status(epoch=self._epoch))
                self._asked, self._ask_s = True, now_s + every_s
        except LinkError:
            self.close()
            return None
        return found

    def close(self) -> None:
        """Disconnect; the next poll makes a new connection."""
        if self._link is not None:
            self._link.close()
        self._link, self._registered, self._asked = None, False, False

    def _open(self, now_s: float) -> bool:
        if now_s < self._ask_s:
            return False
        self._ask_s = now_s + RETRY_S
        self._link = self._connect()
        self._send(
            Hello(
                epoch=self._epoch,
                roles=("client",),
                name=f"client-{os.getpid()}",
                host=socket.gethostname()[:512],
                pid=os.getpid(),
            )
        )
        return True

    def _take(self) -> Reported | None:
        assert self._link is not None
        found: Reported | None = None
        while (frames := self._link.receive(0.0)) is not None:
            try:
                reply = REPLY.decode(frames)
            except DecodeError as error:
                raise LinkClosed(f"the coordinator's answer is malformed: {error}") from None
            self._registered |= isinstance(reply, Welcome)
            if isinstance(reply, Reported):
                self._asked, found = False, reply
        return found

    def _send(self, message: Message) -> None:
        assert self._link is not None
        self._link.offer(encode(message))
