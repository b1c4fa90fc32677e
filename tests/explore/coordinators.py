"""Coordinators in virtual time, each on a machine with a disk: what is on that outlives the
coordinator, which may die at any write, before it, in the midst of it, or behind it. One leads; one
on another machine may be its standby."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol
from zlib import crc32

from dovetail.protocol.codec import encode
from dovetail.protocol.messages import Follow
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.coordinator import Coordinator
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.journal.segments import HEAD
from dovetail.runtime.standby.follower import Arrived, Follower
from dovetail.runtime.standby.watching import CALL_EVERY_S, LOOK_EVERY_S
from explore import invariants
from explore.clock import MS, S, Time
from explore.processes import Process
from explore.sabotage import Loud
from explore.wires import Crash, FaultyHub, StandbyLink

READ_NS = MS
"""A prompt is read elsewhere for so long."""
RECOVERY_S = 6.0
STUCK_S = 3.0
TICK_NS = S // 2
NOBODY = "/"
"""The owner of a request whose client has no key and names no user."""


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


class Surroundings(Protocol):
    """The world as a machine knows it."""

    time: Time
    loud: Loud
    processes: list[Process]
    machines: "list[Machine]"

    def died(self, machine: "Machine", *, deposed: bool = False) -> None: ...

    def note(self, what: object) -> None: ...


class Machine:
    """A machine with a coordinator, which leads or is a standby, or has died; and what has been
    seen of it."""

    role = "coordinator"

    def __init__(self, world: Surroundings, number: int, *, journal: bool) -> None:
        self._world, self.time, self.words = world, world.time, f"coordinator {number}"
        self._always_stands_by = number > 1
        self.hub = FaultyHub(self.time)
        self.hub.closed = True
        self.disk: Disk | None = None
        """The disk under its journal; None: it keeps none."""
        self.coordinator: Coordinator | None = None
        """The one that leads here, or was the last to; None: none has."""
        self.follower: Follower | None = None
        """The standby that is here, or was the last; None: there was none, or it has taken over."""
        self.link: StandbyLink | None = None
        """The last link of its standby to the coordinator that this follows."""
        self.apart: dict[object, int] = {}
        """Who does not reach this machine until when."""
        self.bare_since_ns: int | None = self.time.now_ns
        """Since when the coordinator has no target; None: it has one."""
        self.taken_over_ns: int | None = None
        """When it took over; None: it was started to lead."""
        self.losses = 0
        """Targets that its coordinators have lost."""
        self._journal = journal
        self._targets: set[bytes] = set()
        self._committed: dict[int, tuple[int, ...]] = {}
        """By session: the tokens that it had when it was last looked at."""
        self.begun: list[weakref.ref[RunningRequest]] = []
        """The requests that have run."""

    @property
    def leads(self) -> bool:
        return not self.hub.closed and self.follower is None

    @property
    def follows(self) -> bool:
        return not self.hub.closed and self.follower is not None

    @property
    def term(self) -> int:
        return -1 if self.coordinator is None else self.coordinator.service.term

    def reached_by(self, one: object) -> FaultyHub | None:
        """Return the hub here, if it is there for one who tries to reach it."""
        apart = self.time.now_ns < self.apart.get(one, 0)
        return None if self.hub.closed or apart else self.hub

    def part(self, one: object, *, up: bool, down: bool, for_ns: int) -> None:
        """Have the way from one, a process or another machine, to this machine be silent: `up` to
        here, `down` from here. Nobody can connect over it."""
        self.apart[one] = max(self.apart.get(one, 0), self.time.now_ns + for_ns)
        if (wire := self.hub.wire_of(one)) is not None:
            wire.silence(up=up, down=down, heal_ns=for_ns)

    # -- what it does ------------------------------------------------------------------------------

    def _boot(self) -> Journal | None:
        """Have a new process, over the same disk; return its journal."""
        self.hub = hub = FaultyHub(self.time)
        if not self._journal:
            return None
        self.disk = Disk(hub, self.disk)
        return Journal(self.disk, now_s=lambda: self.time.now_ns / S)  # type: ignore[arg-type]

    def start(self, other: "Machine | None" = None, *, deposed: bool = False) -> None:
        """Have a coordinator here; `other`: the machine of the second of a pair, `deposed`: that
        one leads, as was heard by the one here."""
        journal = self._boot()
        self.follower = self.taken_over_ns = None
        if other is None or journal is None:
            self._lead(journal)
        elif deposed or self._always_stands_by:
            self._stand_by(other, journal, leads_on=journal.led and not deposed)
        elif journal.followed:
            self._stand_by(other, journal, leads_on=True)
        else:
            self._lead(journal)

    def _stand_by(self, other: "Machine", journal: Journal, *, leads_on: bool) -> None:
        hub = self.hub
        self.follower = follower = Follower(
            hub,  # type: ignore[arg-type]
            journal,
            other.words,
            leads_on=leads_on,
            now_s=self.time.now_ns / S,
        )

        def link() -> StandbyLink | None:
            if (there := other.reached_by(self)) is None:
                return None
            self.link = StandbyLink(there, self)
            return self.link

        def look() -> None:
            arrived = follower.step(self.time.now_ns / S, link)  # type: ignore[arg-type]
            if arrived is not None:
                self._take_over(follower, journal, arrived)
            elif not hub.closed:
                self.time.later(round(LOOK_EVERY_S * S), lambda: self.within(hub, look), hub)

        self.within(hub, look)

    def _take_over(self, follower: Follower, journal: Journal, arrived: Sequence[Arrived]) -> None:
        invariants.no_quorum_hears_another(
            follower.watch.voters, self, self._world.machines, self._world.processes
        )
        if self.link is not None:
            invariants.a_copy_has_all_that_was_confirmed(self.link.confirmed, journal)
        follower.close()
        self._world.note(f"{self.words} takes over")
        self.follower, self.taken_over_ns = None, self.time.now_ns
        self._lead(journal, arrived)
        self._call()

    def _lead(self, journal: Journal | None, arrived: Sequence[Arrived] = ()) -> None:
        hub, self.bare_since_ns, self.link = self.hub, self.time.now_ns, None
        self._committed, self.begun, self._targets = {}, [], set()
        self.coordinator = coordinator = open_coordinator(hub, self.time, self.called, journal)

        def do(action: Callable[[], object]) -> Callable[[], None]:
            return lambda: self.within(hub, action)

        hub.pump = do(coordinator.pump)
        hub.look_around = do(lambda: (coordinator.look_around(), coordinator.pump()))
        for peer, frames in arrived:
            do(lambda peer=peer, frames=frames: coordinator.hear(peer, frames))()

        def tick() -> None:
            if not hub.closed:
                do(coordinator.tick)()
                hub.look_around()
                self.time.later(TICK_NS, tick, hub)

        tick()

    def _call(self) -> None:
        """Tell the coordinator on the other machine that this one leads, now and then."""
        hub, coordinator = self.hub, self.coordinator
        assert coordinator is not None
        told = Follow(
            epoch=0, host=self.words, pid=1, term=coordinator.service.term, address=self.words
        )

        def call() -> None:
            if hub.closed:
                return
            for other in self._world.machines:
                if other is not self and (there := other.reached_by(self)) is not None:
                    link = StandbyLink(there, self, calls=True)
                    link.offer(encode(told))
                    self.time.later(round(CALL_EVERY_S * S), link.close, self)
            self.time.later(round(CALL_EVERY_S * S), call, hub)

        self.time.later(round(CALL_EVERY_S * S), call, hub)

    def die(self) -> None:
        """End the process of this machine."""
        if self.link is not None:
            self.link.wire.died()
        self.hub.close()

    # -- what comes of it --------------------------------------------------------------------------

    def within(self, hub: FaultyHub, action: Callable[[], object]) -> None:
        """Have the process of this hub do something, and look at what came of it."""
        if hub.closed:
            return
        try:
            action()
        except Crash:
            self._world.died(self)
            return
        if hub.found is not None:
            raise hub.found
        if self.leads:
            assert self.coordinator is not None
            if self.coordinator.service.deposed:
                self._world.note(f"{self.words} steps down")
                self._world.died(self, deposed=True)
            else:
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
        for other in self._world.machines:
            if other.taken_over_ns is not None and other.leads and other.term > self.term:
                invariants.who_was_taken_over_from_falls_silent(
                    self, self._world.processes, self.time.now_ns - other.taken_over_ns
                )

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
