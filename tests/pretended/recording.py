"""The graph that a thread captures: operations, one behind the other."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pretended.values import values_in


@dataclass(frozen=True)
class Recorded:
    """An operation of a graph: what it is called with, and the tensors that its results go to."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Sequence[Tensor]
    moved: int
    """The bytes that it reads and writes (`traffic.py`)."""

    def replay(self) -> None:
        """Do the operation once more, on the same memory."""
        found = values_in(self.call(*self.args, **self.kwargs))
        for old, new in zip(self.results, (r for r in found if isinstance(r, Tensor)), strict=True):
            if new.data_ptr() != old.data_ptr():
                old.copy_(new)


_thread = threading.local()


def recording() -> list[Recorded] | None:
    """Return the graph that this thread captures; None: it captures none."""
    return getattr(_thread, "graph", None)


@contextmanager
def recorded() -> Iterator[list[Recorded]]:
    """Have all that this thread asks of the device within the block become a graph."""
    graph: list[Recorded] = []
    _thread.graph = graph
    try:
        yield graph
    finally:
        _thread.graph = None
