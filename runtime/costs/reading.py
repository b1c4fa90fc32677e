"""The cost of prefill: seconds that rows of logs add to a pass, learned from the last chunks."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence

LAST = 9  # number of stored chunks; their median seconds per row counts, which excludes pauses
FIRST_ROWS = 16  # rows of a chunk while their cost is unknown
LEAST_S = 1e-6  # minimum seconds of a row, so that chunks stay finite where rows are free
MORE = 2  # a chunk is at most this much larger than the last ones, to notice rising costs early


class ReadingCosts:
    """The seconds that rows of logs add to a pass of one worker."""

    def __init__(self) -> None:
        self._rows_s: deque[float] = deque(maxlen=LAST)  # seconds a row of each of the last chunks
        self._known_rows = 0  # the most rows of the last chunks, halved with each smaller chunk

    def observe(self, rows: int, seconds: float) -> None:
        """Learn that a chunk of `rows` rows added `seconds` to its pass."""
        if rows > 0:
            self._rows_s.append(max(LEAST_S, seconds / rows))
            self._known_rows = max(rows, self._known_rows // MORE)

    def rows_within(self, seconds: float) -> int:
        """Return how many rows a chunk may have to add at most `seconds`."""
        if not self._rows_s:
            return FIRST_ROWS
        return min(max(FIRST_ROWS, MORE * self._known_rows), int(max(0.0, seconds) / self.row_s))

    @property
    def row_s(self) -> float:
        """The seconds of a row; 0 if unknown."""
        return sorted(self._rows_s)[len(self._rows_s) // 2] if self._rows_s else 0.0


def reading_order(
    owners: Sequence[str],
    *,
    waited_s: Sequence[float],
    reading_s: Sequence[float],
    since_s: Mapping[str, float] | None = None,
) -> list[int]:
    """Return the order in which logs are read: one of each owner, then the second ones, and so on;
    the longest wait minus reading time comes first. `since_s`: seconds since an owner's last log
    was read, from when its others count as waiting."""
    before: Counter[str] = Counter()
    turns = list[tuple[int, float, int, int]]()
    for place in sorted(range(len(owners)), key=lambda log: reading_s[log] - waited_s[log]):
        owner, waited = owners[place], waited_s[place]
        waited = min(waited, (since_s or {}).get(owner, waited))
        turns.append((before[owner], reading_s[place] - waited, len(turns), place))
        before[owner] += 1
    return [place for *_, place in sorted(turns)]


def shares(left: list[int], rows: int, *, at_once: int) -> list[int]:
    """Return how many of `rows` rows each log gets, given its `left` unread rows: the first
    `at_once` logs get equal shares, at least one each; the others get the rest, in order."""
    given = [0] * len(left)
    waiting = [place for place, most in enumerate(left) if most > 0]
    open_ = waiting[:at_once]
    while open_ and rows > 0:
        each = max(1, rows // len(open_))
        for place in open_:
            more = min(each, left[place] - given[place], rows)
            given[place] += more
            rows -= more
        open_ = [place for place in waiting if given[place] < left[place]][:at_once]
    return given
