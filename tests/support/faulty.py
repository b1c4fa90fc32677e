"""A coordinator's hub and the processes of its workers in virtual time, with everything that may
happen to them on the way.

A connection keeps what a link promises - frames whole, in order, at most once for as long as it
lasts - and the rest is up for change: how long a message takes, whether one direction is silent,
when each end finds out that the other has gone, what is said twice, late or makes no sense. A
process computes one command at a time, can be killed, stopped, be stuck, and connects again as a
worker does. What happens when is `schedules.py`'s business.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dovetail.launch.simulation.clockwork import Agenda, Clock
from dovetail.protocol.codec import COMMAND, encode
from dovetail.protocol.errors import PeerGone
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import (
    Command,
    Draft,
    Drafted,
    Drafts,
    Drain,
    Engage,
    Event,
    Failed,
    Feed,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    Read,
    ReadItem,
    Refeed,
    Verified,
    Verify,
    VerifyItem,
    Welcome,
)
from support.scripted import ScriptedDraft, ScriptedTarget, ScriptedWorker, hello

S = 1_000_000_000
MS = 1_000_000
HEARTBEAT_NS = 1500 * MS
"""After so long without a sign of life an end of a connection takes the other for gone."""
NOTICE_NS = 1 * MS
"""Until the hub learns that a process died whose machine is there."""
HOP_NS = 50_000
FIRST_PAUSE_NS, LONGEST_PAUSE_NS = S // 10, S
"""Between attempts to connect; doubling."""
LOAD_NS = S // 2
"""A process starts and loads its model."""
MOST_SAID = 64
"""Events of a process that may be heard again, late."""


class Time:
    """The clock that everybody shares, and what happens when."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._agenda = Agenda()

    @property
    def now_ns(self) -> int:
        return self.clock()

    def later(self, after_ns: int, action: Callable[[], object]) -> None:
        """Have something happen after so long."""

        def act(time_ns: int) -> None:
            self.clock.wait_until(time_ns)
            action()

        self._agenda.plan(self.now_ns + after_ns, act)

    def step(self) -> None:
        """Let the next thing happen."""
        assert self._agenda.step(), "nothing will ever happen again"


# -- connections -----------------------------------------------------------------------------------


