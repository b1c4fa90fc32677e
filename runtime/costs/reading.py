"""Costs of reading logs: what their rows add to a pass, learned from the last ones. Pure."""

from collections import deque

LAST = 9
"""Parts that are remembered; the middle one of what a row of each took counts, so that a pause of
the machine is no cost of reading."""
FIRST_ROWS = 16
"""Rows that are read at a time where nothing is known of their cost."""
LEAST_S = 1e-6
"""A row takes so long at least: what costs nothing beside weights that stream through memory, or to
a GPU, still has an end."""
MORE = 2
"""So many times the rows of the last parts are read in the next at most, so that what is dear is
known before it is paid."""


class ReadingCosts:
    """Seconds that rows of a log add to a pass of one worker."""

    def __init__(self) -> None:
        self._rows_s: deque[float] = deque(maxlen=LAST)
        """Seconds that a row of each of the last parts took."""
        self._known_rows = 0
        """Rows of the last parts."""

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows have taken so long, beside what else was in their pass."""
        if rows > 0:
            self._rows_s.append(max(LEAST_S, seconds / rows))
            self._known_rows = max(rows, self._known_rows // MORE)

    def rows_within(self, seconds: float) -> int:
        """Return how many rows take so long."""
        if not self._rows_s:
            return FIRST_ROWS
        row_s = sorted(self._rows_s)[len(self._rows_s) // 2]
        return min(max(FIRST_ROWS, MORE * self._known_rows), int(max(0.0, seconds) / row_s))


def shares(left: list[int], rows: int) -> list[int]:
    """Divide so many rows among logs of which so many are left: equally, but none gets more than it
    has left, nor, as long as there are rows, the first nothing."""
    given = [0] * len(left)
    open_ = [place for place, most in enumerate(left) if most > 0]
    while open_ and rows > 0:
        each = max(1, rows // len(open_))
        for place in open_:
            more = min(each, left[place] - given[place], rows)
            given[place] += more
            rows -= more
        open_ = [place for place in open_ if given[place] < left[place]]
    return given
