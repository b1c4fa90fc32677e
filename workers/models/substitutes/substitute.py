"""A target's substitute: its layers' linears in a few bits, a draft that needs no training
(SubSpec, section 4.1). Embedding, norms and head are the checkpoint's. The C++ kernels multiply
codes on a CPU. On a GPU `DeviceSubstitute` shares the target's cache, embedding, norm and head, and
`ResidentSubstitute` has its own process."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import SettingsError
from dovetail.protocol.memory import release_memory
from dovetail.workers.devices.base import Capture, Device
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.coded import Coded
from dovetail.workers.kernels.layer import DecoderLayer
from dovetail.workers.kernels.layer_plan import ExpertsPlan, LayerPlan
from dovetail.workers.models.assembly import StumbledError, assemble
from dovetail.workers.models.backends import packing
from dovetail.workers.models.backends.blob import (
    Lying,
    Matrix,
    gather,
    hollow,
    named,
    with_matrices,
)
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.backends.device.layer import DeviceLayer
from dovetail.workers.models.backends.device.levels import Captured, has_fixed_shapes
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.backends.experts import ExpertParts
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.library import Library
from dovetail.workers.models.backends.packing import pack_and_drop
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import (
    DeviceHead,
    ResidentDraft,
    RoundingEngine,
    Staged,
    Staging,
)
from dovetail.workers.models.backends.stages.engines import Run, SettledLayer, TorchEngine
from dovetail.workers.models.backends.stages.stage import StagedCache
from dovetail.workers.models.cache import HALF, KVCache
from dovetail.workers.models.checkpoints.architecture import refuse_without_kernels
from dovetail.workers.models.checkpoints.checkpoint import Checkpoint, open_checkpoint
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.footprint import bytes_of_codes
from dovetail.workers.models.checkpoints.loader import expert_shapes, linear_shapes, open_skeleton
from dovetail.workers.models.language_model import BackEnd, LanguageModel
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.segment import Cache
from dovetail.workers.models.states import LAST, ModelPass
from dovetail.workers.models.substitutes.coded import coded_product, computed_by, linear_product
from dovetail.workers.models.substitutes.kept import CodedLayers, Substitutes, Tell
from dovetail.workers.models.substitutes.quantize import BITS, Codes
from dovetail.workers.models.wanted import GPU_TYPES, KINDS, type_of


class _Engine(RoundingEngine):
    """torch's operations for a substitute in its own process, whose codes stay codes."""

    def lay_out(self, lying: Lying, memory: Tensor) -> Matrix | Product:
        if isinstance(lying.kind, Coded):
            return coded_product(lying, memory, self.products)
        return super().lay_out(lying, memory)