class Way:
    """One direction of a connection."""

    def __init__(self, time: Time, arrive: Callable[[list[bytes]], object]) -> None:
        self.delay_ns, self.jitter = HOP_NS, random.Random(0)
        self.jitter_ns = 0
        self.open = True
        """Whether somebody still listens at its end."""
        self._silent = False
        self._time, self._arrive, self._last_ns = time, arrive, 0
        self._held: deque[list[bytes]] = deque()

    def send(self, frames: Sequence[bytes]) -> None:
        """Have frames arrive, behind all that was sent before them."""
        sent = [bytes(frame) for frame in frames]
        delay_ns = self.delay_ns + (self.jitter.randrange(self.jitter_ns) if self.jitter_ns else 0)
        self._last_ns = max(self._last_ns, self._time.now_ns + delay_ns)
        self._time.later(self._last_ns - self._time.now_ns, lambda: self._reach(sent))

    def _reach(self, frames: list[bytes]) -> None:
        if self._silent:
            self._held.append(frames)
        elif self.open:
            self._arrive(frames)

    @property
    def silent(self) -> bool:
        """Whether nothing arrives; what was sent meanwhile does when that is over, if somebody
        still listens."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._silent = silent
        while not self._silent and self._held:
            self._reach(self._held.popleft())


class Wire:
    """One connection of a process with the hub. Each end closes by itself, and the other finds out
    in its own time."""

    def __init__(self, time: Time, hub: "FaultyHub", peer: bytes, process: "Process") -> None:
        self.peer = peer
        self.up = Way(time, lambda frames: hub.take(peer, frames))
        self.down = Way(time, process.take)
        self._time, self._hub, self._process = time, hub, process
        self._heals_ns = 0

    def hub_closes(self) -> None:
        """The hub gives the connection up: it hears nothing more, and the process is told as soon
        as something reaches it."""
        self.up.open = False
        self._hub.lose(self.peer)
        if not self.down.silent:
            self._time.later(HOP_NS, self.process_closes)

    def process_closes(self) -> None:
        """The process gives it up, or has died."""
        if not self.down.open:
            return
        self.down.open = False
        self._process.disconnected(self)
        if not self.up.silent:
            self._time.later(NOTICE_NS, self.hub_closes)

    def died(self) -> None:
        """The process is no more; what it sent before is still on its way."""
        self.down.open = False
        if not self.up.silent:
            self._time.later(max(NOTICE_NS, self.up.delay_ns + self.up.jitter_ns), self.hub_closes)

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


class FaultyHub:
    """A `Hub` whose peers are processes on such wires, and clients, whom nothing happens to."""

    address = "faulty"

    def __init__(self, time: Time) -> None:
        self.closed = False
        self.pump: Callable[[], None] = lambda: None
        """What the coordinator does when something has arrived; `look_around`: when somebody has
        gone."""
        self.look_around: Callable[[], None] = lambda: None
        self._time = time
        self._inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self._wires: dict[bytes, Wire] = {}
        self._clients: dict[bytes, Callable[[list[bytes]], object]] = {}
        self._gone = self._made = 0

    def connect(self, process: "Process") -> Wire:
        self._made += 1
        peer = b"worker %d" % self._made
        self._wires[peer] = wire = Wire(self._time, self, peer, process)
        return wire

    def join(self, peer: bytes, hear: Callable[[list[bytes]], object]) -> None:
        """A client, who hears at once."""
        self._clients[peer] = hear

    def leave(self, peer: bytes) -> None:
        if self._clients.pop(peer, None) is not None:
            self._left()

    def lose(self, peer: bytes) -> None:
        """A connection is no more."""
        if self._wires.pop(peer, None) is not None:
            self._left()

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
        if peer in self._clients:
            self._clients[peer]([bytes(frame) for frame in frames])
        elif peer in self._wires:
            self._wires[peer].down.send(frames)
        else:
            raise PeerGone(f"peer {peer.hex()} is not connected")

    def turn_away(self, peer: bytes, frames: Sequence[bytes]) -> None:
        raise AssertionError("nobody has a key that could be revoked")

    def disconnects(self) -> int:
        gone, self._gone = self._gone, 0
        return gone

    def user(self, peer: bytes) -> PeerKey | None:
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
            wire.process_closes()


# -- processes -------------------------------------------------------------------------------------


class CarefulTarget(ScriptedTarget):
    """Drops what it has done already, as workers do."""

    stale = 0

    def work(self, command: Command) -> list[Event]:
        if isinstance(command, Open) and command.session in self.logs:
            self.stale += 1
            return []
        if isinstance(command, Verify):
            items = tuple(item for item in command.items if not self._is_done(item))
            reads = tuple(item for item in command.reads if not was_read(self, item))
            self.stale += len(command.items) - len(items) + len(command.reads) - len(reads)
            return super().work(command.model_copy(update={"items": items, "reads": reads}))
        if isinstance(command, Refeed) and command.session in self.begun:
            self.stale += 1
            return []
        if isinstance(command, Read) and was_read(self, command.item):
            self.stale += 1
            return []
        return super().work(command)

    def _is_done(self, item: VerifyItem) -> bool:
        return item.round <= self.rounds[item.session]


def was_read(worker: ScriptedWorker, item: ReadItem) -> bool:
    """Return whether a worker has read this chunk of a log, or has dropped the log."""
    return item.session not in worker.begun or item.start < worker.done[item.session]


class CarefulDraft(ScriptedDraft):
    """Drops what it has done already, as workers do."""

    stale = 0

    def work(self, command: Command) -> list[Event]:
        if self._is_done(command):
            self.stale += 1
            return []
        return super().work(command)

    def _is_done(self, command: Command) -> bool:
        match command:
            case Open():
                return command.session in self.logs
            case Read():
                return was_read(self, command.item)
            case Feed():
                return command.start < self.fed[command.session]
            case Draft():
                return command.round <= self.rounds[command.session]
        return False


@dataclass(frozen=True)
class Costs:
    """What the work of a process takes, in milliseconds."""

    open_ms: float = 3.0
    token_ms: float = 0.2
    """Of a prompt that is read."""
    pass_ms: float = 4.0
    row_ms: float = 0.2
    draft_ms: float = 2.0

    def of(self, command: Command) -> int:
        """Nanoseconds."""
        match command:
            case Open():
                left = len(command.prompt) - command.kept
                return self.reading(left if command.read is None else min(left, command.read))
            case Refeed():
                left = command.prefix - command.start
                return self.reading(left if command.read is None else min(left, command.read))
            case Read():
                return self.reading(command.item.rows)
            case Verify():
                rows = sum(1 + len(item.tokens) for item in command.items)
                read = sum(item.rows for item in command.reads)
                return round(MS * (self.pass_ms + self.row_ms * rows + self.token_ms * read))
            case Draft():
                return round(MS * self.draft_ms)
            case Drafts():
                return round(MS * self.draft_ms * (1.0 + 0.2 * len(command.orders)))
        return MS // 10

    def reading(self, rows: int) -> int:
        """Nanoseconds of so many rows of a log."""
        return round(MS * (self.open_ms + self.token_ms * rows))


@dataclass
class Process:
    """The process of a worker: started, connected, at work; killed and started again. `make` makes
    the worker of an incarnation."""

    time: Time
    role: str
    make: Callable[[int], ScriptedWorker]
    costs: Costs = field(default_factory=Costs)
    about: dict[str, object] = field(default_factory=dict)
    """What its Hello says differently."""
    stuck_ns: int = 10 * S
    """Its own watchdog ends it when a command has taken so long."""
    load_ns: int = LOAD_NS
    restart_ns: int = 2 * S
    """Whoever looks after it starts it again so long after it has ended."""
    hub: Callable[[], FaultyHub | None] = lambda: None
    """Where the coordinator listens, if one does."""

    wire: Wire | None = None
    worker: ScriptedWorker | None = None
    stale: int = 0
    alive: bool = False
    stopped: bool = False
    busy: bool = False
    sticks: bool = False
    """The command that it does next, or does, is never done."""
    refuses: bool = False
    """The command that it does next is answered with Failed."""
    drops: int = 0
    """So many of the next commands that want an answer get none, and are not done."""
    again: int = 0
    """So many of the next events are sent twice; `asked_again`: of the commands, received."""
    asked_again: int = 0
    delay_ms: int = 0
    silent_until_ns: int = 0
    """Until then nobody who calls from there is heard."""

    _life: int = 0
    _epochs: int = 0
    _inbox: deque[Command] = field(default_factory=deque)
    _delayed: list[Callable[[], None]] = field(default_factory=list)
    """What happens when a stopped process goes on."""
    _said: deque[list[bytes]] = field(default_factory=lambda: deque(maxlen=MOST_SAID))

    @property
    def registered(self) -> bool:
        """Whether the coordinator has welcomed it on the connection that it has."""
        return (
            self.alive
            and self.wire is not None
            and self.worker is not None
            and self.worker.coordinator_epoch >= 0
        )

    def start(self) -> None:
        if self.alive:
            return
        self.alive, self.stopped, self.sticks, self.refuses, self.drops = (
            True,
            False,
            False,
            False,
            0,
        )
        if self._life:  # whoever starts it again wants it to serve
            self.about["standby"] = False
        self._life += 1
        self._in_life(self.load_ns, self._connect)

    def kill(self) -> None:
        """It is no more, from one moment to the next; later it is started again."""
        if not self.alive:
            return
        self.alive = self.stopped = self.busy = False
        self._life += 1
        self._inbox.clear()
        self._delayed.clear()
        wire, self.wire, self.worker = self.wire, None, None
        if wire is not None:
            wire.died()
        self.time.later(self.restart_ns, self.start)

    def stop(self, for_ns: int) -> None:
        """It does nothing and hears nothing, and its machine says for it that it is there, but not
        for long."""
        if not self.alive or self.stopped:
            return
        self.stopped = True
        if self.wire is not None:
            wire = self.wire
            self.time.later(
                HEARTBEAT_NS,
                lambda: wire.hub_closes() if self.stopped and self.wire is wire else None,
            )
        self._in_life(for_ns, self._go_on)

    def _go_on(self) -> None:
        self.stopped = False
        delayed, self._delayed = self._delayed, []
        for action in delayed:
            action()
        self._work()

    def silence(self, *, up: bool, down: bool, for_ns: int) -> None:
        """The way between it and the coordinator is silent for so long, and nobody can connect."""
        self.silent_until_ns = max(self.silent_until_ns, self.time.now_ns + for_ns)
        if self.wire is not None:
            self.wire.silence(up=up, down=down, heal_ns=for_ns)

    def slow_down(self, ms: int) -> None:
        """Messages take so much longer, more or less."""
        self.delay_ms = ms
        if self.wire is not None:
            self._set_delay(self.wire)

    def repeat_late(self, which: int) -> None:
        """Something that it said some time ago, perhaps in another life, is heard again now."""
        if self.wire is not None and self._said:
            self.wire.up.send(self._said[which % len(self._said)])

    def babble(self, times: int) -> None:
        """It says something that makes no sense."""
        if self.wire is not None:
            for _ in range(times):
                self.wire.up.send([b"\xc1"])

    def forget(self) -> None:
        """Memory was short: nothing of ended sessions is kept."""
        if self.worker is not None:
            self.worker.kept.clear()

    # -- connecting --------------------------------------------------------------------------------

    def _connect(self, pause_ns: int = FIRST_PAUSE_NS) -> None:
        hub = self.hub()
        if hub is None or hub.closed or self.time.now_ns < self.silent_until_ns:
            self._in_life(pause_ns, lambda: self._connect(min(LONGEST_PAUSE_NS, 2 * pause_ns)))
            return
        self._epochs += 1
        self.worker, self.wire = self.make(self._epochs), hub.connect(self)
        self._set_delay(self.wire)
        introduction = hello(self.role, epoch=self.worker.epoch, pid=self._life, **self.about)  # type: ignore[arg-type]
        self.worker.limits = introduction.limits
        self._send(introduction)

    def _set_delay(self, wire: Wire) -> None:
        for way in (wire.up, wire.down):
            way.delay_ns, way.jitter_ns = HOP_NS + self.delay_ms * MS, self.delay_ms * MS

    def disconnected(self, wire: Wire) -> None:
        """A command that it does is done first; then it is free of all that it held for that
        coordinator, and connects anew."""
        if self.wire is not wire:
            return
        if self.stopped:
            self._delayed.append(lambda: self.disconnected(wire))
            return
        self.wire = None
        self._inbox.clear()
        if not self.busy:
            self._in_life(FIRST_PAUSE_NS, self._connect)

    # -- commands ----------------------------------------------------------------------------------

    def take(self, frames: list[bytes]) -> None:
        """A command has arrived."""
        command = COMMAND.decode(frames)
        self._inbox.append(command)
        if (
            self.asked_again
            and not isinstance(command, Welcome | Failed)
            and not (isinstance(command, Open) and command.base is not None)
        ):
            self.asked_again -= 1
            self._inbox.append(command)
        self._work()

    def _work(self) -> None:
        while self._inbox and self.alive and not self.busy and not self.stopped:
            assert self.worker is not None
            command = self._inbox.popleft()
            if (
                isinstance(command, Failed)
                and command.session is None
                and command.code == "session"
                and self.wire is not None
            ):
                self.wire.process_closes()
            elif isinstance(command, Drain) or (
                isinstance(command, Failed) and command.session is None
            ):
                self.kill()
            elif self.worker.coordinator_epoch not in (-1, command.epoch):
                self.stale += 1
            elif isinstance(command, Probe):
                self._send(self._probed(command))
            elif isinstance(command, Welcome):
                self.worker.handle(command)
            elif isinstance(command, Engage):
                self.about["standby"] = False
            else:
                self._begin(command)

    def _begin(self, command: Command) -> None:
        assert self.worker is not None
        if self.drops and isinstance(
            command, Open | Feed | Refeed | Read | Draft | Drafts | Verify
        ):
            self.drops -= 1
            return
        worker, cost_ns = self.worker, self.costs.of(command)
        refused = self.refuses and isinstance(command, Open | Feed | Draft | Drafts)
        events = self._refusal(command) if refused else worker.handle(command)
        self.refuses, self.busy = self.refuses and not refused, True
        timed = [_timed(event, self.time.now_ns, cost_ns) for event in events]
        for place, event in enumerate(timed[:-1], 1):  # what comes in parts
            self._in_life(cost_ns * place // len(timed), partial(self._say, event))
        self._in_life(cost_ns, lambda: self._done(timed[-1:]))
        self._in_life(
            cost_ns + self.stuck_ns, lambda: self.kill() if self.busy and self.sticks else None
        )

    def _say(self, event: Event) -> None:
        if not self.sticks:
            self._send(event)

    def _done(self, last: Sequence[Event]) -> None:
        """The last answer leaves, if there is somebody to hear it."""
        if self.sticks:
            return
        self.busy = False
        for event in last:
            self._send(event)
        if self.wire is None:
            self._in_life(FIRST_PAUSE_NS, self._connect)
        self._work()

    def _refusal(self, command: Command) -> list[Event]:
        """Refuse a command; of several orders, refuse the first and carry out the others."""
        assert self.worker is not None
        refused, *others = command.split() if isinstance(command, Drafts) else [command]
        assert isinstance(refused, Open | Feed | Draft)
        failed = Failed(
            epoch=self.worker.epoch,
            session=refused.session,
            round=refused.round,
            code="memory",
            text="there is no room",
        )
        return [failed, *(event for order in others for event in self.worker.handle(order))]

    def _probed(self, probe: Probe) -> Probed:
        assert self.worker is not None
        now_ns, sessions = self.time.now_ns, len(self.worker.logs)
        return Probed(
            epoch=self.worker.epoch,
            sent_ns=probe.sent_ns,
            clock_ns=now_ns,
            busy_ns=0,
            stale=self.stale,
            sessions=sessions,
            rss_bytes=0,
        )

    def _send(self, message: Message) -> None:
        """A Failed is said once: it does not name the command, so that another one is taken for an
        answer to the next."""
        frames, once = encode(message), isinstance(message, Failed)
        if not once:
            self._said.append(frames)
        if self.wire is None:
            return
        for _ in range(1 + bool(self.again and not once)):
            self.wire.up.send(frames)
        self.again = max(0, self.again - 1)

    def _in_life(self, after_ns: int, action: Callable[[], Any]) -> None:
        """Have something happen after so long, if the process lives until then; a stopped one does
        it when it goes on."""
        life = self._life

        def act() -> None:
            if self._life != life:
                return
            if self.stopped and action != self._go_on:
                self._delayed.append(action)
            else:
                action()

        self.time.later(after_ns, act)


def _timed(event: Event, began_ns: int, cost_ns: int) -> Event:
    """The event with a span of virtual time."""
    names = {Opened: "prefill", Verified: "verify", Drafted: "draft"}
    name = names.get(type(event))  # type: ignore[call-overload]
    return (
        event if name is None else event.model_copy(update={"spans": ((name, began_ns, cost_ns),)})
    )
