"""A hub without sockets and workers without processes, on a clock of their own: events in the order
in which they would happen.

Knows messages and times, not what is in them: who does the work is handed in, and so is what it
takes.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import Command, Drain, Event, Failed, Hello, Probe, Probed, Welcome
from dovetail.protocol.spans import Spans
from dovetail.runtime.costs.rounds import Messages

EPOCH_NS = 1_000_000_000
"""Time at which simulations begin: not 0, which is a time that nobody's clock shows."""


def in_ns(seconds: float) -> int:
    return round(seconds * 1e9)


class Clock:
    """The time of one process."""

    def __init__(self) -> None:
        self.now_ns = EPOCH_NS

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Work that takes so long."""
        self.now_ns += in_ns(seconds)

    def wait_until(self, time_ns: int) -> None:
        self.now_ns = max(self.now_ns, time_ns)


class ClockSpans(Spans):
    """Spans on such a clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, start, self._clock())


class Agenda:
    """Events in order of their time, those of one time in the order in which they were planned."""

    def __init__(self) -> None:
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._numbers = itertools.count()

    def plan(self, time_ns: int, event: Callable[[int], None]) -> None:
        """`event`, called with its time."""
        heapq.heappush(self._events, (time_ns, next(self._numbers), event))

    def step(self) -> bool:
        """Let the next event happen; False: there is none."""
        if not self._events:
            return False
        time_ns, _, event = heapq.heappop(self._events)
        event(time_ns)
        return True


class Simulated(Protocol):
    """A simulated process: a worker of `workers/`, or one that takes its place. Its work advances
    the clock that it was given."""

    @property
    def sessions(self) -> int: ...

    def hello(self, epoch: int) -> Hello: ...

    def handle(self, command: Command) -> Iterable[Event]: ...

    def idle(self) -> bool: ...


class StillHub:
    """A `Hub` for a coordinator whose clock is `now_ns`; what it sends arrives later, at whoever
    joined."""

    def __init__(self, agenda: Agenda, messages: Messages) -> None:
        self.clock = Clock()
        self._agenda, self._messages = agenda, messages
        self._arrived: deque[tuple[bytes, list[bytes]]] = deque()
        self._peers: dict[bytes, Callable[[list[bytes], int], None]] = {}
        self._working = False
        self.pump: Callable[[], None] = lambda: None
        """Called when something has arrived for the coordinator."""

    address = "simulated"

    def join(self, peer: bytes, deliver: Callable[[list[bytes], int], None]) -> None:
        """Deliver what is sent to `peer` from now on by a call, with the time."""
        self._peers[peer] = deliver

    def post(self, peer: bytes, frames: list[bytes], sent_ns: int) -> None:
        """A message of a peer's: on its way from now on."""

        def arrive(time_ns: int) -> None:
            self.clock.wait_until(time_ns)
            self._arrived.append((peer, frames))
            self.pump()

        self._agenda.plan(sent_ns + in_ns(self._messages.hop_s), arrive)

    def time(self) -> int:
        """The coordinator's clock. A message is handled at the time of its arrival; whatever is
        looked at after that comes after the work with it."""
        now_ns = self.clock()
        if self._working:
            self._working = False
            self.clock.advance(self._messages.coordinator_s)
        return now_ns

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Have the coordinator do something after so many seconds."""

        def act(time_ns: int) -> None:
            self.clock.wait_until(time_ns)
            action()

        self._agenda.plan(self.clock() + in_ns(seconds), act)

    # -- what a coordinator asks of its hub --------------------------------------------------------

    def receive(self) -> tuple[bytes, list[bytes]] | None:
        if not self._arrived:
            return None
        self._working = True
        return self._arrived.popleft()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        sent = [bytes(frame) for frame in frames]
        self._agenda.plan(
            self.clock() + in_ns(self._messages.hop_s),
            lambda time_ns: self._peers[peer](sent, time_ns),
        )

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        self.send(peer, frames)

    def user(self, peer: bytes) -> PeerKey | None:
        return None

    def fileno(self) -> int:
        return -1

    def monitor_fileno(self) -> int:
        return -1

    def disconnects(self) -> int:
        return 0

    def refused(self) -> int:
        return 0

    def close(self) -> None: ...


class Process:
    """One simulated worker on its own clock: while nothing has arrived it works ahead, a bit at a
    time, and a bit that has begun is finished."""

    def __init__(self, peer: bytes, worker: Simulated, clock: Clock, hub: StillHub) -> None:
        self._peer, self._worker, self._clock, self._hub = peer, worker, clock, hub
        self._epoch = peer[0] + 1
        self._idle = True
        hub.join(peer, self._deliver)

    def start(self) -> None:
        self._send([self._worker.hello(self._epoch)])

    def _deliver(self, frames: list[bytes], time_ns: int) -> None:
        command = COMMAND.decode(frames)
        if isinstance(command, Probe) and self._clock() > time_ns:  # as real workers do it
            self._hub.post(self._peer, encode(self._probed(command, time_ns, busy=True)), time_ns)
            return
        while self._idle and self._clock() < time_ns:
            self._idle = self._worker.idle()
        self._clock.wait_until(time_ns)
        self._send(self._answers(command))

    def _answers(self, command: Command) -> Iterable[Event]:
        match command:
            case Welcome() | Drain():
                return []
            case Failed():
                raise RuntimeError(
                    f"the coordinator turned a simulated worker away: {command.text}"
                )
            case Probe():
                return [self._probed(command, self._clock(), busy=False)]
            case _:
                self._idle = True
                return self._worker.handle(command)

    def _probed(self, probe: Probe, now_ns: int, *, busy: bool) -> Probed:
        return Probed(
            epoch=self._epoch,
            sent_ns=probe.sent_ns,
            clock_ns=now_ns,
            busy_ns=0,
            stale=0,
            sessions=self._worker.sessions,
            rss_bytes=0,
            busy=busy,
        )

    def _send(self, events: Iterable[Hello | Event]) -> None:
        for event in events:
            self._hub.post(self._peer, encode(event), self._clock())
