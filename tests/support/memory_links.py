"""Links between threads of this process, which keep the promises of `dovetail.protocol.links`
without a socket: one set of tests holds both to them."""

import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from dovetail.protocol.errors import LinkClosed, PeerBusy, PeerGone
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.links.sockets import QUEUE_MESSAGES, check_outgoing


def memory_links() -> "MemoryHub":
    """A hub within this process, whose links `connect` makes."""
    return MemoryHub()


class MemoryHub:
    """A hub whose peers are threads of this process."""

    address = "memory"

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived = _Bell()
        self.left = _Bell()
        self.inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self.closed = False
        self._links: dict[bytes, MemoryLink] = {}
        self._users: dict[bytes, PeerKey] = {}
        self._gone = 0
        self._refused = 0
        self._made = 0

    def connect(self, user: PeerKey | None = None) -> "MemoryLink":
        """A new link; `user` is what the hub will say of its key."""
        with self.changed:
            if self.closed:
                raise LinkClosed("the coordinator disconnected")
            self._made += 1
            peer = struct.pack(">BI", 0, self._made)
            self._links[peer] = link = MemoryLink(self, peer)
            if user is not None:
                self._users[peer] = user
        return link

    def fileno(self) -> int:
        return self.arrived.fileno()

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        with self.changed:
            if not self.inbox:
                self.arrived.silence()
                return None
            peer, frames = self.inbox.popleft()
            if peer in self._links:
                self._links[peer].waiting -= 1
                self.changed.notify_all()
            return peer, frames

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        with self.changed:
            if self.closed or peer not in self._links:
                raise PeerGone(f"peer {peer.hex()} is not connected")
            inbox = self._links[peer].inbox
            if len(inbox) >= QUEUE_MESSAGES:
                raise PeerBusy(
                    f"peer {peer.hex()} reads nothing from its queue of {QUEUE_MESSAGES} messages"
                )
            inbox.append(list(frames))
            self._links[peer].ring()
            self.changed.notify_all()

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        with suppress(PeerGone, PeerBusy):
            self.send(peer, frames)

    def user(self, peer: bytes) -> PeerKey | None:
        return self._users.get(peer)

    def monitor_fileno(self) -> int:
        return self.left.fileno()

    def disconnects(self) -> int:
        with self.changed:
            self.left.silence()
            gone, self._gone = self._gone, 0
            return gone

    def refused(self) -> int:
        return self._refused

    def forget(self, peer: bytes) -> None:
        """A link was closed."""
        with self.changed:
            if self._links.pop(peer, None) is not None and not self.closed:
                self._gone += 1
                self.left.ring()
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            if not self.closed:
                self.closed = True
                self.arrived.close()
                self.left.close()
                for link in self._links.values():
                    link.ring(left=True)
            self.changed.notify_all()


class MemoryLink:
    """A link to a `MemoryHub`."""

    address = "memory"

    def __init__(self, hub: MemoryHub, peer: bytes) -> None:
        self.inbox: deque[list[bytes]] = deque()
        self.waiting = 0
        self._arrived: _Bell | None = None
        self._left: _Bell | None = None
        self._hub = hub
        self._peer = peer
        self._closed = False

    def send(self, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        hub = self._hub
        with hub.changed:
            hub.changed.wait_for(
                lambda: self._closed or hub.closed or self.waiting < QUEUE_MESSAGES
            )
            self._put(frames)

    def offer(self, frames: Sequence[bytes]) -> None:
        check_outgoing(frames)
        with self._hub.changed:
            if self.waiting >= QUEUE_MESSAGES and not self._closed and not self._hub.closed:
                raise PeerBusy(
                    f"the coordinator reads nothing from its queue of {QUEUE_MESSAGES} messages"
                )
            self._put(frames)

    def _put(self, frames: Sequence[bytes]) -> None:
        self._check_open()
        self._hub.inbox.append((self._peer, list(frames)))
        self.waiting += 1
        self._hub.arrived.ring()

    def receive(self, timeout_s: float | None) -> list[bytes] | None:
        with self._hub.changed:
            self._hub.changed.wait_for(
                lambda: self.inbox or self._closed or self._hub.closed, timeout_s
            )
            if self.inbox:
                return self.inbox.popleft()
            self._check_open()
            return None

    def fileno(self) -> int:
        with self._hub.changed:
            self._arrived = self._arrived or _Bell()
            if self.inbox:
                self._arrived.ring()
            return self._arrived.fileno()

    def take(self) -> list[bytes] | None:
        with self._hub.changed:
            if self.inbox:
                return self.inbox.popleft()
            if self._arrived is not None:
                self._arrived.silence()
            return None

    def monitor_fileno(self) -> int:
        with self._hub.changed:
            self._left = self._left or _Bell()
            if self._hub.closed:
                self._left.ring()
            return self._left.fileno()

    def check(self) -> None:
        with self._hub.changed:
            self._check_open()

    def ring(self, *, left: bool = False) -> None:
        """Something has arrived, or the hub has `left`."""
        if (bell := self._left if left else self._arrived) is not None:
            bell.ring()

    def _check_open(self) -> None:
        if self._closed:
            raise LinkClosed("the link was closed here")
        if self._hub.closed:
            raise LinkClosed("the coordinator disconnected")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hub.forget(self._peer)
            for bell in filter(None, (self._arrived, self._left)):
                bell.close()


class _Bell:
    """A descriptor that is readable from `ring` to `silence`."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._event)

    def fileno(self) -> int:
        return self._event

    def ring(self) -> None:
        os.eventfd_write(self._event, 1)

    def silence(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)

    def close(self) -> None:
        self._close()
        self._event = -1
