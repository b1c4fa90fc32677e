"""Substitutes on a GPU: the target's matrices as codes. `DeviceSubstitute` shares the target's
cache, embedding, norm and head; `ResidentSubstitute` has its own process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices.base import Capture, Device
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.coded import Coded
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.assembly import assemble
from dovetail.workers.models.backends.blob import Lying, Matrix, gather, hollow, named
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.backends.device.layer import DeviceLayer
from dovetail.workers.models.backends.device.levels import Captured, Levels
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.layer_parts import why_not_coded_apart
from dovetail.workers.models.backends.packing import pack_and_drop
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.resident import ResidentDraft, RoundingEngine
from dovetail.workers.models.backends.staged import DeviceHead, Staged, Staging
from dovetail.workers.models.backends.stages.engines import RoundedLayer, SettledLayer, TorchEngine
from dovetail.workers.models.cache import HALF, KVCache
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.loader import open_skeleton
from dovetail.workers.models.families.description import LayerSpec
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.states import LAST, ModelPass
from dovetail.workers.models.substitutes.coded import coded_product, computed_by
from dovetail.workers.models.substitutes.coded_layers import CodedLayers
from dovetail.workers.models.substitutes.kept import Substitutes, Tell
from dovetail.workers.models.substitutes.quantize import BITS, Codes


class _Engine(RoundingEngine):
    """torch's operations for a substitute in its own process, whose codes stay codes."""

    def lay_out(self, lying: Lying, memory: Tensor) -> Matrix | Product:
        if isinstance(lying.kind, Coded):
            return coded_product(lying, memory, self.products)
        return super().lay_out(lying, memory)


class ResidentSubstitute(CodedLayers, ResidentDraft):
    """A substitute on one device in its own process. A `BackEnd`; logits stay on the device."""

    def __init__(self, model: Any, kind: Kind, *, substitutes: Substitutes, device: Device) -> None:
        places = [Place.RESIDENT] * len(decoder_layers(model)[1])
        staging = Staging(places, device.transfer(), draft=device)
        context = context_of(model.config)
        super().__init__(
            model, kind, substitutes=substitutes, context=context, staging=staging, cache=HALF
        )
        self.kernels = computed_by(substitutes.bits, products_on(device.torch_device))

    def _open_engine(self, staging: Staging) -> TorchEngine:
        assert staging.transfer is not None
        return _Engine(staging.transfer.device)

    def finish(self, model: Any) -> None:
        """Finish the model with a 16-bit head, whatever the checkpoint has."""
        head = model.get_output_embeddings()
        if head.weight.dtype == torch.float32:
            head.weight = nn.Parameter(head.weight.half(), requires_grad=False)
        super().finish(model)


