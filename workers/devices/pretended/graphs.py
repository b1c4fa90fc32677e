"""Graphs of the pretended device, recorded operation by operation and replayed on the same
memory."""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from dovetail.workers.devices.pretended import counts
from dovetail.workers.devices.pretended.memory import MEMORY
from dovetail.workers.devices.pretended.recording import recorded
from dovetail.workers.devices.pretended.tensors import Elsewhere

ResultT = TypeVar("ResultT")


def capture(function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Capture `function` as a CUDA graph is captured; returns what replays it.

    It is run once before, and while it is captured it may neither meet a tensor of the CPU nor ask
    for a number. The result is always the same tensors, and whatever `function` read or wrote when
    it was captured is what a replay reads and writes.
    """
    before = MEMORY.most = MEMORY.used
    function()
    needed = MEMORY.most - before
    with recorded() as graph:
        result = function()

    @torch.inference_mode()
    def replay() -> ResultT:
        counts.add(launches=1)
        for operation in graph:
            operation.replay()
        return result

    MEMORY.take(needed, replay)
    with torch.inference_mode():
        for tensor in _floats(result):
            tensor.fill_(float("nan"))  # a capture computes nothing: only a replay does
    return replay


def _floats(result: Any) -> Sequence[Tensor]:
    """Return the float tensors of what a captured function returned."""
    if is_dataclass(result):
        result = [getattr(result, field.name) for field in fields(result)]
    found = tree_flatten(result)[0]
    return [t.held for t in found if isinstance(t, Elsewhere) and t.is_floating_point()]
