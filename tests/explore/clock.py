"""Virtual time, and the scheduler of a schedule: what happens next, and what may happen before it.

Things happen in the order of their times, and those of one time in the order in which they were
planned: first in, first out. A schedule may deviate from that. Whatever is due within `WINDOW_NS`
of the next thing may happen before it, which is thereby late by at most as much, as where a process
is not given its core. No lane is overtaken by itself: a lane is one direction of a connection, one
process, or the timers of one coordinator, each of which keeps the order of what happens in it.
"""

import heapq
from collections.abc import Callable
from itertools import count

from simulation.clockwork import Clock

S = 1_000_000_000
MS = 1_000_000
WINDOW_NS = 5 * MS
"""A little more than what the longest ordinary command takes: whatever goes on at the same time may
come in any order."""

Due = tuple[int, int, object, Callable[[], object]]
"""When, a number that tells equals apart, the lane, and what happens."""


class Time:
    """The clock that everybody shares, and what happens when."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._due: list[Due] = []
        self._numbers = count()
        self.steps = 0  # things that have happened

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns

    def later(
        self, after_ns: int, action: Callable[[], object], lane: object | None = None
    ) -> None:
        """Have something happen after so long, behind all that happens before in its lane. Without
        one it keeps no order with anything."""
        number = next(self._numbers)
        at_ns = self.clock.now_ns + after_ns
        heapq.heappush(self._due, (at_ns, number, number if lane is None else lane, action))

    def step(self, place: int = 0) -> None:
        """Let the next thing happen, or one of those that may happen before it."""
        assert self._due, "nothing will ever happen again"
        at_ns, _, _, action = self._take(place) if place else heapq.heappop(self._due)
        self.steps += 1
        self.clock.wait_until(at_ns)
        action()

    def choices(self) -> int:
        """Return how many things may happen next: the first of each lane, if it is due within the
        window."""
        return len(self._firsts())

    def overtaking(self, place: int) -> str:
        """Return in words what would come before what."""
        first, *_ = firsts = self._firsts()
        return f"{_lane(firsts[place % len(firsts)][2])} before {_lane(first[2])}"

    def _take(self, place: int) -> Due:
        """Remove what is at this place, counted around, among the things that may happen next."""
        firsts = self._firsts()
        taken = firsts[place % len(firsts)]
        self._due.remove(taken)
        heapq.heapify(self._due)
        return taken

    def _firsts(self) -> list[Due]:
        """The things that may happen next, in their order."""
        end_ns, firsts = self._due[0][0] + WINDOW_NS, dict[object, Due]()
        for due in sorted((d for d in self._due if d[0] <= end_ns), key=lambda due: due[:2]):
            firsts.setdefault(due[2], due)
        return [*firsts.values()]

    def __len__(self) -> int:
        return len(self._due)


def _lane(lane: object) -> str:
    return getattr(lane, "words", "something else")