class DeviceSubstitute(Captured, CodedLayers):
    """A target's layers as codes on its device, in caches of its stage. A `BackEnd`."""

    backend = "library"

    def __init__(
        self,
        model: Any,
        *,
        context: int,
        target: Staged,
        substitutes: Substitutes,
        capture: Capture | None,
    ) -> None:
        """`capture`: captures levels; None: all passes are computed operation by operation."""
        if not target.in_one_stage or not isinstance(target.engine, TorchEngine):
            raise SettingsError(
                "a substitute on a GPU shares with a target of which that GPU computes all "
                "layers: set target.device to it, without target.split"
            )
        if not target.direct:
            raise SettingsError(
                "draft.share = true on a GPU is for models that are embedding, layers, norm "
                "and head, and this one is more: set it to false"
            )
        super().__init__(model, Kind.FP32, substitutes=substitutes, context=context)
        self.device = target.engine.device
        self.kernels = computed_by(substitutes.bits, target.engine.products)
        self._target, self._engine = target, target.engine
        self._embed = target._model.get_input_embeddings()
        self._coded: list[RoundedLayer] = []
        self._plans: list[LayerPlan] = []
        if capture is not None:
            self.levels = Levels(
                capture=capture,
                device=self.device,
                hidden=model.config.hidden_size,
                plans=self._plans,
                layers=self._coded,
                turn=self._engine.turn,
                by=self._engine.by,
                logits=self._logits,
            )

    @property
    def shared(self) -> int:
        """Return how many layers are shared with the target."""
        return len(self._target.settled)

    def _lacking(self, spec: LayerSpec) -> str:
        return why_not_coded_apart(spec)

    def _codes_of(self, layer: nn.Module, index: int) -> Mapping[nn.Linear, Codes]:
        return {} if index in self._target.settled else super()._codes_of(layer, index)

    def finish(self, model: Any) -> None:
        """Embedding, norm and head are the target's."""
        model.set_input_embeddings(self._embed)
        self._norm, self._head = self._target._norm, self._target._head
        if self.levels is not None:
            self.levels.ours = self._engine.ours_for(self._plans)

    def new_cache(self, capacity: int) -> KVCache:
        cache = self._engine.new_cache(self._plans, capacity, self._target._cache)
        assert isinstance(cache, KVCache)
        return cache

    def compute(self, asked: ModelPass) -> Tensor:
        if (level := self.level_of(asked)) is not None:
            return level
        rows, kept = asked.rows, asked.kept
        states = self._states(asked.tokens).to(self.device)
        seen = self._engine.see(asked.positions, asked.segments)
        for index, layer in enumerate(self._coded):
            kept.keep(index, states)
            layer(seen, states)
        if LAST in kept.wanted:
            kept.keep_last(self._norm(states))
        return self._logits(states if rows is None else states[rows.to(self.device)])

    def _states(self, tokens: Tensor) -> Tensor:
        return self._embedded(tokens).float()

    def _logits(self, states: Tensor) -> Tensor:
        head, states = self._head, self._norm(states)
        logits: Tensor = head.roughly(states) if isinstance(head, DeviceHead) else head(states)
        return self._scaled(logits)

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        """Pack codes, or, only for its proof, a layer that the target keeps there unchanged."""
        return super()._pack_layer(kind, linears) if self._codes else pack_and_drop(kind, linears)

    def _take(self, plan: LayerPlan) -> None:
        settled = self._target.settled.get(plan.index)
        if settled is None:
            self._engine.take(plan)
            blob, products = gather(plan), self._engine.products
            memory = blob.memory.to(self.device)
            matrices = {
                name: coded_product(lying, memory, products)
                for name, lying in blob.matrices.items()
            }
            plan = hollow(plan, blob.matrices)
            settled = SettledLayer(DeviceLayer(plan, self.device, self._engine.parts), matrices)
        self._coded.append(RoundedLayer(settled))
        self._plans.append(hollow(plan, named(plan)))


def load_device_substitute(
    target: LanguageModel,
    capture: Capture | None,
    *,
    weights: str,
    folder: Path | None = None,
    tell: Tell = lambda _done, _all: None,
) -> tuple[LanguageModel, Substitutes, int]:
    """Return a target's substitute on its device, what was quantised, and how many layers it
    shares. `folder`: of cached codes."""
    whole, checkpoint = target.back_end, target.checkpoint
    if not isinstance(whole, Staged):
        raise SettingsError(
            "draft.share = true on a GPU needs a target that is made of the kernels' layers, "
            f"and {target.choice}: set draft.share to false"
        )
    device = whole.engine.device
    substitutes = Substitutes(checkpoint.digest, BITS[weights], folder, tell, device)

    def open_back_end(model: Any) -> DeviceSubstitute:
        return DeviceSubstitute(
            model,
            context=context_of(model.config),
            target=whole,
            substitutes=substitutes,
            capture=capture,
        )

    model = assemble(
        open_skeleton(checkpoint),
        checkpoint,
        weights=weights,
        choice=f"torch computes it on {device}",
        open_back_end=open_back_end,
    )
    model.device = device
    assert isinstance(model.back_end, DeviceSubstitute)
    return model, substitutes, model.back_end.shared
