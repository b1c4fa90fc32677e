"""Faults of real processes and of the connections between them, drawn at random, each of which is
over after some time."""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from support.fleets import Member

Kind = Literal[
    "kill", "stop", "partition", "delay", "corrupt", "repeat", "cut", "half-open", "fault", "drop"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
STOP_S, SILENCE_S, DELAY_S = (0.2, 4.0), (0.3, 4.0), (0.5, 3.0)
"""Ranges of seconds that these last, on both sides of what heartbeats bear."""
LATER_S = (0.001, 0.2)  # the range of seconds by which a message is delayed


@dataclass(frozen=True)
class Happened:
    """A fault: of what kind, when after the beginning, to whom, and for how long if it lasts."""

    kind: Kind
    at_s: float
    who: str
    for_s: float = 0.0


@dataclass
class Faults:
    """Draws faults and makes them happen; `end_due` ends those whose time is over."""

    members: Sequence[Member]
    coordinator: "subprocess.Popen[bytes]"
    kinds: Sequence[Kind]
    seed: int
    happened: list[Happened] = field(default_factory=list)
    _began_s: float = field(default_factory=time.monotonic)
    _ends: list[tuple[float, Callable[[], object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    @property
    def counts(self) -> Counter[Kind]:
        return Counter(fault.kind for fault in self.happened)

    def strike(self) -> Happened:
        """The next fault."""
        kind, member = self.chance.choice(self.kinds), self.chance.choice(self.members)
        for_s = getattr(self, f"_{kind.replace('-', '_')}")(member) or 0.0
        self.happened.append(Happened(kind, time.monotonic() - self._began_s, member.name, for_s))
        return self.happened[-1]

    def end_due(self, *, all_of_them: bool = False) -> None:
        """End the faults whose time is over."""
        now_s = time.monotonic()
        due = [end for at_s, end in self._ends if all_of_them or at_s <= now_s]
        self._ends = [(at_s, end) for at_s, end in self._ends if not all_of_them and at_s > now_s]
        for end in due:
            end()

    def _later(self, bounds: tuple[float, float], end: Callable[[], object]) -> float:
        for_s = self.chance.uniform(*bounds)
        self._ends.append((time.monotonic() + for_s, end))
        return for_s

    def _kill(self, member: Member) -> None:
        member.process.kill()
        member.process.wait()

    def _stop(self, member: Member) -> float:
        process = member.process
        process.send_signal(signal.SIGSTOP)
        return self._later(STOP_S, lambda: process.send_signal(signal.SIGCONT))

    def _partition(self, member: Member) -> float:
        proxy = member.proxy
        assert proxy is not None
        up, down = self.chance.choice(((True, True), (True, False), (False, True)))
        proxy.silence(up=up, down=down)
        return self._later(SILENCE_S, lambda: proxy.silence(up=False, down=False))

    def _delay(self, member: Member) -> float:
        proxy, seconds = member.proxy, self.chance.uniform(*LATER_S)
        assert proxy is not None
        proxy.delay(seconds, jitter_s=seconds / 2)
        return self._later(DELAY_S, lambda: proxy.delay(0.0))

    def _corrupt(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.corrupt(up=self.chance.random() < 0.5)

    def _repeat(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.repeat(up=self.chance.random() < 0.5)

    def _cut(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.cut()

    def _half_open(self, member: Member) -> None:
        assert member.proxy is not None
        member.proxy.half_open()

    def _fault(self, _member: Member) -> None:
        """The coordinator fails at one session (`sabotage.py`)."""
        self.coordinator.send_signal(signal.SIGUSR2)

    def _drop(self, member: Member) -> None:
        """A worker does not answer a command, and does not know that it owes that."""
        member.process.send_signal(signal.SIGUSR2)
