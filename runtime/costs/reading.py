"""Costs of reading logs: what their rows add to a pass, learned from the last ones. Pure."""

RECENT_ROWS = 256
"""Rows after which what was learned before counts half."""
JUMP = 2.0
"""A pass moves what a row is thought to take by this factor at most: a pause of the machine is no
cost of reading."""
FIRST_ROWS = 16
"""Rows that are read at a time where nothing is known of their cost."""


class ReadingCosts:
    """Seconds that rows of a log add to a pass of one worker."""

    def __init__(self) -> None:
        self._row_s = 0.0
        """0 where nothing is known."""

    def observe(self, rows: int, seconds: float) -> None:
        """So many rows have taken so long, beside what else was in their pass."""
        if rows <= 0:
            return
        row_s = max(0.0, seconds / rows)
        if not self._row_s:
            self._row_s = row_s
            return
        row_s = min(max(row_s, self._row_s / JUMP), JUMP * self._row_s)
        self._row_s += rows / (rows + RECENT_ROWS) * (row_s - self._row_s)

    def rows_within(self, seconds: float) -> int:
        """Return how many rows take so long."""
        return int(max(0.0, seconds) / self._row_s) if self._row_s else FIRST_ROWS


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
