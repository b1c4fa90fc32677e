"""When a process of a service is started, and when one that ended or is stuck is started again: decisions over events and times.

The first part is the root. It must know some of the others, the workers, whose work comes from it; when it is lost they stay, and come back to it by
themselves. A part starts when those that it comes after have been ready, the root since it was started last. Until everything was ready once, the first
loss ends the service - whoever started it is there to read why. From then on a part that ends is started again after a pause, which doubles from loss to
loss and begins anew after a minute of health; what ends too often, or says that the user made a mistake, ends the service. A root that says nothing for
long, and a part that the root has known and does not know any more, are stuck: they are replaced. A part that was let go because somebody else took its
place is started again when nobody is in that place any more.
Knows no processes, clocks or signals: names, events and seconds are handed in, and actions are handed back.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dovetail.launch.terminal import counted

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
HEALTHY_S = 60.0
MOST_RESTARTS = 5
"""Of one part within `WITHIN_S`."""
WITHIN_S = 300.0
STANDSTILL_S = 2.0
"""Between two looks; they are much closer together."""


@dataclass(frozen=True)
class Part:
    """A process of the service by its name, and which parts must have been ready before it is started."""

    name: str
    after: tuple[str, ...] = ()
    known: bool = False
    """Whether it is ready when the root knows it, and only as long as it does."""


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit code, and the same in words."""

    code: int
    words: str
    mistake: bool = False
    """Whether it said that the user did something wrong, which no restart mends."""
    let_go: bool = False
    """Whether it ended because the root wants it no more."""


@dataclass(frozen=True)
class Start:
    """Start this part now."""

    name: str


@dataclass(frozen=True)
class Replace:
    """End this part, which is alive and stuck; what it can still say of itself should be heard."""

    name: str


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


Action = Start | Replace | Tell | GiveUp | Leave


@dataclass
class _State:
    """A part: running or waiting to be started."""

    part: Part
    due_s: float
    running: bool = False
    been_ready: bool = False
    """Of the root, since it was started last."""
    ready_s: float | None = None
    """Since when it has been ready."""
    heard_s: float | None = None
    """When it was last known to be there: of the root, when it last answered. None: not since it was started, or it is being replaced."""
    losses: int = 0
    """Since it was last healthy."""
    ends: deque[float] = field(default_factory=deque)
    """When it ended, within the last `WITHIN_S`."""

    def stop(self, due_s: float) -> None:
        self.running, self.ready_s, self.heard_s, self.due_s = False, None, None, due_s

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


@dataclass
class _Away:
    """A part that the root let go."""

    part: Part
    seen_s: float | None = None
    """When somebody was last in its place; None: nobody has been."""


class Watch:
    """The state of a service; each call takes one event and says what follows."""

    def __init__(self, parts: Sequence[Part], now_s: float, *, stuck_s: float) -> None:
        """`stuck_s`: a part that is alive and was not heard of for so long is replaced."""
        self._root, self._stuck_s = parts[0].name, stuck_s
        self._states = {part.name: _State(part, now_s) for part in parts}
        self._away: dict[str, _Away] = {}
        self._looked_s = now_s
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
        """Start what is to be started by now, and replace what is stuck. The time in which nobody asked, since this process stood still, was no silence."""
        actions: list[Action] = []
        if (asleep_s := now_s - self._looked_s) > STANDSTILL_S:
            for state in self._states.values():
                state.heard_s = None if state.heard_s is None else state.heard_s + asleep_s
            for away in self._away.values():
                away.seen_s = None if away.seen_s is None else away.seen_s + asleep_s
        self._looked_s = now_s
        for name, state in self._states.items():
            if not state.running and state.due_s <= now_s and all(self._states[before].been_ready for before in state.part.after):
                state.running = True
                actions.append(Start(name))
            elif self.serving and self._is_stuck(state, now_s):
                state.heard_s = None
                actions += [Tell(f"the {name} is alive, and nothing was heard of it for {self._stuck_s:g} s"), Replace(name)]
        return actions

    def ready(self, name: str, now_s: float) -> list[Action]:
        """A part that runs does its work from now on."""
        state = self._states[name]
        if not state.running or state.ready_s is not None:
            return []
        state.ready_s, state.been_ready = now_s, True
        if name == self._root:
            state.heard_s = now_s
        if self.serving:
            return [Tell(f"the {name} is ready again")]
        self.serving = not self.missing
        return []

    def answered(self, known: Collection[str], now_s: float, served: Collection[str] = ()) -> list[Action]:
        """The root has said which of the others it knows, and in which of their places somebody works."""
        actions: list[Action] = []
        self._states[self._root].heard_s = now_s
        for name, state in self._states.items():
            if not state.part.known or not state.running:
                continue
            if name in known:
                state.heard_s = now_s
                actions += self.ready(name, now_s)
            elif state.ready_s is not None:
                state.ready_s = None
                actions.append(Tell(f"the {self._root} has lost the {name}"))
        return [*actions, *self._fill(served, now_s)]

    def _fill(self, served: Collection[str], now_s: float) -> list[Action]:
        """Have those start again in whose place somebody was who has been gone for as long as a part may be silent."""
        root, actions = self._states[self._root], list[Action]()
        for name, away in [*self._away.items()]:
            if name in served:
                actions += [Tell(f"another worker is in the place of the {name}")] if away.seen_s is None else []
                away.seen_s = now_s
            elif away.seen_s is not None and root.ready_s is not None and now_s - max(away.seen_s, root.ready_s) >= self._stuck_s:
                del self._away[name]
                self._states[name] = _State(away.part, now_s)
                actions.append(Tell(f"nobody is in the place of the {name} any more; it is started again"))
        return actions

    def ended(self, name: str, ending: Ending, now_s: float) -> list[Action]:
        """A process has ended."""
        state = self._states[name]
        if name == self._root and ending.code == 0:
            return [Tell(f"the {name} was told to stop"), Leave()]
        if ending.let_go and self.serving:
            self._away[name] = _Away(self._states.pop(name).part)
            return [Tell(f"the {name} was let go")]
        if ending.mistake or not self.serving:
            return [GiveUp(name)]
        if state.ended_too_often(now_s):
            return [GiveUp(name, f"it ended {counted(len(state.ends), 'time')} within {WITHIN_S / 60:g} minutes, and is not started again")]
        pause_s = state.pause_s(now_s)
        state.stop(now_s + pause_s)
        if name == self._root:
            state.been_ready = False
            self._expect_back()
        return [Tell(f"the {name} {ending.words}; it is started again in {pause_s:g} s")]

    def _expect_back(self) -> None:
        """The root is lost: those that it knew have to come back to the next one."""
        for state in self._states.values():
            if state.part.known:
                state.ready_s = None

    def _is_stuck(self, state: _State, now_s: float) -> bool:
        """Whether the root, or a part that it once knew, has been silent for too long; of a part it counts only what the root has said since."""
        root = self._states[self._root]
        if state.heard_s is None or root.heard_s is None or root.ready_s is None:
            return False
        silent_s = now_s - root.heard_s if state is root else root.heard_s - max(state.heard_s, root.ready_s)
        return silent_s >= self._stuck_s
