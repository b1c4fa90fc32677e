"""Consecutive layers on one device: resident or streamed; they may read keys of the stage
before."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.devices.base import Capture, Transfer
from dovetail.workers.kernels.layer import DecoderLayer
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.backends.blob import Blob
from dovetail.workers.models.backends.blocked_cache import BlockedCache, CacheLayout
from dovetail.workers.models.backends.placement import BUFFERS
from dovetail.workers.models.backends.stages.cache import StagedPass, part_of
from dovetail.workers.models.backends.stages.engines import Engine, Ready, Run, SettledLayer
from dovetail.workers.models.backends.stages.span import Span, spans_of
from dovetail.workers.models.backends.stages.streaming import Ring
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.models.states import Kept
from dovetail.workers.progress import beat


class Stage:
    """Some layers in a row on one device."""

    def __init__(self, number: int, first: int, engine: Engine, transfer: Transfer | None) -> None:
        """`transfer`: of a device next to the CPU."""
        self.engine = engine
        self._number, self._first, self._transfer = number, first, transfer
        self.layout = CacheLayout()
        self._layers: list[Run | Ready] = []
        self._blobs: list[Tensor] = []  # the numbers of the layers that are streamed
        self._ring: Ring | None = None
        self._made: dict[tuple[int, int], Run] = {}
        self._spans: Mapping[int, Span] = {}  # layers that are captured, by the first of them
        self._mirrored: list[tuple[int, int]] = []
        """Places of mirrored layers in the caches of the stage before and of this one."""

    def take(self, plan: LayerPlan, blob: Blob, *, streamed: bool) -> None:
        """The next layer of the stage."""
        ready = self.engine.prepare(self.layout.take(plan), blob)
        if streamed:
            assert self._transfer is not None
            self._transfer.pin(blob.memory)
            self._layers.append(ready)
            self._blobs.append(blob.memory)
        else:
            self._layers.append(ready.settled(blob.memory.to(self.engine.device)))

    @property
    def settled(self) -> Mapping[int, SettledLayer]:
        """Number in this stage -> layer whose weights stay and which torch computes."""
        return {
            index: layer
            for index, layer in enumerate(self._layers)
            if isinstance(layer, SettledLayer)
        }

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """Return the layers that the C++ kernels compute."""
        runs = {index: layer for index, layer in enumerate(self._layers) if callable(layer)}
        owners = {index: getattr(run, "__self__", None) for index, run in runs.items()}
        return {index: owner for index, owner in owners.items() if isinstance(owner, DecoderLayer)}

    def finish(self, capture: Capture | None, cache: torch.dtype) -> None:
        """Fetch the first streamed layers, and find layers to capture, once all are there."""
        if not self._mirrored:
            plans = self.layout.plans
            self._spans = spans_of(self._layers, plans, self.engine, capture, cache)
        if self._blobs:
            assert self._transfer is not None
            self._ring = Ring(self._transfer, self._blobs, min(BUFFERS, len(self._blobs)))

    def new_cache(self, capacity: int, dtype: torch.dtype) -> Cache:
        """Return an empty cache for `capacity` rows."""
        return self.engine.new_cache(self.layout.plans, capacity, dtype)

    def mirror(self, layer: int, before: CacheLayout) -> None:
        """Mirror the keys and values of a layer of the stage before."""
        source = before.caching(layer)
        own = self.layout.take(replace(source, index=layer))
        self._mirrored.append((source.index, own.index))

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """states [T, hidden] through all layers, on the stage's device."""
        for segment in seen.segments if self._mirrored else ():
            self._bring(segment)
        parts: list[tuple[slice, Any]] | None = None
        own = [replace(one, cache=part_of(one.cache, self._number)) for one in seen.segments]
        index = streamed = 0
        while index < len(self._layers):
            beat()
            span = self._spans.get(index)
            if span is not None and seen.inputs is None and span.covers(states, own):
                states = span.run(states, seen.positions, own, kept, self._first + index)
                index = span.stop
                continue
            layer, states = self._layers[index], states.to(self.engine.device)
            parts = self._parts(seen) if parts is None else parts
            kept.keep(self._first + index, states)
            if callable(layer):
                run_parts(layer, parts, states)
            else:
                with self._fetched(layer, streamed) as run:
                    run_parts(run, parts, states)
                streamed += 1
            index += 1
        beat()
        return states.to(self.engine.device)

    def _parts(self, seen: StagedPass) -> list[tuple[slice, Any]]:
        """Return the rows of a pass, some at a time, as the layers take them."""
        return [
            (rows, self.engine.see(seen.positions[rows], segments, seen.inputs_of(rows)))
            for rows, segments in seen.parts(self._number, self.engine.chunk)
        ]

    def _bring(self, segment: Segment) -> None:
        """Copy the rows of a session written by the stage before, for layers here that read
        them."""
        before, own = (part_of(segment.cache, self._number - back) for back in (1, 0))
        assert isinstance(before, BlockedCache)
        assert isinstance(own, BlockedCache | KVCache)
        for source, target in self._mirrored:
            key, value = before.read(source, segment.start, segment.start + segment.count)
            own.write(target, key, value, segment.start)

    @contextmanager
    def _fetched(self, layer: Ready, streamed: int) -> Iterator[Run]:
        """A streamed layer, the stage's n-th, with its weights."""
        assert self._ring is not None
        with self._ring.next(streamed) as (slot, memory):
            yield made_once(self._made, layer, streamed, slot, memory)


def made_once(
    made: dict[tuple[int, int], Run], layer: Ready, index: int, slot: int, memory: Tensor
) -> Run:
    """A layer in a buffer, made once for each of the buffers."""
    if (index, slot) not in made:
        made[index, slot] = layer.at(memory)
    return made[index, slot]


def run_parts(layer: Run, parts: Sequence[tuple[slice, Any]], states: Tensor) -> None:
    for rows, seen in parts:
        if rows.start:
            beat()
        layer(seen, states[rows])
