"""The queue of requests that wait for room on a target, fair by API key. Pure: times are arguments.

A key is charged the tokens that it holds on targets or that it received recently, whichever is
more, minus some for each second that it has waited: since its first waiting request arrived, or
since its last request began, whichever is later. So a key with many requests ages no faster than
one with few. The first request of the key with the lowest charge is next, so none waits for ever.
Requests of one key keep their order, except that those waiting for something other than room are
overtaken. Other keys may overtake a request that does not fit yet, but not for long."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

AGEING = 256.0  # tokens deducted from a key's charge for each second that it has waited
HALF_LIFE_S = 30.0  # the half-life of the tokens that a key has received
PASSED_S = 10.0  # a request that has waited this long is no longer overtaken

MOST_PASSED = 8  # the most requests of a key that are overtaken: each is checked at every event

T = TypeVar("T")


@dataclass(frozen=True)
class Waiting(Generic[T]):
    """A request in the queue."""

    key: str
    since_ns: int
    what: T


@dataclass(frozen=True)
class KeyQueue(Generic[T]):
    """The waiting requests of one key: their number, the first, and how long that has waited."""

    key: str
    length: int
    first: T
    longest_s: float


class FairQueue(Generic[T]):
    """The waiting requests, by API key."""

    def __init__(self, most: int, most_of_key: int) -> None:
        """`most`: the limit of waiting requests; `most_of_key`: the limit for one key."""
        self._most, self._most_of_key = most, most_of_key
        self._waiting: dict[str, list[Waiting[T]]] = {}  # by key: its requests, in order of arrival
        self._given: dict[str, tuple[float, int]] = {}
        """By key: its tokens, halved every `HALF_LIFE_S`, and their time in ns."""
        self._begun: dict[str, int] = {}
        """By key of `_given`: when the last of its requests began, in ns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[T]:
        return (waiting.what for own in self._waiting.values() for waiting in own)

    def full(self, key: str) -> str:
        """Return why another request of this key cannot wait; empty if it can."""
        if len(self) >= self._most:
            return f"{self._most} requests wait, the limit (coordinator.queue)"
        if len(self._waiting.get(key, ())) >= self._most_of_key:
            return (
                f"{self._most_of_key} requests of this API key wait, the limit "
                "(coordinator.key_queue)"
            )
        return ""

    def add(self, key: str, what: T, now_ns: int) -> None:
        """Add a request to the queue."""
        self._waiting.setdefault(key, []).append(Waiting(key, now_ns, what))

    def given(self, key: str, tokens: int, now_ns: int) -> None:
        """Note that a request of this key has begun, which may take up to `tokens`."""
        late = {key: (self._of_late(key, now_ns), now_ns) for key in self._given}
        self._given = {key: known for key, known in late.items() if known[0] >= 1.0}
        self._given[key] = self._of_late(key, now_ns) + tokens, now_ns
        self._begun = {key: at for key, at in self._begun.items() if key in self._given}
        self._begun[key] = now_ns

    def _of_late(self, key: str, now_ns: int) -> float:
        """Return the tokens that a key has received, with decay."""
        tokens, at_ns = self._given.get(key, (0.0, now_ns))
        return float(tokens * 0.5 ** ((now_ns - at_ns) / 1e9 / HALF_LIFE_S))

    def take(
        self, fits: Callable[[T], bool | None], held: Mapping[str, int], now_ns: int
    ) -> T | None:
        """Remove and return the next request that fits, or None. `fits` is None for one that waits
        for something other than room. `held`: tokens of each key on targets."""

        def rank(head: Waiting[T]) -> tuple[float, int]:
            tokens = max(held.get(head.key, 0), self._of_late(head.key, now_ns))
            since_ns = max(head.since_ns, self._begun.get(head.key, 0))
            return tokens - AGEING * max(0, now_ns - since_ns) / 1e9, head.since_ns

        for own in sorted(self._waiting.values(), key=lambda own: rank(own[0])):
            for place, waiting in enumerate(own[: MOST_PASSED + 1]):
                if (fitting := fits(waiting.what)) is None:
                    continue
                if fitting:
                    del own[place]
                    if not own:
                        del self._waiting[waiting.key]
                    return waiting.what
                if _s(waiting, now_ns) > PASSED_S:
                    return None
                break
        return None

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Remove the unwanted requests, and return them."""
        gone = [what for what in self if unwanted(what)]
        kept = {
            key: [waiting for waiting in own if not any(waiting.what is what for what in gone)]
            for key, own in self._waiting.items()
        }
        self._waiting = {key: own for key, own in kept.items() if own}
        return gone

    def keys(self, now_ns: int) -> Sequence[KeyQueue[T]]:
        """Return how many requests of each key wait, the longest wait first."""
        found = [
            KeyQueue(key, len(own), own[0].what, _s(own[0], now_ns))
            for key, own in self._waiting.items()
        ]
        return sorted(found, key=lambda queue: -queue.longest_s)


def _s(waiting: Waiting[T], now_ns: int) -> float:
    return max(0, now_ns - waiting.since_ns) / 1e9
