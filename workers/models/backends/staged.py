"""The kernels back end in stages: the first layers on the CPU, the others and the head on a device,
resident or streamed; and prompts that a device reads for layers on the CPU. A CPU in place of a GPU
gives the same bytes; on a GPU torch computes the same function up to rounding. Long prompts pass
one layer after the other, so that weights are copied once. A small draft is on one device, with
rounding products, and levels captured as one launch (`device/levels.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.experts import Routing
from dovetail.workers.devices.base import Capture, Device, Transfer
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer
from dovetail.workers.kernels.layer_plan import LayerPlan, Norm, NormKind
from dovetail.workers.models.backends.blob import Blob, Lying, Matrix, alone, gather, hollow
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.backends.device.fixed import SLOTS, Arenas
from dovetail.workers.models.backends.device.levels import Captured, has_fixed_shapes
from dovetail.workers.models.backends.device.parts import DeviceNorm
from dovetail.workers.models.backends.device.products import (
    Product,
    narrowed,
    product,
    rounded_product,
)
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.packing import KernelLinear, KernelNorm
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.stages.engines import (
    Engine,
    KernelEngine,
    SettledLayer,
    TorchEngine,
    engine_of,
)
from dovetail.workers.models.backends.stages.stage import (
    PromptReader,
    Stage,
    StagedCache,
    StagedPass,
    part_of,
)
from dovetail.workers.models.parity.following import as_given, in_rows
from dovetail.workers.models.segment import PROMPT_ROWS, Segment
from dovetail.workers.models.states import Kept, ModelPass

LONG_PROMPT_ROWS = 1 << 15  # rows of a prompt that pass a layer: 512 MiB at width 4096


@dataclass(frozen=True)
class Staging:
    """The spread of a model over stages."""

    places: Sequence[Place]  # the places of all layers; those on the CPU come first
    transfer: Transfer | None = None  # to the device of the head and of layers not on the CPU
    reader: Transfer | None = None  # to a device that reads prompts for layers on the CPU
    host_experts: bool = False  # True if the CPU computes the experts of these layers
    capture: Capture | None = None  # captures passes over resident layers; None: none
    draft: Device | None = None  # the device that computes a draft, and may round


class StagedLayers(nn.Module):
    """All decoder layers of a model, as one module."""

    def __init__(self, stages: Sequence[Stage], reader: PromptReader | None) -> None:
        super().__init__()
        self._stages, self._reader = stages, reader

    def forward(
        self, hidden: Tensor, *unused: Any, seen: StagedPass, kept: Kept, **also_unused: Any
    ) -> Tensor:
        """hidden [1, T, hidden], or several streams of it, through all layers."""
        states = self.run(in_rows(hidden)[0].contiguous(), seen, kept)
        return as_given(states.unsqueeze(0), hidden)

    def run(self, states: Tensor, seen: StagedPass, kept: Kept) -> Tensor:
        """Run the layers on states [T, hidden]; the result is on the device of the last stage."""
        for stage in self._stages:
            apart = seen.apart and stage is self._stages[0] and self._reader is not None
            states = (
                self._reader.run(states, seen, kept)
                if apart and self._reader is not None
                else stage.run(states, seen, kept)
            )
        kept.keep(self._stages[-1].stop, states)
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
    """The head on a device; its logits are copied to the CPU."""

    def __init__(self, matrix: PackedMatrix, engine: TorchEngine) -> None:
        super().__init__()
        self._engine = engine
        lying, memory = alone(matrix)
        self._matrix = engine.lay_out(lying, memory.to(engine.device))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., vocabulary]."""
        return product(self._matrix, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1).cpu()

    def roughly(self, x: Tensor) -> Tensor:
        """Return logits for a draft: x [T, hidden] -> [T, vocabulary], which stay on the device."""
        parts = self._engine.parts
        return rounded_product(self._matrix, x, narrowed if parts is None else parts.narrow)


