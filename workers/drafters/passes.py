"""Passes of a draft over rows of several sessions.

The rows that a session must compute, of its log or of nodes of its tree, are a `Reading`: a
generator that yields its rows part by part and receives the results. Parts of one kind share a
pass."""

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.workers.devices.memory import is_out_of_memory, without_graphs
from dovetail.workers.heads.reduced.recent import RecentRows
from dovetail.workers.models.backends.device.levels import AskedRows
from dovetail.workers.speculation.growth import Nodes

EMPTY = torch.empty(0)
ResultT = TypeVar("ResultT")


Steps = Generator[Any, Any, Tensor]
"""Yields parts, receives the result of each, and returns logits [N, V]."""
Compute = Callable[[Sequence[Any]], Sequence[Any]]  # parts of one kind -> the result of each


@dataclass
class Reading:
    """The rows of one session that are being computed: of its log, or of `nodes`."""

    nodes: Nodes
    begin: Callable[[], Steps]
    since_ns: int = 0  # when its first pass began
    rows: int = 0  # all rows of its passes, including those of other sessions
    logits: Tensor | None = None  # [N, V] after the nodes, once computed
    error: Exception | None = None  # the exception that it failed with
    part: Any = None  # the part that it needs next
    _steps: Steps | None = field(default=None, repr=False)

    @property
    def over(self) -> bool:
        """Whether it has finished or failed."""
        return self.logits is not None or self.error is not None

    def go_on(self, found: Any = None) -> None:
        """Advance to the next part, with the result of the last one."""
        try:
            if self._steps is None:
                self._steps = self.begin()
            self.part = self._steps.send(found)
        except StopIteration as end:
            self.part, self.logits = None, end.value
        except Exception as error:
            self.part, self.error = None, error


def read_together(readings: Sequence[Reading], compute: Compute, now_ns: int) -> None:
    """Compute the next part of each unfinished reading; one that fails does not affect the others.
    A reading that does not fit into memory even alone fails; the others try again in the next pass,
    once its memory is freed. `now_ns`: when this began."""
    for reading in readings:
        if reading.part is None:
            reading.since_ns = now_ns
            reading.go_on()
    kinds: dict[Hashable, list[Reading]] = {}
    for reading in readings:
        if reading.part is not None:
            kinds.setdefault(reading.part.kind, []).append(reading)
    asked = [reading for alike in kinds.values() for reading in alike]
    rows = sum(reading.part.count for reading in asked)
    for reading in asked:
        reading.rows += rows
    for alike in kinds.values():
        if not _pass(alike, compute):
            break


def _pass(readings: Sequence[Reading], compute: Compute) -> bool:
    """Compute a part of each in one pass. If that fails, because of one session or a lack of
    memory, retry each half separately. Return False if there is not enough memory for a single
    one."""
    found: Sequence[Any] | None = None
    try:
        found = without_graphs(lambda: compute([reading.part for reading in readings]))
    except Exception as error:
        if len(readings) == 1:
            readings[0].part, readings[0].error = None, error
            return not is_out_of_memory(error)
    if found is None:  # memory held by the exception is free by now
        half = len(readings) // 2
        return _pass(readings[:half], compute) and _pass(readings[half:], compute)
    for reading, its in zip(readings, found, strict=True):
        reading.go_on(its)
    return True


def read_alone(steps: Generator[Any, Any, ResultT], compute: Compute) -> ResultT:
    """Run `steps` with a pass for each part, and return their result."""
    try:
        part = next(steps)
        while True:
            (found,) = without_graphs(partial(compute, [part]))
            part = steps.send(found)
    except StopIteration as end:
        result: ResultT = end.value
        return result


@dataclass(frozen=True)
class Rows(AskedRows):
    """Rows of one session for a model or a head."""

    kind: Hashable = None
    features: Tensor = EMPTY  # [N, W], for a head
    recent: RecentRows | None = None  # the session's own tokens, for a reduced output head

    @property
    def count(self) -> int:
        return self.tokens.shape[0]  # which is faster than len()


def wanted_rows(parts: Sequence[Rows]) -> Tensor | None:
    """Return the indices of the requested rows of a pass, int64; None: all of them."""
    if all(part.wanted == part.count for part in parts):
        return None
    stops = accumulate(part.count for part in parts)
    return torch.cat(
        [torch.arange(stop - part.wanted, stop) for part, stop in zip(parts, stops, strict=True)]
    )
