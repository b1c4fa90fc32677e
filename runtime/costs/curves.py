"""T(M, context) of a profile: curves over the rows M at some lengths of the cache. Pure."""

from bisect import bisect_left
from collections.abc import Sequence

from dovetail.protocol.calibration import Calibration, ContextCurve


def curves_of(calibration: Calibration) -> "PassCurves":
    """Return the pass times of a calibration."""
    own = ContextCurve(context=calibration.context, t_v=calibration.t_v)
    return PassCurves([own, *calibration.t_v_by_context])


class PassCurves:
    """T(M, context) by curves over the rows at one or more lengths of the cache: linear in between,
    constant before the first length, and extrapolated along the last two beyond the last."""

    def __init__(self, curves: Sequence[ContextCurve]) -> None:
        """`curves`: at least one."""
        by_context = {curve.context: curve for curve in curves}
        self.contexts = sorted(by_context)
        self.curves = tuple(by_context[context] for context in self.contexts)
        self._levels: list[list[float]] = [[] for _ in self.curves]
        """Each curve at 0, 1, 2, ... rows."""

    def at(self, rows: int, context: float = 0.0) -> float:
        """Return the seconds of a pass over this many rows."""
        below, above, share = self._around(context)
        low, high = self._level(below, rows)[rows], self._level(above, rows)[rows]
        return (1.0 - share) * low + share * high

    def table(self, most: int, context: float) -> list[float]:
        """Return the seconds of passes over 0, 1, ... `most` rows."""
        below, above, share = self._around(context)
        low = self._level(below, most)
        if above == below:
            return low[: most + 1]
        high = self._level(above, most)
        return [(1.0 - share) * low[rows] + share * high[rows] for rows in range(most + 1)]

    def _around(self, context: float) -> tuple[int, int, float]:
        """Return the curves below and above a context, and its relative position between them."""
        if len(self.contexts) == 1 or context <= self.contexts[0]:
            return 0, 0, 0.0
        place = min(bisect_left(self.contexts, context), len(self.contexts) - 1)
        low, high = self.contexts[place - 1], self.contexts[place]
        return place - 1, place, (context - low) / (high - low)

    def _level(self, curve: int, most: int) -> list[float]:
        level = self._levels[curve]
        if len(level) <= most:
            t_v = self.curves[curve].t_v
            level.extend(t_v.at(rows) for rows in range(len(level), most + 1))
        return level
