"""Coordinators in virtual time, each on a machine with a disk: what is on that outlives the
coordinator, which may die at any write, in front of it or behind it."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.journal.database import Row
from dovetail.runtime.journal.journal import Journal
from explore import invariants
from explore.clock import MS, S, Time
from explore.sabotage import Loud
from explore.wires import Crash, FaultyHub

READ_NS = MS  # a prompt is read elsewhere for so long
RECOVERY_S = 6.0
STUCK_S = 3.0
TICK_NS = S // 2
NOBODY = "/"  # the owner of a request whose client has no key and names no user


class Disk:
    """The database of a journal, in memory."""

    folder = Path("disk")
    damaged = False

    def __init__(self, hub: FaultyHub, before: "Disk | None" = None) -> None:
        """`before`: what an earlier coordinator has left."""
        self.rows: dict[tuple[int, int], bytes] = {} if before is None else {**before.rows}
        self._hub = hub
        self.fuse: int | None = None
        """Transactions until the coordinator dies at one; None: it does not."""
        self.lasts = False  # true if that one is there then

    @property
    def size(self) -> int:
        return sum(map(len, self.rows.values()))

    def read(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield each reply: its number and its records."""
        for reply in sorted({reply for reply, _ in self.rows}):
            yield reply, self.find(reply)

    def find(self, reply: int) -> list[bytes]:
        """Return the records of a reply."""
        return [record for (one, _), record in sorted(self.rows.items()) if one == reply]

    def write(self, rows: Sequence[Row], deleted: Sequence[int]) -> None:
        """Write rows and delete replies; nothing arrives there from a process that has died."""
        if self._hub.closed:
            return
        if self.fuse is not None:
            self.fuse -= 1
            self._hub.closed = self.fuse < 0
        if not self._hub.closed or self.lasts:
            self.rows |= {(reply, number): record for reply, number, record in rows}
            self.rows = {at: record for at, record in self.rows.items() if at[0] not in deleted}
        if self._hub.closed:
            raise Crash

    def sync(self) -> None:
        """Do nothing: what was written is there already."""


class Surroundings(Protocol):
    """The world as a machine knows it."""

    time: Time
    loud: Loud

    def died(self) -> None: ...

    def note(self, what: object) -> None: ...


class Machine:
    """A machine with a coordinator, and what has been seen of it."""

    role = "coordinator"

    def __init__(self, world: Surroundings, *, journal: bool) -> None:
        self._world, self.time = world, world.time
        self.hub = FaultyHub(self.time)
        self.hub.closed = True
        self.disk: Disk | None = None  # the disk under its journal; None: it keeps none
        self.coordinator: Coordinator | None = None
        """The one that runs here; None: none has been started."""
        self.bare_since_ns: int | None = self.time.now_ns
        """Since when the coordinator has no target; None: it has one."""
        self.losses = 0  # targets that its coordinators have lost
        self._journal = journal
        self._targets: set[bytes] = set()
        self._committed: dict[int, tuple[int, ...]] = {}
        """By session: the tokens that it had when it was last looked at."""
        self.begun: list[weakref.ref[RunningRequest]] = []  # the requests that have run

    # -- what it does ------------------------------------------------------------------------------

    def _boot(self) -> Journal | None:
        """Have a new process, over the same disk; return its journal."""
        self.hub = hub = FaultyHub(self.time)
        if not self._journal:
            return None
        self.disk = Disk(hub, self.disk)
        return Journal(self.disk, now_s=lambda: self.time.now_ns / S)  # type: ignore[arg-type]

    def start(self) -> None:
        """Start a coordinator over the same disk."""
        journal = self._boot()
        hub, self.bare_since_ns = self.hub, self.time.now_ns
        self._committed, self.begun, self._targets = {}, [], set()
        self.coordinator = coordinator = open_coordinator(hub, self.time, self.called, journal)

        def do(action: Callable[[], object]) -> Callable[[], None]:
            return lambda: self.within(hub, action)

        hub.pump = do(coordinator.pump)
        hub.look_around = do(lambda: (coordinator.look_around(), coordinator.pump()))

        def tick() -> None:
            if not hub.closed:
                do(coordinator.tick)()
                hub.look_around()
                self.time.later(TICK_NS, tick, hub)

        tick()

    def die(self) -> None:
        """End the process of this machine."""
        self.hub.close()

    # -- what comes of it --------------------------------------------------------------------------

    def within(self, hub: FaultyHub, action: Callable[[], object]) -> None:
        """Have the process of this hub do something, and look at what came of it."""
        if hub.closed:
            return
        try:
            action()
        except Crash:
            self._world.died()
            return
        if hub.found is not None:
            raise hub.found
        if not self.hub.closed:
            self.look()

    def called(self, hub: FaultyHub, action: Callable[[], object]) -> None:
        """Have the loop of this hub's coordinator call something that was planned. What it raises
        the loop logs, and goes on."""

        def act() -> None:
            try:
                action()
            except BaseException as error:
                reraise_exits(error)
                self._world.loud.hear(error)

        self.within(hub, act)

    def look(self) -> None:
        """Take notice of who is there and what runs, and of what has been committed."""
        assert self.coordinator is not None
        for number, running in self.coordinator._running.items():
            if (before := self._committed.get(number)) is None:
                before = ()
                self.begun.append(weakref.ref(running))
            now = running.session.tokens
            if len(before) != len(now) or not before:
                invariants.committed_prefix_only_grows(before, now)
                self._committed[number] = tuple(now)
        workers = self.coordinator.registry.workers
        targets = {peer: worker for peer, worker in workers.items() if worker.plays("target")}
        self.losses += len(self._targets - targets.keys())
        self._targets = set(targets)
        if any(target.serves for target in targets.values()):
            self.bare_since_ns = None
        elif self.bare_since_ns is None:
            self.bare_since_ns = self.time.now_ns

    # -- what is asked of it -----------------------------------------------------------------------

    def has_place(self) -> bool:
        """Return whether a target that is there may be given one session more."""
        assert self.coordinator is not None
        return any(
            worker.plays("target") and worker.available and worker.sessions < worker.limits.sessions
            for worker in self.coordinator.registry.workers.values()
        )

    def committed(self, client: bytes, request: int) -> int | None:
        """Return how many tokens of a request are committed, those that it will go on from too;
        None: it is over."""
        if (coordinator := self.coordinator) is None:
            return None
        if (peer := coordinator.registry.clients.get(client)) is None:
            return None
        if (number := peer.sessions.get(request)) is not None:
            return len(coordinator._running[number].session.tokens)
        waits = any(one.is_of(peer, request) for one in coordinator._shared.queue)
        if not waits and request not in peer.reading:
            return None
        ticket, journal = f"{peer.hello.epoch}/{request}", coordinator._journal
        entry = None if journal is None else journal.find(ticket, NOBODY)
        return 0 if entry is None else len(entry.tokens)


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
