"""The cost of experts: how many experts a pass over M rows uses, and the seconds of each. Both are
learned from passes for which the target reports the number of experts.

Rows of one text share more experts than independent rows, especially in repetitive text; this
variety is estimated from the last passes of any size. The cost of an expert is a weighted median of
slopes, seconds over experts. Slopes are between consecutive passes, so that a machine that slows
down does not distort them. Each of the two is first compared with passes over as many rows, so that
costs of rows cancel. Pure."""

from collections import deque
from math import log

from dovetail.protocol.calibration import ExpertCosts, weighted_median

VARIETIES = 8  # the last passes, from which the variety of rows is estimated
FULL = 0.95  # share of experts above which a pass is little evidence of variety
SLOPES = 128  # last slopes from which the cost of an expert is estimated
PRIOR = 2.0  # weight of the known cost: that of a slope between passes as many rows' experts apart


class ExpertsOfPasses:
    """Predicts the number of experts of passes, and learns their cost."""

    def __init__(self, known: ExpertCosts) -> None:
        self._known, self.routing = known, known.routing
        self._varieties: deque[tuple[float, float]] = deque(maxlen=VARIETIES)  # (variety, weight)
        self._slopes: deque[tuple[float, float]] = deque(maxlen=SLOPES)
        """(seconds an expert, weight)."""
        self._before: tuple[float, float] | None = None
        self.variety = 1.0  # the exponent of rows (`Routing.unique`)
        self.expert_s = known.expert_s
        """Seconds of each further expert, at the usual speed of the machine."""

    def at(self, rows: int) -> float:
        """Return how many experts a future pass over `rows` rows is expected to use."""
        return self.routing.unique(rows, self.variety)

    def measured(self, rows: int) -> float | None:
        """Return how many experts the passes of the profile used; None: not counted."""
        return self._known.measured(rows) if self._known.passes else None

    def count(self, rows: int, experts: int) -> None:
        """Learn variety from a pass over `rows` rows that used `experts` experts."""
        routing = self.routing
        if rows > 1 and routing.unique(rows) <= FULL * routing.most:
            self._varieties.append((routing.variety(rows, experts), log(rows)))
            self.variety = weighted_median(self._varieties)

    def weigh(self, seconds: float, experts: float, *, usual_s: float, row_s: float) -> None:
        """Learn an expert's cost from a pass of `seconds` with `experts` more than usual; usual
        passes take `usual_s`. `row_s`: a pass over one row, an upper bound."""
        before, now = self._before, (seconds / usual_s, experts / usual_s)
        self._before = now
        if before is None or (apart := now[1] - before[1]) == 0.0:
            return
        self._slopes.append(((now[0] - before[0]) / apart, abs(apart)))
        row = self.routing.row
        prior = self._known.expert_s, PRIOR * row / row_s
        self.expert_s = min(max(0.0, weighted_median([*self._slopes, prior])), row_s / row)
