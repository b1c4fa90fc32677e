"""A coordinator in virtual time, and its disk: what is on that outlives the coordinator, which may
die at any write, before it, in the midst of it, or behind it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from zlib import crc32

from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.journal.segments import HEAD
from explore.clock import MS, S, Time
from explore.wires import Crash, FaultyHub

READ_NS = MS
"""A prompt is read elsewhere for so long."""
RECOVERY_S = 6.0
STUCK_S = 3.0


class Disk:
    """Segments of a journal, in memory."""

    folder = Path("disk")

    def __init__(self, hub: FaultyHub, before: "Disk | None" = None) -> None:
        """`before`: what an earlier coordinator has left."""
        self.content: dict[int, bytes] = {} if before is None else {**before.content}
        self._hub = hub
        self.fuse: int | None = None
        """Writes until the coordinator dies at one; None: it does not."""
        self.torn = 0
        """Bytes of that one which are there then, counted around."""

    @property
    def all(self) -> list[int]:
        return [*self.content]

    @property
    def size(self) -> int:
        return sum(map(len, self.content.values()))

    @property
    def newest_size(self) -> int:
        return len(self.content[self.all[-1]])

    def read(self, number: int) -> Iterator[bytes]:
        """Yield the records of a segment up to the first that is not whole."""
        content, place = self.content[number], 0
        while place + HEAD.size <= len(content):
            size, check = HEAD.unpack_from(content, place)
            record = content[place + HEAD.size :][:size]
            if len(record) < size or crc32(record) != check:
                return
            yield record
            place += HEAD.size + size

    def begin(self, content: bytes = b"") -> int:
        """Begin a segment, which is there with all of this or not at all."""
        number = max(self.content, default=0) + 1
        if self._dies():
            raise Crash
        self.content[number] = b"" if self._hub.closed else content
        return number

    def _dies(self) -> bool:
        """Return whether the coordinator dies at this write."""
        if self._hub.closed or self.fuse is None:
            return False
        self.fuse -= 1
        self._hub.closed = self.fuse < 0
        return self._hub.closed

    def append(self, content: bytes) -> None:
        """Write to the newest segment; nothing arrives there from a process that has died."""
        if self._hub.closed:
            return
        newest = self.all[-1]
        if self._dies():
            self.content[newest] += content[: self.torn % (len(content) + 1)]
            raise Crash
        self.content[newest] += content

    def sync(self) -> None:
        """Do nothing: what was appended is there already."""

    def remove(self, number: int) -> None:
        if not self._hub.closed:
            del self.content[number]


Call = Callable[[FaultyHub, Callable[[], object]], None]


def open_coordinator(
    hub: FaultyHub, time: Time, call: Call, journal: Journal | None = None
) -> Coordinator:
    """A coordinator in virtual time. `call` calls what is due in its name."""

    def planned(action: Callable[[], object]) -> Callable[[], None]:
        hub.timers += 1

        def act() -> None:
            hub.timers -= 1
            call(hub, action)

        return act

    return Coordinator(
        hub,
        clock_ns=time.clock,
        defer=lambda work, done: time.later(READ_NS, planned(lambda: done(work()))),
        later=lambda seconds, action: time.later(round(seconds * S), planned(action), hub),
        settings=CoordinatorSettings(recovery_s=RECOVERY_S, stuck_s=STUCK_S),
        journal=journal,
    )
