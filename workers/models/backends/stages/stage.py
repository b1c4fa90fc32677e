"""Consecutive layers on one device: resident, or streamed through a few buffers, each copied while
those before it are used, across layers and passes. A buffer is refilled only after its use: section
4.4 of the papers' code omits that, and slow layers then compute with the next one's weights. Layers
may read keys of the stage before, and a device may read prompts for layers on the CPU."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.devices.base import Capture, Mark, Transfer
from dovetail.workers.kernels.layer import DecoderLayer
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.backends.blob import Blob
from dovetail.workers.models.backends.blocked_cache import BlockedCache, CacheLayout
from dovetail.workers.models.backends.placement import BUFFERS
from dovetail.workers.models.backends.stages.engines import (
    Engine,
    Ready,
    Run,
    SettledLayer,
    engine_of,
)
from dovetail.workers.models.backends.stages.span import Span, spans_of
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.models.states import Kept
from dovetail.workers.progress import beat


@dataclass
class StagedPass:
    """The rows of a pass for all stages."""

    positions: Tensor
    segments: Sequence[Segment]
    apart: bool = False  # True if the reader computes the layers on the CPU
    inputs: Tensor | None = None  # the layers' own inputs [rows, width of all]; None: none

    def use_inputs(self, inputs: Tensor) -> None:
        """Set the separate inputs of layers."""
        self.inputs = inputs

    def inputs_of(self, rows: slice) -> Tensor | None:
        """Return the inputs of some rows."""
        return None if self.inputs is None else self.inputs[rows]

    def parts(self, engine: Engine, segments: Sequence[Segment]) -> list[tuple[slice, Any]]:
        """Return the rows of a pass some at a time, as an engine's layers take them."""
        return [
            (rows, engine.see(self.positions[rows], some, self.inputs_of(rows)))
            for rows, some in chunks_of(segments, engine.chunk)
        ]


def part_of(cache: Cache, stage: int) -> Cache:
    if not isinstance(cache, StagedCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    return cache.parts[stage]


def chunks_of(segments: Sequence[Segment], chunk: int) -> Iterator[tuple[slice, Sequence[Segment]]]:
    """Yield the rows of a pass, `chunk` at a time if they belong to one prompt."""
    if len(segments) > 1 or segments[0].paths is not None:
        yield slice(0, sum(segment.count for segment in segments)), segments
        return
    segment = segments[0]
    for first in range(0, segment.count, chunk):
        count, follows = min(chunk, segment.count - first), segment.follows or first > 0
        part = replace(segment, start=segment.start + first, count=count, follows=follows)
        yield slice(first, first + count), [part]


class StagedCache:
    """A session's keys and values, stored on the device of each stage."""

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts
        self.length, self.capacity = 0, parts[0].capacity

    def keep(self, slots: Sequence[int], committed: int) -> None:
        for part in self.parts:
            part.keep(slots, committed)
        self.length += committed

    def truncate(self, length: int) -> None:
        for part in self.parts:
            part.truncate(length)
        self.length = length

    def restorable(self, length: int) -> int:
        while (least := min(part.restorable(length) for part in self.parts)) < length:
            length = least
        return length

    def checkpoint(self) -> None:
        for part in self.parts:
            part.checkpoint()

    def resize(self, capacity: int) -> None:
        for part in self.parts:
            part.resize(capacity)
        self.capacity = capacity

    def branch(self, length: int, *, used: int = 0) -> "StagedCache":
        other = StagedCache([part.branch(length, used=used) for part in self.parts])
        other.length = other.capacity = length
        return other

    @property
    def branches(self) -> bool:
        return all(part.branches for part in self.parts)

    @property
    def base_bytes(self) -> int:
        return sum(part.base_bytes for part in self.parts)

    @property
    def row_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)


