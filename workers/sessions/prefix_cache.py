"""Sessions that have ended and whose rows are kept, so that the next turn of a conversation reads
only what is new.

Which are kept, and which session goes on from which, is the coordinator's decision; here it is seen
to that only rows are taken over that are those of the new prompt, and that no more is held than was
promised. Knows token logs and no models; imports no torch.
"""

from collections.abc import Collection, Sequence
from typing import Generic, Protocol, Self, TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import MAX_HELD, HeldSession, Open

MEMORY_SHARE = 8
"""Kept rows are promised this part of the memory that is free at the start; since a cache may be
half empty they take two at most."""

ROOM_SHARE = 0.75
"""The share of the memory free at the start that sessions may take."""


class Left(Protocol):
    """The log and the rows of a session that has ended, or of an open one with which another
    begins."""

    @property
    def log(self) -> Sequence[int]:
        """The prompt and every committed token."""

    @property
    def there(self) -> int:
        """Return how many tokens of the log another session can go on from."""

    def check(self, prompt: Sequence[int], kept: int) -> None:
        """`RequestError` of code "prefix" unless a session with this prompt can go on from the
        first `kept` tokens of it."""

    def branch(self, kept: int) -> Self:
        """Return what a session that begins with the first `kept` tokens goes on from, and leave
        this one as it is."""


LeftT = TypeVar("LeftT", bound=Left)


class KeptSessions(Generic[LeftT]):
    """The logs and rows of sessions that have ended, by their numbers, the oldest first."""

    def __init__(self, most_tokens: int, beside: int = 0) -> None:
        """`most_tokens`: of all logs together; each session counts `beside` additional tokens."""
        self._most_tokens, self._beside = most_tokens, beside
        self._left: dict[int, LeftT] = {}

    def __len__(self) -> int:
        return len(self._left)

    def __contains__(self, number: int) -> bool:
        return number in self._left

    def takes(self, tokens: int) -> bool:
        """True if a session of this many tokens can be kept."""
        return tokens + self._beside <= self._most_tokens

    def add(self, number: int, left: LeftT) -> None:
        """Keep a session that it `takes`; where there is no room for it, the oldest go."""
        self._left[number] = left
        while self._taken > self._most_tokens:
            del self._left[next(iter(self._left))]

    @property
    def _taken(self) -> int:
        return sum(len(other.log) + self._beside for other in self._left.values())

    def hold(self, number: int, left: LeftT) -> None:
        """Keep an open session whose coordinator has gone, whatever room it takes: it had that when
        it was open. Nothing is kept where nothing was promised."""
        if self._most_tokens and left.there:
            self._left[number] = left

    @property
    def held(self) -> tuple[HeldSession, ...]:
        """Return what can be gone on from, for an introduction."""
        left = [(number, left.there) for number, left in self._left.items() if left.there]
        return tuple(HeldSession(session=number, rows=rows) for number, rows in left[-MAX_HELD:])

    def only(self, numbers: Collection[int]) -> None:
        """Forget all sessions but these."""
        self._left = {number: left for number, left in self._left.items() if number in numbers}

    def drop(self, number: int) -> None:
        """Forget a session; unknown ones are forgotten already."""
        self._left.pop(number, None)

    def clear(self) -> None:
        """Forget all sessions."""
        self._left.clear()

    def base(self, order: Open, open_session: LeftT | None = None) -> LeftT | None:
        """Return the base of a new session: the rows of another, which is then no longer kept, or,
        with `shared`, a branch of that or of `open_session`. None without a base in the command.
        `RequestError` of code "prefix" if the base is missing; then nothing has changed.
        """
        if order.base is None and not order.kept:
            return None
        left = open_session if order.shared and open_session else self._left.get(order.base or 0)
        if left is None:
            name = "no session" if order.base is None else f"session {order.base}"
            raise RequestError(
                "prefix",
                f"{order.kept} tokens were to be taken over from {name}, which is not kept here; "
                "open the session without it",
            )
        left.check(order.prompt, order.kept)
        if order.shared:
            return left.branch(order.kept)
        del self._left[order.base or 0]
        return left


def check_prefix(log: Sequence[int], prompt: Sequence[int], kept: int, *, there: int) -> None:
    """`RequestError` of code "prefix" unless `prompt` goes on behind its first `kept` tokens, which
    are those of `log`, `there` of which have rows."""
    if kept >= len(prompt):
        raise RequestError(
            "prefix",
            f"{kept} tokens were to be taken over for a prompt of {len(prompt)}, whose last "
            "one has to be read; take fewer",
        )
    if kept > there:
        raise RequestError(
            "prefix",
            f"{kept} tokens were to be taken over from a session that has rows of {there}; "
            "take fewer",
        )
    if list(prompt[:kept]) != list(log[:kept]):
        raise RequestError(
            "prefix",
            f"{kept} tokens were to be taken over from a session that begins otherwise than "
            "the prompt; take fewer",
        )


def room_tokens(free_bytes: int, row_bytes: int) -> int:
    """Return how many tokens of `row_bytes` each fit into the part of the free memory that is for
    sessions."""
    return int(ROOM_SHARE * free_bytes) // max(1, row_bytes)


def affordable_tokens(free_bytes: int, row_bytes: int) -> int:
    """The number of tokens whose rows of this many bytes get a share of the free memory."""
    return free_bytes // MEMORY_SHARE // max(1, row_bytes)
