"""A layer with a state in its proof: what transformers computes of rows one after the other, and
the same rows as a chain and by their paths."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import CacheRows, new_cache
from dovetail.workers.kernels.layer_plan import Paths as KernelPaths
from dovetail.workers.models.checkpoints.configured import quiet
from dovetail.workers.models.lean import DynamicCache
from dovetail.workers.models.parity.following import first_of
from dovetail.workers.models.recurrent.states import RecurrentStates

if TYPE_CHECKING:
    from dovetail.workers.models.parity.oracle import Oracle


def run_recurrently(oracle: "Oracle", layer: nn.Module, index: int, states: Tensor) -> Tensor:
    """Return what transformers' layer makes of states [count, hidden] one after the other, by the
    function that it has for one row at a time."""
    cache, rows = DynamicCache(config=oracle.config), []
    with oracle.eagerly(layer), quiet():
        for row in states:
            args, kwargs = oracle.arranged(index, cache).of(row.view(1, 1, -1))
            rows.append(first_of(layer(*args, **kwargs)))
    return torch.cat(rows)


def run_together(oracle: "Oracle", layer: nn.Module, index: int, states: Tensor) -> Tensor:
    """Return what transformers' layer makes of states [count, hidden] by the function that it has
    for many rows."""
    with oracle.eagerly(layer), quiet():
        args, kwargs = oracle.arranged(index, None).of(states.unsqueeze(0))
        return first_of(layer(*args, **kwargs))


def run_states(layer: DecoderLayer, states: Tensor, dense: int) -> None:
    """Run a layer on states [dense + count, hidden], in place: the first `dense` rows as a chain,
    and all `count` as the path of a session of their own."""
    count = len(states) - dense
    assert layer.plan.scan is not None
    shapes = [layer.plan.scan.shape]
    path = list(range(count))
    segments = [
        _rows(RecurrentStates(shapes), dense, None),
        _rows(RecurrentStates(shapes), count, [path[: row + 1] for row in path]),
    ]
    layer.run(LayerPass(torch.zeros(len(states), dtype=torch.int64), segments), states)


def _rows(states: RecurrentStates, count: int, paths: Sequence[Sequence[int]] | None) -> CacheRows:
    keys, values = new_cache(layers=1, kv_heads=1, head_dim=1, capacity=count)
    seen = None
    if paths is not None:
        offsets = torch.tensor([0, *(len(path) for path in paths)]).cumsum(0).int()
        seen = KernelPaths(0, offsets, torch.tensor([s for path in paths for s in path]).int())
    rows = states.rows(0, 0, count, chain=paths is None)
    return CacheRows(keys, values, 0, count, seen, rows)
