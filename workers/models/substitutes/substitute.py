"""The substitute of a target: the linears of its own layers in a few bits, for a draft that needs
no training (SubSpec, section 4.1).

Embedding, norms and head stay as the checkpoint has them. Codes are made once for a checkpoint, an
inflation and a number of bits, and kept on disk, a file a layer that is put in its place whole;
what is there already is not made again. Products go over the codes themselves: those of the C++
kernels on a CPU, torch's int4 products on a GPU. Knows layers; nothing of drafts or sessions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import SettingsError
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer_plan import ExpertsPlan
from dovetail.workers.models.assembly import assemble
from dovetail.workers.models.backends import packing
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.backends.experts import ExpertParts
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import LayerParts
from dovetail.workers.models.backends.library import Library
from dovetail.workers.models.backends.staged import Staged
from dovetail.workers.models.backends.stages.cache import StagedCache
from dovetail.workers.models.checkpoints.architecture import refuse_without_kernels
from dovetail.workers.models.checkpoints.checkpoint import (
    Checkpoint,
    open_checkpoint,
)
from dovetail.workers.models.checkpoints.configured import decoder_layers
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.inflate import inflated_digest
from dovetail.workers.models.checkpoints.loader import open_skeleton
from dovetail.workers.models.language_model import BackEnd, LanguageModel
from dovetail.workers.models.memory import release_memory
from dovetail.workers.models.parity.following import UnsupportedError
from dovetail.workers.models.segment import Cache
from dovetail.workers.models.substitutes.coded import coded_product, pack_codes, pack_stack
from dovetail.workers.models.substitutes.kept import Substitutes, Tell
from dovetail.workers.models.substitutes.quantize import (
    BITS,
    Codes,
)
from dovetail.workers.models.weight_types import GPU_TYPES, KINDS, type_of


class KernelSubstitute(Kernels):
    """The kernels with layers of codes. A `BackEnd`, whose caches are those of `Kernels`."""

    def __init__(self, model: Any, kind: Kind, *, context: int, substitutes: Substitutes) -> None:
        """`kind`: of the head."""
        super().__init__(model, kind, context=context)
        self._substitutes = substitutes
        self._codes: Mapping[nn.Linear, Codes] = {}

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        self._codes = self._substitutes.of_layer(layer, index, self._model.config.num_hidden_layers)
        taken = super().take_layer(layer, index)
        self._codes = {}
        return taken

    def _expert_plan(self, experts: ExpertParts) -> ExpertsPlan:
        codes = self._substitutes.of_experts(experts, self._taken)

        def packed(name: str) -> Sequence[PackedMatrix]:
            return pack_stack(
                lambda expert: codes(name, expert), experts.count, experts.biases(name)
            )

        return experts.plan(packed)

    def _arrange(self, parts: LayerParts) -> None:
        """Bring codes, which are those of the checkpoint's rows, into the order of the linears."""
        super()._arrange(parts)
        codes = dict(self._codes)
        if (gates := parts.gates) is not None:
            for part, places in zip(
                (gates.queries, gates.gates), gates.order.chunk(2), strict=True
            ):
                codes[part] = codes[gates.module].rows(places)
        for name, orders in parts.rows.items():
            for part, order in zip(parts.linears[name], orders, strict=True):
                if order is not None:
                    codes[part] = codes[part].rows(order)
        self._codes = codes

    def share(self, target: Kernels) -> int:
        """Compute with the embedding, the norm, the head and the resident layers of this target
        from now on; how many layers these are."""
        self._norm, self._head, self._cache = target._norm, target._head, target._cache
        base = self._model.base_model
        for name, module in target._model.base_model.named_children():
            if module is target._norm:
                setattr(base, name, module)
        self._model.set_output_embeddings(target._head)
        self._model.set_input_embeddings(target._model.get_input_embeddings())
        for index, layer in target.resident.items():
            self._layers[index] = layer
        return len(target.resident)

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        return pack_codes([self._codes[part] for part in linears], [part.bias for part in linears])


