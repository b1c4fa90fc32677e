"""The kernels back end in stages: the first layers on the CPU, the others and the head on a device,
which keeps some of their weights and has the rest stream through; and prompts that a device reads
for layers that lie on the CPU.

A device that is the CPU itself stands for a GPU: its layers are computed by the same kernels from
the same bytes, so that every token is the same bytes too. On a GPU torch computes them, the same
function up to rounding. A long part of a prompt goes through one layer after the other as a whole,
so that weights are read, and copied, once. Knows placements and transfers; what a layer is, the
other modules know.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dovetail.workers.devices.base import Transfer
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import LANES, DecoderLayer, LayerPass, LayerPlan, Norm, NormKind
from dovetail.workers.models import attention
from dovetail.workers.models.attention import Masks
from dovetail.workers.models.backends.blob import (
    MATRICES,
    Blob,
    Lying,
    Matrix,
    gather,
    hollow,
    plan_at,
    unpack,
)
from dovetail.workers.models.backends.device_layer import (
    Angles,
    DeviceLayer,
    DeviceNorm,
    Rows,
    Turn,
    product,
    rounded_product,
)
from dovetail.workers.models.backends.fused import (
    BlockedCache,
    KernelLinear,
    KernelNorm,
    Kernels,
    cache_rows,
)
from dovetail.workers.models.backends.placement import BUFFERS, Place
from dovetail.workers.models.backends.streaming import Ring
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Segment
from dovetail.workers.models.states import Kept
from dovetail.workers.models.timing import asked
from dovetail.workers.progress import beat

LONG_PROMPT_ROWS = 1 << 15
"""Rows of a prompt that go through a layer before the next one's weights are read: 512 MiB of
states of width 4096."""

GPU_ROWS = 1024
"""Of these, so many at a time on a GPU, where each time the streamed matrices are laid out anew: 90
MB between the matrices of a 7B model's MLP."""

Run = Callable[[Any, Tensor], None]
"""A layer whose weights are there: (the rows of a pass, as its engine sees them; states [T,
hidden]), in place."""


@dataclass(frozen=True)
class Staging:
    """How a model is spread."""

    places: Sequence[Place]
    """Of every layer; those on the CPU come first."""
    transfer: Transfer | None = None
    """The way to the device that computes what is not on the CPU, and the head."""
    reader: Transfer | None = None
    """The way to a device that reads prompts for the layers on the CPU."""


class Ready(Protocol):
    """A layer that lacks its matrices."""

    def at(self, memory: Tensor) -> Run:
        """The layer with a copy of its blob that lies in `memory`, on the device, for as long as it
        lies there."""

    def settled(self, memory: Tensor) -> Run:
        """The layer that stays: of a copy of its blob, which only it holds on to."""


class Engine(Protocol):
    """What computes layers on a device."""

    device: torch.device
    chunk: int
    """Rows of a prompt that a layer computes at a time."""

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        """A layer, but for its matrices."""

    def new_cache(self, layers: int, plan: LayerPlan, capacity: int) -> Cache:
        """An empty cache of so many layers like this one."""

    def see(self, positions: Tensor, segments: Sequence[Segment]) -> Any:
        """The rows of a pass as the layers take them."""

    def hand_over(self, cache: Cache, to: BlockedCache, layer: int, rows: int) -> None:
        """The first rows of a cache of one layer, into a layer of a cache on the CPU."""


@dataclass(frozen=True)
class _KernelReady:
    plan: LayerPlan
    blob: Blob

    def at(self, memory: Tensor) -> Run:
        return DecoderLayer(plan_at(self.plan, self.blob, memory)).run

    settled = at