class Staged(Kernels):
    """Takes over the layers of a model one by one, each on its device. A `BackEnd`."""

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
        long = self._long_prompt_rows()
        self.reads_apart = 0 if staging.reader is None else long
        self.prompt_rows = long if Place.STREAMED in staging.places else PROMPT_ROWS
        count, self._first = len(staging.places), list(staging.places).count(Place.CPU)
        self._stages: list[Stage] = []
        if self._first:
            self._stages.append(Stage(0, 0, KernelEngine(), None))
        if self._first < count:
            assert staging.transfer is not None
            self._stages.append(
                Stage(len(self._stages), self._first, self._open_engine(staging), staging.transfer)
            )
        self._on_cpu: list[tuple[LayerPlan, Blob]] = []

    def _open_engine(self, staging: Staging) -> Engine:
        """Return the engine of the layers that are not on the CPU."""
        assert staging.transfer is not None
        return engine_of(staging.transfer)

    def _long_prompt_rows(self) -> int:
        """Return the rows of a prompt that pass a layer at a time; fewer with own inputs."""
        if self._inputs is None:
            return LONG_PROMPT_ROWS
        hidden = int(self._model.config.hidden_size)
        return max(PROMPT_ROWS, LONG_PROMPT_ROWS * hidden // (hidden + self._inputs.width))

    def read(self, asked: ModelPass) -> Tensor:
        """`compute` for the first rows of a session, with the reader in place of the CPU."""
        (segment,) = asked.segments
        if segment.start or segment.paths is not None:
            raise ValueError("a reader reads the beginning of a prompt")
        return self._pass(asked, StagedPass(asked.positions, asked.segments, apart=True))

    @property
    def routing(self) -> Routing | None:
        """Return None: a device does not count the experts that a pass uses."""
        return None

    def _take(self, plan: LayerPlan) -> None:
        place = self._staging.places[plan.index]
        apart = self._staging.host_experts and place is not Place.CPU
        blob = gather(plan, experts=not apart)
        plan = hollow(plan, blob.matrices)
        stage = self._stages[0 if place is Place.CPU else -1]
        if plan.reads is not None and not stage.layout.has(plan.reads):
            stage.mirror(plan.reads, self._stages[0].layout)
        stage.take(plan, blob, streamed=place is Place.STREAMED)
        if place is Place.CPU and self._staging.reader is not None:
            self._on_cpu.append((plan, blob))

    def _together(self) -> StagedLayers:
        for stage in self._stages:
            stage.engine.expect(self._cache)
            stage.finish(self._staging.capture, self._cache)
        reader = (
            None
            if self._staging.reader is None
            else PromptReader(self._staging.reader, self._on_cpu, self._cache)
        )
        return StagedLayers(self._stages, reader)

    def _final_norm(self, kind: NormKind, norm: Norm, epsilon: float) -> nn.Module:
        engine = self._stages[-1].engine
        if isinstance(engine, TorchEngine) and engine.device.type != "cpu":
            return _DeviceNorm(DeviceNorm(kind, norm, epsilon, engine.device, engine.parts))
        return KernelNorm(kind, norm, epsilon)

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
        """Return the engine of the last layers."""
        return self._stages[-1].engine

    @property
    def settled(self) -> Mapping[int, SettledLayer]:
        """Layers that stay on a device and are computed by torch."""
        return self._stages[0].settled if self.in_one_stage else {}

    @property
    def resident(self) -> Mapping[int, DecoderLayer]:
        """Layers that stay on a device whose place the CPU takes."""
        return self._stages[0].resident if self.in_one_stage and self._first == 0 else {}

    def _see(self, positions: Tensor, segments: Sequence[Segment]) -> StagedPass:
        return StagedPass(positions, segments)

    def _open_cache(self, capacity: int, dtype: torch.dtype) -> StagedCache:
        return StagedCache([stage.new_cache(capacity, dtype) for stage in self._stages])

    def _pass(self, asked: ModelPass, seen: Any) -> Tensor:
        logits, kept = super()._pass(asked, seen), asked.kept
        kept.states = {place: states.cpu() for place, states in kept.states.items()}
        return logits


class RoundingEngine(TorchEngine):
    """For drafts: 16-bit weights are multiplied by inputs of their type, unless our product is
    faster."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, products_on(device))
        self.arenas = Arenas(SLOTS)

    def lay_out(self, lying: Lying, memory: Tensor) -> Matrix | Product:
        if lying.parts:
            return super().lay_out(lying, memory)
        assert self.products is not None
        return self.products.lay_out(lying, memory, rounded=True)


class ResidentDraft(Captured, Staged):
    """All layers, norm and head on one device. A `BackEnd`; logits stay on the device."""

    def __init__(
        self, model: Any, kind: Kind, *, context: int, staging: Staging, cache: torch.dtype
    ) -> None:
        super().__init__(model, kind, context=context, staging=staging, cache=cache)
        assert staging.draft is not None
        self._capture: Capture | None = staging.draft.capture

    def _open_engine(self, staging: Staging) -> TorchEngine:
        assert staging.transfer is not None
        return RoundingEngine(staging.transfer.device)

    def finish(self, model: Any) -> None:
        super().finish(model)
        engine, stage = self.engine, self._stages[0]
        assert isinstance(engine, TorchEngine)
        plans = stage.layout.plans
        if self._capture is None or not self.direct or not all(map(has_fixed_shapes, plans)):
            return
        layers = [layer.roughly for _, layer in sorted(stage.settled.items())]
        hidden = model.config.hidden_size
        self.levels = engine.levels(self._capture, hidden, plans, layers, self._logits)

    def compute(self, asked: ModelPass) -> Tensor:
        if (level := self.level_of(asked)) is not None:
            return level
        return super().compute(asked).to(self.engine.device)

    def _own(self, segment: Segment) -> Segment:
        return replace(segment, cache=part_of(segment.cache, 0))

    def _states(self, tokens: Tensor) -> Tensor:
        return self.embedded(tokens).float()

    def _logits(self, states: Tensor) -> Tensor:
        assert isinstance(self._head, DeviceHead)
        return self._scaled(self._head.roughly(self._norm(states)))
