"""Prompts that a device reads for layers that lie on the CPU."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dovetail.workers.devices.base import Transfer
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.backends.blob import Blob
from dovetail.workers.models.backends.blocked_cache import BlockedCache, CacheLayout
from dovetail.workers.models.backends.placement import BUFFERS
from dovetail.workers.models.backends.stages.cache import StagedPass, chunks_of, part_of
from dovetail.workers.models.backends.stages.engines import Run, engine_of
from dovetail.workers.models.backends.stages.stage import made_once, run_parts
from dovetail.workers.models.backends.stages.streaming import Ring
from dovetail.workers.models.segment import Cache
from dovetail.workers.models.states import Kept
from dovetail.workers.progress import beat


class PromptReader:
    """Reads a prompt on a device for layers on the CPU: weights stream in, keys and values come
    back."""

    def __init__(
        self, transfer: Transfer, layers: Sequence[tuple[LayerPlan, Blob]], cache: torch.dtype
    ) -> None:
        """`cache`: the type of keys and values."""
        self._engine, self._cache = engine_of(transfer), cache
        for _, blob in layers:
            transfer.pin(blob.memory)
        self._plans, together = [plan for plan, _ in layers], CacheLayout()
        self._placed = [together.take(plan) for plan in self._plans]
        self._alone = [self._by_itself(plan) for plan in self._plans]
        self._layers = [
            self._engine.prepare(plan, blob)
            for plan, (_, blob) in zip(self._alone, layers, strict=True)
        ]
        self._ring = Ring(transfer, [blob.memory for _, blob in layers], min(BUFFERS, len(layers)))
        self._made: dict[tuple[int, int], Run] = {}

    def _by_itself(self, plan: LayerPlan) -> LayerPlan:
        """Return a layer in a cache of its own, or of the layer whose keys it reads."""
        layout = CacheLayout()
        if plan.reads is not None:
            layout.take(self._plans[plan.reads])
        return layout.take(plan)

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """states [T, hidden] of the first T rows of a session, as they arrived on the CPU."""
        (segment,) = seen.segments
        cache = part_of(segment.cache, 0)
        assert isinstance(cache, BlockedCache)
        there = states.to(self._engine.device)
        read_again = {plan.reads for plan in self._plans if plan.reads is not None}
        caches = {layer: self._new_cache(layer, segment.count) for layer in read_again}
        for index, layer in enumerate(self._layers):
            beat()
            kept.keep(index, there)
            reads = self._plans[index].reads
            own = caches.get(index if reads is None else reads) or self._new_cache(
                index, segment.count
            )
            parts = [
                (rows, self._engine.see(seen.positions[rows], part, seen.inputs_of(rows)))
                for rows, part in chunks_of([replace(segment, cache=own)], self._engine.chunk)
            ]
            with self._ring.next(index) as (slot, memory):
                run_parts(made_once(self._made, layer, index, slot, memory), parts, there)
            self._engine.hand_over(own, cache, self._placed[index], segment.count)
        return there.to(states.device)

    def _new_cache(self, layer: int, rows: int) -> Cache:
        """Return an empty cache of one layer."""
        return self._engine.new_cache([self._alone[layer]], rows, self._cache)
