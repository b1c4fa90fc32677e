"""Which rows the sessions of one worker share, so that they are counted once. Pure. It mirrors the
workers: a session that reuses rows of another shares them with that one and with all sessions that
already share them. If it reuses many more, a new group is made."""

from collections.abc import Collection
from dataclasses import dataclass, field

WHOLE = 16  # rows are shared in multiples of this number
LEAST = 128  # fewer rows are copied
ANEW = 2  # more than this multiple of the shared rows make a new group


@dataclass
class SharedRows:
    """A worker's sessions in groups of a common beginning, whose first rows they share."""

    _groups: dict[int, int] = field(default_factory=dict)  # the group of each session
    _rows: dict[int, int] = field(default_factory=dict)  # the rows that each session shares

    def begin(self, session: int, base: int, tokens: int) -> None:
        """Note that a session begins with the rows of the first `tokens` tokens of another."""
        rows = tokens // WHOLE * WHOLE
        if rows >= LEAST and rows > ANEW * self._rows.get(base, 0):
            self._groups[base], self._rows[base] = session, rows
        if base in self._groups:
            self._groups[session] = self._groups[base]
            self._rows[session] = min(rows, self._rows[base])

    def follow(self, session: int, base: int, tokens: int) -> None:
        """Note that a session has replaced another, reusing the rows of its first `tokens`
        tokens."""
        if (group := self._groups.pop(base, None)) is not None:
            self._groups[session] = group
            self._rows[session] = min(self._rows.pop(base), tokens // WHOLE * WHOLE)

    def end(self, session: int) -> None:
        """Note that the rows of a session are gone."""
        self._groups.pop(session, None)
        self._rows.pop(session, None)

    def __len__(self) -> int:
        return len(self._groups)

    def saved(self, sessions: Collection[int]) -> int:
        """Return how many fewer rows these sessions have than if each had its own."""
        every, most = 0, dict[int, int]()
        for session in self._groups.keys() & sessions:
            rows, group = self._rows[session], self._groups[session]
            every, most[group] = every + rows, max(most.get(group, 0), rows)
        return every - sum(most.values())

    def saved_by(self, base: int, tokens: int, sessions: Collection[int]) -> int:
        """Return how many fewer rows these sessions and another would have if that one began with
        the first `tokens` tokens of `base`; below 0 if `base` leaves another group for it."""
        after, other = SharedRows({**self._groups}, {**self._rows}), -1
        after.begin(other, base, tokens)
        return after.saved({*sessions, other}) - self.saved(sessions)
