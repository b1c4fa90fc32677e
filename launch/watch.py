"""When a process of a service is started, and when one that ended is started again: decisions over events and times.

The first part is the root: the others live and die with it. A part starts when those that it comes after are ready. Until everything was ready once, the
first loss ends the service - whoever started it is there to read why. From then on a part that ends is started again after a pause, which doubles from
loss to loss and begins anew after a minute of health; what ends too often, or says that the user made a mistake, ends the service.
Knows no processes, clocks or signals: names, events and seconds are handed in, and actions are handed back.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.launch.terminal import counted

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HEALTHY_S = 60.0
MOST_RESTARTS = 5
"""Of one part within `WITHIN_S`."""
WITHIN_S = 300.0


@dataclass(frozen=True)
class Part:
    """A process of the service by its name, and which parts must have been ready before it is started."""

    name: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit code, and the same in words."""

    code: int
    words: str
    mistake: bool = False
    """Whether it said that the user did something wrong, which no restart mends."""


@dataclass(frozen=True)
class Start:
    """Start this part now."""

    name: str


@dataclass(frozen=True)
class End:
    """End these parts, as far as they run."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Tell:
    """What somebody who reads the log should know."""

    text: str


@dataclass(frozen=True)
class GiveUp:
    """End the service with what this part has to say; `why` it is not started again, where that needs words."""

    name: str
    why: str = ""


@dataclass(frozen=True)
class Leave:
    """End the service: that was asked for."""


Action = Start | End | Tell | GiveUp | Leave


@dataclass
class _State:
    """A part: running or waiting to be started."""

    part: Part
    due_s: float
    running: bool = False
    been_ready: bool = False
    """Since the root was started last."""
    ready_s: float | None = None
    """Since when it has been ready."""
    losses: int = 0
    """Since it was last healthy."""
    ends: deque[float] = field(default_factory=deque)
    """When it ended, within the last `WITHIN_S`."""

    def stop(self, due_s: float) -> None:
        self.running, self.ready_s, self.due_s = False, None, due_s

    def pause_s(self, now_s: float) -> float:
        """How long to wait after a loss now; counts it."""
        if self.ready_s is not None and now_s - self.ready_s >= HEALTHY_S:
            self.losses = 0
        self.losses += 1
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.losses - 1))

    def ended_too_often(self, now_s: float) -> bool:
        """Whether a restart now would be one too many; counts the end."""
        self.ends.append(now_s)
        while now_s - self.ends[0] > WITHIN_S:
            self.ends.popleft()
        return len(self.ends) > MOST_RESTARTS


class Watch:
    """The state of a service; each call takes one event and says what follows."""

    def __init__(self, parts: Sequence[Part], now_s: float) -> None:
        self._root = parts[0].name
        self._states = {part.name: _State(part, now_s) for part in parts}
        self.serving = False
        """Whether everything has been ready at one time."""

    @property
    def waiting(self) -> tuple[str, ...]:
        """The parts that run and are not ready yet."""
        return tuple(name for name, state in self._states.items() if state.running and state.ready_s is None)

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts that are not ready, whether they run or not."""
        return tuple(name for name, state in self._states.items() if state.ready_s is None)

    def due(self, now_s: float) -> list[Action]:
        """Start what is to be started by now."""
        actions: list[Action] = []
        for name, state in self._states.items():
            if not state.running and state.due_s <= now_s and all(self._states[before].been_ready for before in state.part.after):
                state.running = True
                actions.append(Start(name))
        return actions

    def ready(self, name: str, now_s: float) -> list[Action]:
        """A part that runs does its work from now on."""
        state = self._states[name]
        if not state.running or state.ready_s is not None:
            return []
        state.ready_s, state.been_ready = now_s, True
        if self.serving:
            return [Tell(f"the {name} is ready again")]
        self.serving = not self.missing
        return []

    def ended(self, name: str, ending: Ending, now_s: float) -> list[Action]:
        """A process has ended; that of a part that does not run any more was ended by us."""
        state = self._states[name]
        if not state.running:
            return []
        if name == self._root and ending.code == 0:
            return [Tell(f"the {name} was told to stop"), Leave()]
        if ending.mistake or not self.serving:
            return [GiveUp(name)]
        if state.ended_too_often(now_s):
            return [GiveUp(name, f"it ended {counted(len(state.ends), 'time')} within {WITHIN_S / 60:g} minutes, and is not started again")]
        pause_s = state.pause_s(now_s)
        state.stop(now_s + pause_s)
        if name == self._root:
            return self._anew(f"the {name} {ending.words}", pause_s)
        return [Tell(f"the {name} {ending.words}; it is started again in {pause_s:g} s")]

    def _anew(self, what: str, pause_s: float) -> list[Action]:
        """The root is lost: the others end and come after it again."""
        others = [state for name, state in self._states.items() if name != self._root]
        running = tuple(state.part.name for state in others if state.running)
        for state in self._states.values():
            state.been_ready = False
        for state in others:
            state.stop(state.due_s)
        names = " and ".join(filter(None, (", ".join(running[:-1]), *running[-1:])))
        ends = [End(running)] if running else []
        return [Tell(f"{what}; it is started again in {pause_s:g} s" + (f", and with it {names}" if running else "")), *ends]
