"""Experts in the seconds of a pass: how many a pass over so many rows goes through, and what a
further one costs.

Both are learned from passes, whose target says how many experts they went through. Rows of one text
agree on experts more often than rows that choose independently, the more the text repeats itself:
their variety is taken from the last passes, whatever their rows. The cost of an expert is the slope
of seconds over experts, each in comparison with passes over equally many rows, so that nothing that
grows with rows is put down to experts, and from one pass to the next, so that a machine that
becomes slower is not; half of the weight of all slopes lies below it, so that an interruption moves
nothing. Pure.
"""

from collections import deque
from math import log

from dovetail.protocol.calibration import ExpertCosts, weighted_median

VARIETIES = 8
"""Last passes that tell the variety of rows."""
FULL = 0.95
"""Passes whose rows would go through more than this share of all experts, if they chose
independently, tell nothing of that."""
SLOPES = 128
"""Last passes that tell the cost of an expert."""
PRIOR = 2.0
"""Weight of what was thought of that cost before any pass: as a slope between passes that lie so
many times the experts of a row apart."""


class ExpertsOfPasses:
    """Predicts the experts of passes, and learns their cost."""

    def __init__(self, known: ExpertCosts) -> None:
        self._known, self.routing = known, known.routing
        self._varieties: deque[tuple[float, float]] = deque(maxlen=VARIETIES)
        """(variety, weight)."""
        self._slopes: deque[tuple[float, float]] = deque(maxlen=SLOPES)
        """(seconds an expert, weight)."""
        self._before: tuple[float, float] | None = None
        self.variety = 1.0
        """The exponent of rows (`Routing.unique`)."""
        self.expert_s = known.expert_s
        """Seconds of a further expert, at the usual speed of the machine."""

    def at(self, rows: int) -> float:
        """Return the experts of a pass over so many rows that is still to come."""
        return self.routing.unique(rows, self.variety)

    def measured(self, rows: int) -> float | None:
        """Return the experts of the passes of the profile; None: they were not counted."""
        return self._known.measured(rows) if self._known.passes else None

    def count(self, rows: int, experts: int) -> None:
        """A pass over so many rows has gone through so many experts."""
        routing = self.routing
        if rows > 1 and routing.unique(rows) <= FULL * routing.most:
            self._varieties.append((routing.variety(rows, experts), log(rows)))
            self.variety = weighted_median(self._varieties)

    def weigh(self, seconds: float, experts: float, *, usual_s: float, row_s: float) -> None:
        """A pass has taken so long, and has gone through so many experts more than others over as
        many rows do, which take `usual_s`; `row_s`: a pass over one row, in which no more than all
        of its seconds can be its experts'."""
        before, now = self._before, (seconds / usual_s, experts / usual_s)
        self._before = now
        if before is None or (apart := now[1] - before[1]) == 0.0:
            return
        self._slopes.append(((now[0] - before[0]) / apart, abs(apart)))
        row = self.routing.row
        prior = self._known.expert_s, PRIOR * row / row_s
        self.expert_s = min(max(0.0, weighted_median([*self._slopes, prior])), row_s / row)
