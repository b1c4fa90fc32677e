"""Connections of processes with a coordinator's hub, in virtual time.

A connection keeps what a link promises - frames whole, in order, at most once for as long as it
lasts - and the rest is up for change: how long a message takes, whether one direction is silent,
when each end finds out that the other has gone.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dovetail.protocol.errors import PeerBusy, PeerGone
from explore.clock import MS, Time

HEARTBEAT_NS = 1500 * MS
"""After so long without a sign of life an end of a connection takes the other for gone."""
NOTICE_NS = 1 * MS  # until the hub learns that a process died whose machine is there
HOP_NS = 50_000


class End(Protocol):
    """Who is at the other end of a connection than the hub."""

    role: str

    def take(self, frames: list[bytes]) -> None:
        """A message has arrived."""

    def disconnected(self, wire: "Wire") -> None:
        """The connection is no more."""


class Way:
    """One direction of a connection."""

    def __init__(self, time: Time, arrive: Callable[[list[bytes]], object], words: str) -> None:
        self.words = words
        self.delay_ns, self.jitter = HOP_NS, random.Random(0)
        self.jitter_ns = 0
        self.open = True  # true if somebody still listens at its end
        self._silent = False
        self._time, self._arrive, self._last_ns = time, arrive, 0
        self._held: deque[list[bytes]] = deque()

    def send(self, frames: Sequence[bytes]) -> None:
        """Have frames arrive, behind all that was sent before them."""
        sent = [bytes(frame) for frame in frames]
        delay_ns = self.delay_ns + (self.jitter.randrange(self.jitter_ns) if self.jitter_ns else 0)
        self._last_ns = max(self._last_ns, self._time.now_ns + delay_ns)
        self._time.later(self._last_ns - self._time.now_ns, lambda: self._reach(sent), self)

    def _reach(self, frames: list[bytes]) -> None:
        if self._silent:
            self._held.append(frames)
        elif self.open:
            self._arrive(frames)

    @property
    def silent(self) -> bool:
        """True while nothing arrives. What was sent meanwhile arrives when that is over, if
        somebody still listens."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._silent = silent
        while not self._silent and self._held:
            self._reach(self._held.popleft())


class Wire:
    """One connection of a process with the hub. Each end closes by itself, and the other finds out
    in its own time."""

    def __init__(self, time: Time, hub: "FaultyHub", peer: bytes, process: End) -> None:
        self.peer, self.hub, self.process = peer, hub, process
        self.up = Way(time, lambda frames: hub.take(peer, frames), f"a {process.role}'s word")
        self.down = Way(time, process.take, f"a {process.role}'s command")
        self._time, self._heals_ns = time, 0

    def hub_closes(self) -> None:
        """The hub gives the connection up: it hears nothing more, and the process is told as soon
        as something reaches it."""
        self.up.open = False
        self.hub.lose(self.peer)
        if not self.down.silent:
            self._time.later(HOP_NS, self.process_closes, self.down)

    def process_closes(self) -> None:
        """The process gives it up, or has died."""
        if not self.down.open:
            return
        self.down.open = False
        self.process.disconnected(self)
        if not self.up.silent:
            self._time.later(NOTICE_NS, self.hub_closes, self.up)

    def died(self) -> None:
        """The process is no more; what it sent before is still on its way."""
        self.down.open = False
        if not self.up.silent:
            late_ns = self.up.delay_ns + self.up.jitter_ns
            self._time.later(max(NOTICE_NS, late_ns), self.hub_closes, self.up)

    def silence(self, *, up: bool, down: bool, heal_ns: int) -> None:
        """Nothing arrives in these directions for so long; who hears nothing for too long gives the
        connection up."""
        self.up.silent, self.down.silent = self.up.silent or up, self.down.silent or down
        if up:
            self._time.later(
                HEARTBEAT_NS, lambda: self.hub_closes() if self.up.silent and self.up.open else None
            )
        if down:
            self._time.later(
                HEARTBEAT_NS, lambda: self.process_closes() if self.down.silent else None
            )
        self._heals_ns = max(self._heals_ns, self._time.now_ns + heal_ns)
        self._time.later(heal_ns, self._heal)

    def _heal(self) -> None:
        """Whoever has given the connection up meanwhile says so now."""
        if self._time.now_ns < self._heals_ns:
            return
        self.up.silent = self.down.silent = False
        if not self.up.open:
            self.process_closes()
        elif not self.down.open:
            self.hub_closes()


