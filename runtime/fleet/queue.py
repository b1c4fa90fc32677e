"""The queue of requests that wait for room, fair by API key. Pure: times are handed in.

Next is a request of the key that holds the fewest tokens on targets, or has been given the fewest
of late; with every second that a request waits it counts as if these were some fewer, so that none
waits for ever. Requests of one
key keep their order. One that there is no room for is passed by others, but not for long.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

AGEING = 256.0
"""Tokens that a request's key counts as holding fewer for each second that it has waited: a few
seconds outweigh an ordinary request."""
HALF_LIFE_S = 30.0
"""After so long what a key has been given counts half."""
PASSED_S = 10.0
"""A request that has waited so long for room is passed by no other any more."""

T = TypeVar("T")


@dataclass(frozen=True)
class Waiting(Generic[T]):
    """A request that waits."""

    key: str
    since_ns: int
    what: T


@dataclass(frozen=True)
class KeyQueue:
    """The requests of one key that wait: how many, and for how long the first has."""

    key: str
    length: int
    longest_s: float


class FairQueue(Generic[T]):
    """Requests that wait, by their keys."""

    def __init__(self, most: int, most_of_key: int) -> None:
        """`most`: that may wait; `most_of_key`: of one key."""
        self._most, self._most_of_key = most, most_of_key
        self._waiting: dict[str, list[Waiting[T]]] = {}
        """By key, in the order in which they came."""
        self._given: dict[str, tuple[float, int]] = {}
        """By key: tokens that it has been given, as they counted at a time."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        return (waiting.what for own in self._waiting.values() for waiting in own)

    def full(self, key: str) -> str:
        """Return why one more request of a key cannot wait, in words; empty if it can."""
        if len(self) >= self._most:
            return f"{self._most} requests wait already, the limit (coordinator.queue)"
        if len(self._waiting.get(key, ())) >= self._most_of_key:
            return (
                f"{self._most_of_key} requests of this API key wait already, the limit "
                "(coordinator.key_queue)"
            )
        return ""

    def add(self, key: str, what: T, now_ns: int) -> None:
        """Have a request wait."""
        self._waiting.setdefault(key, []).append(Waiting(key, now_ns, what))

    def given(self, key: str, tokens: int, now_ns: int) -> None:
        """A request of a key that may come to so many tokens has begun."""
        late = {key: (self._of_late(key, now_ns), now_ns) for key in self._given}
        self._given = {key: known for key, known in late.items() if known[0] >= 1.0}
        self._given[key] = self._of_late(key, now_ns) + tokens, now_ns

    def _of_late(self, key: str, now_ns: int) -> float:
        """Return how many tokens a key has been given, those of long ago counted less."""
        tokens, at_ns = self._given.get(key, (0.0, now_ns))
        return float(tokens * 0.5 ** ((now_ns - at_ns) / 1e9 / HALF_LIFE_S))

    def take(self, fits: Callable[[T], bool], held: Mapping[str, int], now_ns: int) -> T | None:
        """Return the request that is next, which waits no longer; None: there is room for none.
        `held`: tokens that each key holds on targets."""

        def rank(head: Waiting[T]) -> tuple[float, int]:
            tokens = max(held.get(head.key, 0), self._of_late(head.key, now_ns))
            return tokens - AGEING * _s(head, now_ns), head.since_ns

        for head in sorted((own[0] for own in self._waiting.values()), key=rank):
            if fits(head.what):
                self.remove(lambda what, head=head: what is head.what)  # type: ignore[misc]
                return head.what
            if _s(head, now_ns) > PASSED_S:
                return None
        return None

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Return the requests that wait no longer."""
        gone = [what for what in self if unwanted(what)]
        kept = {
            key: [waiting for waiting in own if not any(waiting.what is what for what in gone)]
            for key, own in self._waiting.items()
        }
        self._waiting = {key: own for key, own in kept.items() if own}
        return gone

    def keys(self, now_ns: int) -> Sequence[KeyQueue]:
        """Return what waits by key, the longest wait first."""
        found = [KeyQueue(key, len(own), _s(own[0], now_ns)) for key, own in self._waiting.items()]
        return sorted(found, key=lambda queue: -queue.longest_s)


def _s(waiting: Waiting[T], now_ns: int) -> float:
    return max(0, now_ns - waiting.since_ns) / 1e9
