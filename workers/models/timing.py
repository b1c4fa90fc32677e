"""Times the matrices, the attention and the head of a pass, if the thread that computes it asks.
The kernels add up the parts of a layer themselves; torch's are timed from outside, on the CPU
only."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64
from typing import Any, Literal

from torch import nn

Part = Literal["linears", "attention", "head"]
LINEARS, ATTENTION, EXPERTS, HEAD = range(4)
PLACES: dict[Part, int] = {"linears": LINEARS, "attention": ATTENTION, "head": HEAD}


class TimedParts:
    """Times of a pass's parts over all layers, and the experts that it used."""

    def __init__(self) -> None:
        self._added = (c_int64 * (HEAD + 1))()

    @property
    def layers(self) -> int:
        """Return the address where kernels add int64: ns of matrices, ns of attention, experts."""
        return addressof(self._added)

    @property
    def experts(self) -> int:
        """Return how many experts the pass used, summed over layers."""
        return self._added[EXPERTS]

    def add(self, part: Part, duration_ns: int) -> None:
        self._added[PLACES[part]] += duration_ns

    def ns(self, part: Part) -> int:
        return self._added[PLACES[part]]


class _TimedThread(threading.local):
    parts: TimedParts | None = None


_thread = _TimedThread()


def asked() -> TimedParts | None:
    """Return the totals of the parts of this thread's pass; None if nobody asks for them."""
    return _thread.parts


@contextmanager
def timed() -> Iterator[TimedParts]:
    """Collect the times of the parts computed in this block."""
    before, parts = _thread.parts, TimedParts()
    _thread.parts = parts
    try:
        yield parts
    finally:
        _thread.parts = before


@contextmanager
def timing(part: Part) -> Iterator[None]:
    """Count this block as such a part."""
    if (parts := _thread.parts) is None:
        yield
        return
    began_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        parts.add(part, time.perf_counter_ns() - began_ns)


@contextmanager
def timing_modules(modules: Sequence[tuple[Part, nn.Module]]) -> Iterator[None]:
    """Count modules as such parts within this block, if anybody asks: hooks exist only then."""
    if (parts := _thread.parts) is None:
        yield
        return
    began_ns = [0]

    def begin(*_: Any) -> None:
        began_ns[0] = time.perf_counter_ns()

    handles = []
    for part, module in modules:

        def end(*_: Any, part: Part = part) -> None:
            parts.add(part, time.perf_counter_ns() - began_ns[0])

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
