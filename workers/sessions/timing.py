"""The fine spans of a pass of the target: matrices, attention, the rest, the head.

They alternate from layer to layer; the sum of each is reported as one span, one after the other
from the start of the pass, so that they end with it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.protocol.spans import Spans
from dovetail.workers.models.timing import PLACES, TimedParts, timed


@contextmanager
def timed_pass(spans: Spans, *, counted: bool = False) -> Iterator[TimedParts | None]:
    """Measure the block, which is a pass, and record the seconds of its parts if they are known and
    fine spans are recorded. `counted`: count its experts in any case."""
    if not spans.fine and not counted:
        yield None
        return
    began_ns = time.monotonic_ns()
    with timed() as parts:
        yield parts
    if not spans.fine:
        return
    ended_ns = time.monotonic_ns()
    known = {part: parts.ns(part) for part in PLACES}
    if not known["linears"]:
        return
    other = max(0, ended_ns - began_ns - sum(known.values()))
    for name, duration_ns in (
        ("linears", known["linears"]),
        ("attention", known["attention"]),
        ("other", other),
        ("head", known["head"]),
    ):
        spans.add(name, began_ns, began_ns + duration_ns)
        began_ns += duration_ns
