"""The cost of prefill: seconds that rows of logs add to a pass, learned from the last chunks.
Pure."""

from collections import deque

LAST = 9
"""Chunks that are remembered. The median of their seconds a row counts, so that a pause of the
machine is not taken for the cost of a row."""
FIRST_ROWS = 16
"""Rows of a chunk while nothing is known of their cost."""
LEAST_S = 1e-6
"""The least seconds of a row: rows may cost nothing beside weights that are read anyway, but chunks
are finite."""
MORE = 2
"""The factor by which a chunk may exceed the last ones at most, so that a cost that rises with rows
is seen before it is large."""


class ReadingCosts:
    """The seconds that rows of logs add to a pass of one worker."""

    def __init__(self) -> None:
        self._rows_s: deque[float] = deque(maxlen=LAST)
        """Seconds a row of each of the last chunks."""
        self._known_rows = 0
        """Rows of the last chunks: the most, halved with each chunk that has fewer."""

    def observe(self, rows: int, seconds: float) -> None:
        """Learn that a chunk of `rows` rows added `seconds` to its pass."""
        if rows > 0:
            self._rows_s.append(max(LEAST_S, seconds / rows))
            self._known_rows = max(rows, self._known_rows // MORE)

    def rows_within(self, seconds: float) -> int:
        """Return how many rows a chunk may have to add at most `seconds`."""
        if not self._rows_s:
            return FIRST_ROWS
        row_s = sorted(self._rows_s)[len(self._rows_s) // 2]
        return min(max(FIRST_ROWS, MORE * self._known_rows), int(max(0.0, seconds) / row_s))


def shares(left: list[int], rows: int) -> list[int]:
    """Return how many of `rows` rows each log gets, where `left` rows of each are unread: equal
    shares, but none more than it has left, and the first logs one each if there are too few."""
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
