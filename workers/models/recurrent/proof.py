"""A layer with a state in its proof: transformers' results row by row, and together."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dovetail.workers.models import transformers
from dovetail.workers.models.checkpoints.configured import quiet
from dovetail.workers.models.parity.following import Call, first_of

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle


def run_recurrently(oracle: "Oracle", layer: nn.Module, index: int, states: Tensor) -> Tensor:
    """Return transformers' layer of states [count, hidden], row by row."""
    cache, rows = transformers.DynamicCache(config=oracle.config), []
    call = oracle.arranged(index, cache)
    with oracle.eagerly(layer), quiet():
        for row, state in enumerate(states):
            args, kwargs = _of_row(call, row, len(states)).of(state.view(1, 1, -1))
            rows.append(first_of(layer(*args, **kwargs)))
    return torch.cat(rows)


def run_together(oracle: "Oracle", layer: nn.Module, index: int, states: Tensor) -> Tensor:
    """Return transformers' layer of states [count, hidden], all at once."""
    with oracle.eagerly(layer), quiet():
        args, kwargs = oracle.arranged(index, None).of(states.unsqueeze(0))
        return first_of(layer(*args, **kwargs))


def _of_row(call: Call, row: int, count: int) -> Call:
    """Return the call of a layer for one of its `count` rows, after those before it."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        if not isinstance(value, Tensor):
            return value
        if value.ndim == 4 and tuple(value.shape[-2:]) == (count, count):
            return value[:, :, row : row + 1, : row + 1]
        if value.ndim >= 2 and value.shape[1] == count:
            return value[:, row : row + 1]
        return value

    return Call(
        tuple(map(cut, call.args)), {name: cut(value) for name, value in call.kwargs.items()}
    )
