"""The cost of another pass of the draft, and what it may bring: kept up by the engines, asked
before each pass that somebody waits for.

A pass expands nodes. Each lies on the target's path with its path probability, and if it does, one
of its children is what the target chooses there with a chance that is averaged over what happened.
In tokens a pass brings the sum of the path probabilities times that chance, less what verifying a
child of each will cost, the order's floor; it takes the time of its rows, whose price in tokens is
the order's rate. Where nobody waits, a pass has no price, and the best one brings most in its time.
Knows numbers only: no model, no tree and no clock.
"""

from collections import deque
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dovetail.workers.speculation.proposal import Price

REMEMBERED = 9
"""So many of the last durations count; their median, since the first ones of a process are slow and
a machine has other work too."""
LONGER = 1.3
"""A pass ahead takes at most so many times what one of the order's width takes: an order that comes
meanwhile waits for its end."""
START = 0.8
FORGETTING = 1 / 64
"""Weight of a new outcome: the average is over about so many verdicts' nodes."""


def rows_class(rows: int) -> int:
    """0 for one row, 1 for two, 2 for three and four, 3 for five to eight ..."""
    return (rows - 1).bit_length()


class Recent:
    """The last durations of one kind."""

    def __init__(self) -> None:
        self._taken: deque[int] = deque(maxlen=REMEMBERED)
        self.median_ns: float | None = None
        """Median of the remembered passes; None: there was none yet."""

    def add(self, duration_ns: int) -> None:
        """One more."""
        self._taken.append(duration_ns)
        self.median_ns = median(self._taken)


class PassTimes:
    """The times of passes by the number of their rows, from the last ones of each class. The
    coordinator prices a level by the same passes, which `Drafted` tells it."""

    def __init__(self) -> None:
        self._classes: dict[int, Recent] = {}

    def add(self, rows: int, duration_ns: int) -> None:
        """A pass of so many rows, at least one, took so long."""
        self._classes.setdefault(rows_class(rows), Recent()).add(duration_ns)

    def estimate_ns(self, rows: int) -> float:
        """Return what a pass of so many rows will take: as its class, else as the next smaller one
        that is known, else the next larger; 0 if nothing is known.

        Too low where nothing is known, so that it becomes known. No rows take no time.
        """
        if not rows or not self._classes:
            return 0.0
        wanted = rows_class(rows)
        return (
            self._classes[
                max((c for c in self._classes if c <= wanted), default=min(self._classes))
            ].median_ns
            or 0.0
        )


@dataclass
class Chance:
    """Running average of how often the target's choice is a child, at or above the floor, of a node
    on its path that was expanded."""

    value: float = START

    def add(self, found: bool) -> None:
        """One more node."""
        self.value += FORGETTING * (found - self.value)


def worth_expanding(
    probabilities: NDArray[np.float32],
    rows: NDArray[np.intp],
    price: Price,
    times: PassTimes,
    chance: Chance,
) -> int:
    """Return how many of some nodes, best first, the next pass should expand: where its gain is
    furthest above its price; 0 if it is nowhere above.

    `probabilities` [N]: of the nodes' paths. `rows` [N]: how many rows the first 1, 2, ... of them
    take. Nodes below the floor never count; without a rate all the others do.
    """
    worth = int(np.count_nonzero(probabilities >= price.floor))
    if price.rate is None or not worth:
        return worth
    gains = np.cumsum(
        np.maximum(chance.value * probabilities[:worth].astype(np.float64) - price.floor, 0.0)
    )
    costs = (
        price.rate * 1e-9 * np.array([times.estimate_ns(count) for count in rows[:worth].tolist()])
    )
    best = int(np.argmax(gains - costs))
    return best + 1 if gains[best] > costs[best] else 0


def most_used(probabilities: NDArray[np.float32], width: int, times: PassTimes) -> int:
    """Return how many of some nodes, best first and at least one, a pass that nobody waits for
    should expand: where they are used most for the time it takes.

    `probabilities` [N]: that each is used. Of passes much longer than one of `width` rows none is
    taken; as long as nothing is known, one of that width.
    """
    durations = np.array([times.estimate_ns(rows) for rows in range(1, len(probabilities) + 1)])
    if not durations[0]:
        return min(len(probabilities), width)
    rates = np.cumsum(probabilities, dtype=np.float64) / np.maximum(durations, 1.0)
    return int(np.argmax(np.where(durations <= LONGER * times.estimate_ns(width), rates, 0.0))) + 1
