"""The kernels back end in stages: the first layers on the CPU, the others and the head on a device,
which keeps some of their weights and has the rest stream through; and prompts that a device reads
for layers that lie on the CPU.

A device that is the CPU itself stands for a GPU: its layers are computed by the same kernels from
the same bytes, so that every token is the same bytes too. On a GPU torch computes them, the same
function up to rounding. A long part of a prompt goes through one layer after the other as a whole,
so that weights are read, and copied, once. Knows placements and transfers; what a layer is, the
other modules know.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.devices.base import Transfer
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer
from dovetail.workers.kernels.layer_plan import LayerPlan, Norm, NormKind
from dovetail.workers.kernels.states import placed
from dovetail.workers.models.backends.blob import (
    Blob,
    Lying,
    gather,
    hollow,
)
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.backends.device.products import (
    DeviceNorm,
    product,
    rounded_product,
)
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.packing import KernelLinear, KernelNorm
from dovetail.workers.models.backends.placement import BUFFERS, Place
from dovetail.workers.models.backends.stage_engines import (
    Engine,
    KernelEngine,
    Ready,
    Run,
    SettledLayer,
    TorchEngine,
    engine_of,
)
from dovetail.workers.models.backends.staged_cache import (
    StagedCache,
    StagedPass,
    chunks_of,
    part_of,
)
from dovetail.workers.models.backends.streaming import Ring
from dovetail.workers.models.segment import PROMPT_ROWS, Cache, Segment
from dovetail.workers.models.states import Kept
from dovetail.workers.progress import beat

LONG_PROMPT_ROWS = 1 << 15
"""Rows of a prompt that go through a layer before the next one's weights are read: 512 MiB of
states of width 4096."""


@dataclass(frozen=True)
class Staging:
    """The spread of a model over stages."""

    places: Sequence[Place]
    """The places of all layers; those on the CPU come first."""
    transfer: Transfer | None = None
    """The way to the device that computes what is not on the CPU, and the head."""
    reader: Transfer | None = None
    """The way to a device that reads prompts for the layers on the CPU."""
    host_experts: bool = False
    """True if the CPU computes the experts of the layers that the device computes."""


def behind(plan: LayerPlan, before: Sequence[LayerPlan]) -> LayerPlan:
    """Return a layer behind others in a cache, and in the states of a session."""
    attending = [other for other in before if other.attends]
    shapes = [other.scan.shape for other in before if other.scan is not None]
    return replace(
        plan,
        index=len(attending),
        cached_before=sum(other.kv_heads * other.head_dim for other in attending),
        scan=None if plan.scan is None else placed(plan.scan, shapes),
    )


class Stage:
    """Some layers in a row on one device."""

    def __init__(self, number: int, first: int, engine: Engine, transfer: Transfer | None) -> None:
        """`transfer`: of a device beside the CPU."""
        self.engine = engine
        self._number, self._first, self._transfer = number, first, transfer
        self._plans: list[LayerPlan] = []
        self._layers: list[Run | Ready] = []
        self._blobs: list[Tensor] = []
        """The numbers of the layers that are streamed."""
        self._ring: Ring | None = None
        self._made: dict[tuple[int, int], Run] = {}

    def take(self, plan: LayerPlan, blob: Blob, *, streamed: bool) -> None:
        """The next layer of the stage."""
        plan = behind(plan, self._plans)
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

    def finish(self) -> None:
        """Fetch the first streamed layers, once all layers have been added."""
        if self._blobs:
            assert self._transfer is not None
            self._ring = Ring(self._transfer, self._blobs, min(BUFFERS, len(self._blobs)))

    def new_cache(self, capacity: int, dtype: torch.dtype) -> Cache:
        """An empty cache for `capacity` rows."""
        return self.engine.new_cache(self._plans, capacity, dtype)

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

    def __init__(
        self, transfer: Transfer, layers: Sequence[tuple[LayerPlan, Blob]], cache: torch.dtype
    ) -> None:
        """`cache`: the type of keys and values."""
        self._engine, self._cache = engine_of(transfer), cache
        for _, blob in layers:
            transfer.pin(blob.memory)
        self._plans = [
            behind(plan, [other for other, _ in layers[:i]]) for i, (plan, _) in enumerate(layers)
        ]
        self._alone = [behind(plan, ()) for plan in self._plans]
        self._layers = [
            self._engine.prepare(plan, blob)
            for plan, (_, blob) in zip(self._alone, layers, strict=True)
        ]
        self._ring = Ring(transfer, [blob.memory for _, blob in layers], min(BUFFERS, len(layers)))
        self._made: dict[tuple[int, int], Run] = {}

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """states [T, hidden] of the first T rows of a session, on the CPU as they came."""
        (segment,) = seen.segments
        cache = part_of(segment.cache, 0)
        assert isinstance(cache, BlockedCache)
        there = states.to(self._engine.device)
        for index, layer in enumerate(self._layers):
            beat()
            kept.keep(index, there)
            own = self._engine.new_cache([self._alone[index]], segment.count, self._cache)
            parts = [
                (rows, self._engine.see(seen.positions[rows], part))
                for rows, part in chunks_of([replace(segment, cache=own)], self._engine.chunk)
            ]
            with self._ring.next(index) as (slot, memory):
                _run(_made(self._made, layer, index, slot, memory), parts, there)
            self._engine.hand_over(own, cache, self._plans[index], segment.count)
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
        """Run the layers on states [T, hidden]; they end on the device of the last stage."""
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

    def __init__(self, matrix: PackedMatrix, engine: TorchEngine) -> None:
        super().__init__()
        memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes]
        self._matrix = engine.lay_out(
            Lying(
                Kind(matrix.kind), matrix.n, matrix.k, 0, matrix.nbytes, bool(matrix.struct.bias)
            ),
            memory.to(engine.device),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., vocabulary]."""
        return product(self._matrix, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1).cpu()

    def roughly(self, x: Tensor) -> Tensor:
        """Return logits for a draft: x [T, hidden] -> [T, vocabulary], which stay on the device."""
        return rounded_product(self._matrix, x)


