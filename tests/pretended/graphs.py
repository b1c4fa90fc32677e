"""Graphs of the pretended device, recorded operation by operation and replayed on the same
memory."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from pretended import counts
from pretended.memory import MEMORY
from pretended.recording import Recorded, recorded
from pretended.rules import NAME
from pretended.tensors import Elsewhere
from pretended.times import CLOCK
from pretended.values import values_in

ResultT = TypeVar("ResultT")


def capture(function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Capture `function` as a CUDA graph is captured; returns what replays it.

    `function` is run once before; while it is captured it may neither meet a tensor of the CPU nor
    ask for a number. The result is always the same tensors, and a replay reads and writes whatever
    `function` read and wrote when it was captured.
    """
    before = MEMORY.most = MEMORY.used
    function()
    needed = MEMORY.most - before
    began = CLOCK.seconds
    with recorded() as graph:
        result = function()
    seconds = CLOCK.seconds - began
    own, pool, moved = _own(graph, result), _pool(), sum(one.moved for one in graph)
    pool.hold(needed)

    @torch.inference_mode()
    def replay() -> ResultT:
        counts.add(launches=1, moved=moved)
        CLOCK.seconds += seconds
        pool.begin(own)
        for operation in graph:
            operation.replay()
        return result

    with torch.inference_mode():
        _spoil(own)  # a capture computes nothing: only a replay does
    return replay


class _Pool:
    """The memory that all graphs share, since they are replayed one after the other."""

    def __init__(self) -> None:
        self._size = 0
        self._last: Sequence[Tensor] = ()
        """The results of the graph that was replayed last."""

    def hold(self, size: int) -> None:
        """Have so many bytes at least; `torch.OutOfMemoryError` where they are not there."""
        if size > self._size:
            MEMORY.take(size - self._size, self)
            self._size = size

    def begin(self, own: Sequence[Tensor]) -> None:
        """Note that a graph with these results is replayed: those of another are overwritten."""
        if self._last is not own:
            _spoil(self._last)
            self._last = own


_pools: weakref.WeakValueDictionary[str, _Pool] = weakref.WeakValueDictionary()


def _pool() -> _Pool:
    """Return the memory of all graphs that live."""
    return _pools.setdefault(NAME, _Pool())


def _own(graph: Sequence[Recorded], result: Any) -> Sequence[Tensor]:
    """Return the tensors of a result that lie in the memory of their graph."""
    if is_dataclass(result):
        result = [getattr(result, field.name) for field in fields(result)]
    given: set[int] = set()
    made: set[int] = set()
    for operation in graph:
        arguments = values_in((operation.args, operation.kwargs))
        given |= {_memory(t) for t in arguments if isinstance(t, Tensor)} - made
        made |= {_memory(t) for t in operation.results} - given
    found = values_in(result)
    return [t.held for t in found if isinstance(t, Elsewhere) and _memory(t.held) in made]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
