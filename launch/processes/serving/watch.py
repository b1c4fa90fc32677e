"""Decides when the processes of a service are started and restarted: names, events and seconds in,
actions out. The root, the first part, has the workers registered, which survive its loss and
register again. A part starts once its predecessors are ready. Until everything has been ready once,
a user's mistake or the loss of a needed part ends the service. Later, a lost part restarts after a
pause that doubles, and is short again after a minute of health. A needed part that is lost too
often ends the service, any other is retried at growing intervals. A part is stuck if it is the root
and does not answer, if its heartbeats stop, or if it is not registered with the root; a part that
computes gets more time, one that is loading has no limit. A replaced part starts again when its
replacement is gone."""

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from dovetail.launch.console.terminal import counted
from dovetail.launch.processes.supervise import Ending


@dataclass(frozen=True)
class Part:
    """A process of the service, and the parts that must be ready before it starts."""

    name: str
    after: tuple[str, ...] = ()
    known: bool = False  # true if it is ready exactly while it is registered with the root
    needed: bool = True  # true if requests cannot be served without it or a replacement
    beats: bool = False  # true if it sends heartbeats once it is ready


@dataclass(frozen=True)
class Outage:
    """A missing part: why, since when, and when it is restarted."""

    part: str
    why: str
    since_s: float
    retry_s: float | None
    """Seconds until it is restarted; None if it has been started and is not ready yet."""


@dataclass(frozen=True)
class Start:
    """Start this part now."""

    name: str


@dataclass(frozen=True)
class Replace:
    """End this part, which is stuck, after it has dumped its stacks."""

    name: str


@dataclass(frozen=True)
class Stop:
    """End this part, which is restarting: it has been replaced."""

    name: str


@dataclass(frozen=True)
class Tell:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class GiveUp:
    """End the service with the error of this part; `why` it is not restarted, if that is not
    obvious."""

    name: str
    why: str = ""


@dataclass(frozen=True)
class Leave:
    """End the service, as requested."""


Action = Start | Replace | Stop | Tell | GiveUp | Leave

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
LONGEST_SPARED_PAUSE_S = 300.0
"""Longest pause of an optional part, since loading it slows the others."""
HEALTHY_S = 60.0
MOST_RESTARTS = 5  # the most restarts of one part within `WITHIN_S`
WITHIN_S = 300.0
MOST_DOUBLINGS = 32
BUSY = 6.0
"""Multiple of the patience: CPU time of a silent part that computes, or wall time of a new one."""
STANDSTILL_S = 2.0  # the longest time between two polls, normally much less
RESTARTED = "; it has been restarted and is not ready yet"


@dataclass
class _State:
    """A part: running or waiting to be started."""

    part: Part
    due_s: float
    running: bool = False
    been_ready: bool = False  # true if the root has been ready since its last start
    ready_s: float | None = None  # when it became ready
    heard_s: float | None = None
    """Time of its last sign of life; the root: of its last answer. None before the first."""
    worked_s: float = -math.inf  # when it was last known to compute
    cpu_s: float = 0.0  # CPU time that it has used; `heard_cpu_s`: at its last report
    heard_cpu_s: float = 0.0
    down_s: float | None = None
    """Since when it has been lost; None if it is ready, or is starting for the first time."""
    why: str = ""  # why it was lost or is about to be ended
    stuck: bool = False  # true if it is about to be ended because it is stuck
    beside: bool = False
    """True if another worker served with it when it was lost, and so is no replacement."""
    losses: int = 0  # losses since it was last healthy
    drained: bool = False  # true from the time an operator drains the part until its process ends
    ends: deque[float] = field(default_factory=deque)
    """Times within the last `WITHIN_S` at which it ended."""

    def stop(self, due_s: float) -> None:
        self.running = self.stuck = False
        self.ready_s = self.heard_s = None
        self.due_s = due_s
        self.cpu_s = self.heard_cpu_s = 0.0

    def hear(self, now_s: float) -> None:
        self.heard_s, self.heard_cpu_s = now_s, self.cpu_s

    def lost(self, why: str, now_s: float) -> None:
        """Note why it is missing, and since when; it may have been lost before."""
        self.why, self.down_s = why, now_s if self.down_s is None else self.down_s

    def pause_s(self, now_s: float, longest_s: float) -> float:
        """Count a loss, and return how long to wait after it, at most `longest_s`."""
        if self.ready_s is not None and now_s - self.ready_s >= HEALTHY_S:
            self.losses = 0
        self.losses += 1
        return min(longest_s, FIRST_PAUSE_S * 2.0 ** min(self.losses - 1, MOST_DOUBLINGS))

    def ended_too_often(self, now_s: float) -> bool:
        """Count the end; True if a restart now would be one too many."""
        self.ends.append(now_s)
        while now_s - self.ends[0] > WITHIN_S:
            self.ends.popleft()
        return len(self.ends) > MOST_RESTARTS


