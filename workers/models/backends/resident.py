"""A small draft whose layers a device computes as the kernels describe them, with rounding
products, and levels captured as one launch (`device/levels.py`). Experts, states and prompts are
computed operation by operation."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.devices.base import Capture
from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends.blob import Lying, Matrix
from dovetail.workers.models.backends.device.arenas import Arenas
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.backends.device.fixed import SLOTS
from dovetail.workers.models.backends.device.levels import Captured, Levels, has_fixed_shapes
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.staged import DeviceHead, Staged, Staging
from dovetail.workers.models.backends.stages.cache import part_of
from dovetail.workers.models.backends.stages.engines import RoundedLayer, TorchEngine
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import ModelPass


class RoundingEngine(TorchEngine):
    """For drafts: 16-bit weights meet inputs of their own type, unless a product of ours is
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
        self.levels = Levels(
            capture=self._capture,
            device=engine.device,
            hidden=model.config.hidden_size,
            plans=plans,
            layers=[RoundedLayer(layer) for _, layer in sorted(stage.settled.items())],
            turn=engine.turn,
            by=engine.by,
            logits=self._logits,
            ours=engine.ours_for(plans),
        )

    def compute(self, asked: ModelPass) -> Tensor:
        if (level := self.level_of(asked)) is not None:
            return level
        return super().compute(asked).to(self.engine.device)

    def _own(self, segment: Segment) -> Segment:
        return replace(segment, cache=part_of(segment.cache, 0))

    def _states(self, tokens: Tensor) -> Tensor:
        return self._embedded(tokens).float()

    def _logits(self, states: Tensor) -> Tensor:
        assert isinstance(self._head, DeviceHead)
        return self._scaled(self._head.roughly(self._norm(states)))