class Crash(SystemExit):
    """The coordinator's process has died, in the midst of what it did."""


@dataclass
class Fuse:
    """Says at which message the coordinator dies: behind so many others, and before or after that
    one has left."""

    others: int
    leaves: bool

    def burn(self) -> bool:
        self.others -= 1
        return self.others < 0


class FaultyHub:
    """A `Hub` whose peers are processes on such wires, and clients, whom nothing happens to."""

    address = "faulty"
    words = "a timer of the coordinator"

    def __init__(self, time: Time) -> None:
        self.closed = False
        self.deaf: dict[bytes, int] = {}
        """Clients that take no messages off their queues, which are full, until these times."""
        self.timers = 0
        """The number of actions that the coordinator has planned, or has done elsewhere, and has
        not come to yet."""
        self.found: Exception | None = None  # the first thing that a client has found wrong
        self.fuse: Fuse | None = None  # the message at which the coordinator dies; None: at none
        self.pump: Callable[[], None] = lambda: None
        """Called when something has arrived; `look_around`: when somebody has gone."""
        self.look_around: Callable[[], None] = lambda: None
        self._time = time
        self._inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self._wires: dict[bytes, Wire] = {}
        self._clients: dict[bytes, Callable[[list[bytes]], object]] = {}
        self._gone = self._made = 0

    def connect(self, process: End) -> Wire:
        self._made += 1
        peer = b"%s %d" % (process.role.encode(), self._made)
        self._wires[peer] = wire = Wire(self._time, self, peer, process)
        return wire

    def join(self, peer: bytes, hear: Callable[[list[bytes]], object]) -> None:
        """A client, who hears at once: this is a new connection."""
        self.deaf.pop(peer, None)
        self._clients[peer] = hear

    def leave(self, peer: bytes) -> None:
        if self._clients.pop(peer, None) is not None:
            self._left()

    def lose(self, peer: bytes) -> None:
        """A connection is no more."""
        if self._wires.pop(peer, None) is not None:
            self._left()

    def sever(self) -> None:
        """All connections of workers are no more, at once."""
        wires = [*self._wires.values()]
        self._wires.clear()
        for wire in wires:
            wire.up.open = False
        self._left()
        for wire in wires:
            wire.process_closes()

    def _left(self) -> None:
        self._gone += 1
        if not self.closed:
            self.look_around()

    def take(self, peer: bytes, frames: list[bytes]) -> None:
        """A message has arrived."""
        if not self.closed:
            self._inbox.append((peer, frames))
            self.pump()

    # -- what a coordinator asks of its hub --------------------------------------------------------

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        return self._inbox.popleft() if self._inbox else None

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        if self.closed:
            return
        if self.fuse is not None and self.fuse.burn():
            if self.fuse.leaves:
                self._send(peer, frames)
            self.closed = True
            raise Crash
        self._send(peer, frames)

    def _send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        if peer in self._clients:
            if self._time.now_ns < self.deaf.get(peer, 0):
                raise PeerBusy(f"peer {peer.hex()} reads nothing from its queue")
            self._hear(peer, frames)
        elif peer in self._wires:
            self._wires[peer].down.send(frames)
        else:
            raise PeerGone(f"peer {peer.hex()} is not connected")

    def _hear(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Have a client hear something. What it finds wrong is not the coordinator's to handle."""
        try:
            self._clients[peer]([bytes(frame) for frame in frames])
        except Exception as error:
            self.found = self.found or error

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        raise AssertionError("nobody has a key that could be revoked")

    def disconnects(self) -> int:
        gone, self._gone = self._gone, 0
        return gone

    def user(self, _peer: bytes) -> None:
        return None

    def refused(self) -> int:
        return 0

    def fileno(self) -> int:
        return -1

    def monitor_fileno(self) -> int:
        return -1

    def close(self) -> None:
        """The coordinator's process has died: whoever is connected finds out."""
        self.closed = True
        for wire in [*self._wires.values()]:
            wire.up.open = False
            if not wire.down.silent:
                wire.process_closes()