class Staged(Kernels):
    """Takes over the layers of a model one by one, each where it is to be. A `BackEnd`."""

    _apart = True

    def __init__(
        self,
        model: Any,
        kind: Kind,
        *,
        context: int,
        staging: Staging,
        cache: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(model, kind, context=context, cache=cache)
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
        place = self._staging.places[plan.index]
        apart = self._staging.host_experts and place is not Place.CPU
        blob = gather(plan, experts=not apart)
        plan = hollow(plan, blob)
        self._stages[0 if place is Place.CPU else -1].take(
            plan, blob, streamed=place is Place.STREAMED
        )
        if place is Place.CPU and self._staging.reader is not None:
            self._on_cpu.append((plan, blob))

    def _together(self) -> StagedLayers:
        for stage in self._stages:
            stage.finish()
            stage.engine.expect(self._cache)
        reader = (
            None
            if self._staging.reader is None
            else Reader(self._staging.reader, self._on_cpu, self._cache)
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
        engine = self._stages[-1].engine
        if isinstance(engine, TorchEngine) and engine.device.type != "cpu":
            return DeviceHead(matrix, engine)
        return KernelLinear(matrix)

    @property
    def in_one_stage(self) -> bool:
        """Return whether one device computes all layers."""
        return len(self._stages) == 1

    @property
    def engine(self) -> Engine:
        """Return what computes the last layers."""
        return self._stages[-1].engine

    @property
    def settled(self) -> Mapping[int, SettledLayer]:
        """Layers that stay on a device and are computed by torch."""
        return self._stages[0].settled if self.in_one_stage else {}

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """Layers that stay on a device for which the CPU stands in."""
        return self._stages[0].resident if self.in_one_stage and self._first == 0 else {}

    def _see(self, positions: Tensor, segments: Sequence[Segment]) -> StagedPass:
        return StagedPass(positions, segments)

    def _open_cache(self, capacity: int, dtype: torch.dtype) -> StagedCache:
        return StagedCache([stage.new_cache(capacity, dtype) for stage in self._stages])

    def _pass(
        self, tokens: Tensor, positions: Tensor, seen: Any, rows: Tensor | None, kept: Kept
    ) -> Tensor:
        logits = super()._pass(tokens, positions, seen, rows, kept)
        kept.states = {place: states.cpu() for place, states in kept.states.items()}
        return logits
