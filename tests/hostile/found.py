"""The record of a victim: how many messages it got, what it did with them, whether the healthy one
beside it noticed, and its memory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

SETTLED = 0.2
"""After this share of the messages, caches are warm and memory is as it will be."""
DEBRIS_MIB = 64
"""The memory that a message of the largest size may leave behind in Python's own heaps."""
HERE = psutil.Process()


@dataclass
class Found:
    """The outcome of the messages that one victim got."""

    victim: str
    messages: int = 0
    refused: int = 0
    """Dropped and counted, or answered with an error: no message, or none that may be said now."""
    hung_up: int = 0
    """Peers that the victim stopped listening to."""
    asked: int = 0
    """Times that the healthy one was looked at; `disturbed`: that it was not as it should be."""
    disturbed: int = 0
    slowest_s: float | None = None
    """The longest that it had to wait, where that is not a matter of the order of things here."""
    faults: list[str] = field(default_factory=list)
    """Whatever was raised that should not have been, and whatever never came."""
    seconds: float = 0.0
    settled_mib: float = 0.0
    peak_mib: float = 0.0
    may_grow_mib: float = DEBRIS_MIB

    @property
    def grown_mib(self) -> float:
        """The growth of memory after the beginning."""
        return max(0.0, self.peak_mib - self.settled_mib)

    @property
    def passed(self) -> bool:
        return (
            not self.faults
            and not self.disturbed
            and self.asked > 0
            and self.grown_mib < self.may_grow_mib
        )

    def look(self, share: float, bytes_now: int | None = None) -> None:
        """Take down the memory in use, this process's where it is not said, when this share of the
        messages has been handled."""
        now_mib = (HERE.memory_info().rss if bytes_now is None else bytes_now) / (1 << 20)
        self.peak_mib = max(self.peak_mib, now_mib)
        if share <= SETTLED:
            self.settled_mib = self.peak_mib


@contextmanager
def faults_of(logger: str) -> Iterator[list[str]]:
    """The tracebacks that a logger is given: faults of ours, however well they were contained. It
    says nothing meanwhile."""
    found: list[str] = []
    handler, chosen = _Tracebacks(found), logging.getLogger(logger)
    before, chosen.propagate = chosen.propagate, False
    chosen.addHandler(handler)
    try:
        yield found
    finally:
        chosen.removeHandler(handler)
        chosen.propagate = before


class _Tracebacks(logging.Handler):
    """Keeps records that have one."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._found.append(logging.Formatter().format(record))
