"""The cost and the expected gain of another pass of the draft, compared before each pass for which
a round waits.

A pass expands nodes. Each is on the target's path with its path probability; if it is, one of its
children is the target's choice with a probability averaged over past outcomes. A pass gains the sum
of the path probabilities times that probability, minus the cost of verifying a child of each (the
order's floor), in tokens; its rows take time, priced by the order's rate in tokens per second. If
no round waits, a pass has no price, and the best one has the highest gain per time. Independent of
model, tree and clock."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dovetail.workers.speculation.proposal import Price

REMEMBERED = 9
"""The number of last durations whose median counts: the first ones of a process are slow, and other
programs interfere."""
LONGER = 1.3
"""A pass ahead takes at most this multiple of a pass of the tree's width, since a command that
arrives meanwhile waits for its end."""
START = 0.8
FORGETTING = 1 / 64  # weight of a new outcome: the inverse of the number of averaged nodes


def rows_class(rows: int) -> int:
    """0 for one row, 1 for two, 2 for three and four, 3 for five to eight ..."""
    return (rows - 1).bit_length()


class Recent:
    """The last durations of one kind."""

    def __init__(self) -> None:
        self._taken: deque[int] = deque(maxlen=REMEMBERED)
        self.median_ns: float | None = None  # their median; None: there are none yet

    def add(self, duration_ns: int) -> None:
        self._taken.append(duration_ns)
        self.median_ns = median(self._taken)


class PassTimes:
    """The times of passes by the number of their rows, from the last ones of each class. `Drafted`
    reports the same passes to the coordinator, which prices levels by them."""

    def __init__(self) -> None:
        self._classes: dict[int, Recent] = {}

    def add(self, rows: int, duration_ns: int) -> None:
        """Note the time of a pass of this many rows, at least one."""
        self._classes.setdefault(rows_class(rows), Recent()).add(duration_ns)

    def estimate_ns(self, rows: int) -> float:
        """Return the expected time of a pass of this many rows: that of its class, else of the next
        smaller known one, else of the next larger. 0 for no rows, or if nothing is known, so that a
        pass gets measured."""
        if not rows or not self._classes:
            return 0.0
        wanted = rows_class(rows)
        return (
            self._classes[
                max((c for c in self._classes if c <= wanted), default=min(self._classes))
            ].median_ns
            or 0.0
        )

    def estimates_ns(self, rows: NDArray[np.intp], others: int = 0) -> NDArray[np.float64]:
        """Return how much longer passes take with this many rows in addition to `others`."""
        known = {
            rows_class(count): self.estimate_ns(count)
            for count in {1 << (most - 1).bit_length() for most in rows.tolist() if most}
        }
        already_ns = self.estimate_ns(others)
        return np.array(
            [(known[rows_class(count)] if count else 0.0) - already_ns for count in rows.tolist()]
        )


@dataclass
class Chance:
    """For expanded nodes on the target's path, the running average of how often its choice is among
    their children at or above the floor."""

    value: float = START

    def add(self, found: bool) -> None:
        self.value += FORGETTING * (found - self.value)


@dataclass(frozen=True)
class Candidates:
    """Nodes of one tree that a pass may expand, best first, and the order's price."""

    probabilities: NDArray[np.float32]  # [N]: their path probabilities
    rows: NDArray[np.intp]  # [N]: the rows of the first 1, 2, ... of them
    price: Price
    chance: Chance

    @property
    def gains(self) -> NDArray[np.float64]:
        """The tokens that each node at or above the floor is expected to gain."""
        worth = int(np.count_nonzero(self.probabilities >= self.price.floor))
        found: NDArray[np.float64] = np.maximum(
            self.chance.value * self.probabilities[:worth].astype(np.float64) - self.price.floor,
            0.0,
        )
        return found


def worth_expanding(
    trees: Sequence[Candidates], times: PassTimes, *, others: int = 0
) -> Sequence[int]:
    """Return how many nodes of each tree the next pass should expand: the numbers that together
    gain the most above the price of all their rows; none if nothing exceeds that price.

    Nodes below the floor are never expanded; without a rate all others are. `others`: other rows of
    the pass, computed in any case. A second is worth the mean of the trees' rates."""
    gains = [tree.gains for tree in trees]
    counts = np.array([len(its) for its in gains])
    priced = [place for place, tree in enumerate(trees) if tree.price.rate is not None]
    for place, tree in enumerate(trees):
        if tree.price.rate is None and counts[place]:
            others += int(tree.rows[counts[place] - 1])
    if not any(counts[place] for place in priced):
        return [int(count) for count in counts]
    rate = sum(trees[place].price.rate or 0.0 for place in priced) / len(priced)
    whose = np.repeat(priced, counts[priced])
    gained = np.concatenate([gains[place] for place in priced])
    rows = np.concatenate(
        [np.diff(trees[place].rows[: counts[place]], prepend=0) for place in priced]
    )
    order = np.argsort(-gained, kind="stable") if len(priced) > 1 else np.arange(len(gained))
    costs = rate * 1e-9 * (times.estimates_ns(others + np.cumsum(rows[order]), others))
    worth = np.cumsum(gained[order]) - costs
    best = int(np.argmax(worth))
    taken = whose[order[: best + 1]] if worth[best] > 0.0 else whose[:0]
    counts[priced] = np.bincount(taken, minlength=len(trees))[priced]
    return [int(count) for count in counts]


def most_used(probabilities: NDArray[np.float32], width: int, times: PassTimes) -> int:
    """Return how many nodes, best first and at least one, a pass ahead should expand for the most
    use per time. `probabilities` [N]: of being used. Passes much longer than one of `width` rows
    are excluded; while no times are known, the pass has `width` rows."""
    durations = np.array([times.estimate_ns(rows) for rows in range(1, len(probabilities) + 1)])
    if not durations[0]:
        return min(len(probabilities), width)
    rates = np.cumsum(probabilities, dtype=np.float64) / np.maximum(durations, 1.0)
    return int(np.argmax(np.where(durations <= LONGER * times.estimate_ns(width), rates, 0.0))) + 1
