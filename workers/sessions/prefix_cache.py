"""The prefix cache: rows of ended sessions, so that the next turn of a conversation only prefills
what is new.

The coordinator decides which sessions are kept and reused; this module ensures that reused rows
match the new prompt, and enforces the limit. Independent of models; imports no torch."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import MAX_HELD, HeldSession, Open

if TYPE_CHECKING:
    from dovetail.workers.models.segment import Cache

MEMORY_SHARE = 8
"""Kept rows get this fraction of the memory that is free at the start; since a cache may be half
empty they take up to twice as much."""

ROOM_SHARE = 0.75  # the share of the memory free at the start that sessions may take


@dataclass(frozen=True)
class Left:
    """The log and the rows of a session that has ended, or of an open one that another one starts
    from."""

    log: list[int]  # the prompt and every committed token
    cache: "Cache"
    used: int = 0  # rows after those of the log, in an open session

    @property
    def there(self) -> int:
        """The number of tokens of the log that another session can reuse."""
        return self.cache.length

    @property
    def whole(self) -> int:
        """The number of rows that can be stored as blocks: those of the first tokens."""
        return self.cache.length

    def check(self, prompt: Sequence[int], kept: int) -> None:
        """Raise `RequestError` of code "prefix" unless a session with this prompt can reuse the
        first `kept` tokens."""
        if kept >= len(prompt):
            why = f"for a prompt of {len(prompt)}, whose last one must be computed"
        elif kept > self.there:
            why = f"of a session that has rows of {self.there}"
        elif list(prompt[:kept]) != self.log[:kept]:
            why = "of a session that begins differently from the prompt"
        else:
            return
        raise RequestError("prefix", f"cannot reuse {kept} tokens {why}; reuse fewer")

    def branch(self, kept: int) -> Self:
        """Return a copy for a session that reuses the first `kept` tokens."""
        rows = min(kept, self.cache.length)
        return replace(self, cache=self.cache.branch(rows, used=self.used), used=0)


LeftT = TypeVar("LeftT", bound=Left)


class KeptSessions(Generic[LeftT]):
    """The logs and rows of ended sessions by their numbers, the oldest first."""

    def __init__(self, most_tokens: int, extra: int = 0) -> None:
        """`most_tokens`: of all logs together; each session counts for `extra` more tokens."""
        self._most_tokens, self._extra = most_tokens, extra
        self._left: dict[int, LeftT] = {}

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, number: int) -> bool:
        return number in self._left

    def takes(self, tokens: int) -> bool:
        """Return whether a session of this many tokens can be kept."""
        return tokens + self._extra <= self._most_tokens

    def add(self, number: int, left: LeftT) -> None:
        """Keep a session for which `takes` holds, dropping the oldest ones to make room."""
        self._left[number] = left
        while self._taken > self._most_tokens:
            del self._left[next(iter(self._left))]

    @property
    def _taken(self) -> int:
        return sum(len(other.log) + self._extra for other in self._left.values())

    def hold(self, number: int, left: LeftT) -> None:
        """Keep an open session whose coordinator is lost, regardless of the limit, since its memory
        is already allocated. Without a prefix cache nothing is kept."""
        if self._most_tokens and left.there:
            self._left[number] = left

    @property
    def held(self) -> tuple[HeldSession, ...]:
        """The reusable sessions, for the registration."""
        left = [(number, left.there) for number, left in self._left.items() if left.there]
        return tuple(HeldSession(session=number, rows=rows) for number, rows in left[-MAX_HELD:])

    def only(self, numbers: Collection[int]) -> None:
        """Drop all sessions but these."""
        self._left = {number: left for number, left in self._left.items() if number in numbers}

    def drop(self, number: int) -> None:
        """Drop a session, if it is known."""
        self._left.pop(number, None)

    def clear(self) -> None:
        """Drop all sessions."""
        self._left.clear()

    def base(self, order: Open, open_session: LeftT | None = None) -> LeftT | None:
        """Return the base of a new session: the rows of a kept one, which is removed, or, with
        `shared`, a branch of that or of `open_session`. None if the command names no base. Raises
        `RequestError` of code "prefix", changing nothing, if the base is missing."""
        if order.base is None and not order.kept:
            return None
        left = open_session if order.shared and open_session else self._left.get(order.base or 0)
        if left is None:
            name = "no session" if order.base is None else f"session {order.base}"
            text = f"cannot reuse {order.kept} tokens of {name}, which is not kept here"
            raise RequestError("prefix", f"{text}; open the session without it")
        left.check(order.prompt, order.kept)
        if order.shared:
            return left.branch(order.kept)
        del self._left[order.base or 0]
        return left


def room_tokens(free_bytes: int, row_bytes: int) -> int:
    """Return how many tokens of `row_bytes` each fit into the sessions' share of the free
    memory."""
    return int(ROOM_SHARE * free_bytes) // max(1, row_bytes)


def affordable_tokens(free_bytes: int, row_bytes: int) -> int:
    """Return how many tokens of `row_bytes` each fit into the prefix cache's share of the free
    memory."""
    return free_bytes // MEMORY_SHARE // max(1, row_bytes)