class Ring:
    """Blobs used cyclically, in fewer buffers than there are blobs."""

    def __init__(self, transfer: Transfer, blobs: Sequence[Tensor], buffers: int) -> None:
        """blobs: uint8, pinned by their owner; `buffers`: at most as many."""
        if not 1 <= buffers <= len(blobs):
            raise ValueError(f"{buffers} buffers for {len(blobs)} blobs")
        self._transfer, self._blobs = transfer, blobs
        largest = max(blob.numel() for blob in blobs)
        self._buffers = [transfer.buffer(largest) for _ in range(buffers)]
        self._made: dict[tuple[int, int], Run] = {}  # layers by blob and buffer
        self._turn = 0  # blobs so far: the next is blobs[turn % blobs], in buffers[turn % buffers]
        self.copied_bytes = 0
        start = transfer.computed()
        self._filled = [self._fetch(turn, start) for turn in range(buffers)]

    @contextmanager
    def next(self, blob: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of a blob's buffer and the blob in it, for use within the block."""
        while self._turn % len(self._blobs) != blob:  # after a pass that failed half-way
            self._move_on()
        slot = self._turn % len(self._buffers)
        self._transfer.wait(self._filled[slot])
        try:
            yield slot, self._buffers[slot][: self._blobs[blob].numel()]
        finally:
            self._move_on()

    @contextmanager
    def layer(self, ready: Ready, blob: int) -> Iterator[Run]:
        """Yield a layer with its blob, made once for each of the buffers."""
        with self.next(blob) as (slot, memory):
            if (blob, slot) not in self._made:
                self._made[blob, slot] = ready.at(memory)
            yield self._made[blob, slot]

    def _move_on(self) -> None:
        """Advance to the next blob, and fetch the blob that follows in its buffer."""
        slot = self._turn % len(self._buffers)
        if len(self._buffers) < len(self._blobs):
            following = self._turn + len(self._buffers)
            self._filled[slot] = self._fetch(following, self._transfer.computed())
        self._turn += 1

    def _fetch(self, turn: int, after: Mark) -> Mark:
        source, buffer = self._blobs[turn % len(self._blobs)], turn % len(self._buffers)
        self.copied_bytes += source.numel()
        return self._transfer.copy(source, self._buffers[buffer][: source.numel()], after)


class Stage:
    """Some consecutive layers on one device."""

    def __init__(self, number: int, first: int, engine: Engine, transfer: Transfer | None) -> None:
        """`transfer`: of a device next to the CPU."""
        self.engine = engine
        self._number, self._first, self._transfer = number, first, transfer
        self.layout = CacheLayout()
        self._layers: list[Run | Ready] = []
        self._blobs: list[Tensor] = []  # the numbers of the layers that are streamed
        self._ring: Ring | None = None
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
        layers = enumerate(self._layers)
        return {index: layer for index, layer in layers if isinstance(layer, SettledLayer)}

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

    @property
    def stop(self) -> int:
        """Return the number of the layer after the last one."""
        return self._first + len(self._layers)

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
            parts = seen.parts(self.engine, own) if parts is None else parts
            kept.keep(self._first + index, states)
            if callable(layer):
                run_parts(layer, parts, states)
            else:
                assert self._ring is not None
                with self._ring.layer(layer, streamed) as run:
                    run_parts(run, parts, states)
                streamed += 1
            index += 1
        beat()
        return states.to(self.engine.device)

    def _bring(self, segment: Segment) -> None:
        """Copy the rows of a session written by the stage before, for layers here that read
        them."""
        before, own = (part_of(segment.cache, self._number - back) for back in (1, 0))
        assert isinstance(before, BlockedCache)
        assert isinstance(own, BlockedCache | KVCache)
        for source, target in self._mirrored:
            key, value = before.read(source, segment.start, segment.start + segment.count)
            own.write(target, key, value, segment.start)


def run_parts(layer: Run, parts: Sequence[tuple[slice, Any]], states: Tensor) -> None:
    for rows, seen in parts:
        if rows.start:
            beat()
        layer(seen, states[rows])


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

    def _by_itself(self, plan: LayerPlan) -> LayerPlan:
        """Return a layer in a cache of its own, or of the layer whose keys it reads."""
        layout = CacheLayout()
        if plan.reads is not None:
            layout.take(self._plans[plan.reads])
        return layout.take(plan)

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """states [T, hidden] of the first T rows of a session, once they are on the CPU."""
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
            own = caches.get(index if reads is None else reads)
            own = own or self._new_cache(index, segment.count)
            parts = seen.parts(self._engine, [replace(segment, cache=own)])
            with self._ring.layer(layer, index) as run:
                run_parts(run, parts, there)
            self._engine.hand_over(own, cache, self._placed[index], segment.count)
        return there.to(states.device)

    def _new_cache(self, layer: int, rows: int) -> Cache:
        """Return an empty cache of one layer."""
        return self._engine.new_cache([self._alone[layer]], rows, self._cache)
