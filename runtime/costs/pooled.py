"""T_V(M) of one target, from its own passes and, for other numbers of rows, from those of targets
with the same fingerprint. Pure. Below the smallest known number of rows, T_V is assumed to be
proportional to the rows. That is optimistic; the first session that moves because of it shows the
true time."""

from bisect import bisect_left
from collections.abc import Iterable

from dovetail.protocol.calibration import RowsSeconds


class PooledPasses:
    """Seconds of a target's passes over any number of rows."""

    def __init__(self, own: RowsSeconds | None, others: Iterable[RowsSeconds | None]) -> None:
        """`own`: of the target's passes; `others`: of those of other targets."""
        points = _points(own)
        for curve in others:
            theirs = _points(curve)
            scale = _scale(points, theirs)
            for rows, seconds in theirs.items():
                if rows not in points and _rises(points, rows, scale * seconds):
                    points[rows] = scale * seconds
        self._rows = sorted(points)
        self._seconds = [points[rows] for rows in self._rows]

    def at(self, rows: int) -> float:
        """Return the seconds of a pass over this many rows; 0 if nothing is known."""
        if not self._rows or rows <= 0:
            return 0.0
        place = bisect_left(self._rows, rows)
        if place == 0:
            return self._seconds[0] * rows / self._rows[0]
        if place == len(self._rows):
            return self._beyond(rows)
        low, high = self._rows[place - 1], self._rows[place]
        share = (rows - low) / (high - low)
        return self._seconds[place - 1] + share * (self._seconds[place] - self._seconds[place - 1])

    def _beyond(self, rows: int) -> float:
        """Extrapolate beyond the largest number of rows: by two points, else in proportion."""
        most, seconds = self._rows[-1], self._seconds[-1]
        before, less = (0, 0.0) if len(self._rows) == 1 else (self._rows[-2], self._seconds[-2])
        return seconds + (rows - most) * max(0.0, seconds - less) / (most - before)


def slowness(own: RowsSeconds | None, others: RowsSeconds | None) -> float:
    """Return the ratio to another target's passes of equal rows; 1 without common rows."""
    return _scale(_points(own), _points(others))


def _points(curve: RowsSeconds | None) -> dict[int, float]:
    return {} if curve is None else dict(zip(curve.rows, curve.seconds, strict=True))


def _scale(own: dict[int, float], theirs: dict[int, float]) -> float:
    """Return how much longer our passes take, over rows that both have measured."""
    ratios = sorted(own[rows] / theirs[rows] for rows in own.keys() & theirs.keys())
    return ratios[len(ratios) // 2] if ratios else 1.0


def _rises(points: dict[int, float], rows: int, seconds: float) -> bool:
    """Return whether a further point keeps the curve rising with rows."""
    return all(
        known <= seconds if count < rows else seconds <= known for count, known in points.items()
    )
