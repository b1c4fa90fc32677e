"""Running averages of seconds, and of other figures of rounds."""

from collections import deque
from collections.abc import Iterable
from math import log

RECENT = 32.0  # values after which the weight of an older value has fallen to about a third
LAST = 16  # the number of remembered durations with their amounts


class Average:
    """A running mean of the last values; the first values have equal weights."""

    def __init__(self, recent: float = RECENT) -> None:
        self.recent, self.count = recent, 0  # values that count, and all values
        self.known = False
        self.value = 0.0  # 0 if nothing is known

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.known = True
        self.value += (value - self.value) / min(self.count, self.recent)


def add_all(told: Iterable[tuple[Average, float]]) -> None:
    """Add a value to each of these averages; a round has many."""
    for average, value in told:
        average.count += 1
        average.known = True
        average.value += (value - average.value) / min(average.count, average.recent)


class Lags:
    """The last durations of something with their amounts."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=LAST)

    def add(self, tokens: int, seconds: float) -> None:
        """Record the duration of this many tokens; zero tokens are ignored."""
        if tokens > 0:
            self._last.append((tokens, seconds))

    def expect(self, tokens: int) -> float | None:
        """Return seconds for this many, scaled from the nearest recorded number; None if
        unknown."""
        if not self._last:
            return None
        length, seconds = min(
            reversed(self._last), key=lambda last: abs(log(last[0] / max(1, tokens)))
        )
        return seconds * max(1.0, tokens / length)
