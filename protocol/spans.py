"""Intervals on a monotonic clock, and the offset between two machines' clocks.

A span is (name, start_ns, duration_ns) on the clock of the process that measured it. Only durations decide anything; offsets serve display.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Span = tuple[str, int, int]


class Spans:
    """Records spans until they are taken away with the next event."""

    def __init__(self) -> None:
        self._spans: list[Span] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic_ns())

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        self._spans.append((name, start_ns, end_ns - start_ns))

    def take(self, limit: int) -> tuple[Span, ...]:
        """The spans since the last call, at most the newest `limit` of them."""
        spans, self._spans = tuple(self._spans[max(0, len(self._spans) - limit) :]), []
        return spans


@dataclass
class ClockOffset:
    """How far a peer's monotonic clock is ahead of ours, from the fastest of the last probes.

    The true offset lies within `bound_ns` of `offset_ns`: half the round trip of the probe that it came from (Cristian, 1989).
    """

    keep: int = 32
    _samples: list[tuple[int, int]] = field(default_factory=list)

    def add(self, sent_ns: int, peer_ns: int, received_ns: int) -> None:
        round_trip = received_ns - sent_ns
        self._samples = [*self._samples, (round_trip, peer_ns - (sent_ns + received_ns) // 2)][-self.keep :]

    @property
    def known(self) -> bool:
        return bool(self._samples)

    @property
    def offset_ns(self) -> int:
        return min(self._samples)[1] if self._samples else 0

    @property
    def bound_ns(self) -> int:
        return min(self._samples)[0] // 2 if self._samples else 0

    def to_ours(self, peer_ns: int) -> int:
        return peer_ns - self.offset_ns