def share(substitute: LanguageModel, target: LanguageModel) -> int:
    """Have a substitute compute with what it shares with its target in this process; of how many
    layers it does. `SettingsError` where it cannot."""
    own, whole = substitute.back_end, target.back_end
    if not isinstance(own, KernelSubstitute) or not isinstance(whole, Kernels):
        why = substitute.choice if not isinstance(own, KernelSubstitute) else target.choice
        raise SettingsError(
            "draft.share = true needs a target and a substitute that the C++ kernels compute, "
            f"and {why}: set draft.share to false"
        )
    if isinstance(whole, Staged) and not whole.in_one_stage:
        raise SettingsError(
            "draft.share = true is not built for a target that is split between devices: leave "
            "target.split.layers out, or draft.share"
        )
    shared = own.share(whole)
    release_memory()
    return shared


def shared_cache(cache: Cache) -> Cache:
    """A target's cache as its substitute's layers take it."""
    return cache.parts[0] if isinstance(cache, StagedCache) else cache


class _CodedLinear(nn.Module):
    """A linear of codes, by our product or torch's."""

    def __init__(self, codes: Codes, bias: Tensor | None, device: torch.device) -> None:
        super().__init__()
        products = None if device.type == "cpu" else products_on(device)
        self._product = coded_product([codes], [bias], device, products)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self._product(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], -1)


class LibrarySubstitute(Library):
    """transformers' modules with products of codes in the layers: on a GPU, and on a CPU
    without the C++ kernels. A `BackEnd`."""

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
        """A module whose parameters are of the type that is computed in; its buffers, such as
        rotary frequencies, stay as they are."""
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self._dtype)
        return module


def load_substitute(
    source: str,
    *,
    weights: str,
    device: str,
    inflate_bytes: int = 0,
    context: int | None = None,
    folder: Path | None = None,
    tell: Tell = lambda _done, _all: None,
) -> tuple[LanguageModel, Substitutes]:
    """The substitute of the model in `source`, inflated as its target is and of the same context:
    `weights` int8, int4, int3 or int2. `folder`: of the caches."""
    bits, place = BITS[weights], torch.device(device)
    checkpoint = replace(open_checkpoint(source), context=context)
    digest = inflated_digest(checkpoint.digest, inflate_bytes)
    substitutes = Substitutes(digest, bits, folder, tell, place)
    why_not = "on a GPU torch computes it"
    if place.type == "cpu":
        kind = KINDS[type_of("stored", checkpoint)]
        why_not = packing.reason_against(kind)
        if not why_not:
            try:
                model = _assemble(
                    checkpoint,
                    inflate_bytes,
                    weights,
                    "the C++ kernels compute it",
                    lambda model, _: _kernels(model, kind, substitutes),
                )
                return model, substitutes
            except UnsupportedError as error:
                why_not = f"the C++ kernels cannot compute it: {error}"
    dtype = torch.float32 if place.type == "cpu" else GPU_TYPES["bf16"]
    model = _assemble(
        checkpoint,
        inflate_bytes,
        weights,
        why_not,
        lambda model, _: _library(model, place, dtype, substitutes, checkpoint.source, why_not),
    )
    return model, substitutes


def _assemble(
    checkpoint: Checkpoint,
    inflate_bytes: int,
    weights: str,
    choice: str,
    open_back_end: Callable[[Any, Any], BackEnd],
) -> LanguageModel:
    return assemble(
        open_skeleton(checkpoint),
        checkpoint,
        weights=weights,
        choice=choice,
        inflate_bytes=inflate_bytes,
        open_back_end=open_back_end,
    )


def _kernels(model: Any, kind: Kind, substitutes: Substitutes) -> KernelSubstitute:
    return KernelSubstitute(model, kind, context=context_of(model.config), substitutes=substitutes)


def _library(
    model: Any,
    device: torch.device,
    dtype: torch.dtype,
    substitutes: Substitutes,
    source: str,
    why_not: str,
) -> LibrarySubstitute:
    why = f"{why_not}; use a draft of another kind"
    refuse_without_kernels(model.config.model_type, source, why)
    return LibrarySubstitute(
        device=device, dtype=dtype, substitutes=substitutes, layers=len(decoder_layers(model)[1])
    )