@dataclass
class _Away:
    """A part that the root dismissed."""

    part: Part
    seen_s: float | None = None  # time at which another worker last replaced it; None if none did


class Watch:
    """The state of a service; each call takes one event and returns actions."""

    def __init__(self, parts: Sequence[Part], now_s: float, *, stuck_s: float) -> None:
        """`stuck_s`: a part that is alive without a report for this long is replaced."""
        self._root, self._stuck_s = parts[0].name, stuck_s
        self._states = {part.name: _State(part, now_s) for part in parts}
        self._away: dict[str, _Away] = {}
        self._filled: Collection[str] = ()
        """The parts that another worker replaces, as reported by the root."""
        self._given: Collection[str] = ()  # parts that were replaced by a worker from standby
        self._looked_s = now_s
        self.serving = False
        """True if everything has been ready at least once, except lost parts that are not
        needed."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """The parts that run and are not ready yet."""
        return tuple(
            name for name, state in self._states.items() if state.running and state.ready_s is None
        )

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name, state in self._states.items() if state.ready_s is None)

    @property
    def outages(self) -> tuple[Outage, ...]:
        """The parts that are lost and not back yet, in order."""
        return tuple(
            Outage(name, state.why, state.down_s, None if state.running else state.due_s)
            for name, state in self._states.items()
            if state.down_s is not None
        )

    @property
    def drained(self) -> tuple[str, ...]:
        return tuple(name for name, away in self._away.items() if away.seen_s is None)

    def needs(self, name: str) -> bool:
        return self._states[name].part.needed and name not in self._filled

    def due(self, now_s: float) -> list[Action]:
        """Start the parts whose time has come, and replace stuck ones. Time in which this process
        was stopped does not count as silence."""
        actions: list[Action] = []
        if (asleep_s := now_s - self._looked_s) > STANDSTILL_S:
            for state in self._states.values():
                state.heard_s = None if state.heard_s is None else state.heard_s + asleep_s
                state.worked_s += asleep_s
            for away in self._away.values():
                away.seen_s = None if away.seen_s is None else away.seen_s + asleep_s
        self._looked_s = now_s
        for name, state in self._states.items():
            if (
                not state.running
                and state.due_s <= now_s
                and all(self._states[before].been_ready for before in state.part.after)
            ):
                state.running, state.worked_s = True, now_s
                state.why += RESTARTED if state.down_s is not None else ""
                actions.append(Start(name))
            elif self.serving and self._is_stuck(state, now_s):
                patience_s = self._stuck_s * (1.0 if state.heard_s is not None else BUSY)
                state.heard_s, state.stuck = None, True
                self._lose(name, f"it did not respond for {patience_s:g} s", now_s)
                actions += [
                    Tell(f"the {name} is alive but did not respond for {patience_s:g} s"),
                    Replace(name),
                ]
        return actions

    def ready(self, name: str, now_s: float) -> list[Action]:
        state = self._states[name]
        if not state.running or state.ready_s is not None:
            return []
        state.ready_s, state.been_ready, state.down_s = now_s, True, None
        if name == self._root or state.part.beats:
            state.hear(now_s)
        if self.serving:
            return [Tell(f"the {name} is ready again")]
        self._begin_to_serve()
        return []

    def heartbeat(self, name: str, now_s: float) -> None:
        if self._states[name].ready_s is not None:
            self._states[name].hear(now_s)

    def computes(self, name: str, cpu_s: float | None, now_s: float) -> None:
        """Note the CPU time of a part's process; None if it has no host yet."""
        state = self._states[name]
        most_s = math.inf if state.heard_s is None else BUSY * self._stuck_s
        if cpu_s is None or state.cpu_s < cpu_s < state.heard_cpu_s + most_s:
            state.worked_s = now_s
        state.cpu_s = cpu_s or 0.0

    def _begin_to_serve(self) -> None:
        """Serve if all parts are ready, except lost ones that are not needed."""
        self.serving = not any(
            state.ready_s is None and (state.down_s is None or self.needs(name))
            for name, state in self._states.items()
        )

    def answered(
        self,
        known: Collection[str],
        now_s: float,
        filled: Collection[str] = (),
        given: Collection[str] = (),
        drained: Collection[str] = (),
        why: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Action]:
        """Handle the root's report of registered parts. `filled`: parts whose places other workers
        have; `given`: those replaced on purpose. Parts that an operator `drained` are not
        restarted. `why`: why the root lost a part."""
        self._states[self._root].hear(now_s)
        for name in drained:
            if name in self._away:
                self._away[name].seen_s = None
        for name, state in self._states.items():
            state.drained = name in drained and name not in known
        self._filled, self._given = filled, given
        actions = self._yield_places(now_s)
        for name, state in self._states.items():
            if not state.part.known or not state.running:
                continue
            if name in known:
                state.heard_s = now_s
                actions += self.ready(name, now_s)
            elif state.ready_s is not None and not state.drained:
                state.ready_s = None
                reason = f": it {why[name]}" if why.get(name) else ""
                self._lose(name, f"the {self._root} has lost it{reason}", now_s)
                actions.append(
                    Tell(f"the {self._root} has lost the {name}{reason}")
                    if reason or name not in given
                    else Tell(f"the {name} has left the {self._root}: another worker replaces it")
                )
        for name, state in self._states.items():
            # it may not have been needed when its pause began
            if not state.running and self.needs(name):
                state.due_s = min(state.due_s, now_s + LONGEST_PAUSE_S)
        return [*actions, *self._fill(filled, now_s)]

    def _lose(self, name: str, why: str, now_s: float) -> None:
        """Note that a part is missing, why, and whether another worker served with it."""
        state = self._states[name]
        state.beside = name in self._given if state.down_s is None else state.beside
        state.lost(why, now_s)

    def _yield_places(self, now_s: float) -> list[Action]:
        """Do not restart lost parts that have been replaced, while their replacement serves."""
        actions: list[Action] = []
        for name, state in [*self._states.items()]:
            state.beside &= name in self._given
            if not self.serving or state.down_s is None or state.beside or name not in self._given:
                continue
            self._away[name] = _Away(self._states.pop(name).part, seen_s=now_s)
            actions.append(
                Tell(
                    f"another worker has replaced the {name}, which is not restarted while it "
                    "serves"
                )
            )
            actions += [Stop(name)] if state.running else []
        return actions

    def _fill(self, filled: Collection[str], now_s: float) -> list[Action]:
        """Restart parts whose replacement has been gone for as long as a part may be silent."""
        root, actions = self._states[self._root], list[Action]()
        for name, away in [*self._away.items()]:
            if name in filled:
                actions += (
                    [Tell(f"another worker replaces the {name}")] if away.seen_s is None else []
                )
                away.seen_s = now_s
            elif (
                away.seen_s is not None
                and root.ready_s is not None
                and now_s - max(away.seen_s, root.ready_s) >= self._stuck_s
            ):
                del self._away[name]
                self._states[name] = _State(away.part, now_s)
                actions.append(Tell(f"no worker replaces the {name} any longer; it is restarted"))
        return actions

    def ended(self, name: str, ending: Ending, now_s: float) -> list[Action]:
        state = self._states[name]
        if name == self._root and ending.code == 0:
            return [Tell(f"the {name} was asked to stop"), Leave()]
        if (ending.let_go or state.drained) and self.serving:
            self._away[name] = _Away(self._states.pop(name).part)
            return [Tell(f"the {name} has left, and is not restarted: it was replaced or drained")]
        needed = self.needs(name)
        if not self.serving and (needed or ending.mistake):
            return [GiveUp(name)]
        if needed and state.ended_too_often(now_s):
            return [
                GiveUp(
                    name,
                    f"ended {counted(len(state.ends), 'time')} within {WITHIN_S / 60:g} minutes, "
                    "and is not restarted",
                )
            ]
        pause_s = state.pause_s(now_s, LONGEST_PAUSE_S if needed else LONGEST_SPARED_PAUSE_S)
        said = f": {ending.last_line}" if ending.last_line else ""
        self._lose(name, state.why if state.stuck else f"it {ending.words}{said}", now_s)
        state.stop(now_s + pause_s)
        if not self.serving:
            self._begin_to_serve()
        if name == self._root:
            state.been_ready = False
            for other in self._states.values():  # its workers must register with the next one
                if other.part.known:
                    other.ready_s = None
        return [Tell(f"the {name} {ending.words}; it is restarted in {pause_s:g} s")]

    def refused(self, name: str, why: str, now_s: float) -> list[Action]:
        """A part cannot be started at present. This does not count as a loss, since nothing was
        tried and the obstacle may disappear."""
        state = self._states[name]
        pause_s = state.pause_s(
            now_s, LONGEST_PAUSE_S if self.needs(name) else LONGEST_SPARED_PAUSE_S
        )
        self._lose(name, f"it was not started: {why}", now_s)
        state.stop(now_s + pause_s)
        return [Tell(f"the {name} was not started; the next attempt is in {pause_s:g} s: {why}")]

    def _is_stuck(self, state: _State, now_s: float) -> bool:
        """True if a part has been silent for too long, judged by the root's reports if it sends
        none. A part that has never reported is stuck unless it computes."""
        root = self._states[self._root]
        if state.heard_s is None:
            idle_s = now_s - state.worked_s
            begun = state.running and state.ready_s is None and not state.stuck
            return begun and idle_s >= BUSY * self._stuck_s
        if state is root or state.part.beats:
            return now_s - max(state.heard_s, state.worked_s) >= self._stuck_s
        if root.heard_s is None or root.ready_s is None:
            return False
        return root.heard_s - max(state.heard_s, root.ready_s) >= self._stuck_s