class KernelEngine:
    """The C++ kernels."""

    chunk = PROMPT_ROWS

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        return _KernelReady(plan, blob)

    def new_cache(self, layers: int, plan: LayerPlan, capacity: int) -> BlockedCache:
        return BlockedCache(
            layers=layers, kv_heads=plan.kv_heads, head_dim=plan.head_dim, capacity=capacity
        )

    def see(self, positions: Tensor, segments: Sequence[Segment]) -> LayerPass:
        rows = LayerPass(positions, [cache_rows(segment) for segment in segments])
        if (parts := asked()) is not None:
            rows.time_parts(parts.layers)
        return rows

    def hand_over(self, cache: Cache, to: BlockedCache, layer: int, rows: int) -> None:
        assert isinstance(cache, BlockedCache)
        blocks = -(-rows // LANES)
        to.keys[layer, :, :blocks] = cache.keys[0, :, :blocks]
        to.values[layer, :, :rows] = cache.values[0, :, :rows]


@dataclass(frozen=True)
class SettledLayer:
    """A layer that stays on a device, with its matrices as torch has them."""

    layer: DeviceLayer
    matrices: Mapping[str, Matrix]

    def __call__(self, rows: Rows, states: Tensor) -> None:
        self.layer.run(rows, states, lambda name, x: product(self.matrices[name], x))


class _TorchReady:
    def __init__(self, plan: LayerPlan, blob: Blob, device: torch.device) -> None:
        self._blob, self._layer = blob, DeviceLayer(plan, device)

    def at(self, memory: Tensor) -> Run:
        """Each matrix is laid out when it is due, so that no more than one is there twice."""
        return lambda rows, states: self._layer.run(
            rows, states, lambda name, x: product(unpack(self._blob.matrices[name], memory), x)
        )

    def settled(self, memory: Tensor) -> Run:
        return SettledLayer(
            self._layer, {name: unpack(self._blob.matrices[name], memory) for name in MATRICES}
        )


class TorchEngine:
    """torch's operations, on a GPU."""

    chunk = GPU_ROWS

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._masks: Masks | None = None
        self._angles: Angles | None = None

    def prepare(self, plan: LayerPlan, blob: Blob) -> Ready:
        if self._angles is None and plan.rotary is not None:
            self._angles = Angles(plan.rotary, self.device)  # a model has one table
        if self._masks is None:
            self._masks = Masks(
                groups=plan.heads // plan.kv_heads, device=self.device, dtype=torch.float32
            )
        return _TorchReady(plan, blob, self.device)

    def new_cache(self, layers: int, plan: LayerPlan, capacity: int) -> KVCache:
        """Of zeros: who reads it in fixed shapes multiplies slots that nobody has written by 0."""
        cache = KVCache(
            layers=layers,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            capacity=capacity,
            dtype=torch.float32,
            device=self.device,
        )
        cache.rows.zero_()
        return cache

    def see(self, positions: Tensor, segments: Sequence[Segment]) -> Rows:
        assert self._masks is not None
        return Rows(self.turn(positions.to(self.device)), attention.arrange(segments, self._masks))

    def turn(self, positions: Tensor) -> Turn | None:
        """The angles of rows, positions int64 [T] on the device."""
        return None if self._angles is None else self._angles.at(positions)

    def hand_over(self, cache: Cache, to: BlockedCache, layer: int, rows: int) -> None:
        assert isinstance(cache, KVCache)
        keys, values = (cache.rows[0, which, :, :rows].cpu() for which in (0, 1))
        to.values[layer, :, :rows] = values
        whole = rows // LANES
        kv_heads, _, head_dim = keys.shape
        to.keys[layer, :, :whole] = (
            keys[:, : whole * LANES].view(kv_heads, whole, LANES, head_dim).transpose(2, 3)
        )
        if rows % LANES:
            to.keys[layer, :, whole, :, : rows % LANES] = keys[:, whole * LANES :].transpose(1, 2)


def engine_of(transfer: Transfer) -> Engine:
    """What computes on the device at the end of a way."""
    return KernelEngine() if transfer.device.type == "cpu" else TorchEngine(transfer.device)


@dataclass(frozen=True)
class StagedPass:
    """The rows of a pass for all stages."""

    positions: Tensor
    segments: Sequence[Segment]
    apart: bool = False
    """Whether the reader computes the layers on the CPU."""

    def parts(self, stage: int, chunk: int) -> Iterator[tuple[slice, Tensor, Sequence[Segment]]]:
        """For a stage, a part of the rows at a time: which they are, their positions, and their
        segments with the stage's own caches."""
        segments = [
            replace(segment, cache=_part(segment.cache, stage)) for segment in self.segments
        ]
        for rows, part in _chunks(segments, chunk):
            yield rows, self.positions[rows], part


def _part(cache: Cache, stage: int) -> Cache:
    if not isinstance(cache, StagedCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    return cache.parts[stage]


def _chunks(segments: Sequence[Segment], chunk: int) -> Iterator[tuple[slice, Sequence[Segment]]]:
    """The rows of a pass `chunk` at a time where they are those of one prompt; else all of them."""
    if len(segments) > 1 or segments[0].paths is not None:
        yield slice(0, sum(segment.count for segment in segments)), segments
        return
    segment = segments[0]
    for first in range(0, segment.count, chunk):
        count = min(chunk, segment.count - first)
        yield (
            slice(first, first + count),
            [replace(segment, start=segment.start + first, count=count)],
        )


class StagedCache:
    """A session's keys and values, each stage's where it computes."""

    def __init__(self, parts: Sequence[Cache]) -> None:
        self.parts = parts
        self.length, self.capacity = 0, parts[0].capacity

    def keep(self, slots: Sequence[int], committed: int) -> None:
        """Move `slots` to length, length + 1, ... in this order and commit the first
        `committed`."""
        for part in self.parts:
            part.keep(slots, committed)
        self.length += committed

    def truncate(self, length: int) -> None:
        """Let the committed rows from slot `length` on go."""
        for part in self.parts:
            part.truncate(length)
        self.length = length

    def resize(self, capacity: int) -> None:
        """Have slots for `capacity` rows."""
        for part in self.parts:
            part.resize(capacity)
        self.capacity = capacity

    @property
    def row_bytes(self) -> int:
        """Memory of one row, of whatever device."""
        return sum(part.row_bytes for part in self.parts)


class Stage:
    """Some layers in a row on one device."""

    def __init__(self, number: int, first: int, engine: Engine, transfer: Transfer | None) -> None:
        """`transfer`: of a device beside the CPU."""
        self.engine = engine
        self._number, self._first, self._transfer = number, first, transfer
        self._plans: list[LayerPlan] = []
        self._layers: list[Run | Ready] = []
        self._blobs: list[Tensor] = []
        """Of the layers that are streamed."""
        self._ring: Ring | None = None
        self._made: dict[tuple[int, int], Run] = {}

    def take(self, plan: LayerPlan, blob: Blob, *, streamed: bool) -> None:
        """The next layer of the stage."""
        plan = replace(plan, index=len(self._layers))
        ready = self.engine.prepare(plan, blob)
        self._plans.append(plan)
        if streamed:
            assert self._transfer is not None
            self._transfer.pin(blob.memory)
            self._layers.append(ready)
            self._blobs.append(blob.memory)
        else:
            self._layers.append(ready.settled(blob.memory.to(self.engine.device)))

    @property
    def settled(self) -> Mapping[int, SettledLayer]:
        """By their numbers in this stage, the layers whose weights stay, where torch computes
        them."""
        return {
            index: layer
            for index, layer in enumerate(self._layers)
            if isinstance(layer, SettledLayer)
        }

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """The same where the C++ kernels compute them."""
        runs = {index: layer for index, layer in enumerate(self._layers) if callable(layer)}
        owners = {index: getattr(run, "__self__", None) for index, run in runs.items()}
        return {index: owner for index, owner in owners.items() if isinstance(owner, DecoderLayer)}

    def finish(self) -> None:
        """All layers are there: fetch the first that are streamed."""
        if self._blobs:
            assert self._transfer is not None
            self._ring = Ring(self._transfer, self._blobs, min(BUFFERS, len(self._blobs)))

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` rows."""
        return self.engine.new_cache(len(self._layers), self._plans[0], capacity)

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """states [T, hidden] through all layers, on the stage's device."""
        states = states.to(self.engine.device)
        parts = [
            (rows, self.engine.see(positions, segments))
            for rows, positions, segments in seen.parts(self._number, self.engine.chunk)
        ]
        streamed = 0
        for index, layer in enumerate(self._layers):
            beat()
            kept.keep(self._first + index, states)
            if callable(layer):
                _run(layer, parts, states)
            else:
                with self._fetched(layer, streamed) as run:
                    _run(run, parts, states)
                streamed += 1
        beat()
        return states

    @contextmanager
    def _fetched(self, layer: Ready, streamed: int) -> Iterator[Run]:
        """A streamed layer, the stage's n-th, with its weights."""
        assert self._ring is not None
        with self._ring.next(streamed) as (slot, memory):
            yield _made(self._made, layer, streamed, slot, memory)


def _made(
    made: dict[tuple[int, int], Run], layer: Ready, index: int, slot: int, memory: Tensor
) -> Run:
    """A layer in a buffer, made once for each of the buffers."""
    if (index, slot) not in made:
        made[index, slot] = layer.at(memory)
    return made[index, slot]


def _run(layer: Run, parts: Sequence[tuple[slice, Any]], states: Tensor) -> None:
    for rows, seen in parts:
        if rows.start:
            beat()
        layer(seen, states[rows])


class Reader:
    """Computes the rows of a prompt for layers that lie on the CPU: their weights stream through a
    device, and each layer's keys and values come back."""

    def __init__(self, transfer: Transfer, layers: Sequence[tuple[LayerPlan, Blob]]) -> None:
        self._engine = engine_of(transfer)
        for _, blob in layers:
            transfer.pin(blob.memory)
        self._plans = [replace(plan, index=0) for plan, _ in layers]
        self._layers = [
            self._engine.prepare(plan, blob)
            for plan, (_, blob) in zip(self._plans, layers, strict=True)
        ]
        self._ring = Ring(transfer, [blob.memory for _, blob in layers], min(BUFFERS, len(layers)))
        self._made: dict[tuple[int, int], Run] = {}

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """states [T, hidden] of the first T rows of a session, on the CPU as they came."""
        (segment,) = seen.segments
        cache = _part(segment.cache, 0)
        assert isinstance(cache, BlockedCache)
        own = self._engine.new_cache(1, self._plans[0], segment.count)
        parts = [
            (rows, self._engine.see(seen.positions[rows], part))
            for rows, part in _chunks([replace(segment, cache=own)], self._engine.chunk)
        ]
        there = states.to(self._engine.device)
        for index, layer in enumerate(self._layers):
            beat()
            kept.keep(index, there)
            with self._ring.next(index) as (slot, memory):
                _run(_made(self._made, layer, index, slot, memory), parts, there)
            self._engine.hand_over(own, cache, index, segment.count)
        return there.to(states.device)


class StagedLayers(nn.Module):
    """All decoder layers of a model as one."""

    def __init__(self, stages: Sequence[Stage], reader: Reader | None) -> None:
        super().__init__()
        self._stages, self._reader = stages, reader

    def forward(
        self, hidden: Tensor, *unused: Any, seen: StagedPass, kept: Kept, **also_unused: Any
    ) -> Tensor:
        """hidden [1, T, hidden] through all layers."""
        return self.run(hidden[0].contiguous(), seen, kept).unsqueeze(0)

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """The same of states [T, hidden]; they end on the device of the last stage."""
        for stage in self._stages:
            apart = seen.apart and stage is self._stages[0] and self._reader is not None
            states = (
                self._reader.run(states, seen, kept)
                if apart and self._reader is not None
                else stage.run(states, seen, kept)
            )
        return states


class _DeviceNorm(nn.Module):
    """The final norm on a device."""

    def __init__(self, norm: DeviceNorm) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden], normalised."""
        return self._norm(x)


class DeviceHead(nn.Module):
    """The head on a device; its logits come to the CPU."""

    def __init__(self, matrix: PackedMatrix, device: torch.device) -> None:
        super().__init__()
        memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes].to(device)
        self._matrix = unpack(
            Lying(
                Kind(matrix.kind), matrix.n, matrix.k, 0, matrix.nbytes, bool(matrix.struct.bias)
            ),
            memory,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., vocabulary]."""
        return product(self._matrix, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1).cpu()

    def roughly(self, x: Tensor) -> Tensor:
        """The same for a draft: x [T, hidden] -> [T, vocabulary], which stay on the device."""
        return rounded_product(self._matrix, x)


class Staged(Kernels):
    """Takes over the layers of a model one by one, each where it is to be. A `BackEnd`."""

    def __init__(self, model: Any, kind: Kind, *, context: int, staging: Staging) -> None:
        super().__init__(model, kind, context=context)
        self._staging = staging
        self.reads_apart = 0 if staging.reader is None else LONG_PROMPT_ROWS
        self.prompt_rows = LONG_PROMPT_ROWS if Place.STREAMED in staging.places else PROMPT_ROWS
        count, self._first = len(staging.places), list(staging.places).count(Place.CPU)
        self._stages: list[Stage] = []
        if self._first:
            self._stages.append(Stage(0, 0, KernelEngine(), None))
        if self._first < count:
            assert staging.transfer is not None
            self._stages.append(
                Stage(len(self._stages), self._first, engine_of(staging.transfer), staging.transfer)
            )
        self._on_cpu: list[tuple[LayerPlan, Blob]] = []

    def read(
        self, tokens: Tensor, positions: Tensor, segment: Segment, rows: Tensor | None, kept: Kept
    ) -> Tensor:
        """`compute` for the first rows of a session, of which the reader does what the CPU would
        do."""
        if segment.start or segment.paths is not None:
            raise ValueError("a reader reads the beginning of a prompt")
        return self._pass(
            tokens, positions, StagedPass(positions, [segment], apart=True), rows, kept
        )

    def _take(self, plan: LayerPlan) -> None:
        blob, place = gather(plan), self._staging.places[plan.index]
        plan = hollow(plan)
        self._stages[0 if place is Place.CPU else -1].take(
            plan, blob, streamed=place is Place.STREAMED
        )
        if place is Place.CPU and self._staging.reader is not None:
            self._on_cpu.append((plan, blob))

    def _together(self) -> StagedLayers:
        for stage in self._stages:
            stage.finish()
        reader = (
            None if self._staging.reader is None else Reader(self._staging.reader, self._on_cpu)
        )
        return StagedLayers(self._stages, reader)

    def _final_norm(self, kind: NormKind, norm: Norm, epsilon: float) -> nn.Module:
        device = self._stages[-1].engine.device
        return (
            KernelNorm(kind, norm, epsilon)
            if device.type == "cpu"
            else _DeviceNorm(DeviceNorm(kind, norm, epsilon, device))
        )

    def _final_linear(self, matrix: PackedMatrix) -> nn.Module:
        device = self._stages[-1].engine.device
        return KernelLinear(matrix) if device.type == "cpu" else DeviceHead(matrix, device)

    @property
    def in_one_stage(self) -> bool:
        """Whether one device computes all layers."""
        return len(self._stages) == 1

    @property
    def engine(self) -> Engine:
        """What computes the last layers."""
        return self._stages[-1].engine

    @property
    def settled(self) -> Mapping[int, SettledLayer]:
        """Those that stay on a device where torch computes."""
        return self._stages[0].settled if self.in_one_stage else {}

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """Those that stay on a device that the CPU stands for."""
        return self._stages[0].resident if self.in_one_stage and self._first == 0 else {}

    def _see(self, positions: Tensor, segments: Sequence[Segment]) -> StagedPass:
        return StagedPass(positions, segments)

    def new_cache(self, capacity: int) -> StagedCache:
        """An empty cache for `capacity` rows."""
        return StagedCache([stage.new_cache(capacity) for stage in self._stages])

    def _pass(
        self, tokens: Tensor, positions: Tensor, seen: Any, rows: Tensor | None, kept: Kept
    ) -> Tensor:
        logits = super()._pass(tokens, positions, seen, rows, kept)
        kept.states = {place: states.cpu() for place, states in kept.states.items()}
        return logits
