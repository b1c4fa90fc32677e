"""Estimates how long a run of turns still takes, from what each kind of turn has taken so far.
Knows a clock, and how many turns are left of each."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Kind:
    left: int
    done: int = 0
    seconds: float = 0.0


class Remaining:
    """Turns of several kinds, whose durations differ by kind; those of a kind that had none yet are
    taken for the mean of all others."""

    def __init__(
        self, left: Mapping[str, int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`left`: how many turns of each kind there will be."""
        self._kinds = {name: _Kind(count) for name, count in left.items()}
        self._clock = clock
        self._began: float | None = None

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        self._began = began = self._clock()
        yield
        kind = self._kinds[name]
        kind.left, kind.done, kind.seconds = (
            max(0, kind.left - 1),
            kind.done + 1,
            kind.seconds + self._clock() - began,
        )
        self._began = None

    def seconds(self) -> float | None:
        """Return what is left to wait, less what the turn that is under way has taken; None before
        the first turn has ended."""
        done = sum(kind.done for kind in self._kinds.values())
        if not done:
            return None
        mean = sum(kind.seconds for kind in self._kinds.values()) / done
        left = sum(
            kind.left * (kind.seconds / kind.done if kind.done else mean)
            for kind in self._kinds.values()
        )
        under_way = self._clock() - self._began if self._began is not None else 0.0
        return max(0.0, left - under_way)