def with_exact(plan: LayerPlan, target: LayerPlan) -> LayerPlan:
    """Return a layer of codes with its target's matrices in place of those without codes: routers,
    and the heads' matrices of latents."""
    theirs = named(target)
    exact = {
        name: theirs[name]
        for name, matrix in named(plan).items()
        if not isinstance(matrix.kind, Coded)
    }
    shared: LayerPlan = with_matrices(plan, exact)
    return shared


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
        kind: Kind,
        *,
        context: int,
        target: Staged,
        substitutes: Substitutes,
        capture: Capture | None,
    ) -> None:
        """`kind`: of matrices without codes. `capture`: captures levels; None: all passes are
        computed operation by operation."""
        if not target.in_one_stage or not isinstance(target.engine, TorchEngine):
            raise SettingsError("draft.share = true needs target.device, without target.split")
        if not target._straight:
            text = "this model is more than embedding, layers, norm and head"
            raise SettingsError(f"{text}: set draft.share to false")
        super().__init__(model, kind, substitutes=substitutes, context=context)
        self.device = target.engine.device
        self.kernels = computed_by(substitutes.bits, target.engine.products)
        self._target, self._engine = target, target.engine
        self._embed = target._model.get_input_embeddings()
        self._coded: list[Run] = []
        self._plans: list[LayerPlan] = []
        self._capture = capture

    @property
    def shared(self) -> int:
        """Return how many layers are shared with the target."""
        return len(self._target.settled)

    def _codes_of(self, layer: nn.Module, index: int) -> Mapping[nn.Linear, Codes]:
        return {} if index in self._target.settled else super()._codes_of(layer, index)

    def _expert_plan(self, experts: ExpertParts) -> ExpertsPlan:
        if self._taken in self._target.settled:
            return experts.pack(self._kind)
        return super()._expert_plan(experts)

    def finish(self, model: Any) -> None:
        """Embedding, norm and head are the target's."""
        model.set_input_embeddings(self._embed)
        self._norm, self._head = self._target._norm, self._target._head
        if self._inputs is not None and self._target._inputs is not None:
            self._inputs.share(self._target._inputs)
        if self._capture is not None and all(map(has_fixed_shapes, self._plans)):
            layers, hidden = (self._plans, self._coded), model.config.hidden_size
            self.levels = self._engine.levels(self._capture, hidden, *layers, self._logits)

    def new_cache(self, capacity: int) -> KVCache:
        cache = self._engine.new_cache(self._layout.plans, capacity, self._target._cache)
        assert isinstance(cache, KVCache)
        return cache

    def compute(self, asked: ModelPass) -> Tensor:
        if (level := self.level_of(asked)) is not None:
            return level
        rows, kept = asked.rows, asked.kept
        states = self._states(asked.tokens).to(self.device)
        inputs = None if self._inputs is None else self._inputs(asked.tokens)
        seen = self._engine.see(asked.positions, asked.segments, inputs)
        for index, layer in enumerate(self._coded):
            kept.keep(index, states)
            layer(seen, states)
        if LAST in kept.wanted:
            kept.keep_last(self._norm(states))
        return self._logits(states if rows is None else states[rows.to(self.device)])

    def _states(self, tokens: Tensor) -> Tensor:
        return self.embedded(tokens).float()

    def _logits(self, states: Tensor) -> Tensor:
        head, states = self._head, self._norm(states)
        logits: Tensor = head.roughly(states) if isinstance(head, DeviceHead) else head(states)
        return self._scaled(logits)

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        """Pack codes, or, only for its proof, a layer that the target keeps there unchanged."""
        if self._taken in self._target.settled:
            return pack_and_drop(kind, linears)
        return super()._pack_layer(kind, linears)

    def _take(self, plan: LayerPlan) -> None:
        settled = self._target.settled.get(plan.index)
        plan = self._layout.take(plan)
        if settled is None:
            self._engine.take(plan)
            blob, products = gather(plan), self._engine.products
            memory = blob.memory.to(self.device)
            matrices = {
                name: coded_product(lying, memory, products)
                if isinstance(lying.kind, Coded)
                else self._engine.lay_out(lying, memory)
                for name, lying in blob.matrices.items()
            }
            plan = hollow(plan, blob.matrices)
            settled = SettledLayer(DeviceLayer(plan, self.device, self._engine.parts), matrices)
        self._coded.append(settled.roughly)
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
            KINDS[type_of("stored", checkpoint)],
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


log = logging.getLogger(__name__)


class KernelSubstitute(CodedLayers):
    """The kernels with layers of codes. A `BackEnd`, whose caches are those of `Kernels`."""

    def share(self, target: Kernels) -> int:
        """Share the target's embedding, norm, head and resident layers; return how many layers."""
        self._norm, self._head, self._cache = target._norm, target._head, target._cache
        base = self._model.base_model
        for name, module in target._model.base_model.named_children():
            if module is target._norm:
                setattr(base, name, module)
        self._model.set_output_embeddings(target._head)
        self._model.set_input_embeddings(target._model.get_input_embeddings())
        if self._inputs is not None and target._inputs is not None:
            self._inputs.share(target._inputs)
        for index, layer in enumerate(target._layers):
            plan = with_exact(self._layers[index].plan, layer.plan)
            self._layers[index] = DecoderLayer(plan)
        for index, layer in target.resident.items():
            self._layers[index] = layer
        return len(target.resident)


def share(substitute: LanguageModel, target: LanguageModel) -> int:
    """Have a substitute share with its target in this process; return how many layers.
    `SettingsError` if it cannot."""
    own, whole = substitute.back_end, target.back_end
    if not isinstance(own, KernelSubstitute) or not isinstance(whole, Kernels):
        why = substitute.choice if not isinstance(own, KernelSubstitute) else target.choice
        raise SettingsError(
            "draft.share = true needs a target and a substitute that the C++ kernels compute, "
            f"and {why}: set draft.share to false"
        )
    if isinstance(whole, Staged) and not whole.in_one_stage:
        raise SettingsError("draft.share = true excludes target.split.layers: leave one out")
    shared = own.share(whole)
    release_memory()
    return shared


def shared_cache(cache: Cache) -> Cache:
    """A target's cache in the form that its substitute's layers take."""
    return cache.parts[0] if isinstance(cache, StagedCache) else cache


class _CodedLinear(nn.Module):
    def __init__(self, codes: Codes, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        self._product = linear_product(codes, bias, device)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._product(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], -1)


