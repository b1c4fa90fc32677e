"""Processes of workers in virtual time, with everything that may happen to them.

A process computes one command at a time, can be killed, stopped, be stuck, say things twice, late
or without sense, and connects again as a worker does. What happens when is `world.py`'s business.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from dovetail.protocol.codec import COMMAND, encode
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
    Hello,
    Message,
    Open,
    Opened,
    Probe,
    Probed,
    Read,
    Refeed,
    Verified,
    Verify,
    Welcome,
)
from dovetail.runtime.fleet.scheduler import Owed
from dovetail.workers.serving.registration import LATER, Standing
from explore.clock import MS, S, Time
from explore.wires import HEARTBEAT_NS, HOP_NS, FaultyHub, Wire
from explore.workers import Costs
from support.scripted import ScriptedWorker, hello

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = S // 10, S  # between attempts to connect; doubling
LOAD_NS = S // 2  # a process starts and loads its model
MOST_SAID = 64  # events of a process that may be heard again, late


@dataclass(eq=False)
class Process:
    """The process of a worker: started, connected, at work; killed and started again. `make` makes
    the worker of an incarnation."""

    time: Time
    role: str
    make: Callable[[int], ScriptedWorker]
    costs: Costs = field(default_factory=Costs)
    about: dict[str, object] = field(default_factory=dict)
    """Fields of its Hello that differ from the usual ones."""
    stuck_ns: int = 10 * S  # its own watchdog ends it when a command has taken so long
    load_ns: int = LOAD_NS
    restart_ns: int = 2 * S  # whoever looks after it starts it again so long after it has ended
    hub: Callable[[], FaultyHub | None] = lambda: None
    """Returns the hub of the coordinator, if it listens."""
    """Hears of each welcome and command that it heeds, with the epoch of who sent it."""

    wire: Wire | None = None
    worker: ScriptedWorker | None = None
    stale: int = 0
    alive: bool = False
    stopped: bool = False
    busy: bool = False
    sticks: bool = False  # the command that it does next, or does, is never done
    refuses: bool = False  # the command that it does next is answered with Failed
    drops: int = 0  # so many of the next commands that want an answer get none, and are not done
    again: int = 0
    """So many of the next events are sent twice; `asked_again`: of the commands, received."""
    asked_again: int = 0
    delay_ms: int = 0
    silent_until_ns: int = 0  # until then nobody who calls from there is heard

    standing: Standing = field(default_factory=lambda: Standing("", standby=False, load_s=0.0))
    _life: int = 0
    _epochs: int = 0
    _inbox: deque[Command] = field(default_factory=deque)
    _delayed: list[Callable[[], None]] = field(default_factory=list)
    """Actions that wait for a stopped process to go on."""
    _said: deque[Message] = field(default_factory=lambda: deque(maxlen=MOST_SAID))

    @property
    def words(self) -> str:
        return f"a {self.role}'s work"

    @property
    def registered(self) -> bool:
        """Return whether the coordinator has welcomed it on the connection that it has."""
        return (
            self.alive
            and self.wire is not None
            and self.worker is not None
            and self.worker.coordinator_epoch >= 0
        )

    def start(self) -> None:
        if self.alive:
            return
        self.alive, self.drops = True, 0
        self.stopped = self.sticks = self.refuses = False
        if self._life:  # whoever starts it again wants it to serve
            self.about["standby"] = False
        self._life += 1
        self.standing = Standing("", standby=False, load_s=0.0)
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
        self.time.later(self.restart_ns, self.start, self)

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

    def repeat_late(self, which: int, owed: Mapping[int, Owed] | None = None) -> bool:
        """Something that it said some time ago, perhaps in another life, is heard again now; return
        False if there is nothing. `owed`: what is waited for; then it is something that could be
        taken for that, if it said so."""
        said = [*self._said]
        if owed is not None:
            said = [message for message in said if _could_be(message, owed)] or said
        if self.wire is None or not said:
            return False
        self.wire.up.send(encode(said[which // 2 % len(said)]))
        return True

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
        if hub is None or self.time.now_ns < self.silent_until_ns:
            self._in_life(pause_ns, lambda: self._connect(min(LONGEST_PAUSE_NS, 2 * pause_ns)))
            return
        self._epochs += 1
        self.worker, self.wire = self.make(self._epochs), hub.connect(self)
        self._set_delay(self.wire)
        introduction = introduce(self.role, **self.about).model_copy(
            update={"epoch": self.worker.epoch, "pid": self._life}
        )
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
                and command.code in ("session", *LATER)
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
                self._welcomed(command)
            elif isinstance(command, Engage):
                self.about["standby"] = False
            else:
                self._begin(command)

    def _welcomed(self, welcome: Welcome) -> None:
        assert self.worker is not None
        assert self.wire is not None
        self.standing.welcomed(welcome)
        self.worker.handle(welcome)

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
            self._said.append(message)
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

        self.time.later(after_ns, act, self)


def _could_be(message: Message, owed: Mapping[int, Owed]) -> bool:
    """Return whether an answer is, but for who gave it, one that is waited for."""
    parts = message.items if isinstance(message, Verified) else (message,)
    return any(
        (wanted := owed.get(getattr(part, "session", 0))) is not None
        and wanted.type is type(message)
        and wanted.round == getattr(part, "round", None)
        for part in parts
    )


@lru_cache(maxsize=256)
def introduce(role: str, **about: Any) -> Hello:
    """Return a worker's Hello, made once for many schedules."""
    return hello(role, epoch=0, **about)


def _timed(event: Event, began_ns: int, cost_ns: int) -> Event:
    """The event with a span of virtual time."""
    names = {Opened: "prefill", Verified: "verify", Drafted: "draft"}
    name = names.get(type(event))  # type: ignore[call-overload]
    return (
        event if name is None else event.model_copy(update={"spans": ((name, began_ns, cost_ns),)})
    )