class LibrarySubstitute(Library):
    """transformers' modules with products of codes, without description or kernels. A `BackEnd`."""

    def __init__(
        self, *, device: torch.device, dtype: torch.dtype, substitutes: Substitutes, layers: int
    ) -> None:
        super().__init__(None, device=device, dtype=dtype)
        self._substitutes, self._count = substitutes, layers

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        names = {module: name for name, module in layer.named_modules()}
        for part, codes in self._substitutes.of_layer(layer, index, self._count).items():
            layer.set_submodule(names[part], _CodedLinear(codes, part.bias, self._device))
        typed: nn.Module = self._typed(layer).to(self._device)
        return typed

    def finish(self, model: Any) -> None:
        super().finish(self._typed(model))

    def _typed(self, module: Any) -> Any:
        """Convert a module's parameters to the computing type; buffers stay."""
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self._dtype)
        return module


def load_substitute(
    source: str,
    *,
    weights: str,
    device: str,
    context: int | None = None,
    folder: Path | None = None,
    tell: Tell = lambda _done, _all: None,
) -> tuple[LanguageModel, Substitutes]:
    """Return the substitute of a model for `weights` int8, int4, int3 or int2; `folder`: of
    caches."""
    bits, place = BITS[weights], torch.device(device)
    checkpoint = replace(open_checkpoint(source), context=context)
    substitutes = Substitutes(checkpoint.digest, bits, folder, tell, place)
    kind, opened = KINDS[type_of("stored", checkpoint)], kind_of(place).open(device)
    assert opened is not None
    assembled = partial(_assemble, checkpoint, weights, opened)
    why_not = packing.reason_against(kind)
    if not why_not:
        who = f"torch computes the kernels' layers on {opened.name}"
        try:
            model = assembled(
                "the C++ kernels compute it" if opened.is_cpu else who,
                lambda model: _described(model, kind, opened, substitutes),
            )
            model.device = place
            return model, substitutes
        except UnsupportedError as error:
            why_not = f"the C++ kernels cannot compute it: {error}"
        except StumbledError as error:
            why_not = f"the kernels' layers cannot be computed on {opened.name}: {error.stumble}"
    model = assembled(
        why_not, lambda model: _library(model, opened, substitutes, checkpoint.source, why_not)
    )
    log.warning(
        "%s: the library computes its substitute on %s, one operation at a time, because %s",
        *(checkpoint.source, opened.name, why_not),
    )
    return model, substitutes


def _assemble(
    checkpoint: Checkpoint,
    weights: str,
    device: Device,
    choice: str,
    open_back_end: Callable[[Any], BackEnd],
) -> LanguageModel:
    def opened(model: Any) -> BackEnd:
        if not device.is_cpu and (why := _against_device(model, weights, device)):
            raise checkpoint.refusal(why)
        return open_back_end(model)

    try:
        return assemble(
            open_skeleton(checkpoint),
            checkpoint,
            weights=weights,
            choice=choice,
            open_back_end=opened,
        )
    except torch.OutOfMemoryError as error:
        what = f"its substitute as {weights} needs more memory of {device.name} while it is loaded"
        raise checkpoint.refusal(f"{what} than is free: {_remedy(weights)}") from error


def _against_device(model: Any, weights: str, device: Device) -> str:
    """Return why a skeleton's substitute exceeds a device's free memory; empty if it fits."""
    head = math.prod(model.get_output_embeddings().weight.shape)
    shapes = (*linear_shapes(model), *expert_shapes(model))
    numbers = sum(map(math.prod, shapes)) - head
    size = bytes_of_codes(numbers, BITS[weights]) + 2 * GPU_TYPES["fp16"].itemsize * head
    free = device.free_bytes()
    if size <= free:
        return ""
    return (
        f"its substitute takes {size / 1e9:.3g} GB of {device.name} as {weights} while it is "
        f"loaded, of which {free / 1e9:.3g} GB are free: {_remedy(weights)}"
    )


def _remedy(weights: str) -> str:
    smaller = BITS[weights] > BITS["int4"]
    first = "set draft.weights to int4, or" if smaller else "choose another draft.kind, or set"
    return f"{first} draft.device to 'cpu'"


def _described(model: Any, kind: Kind, device: Device, substitutes: Substitutes) -> BackEnd:
    if not device.is_cpu:
        return ResidentSubstitute(model, kind, substitutes=substitutes, device=device)
    return KernelSubstitute(model, kind, substitutes=substitutes, context=context_of(model.config))


def _library(
    model: Any, device: Device, substitutes: Substitutes, source: str, why_not: str
) -> BackEnd:
    why = f"{why_not}; use a draft of another kind"
    refuse_without_kernels(model.config.model_type, source, why)
    return LibrarySubstitute(
        device=device.torch_device,
        dtype=torch.float32 if device.is_cpu else GPU_TYPES["bf16"],
        substitutes=substitutes,
        layers=len(decoder_layers(model)[1]),
    )
