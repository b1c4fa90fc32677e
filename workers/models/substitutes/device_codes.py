"""The substitute of a target whose layers a GPU computes: its own matrices in codes, everything
else the target's.

Products go over the codes, by our own over the kernels' layout, or by torch's int4 products: fewer
bits are laid into 4, and 8 are the sum of two products of 4. The layers are `device/layer.py`'s,
over the target's own keys and values; where the target keeps a layer on the device, that is
computed from. Levels of a tree are those of `device/levels.py`. Knows layers, rows and slots;
nothing of drafts or sessions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices import Capture
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.assembly import assemble
from dovetail.workers.models.backends.device.choice import Product
from dovetail.workers.models.backends.device.layer import DeviceLayer
from dovetail.workers.models.backends.device.levels import Levels
from dovetail.workers.models.backends.device.own import OwnCodes
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import why_not_coded_apart
from dovetail.workers.models.backends.staged import DeviceHead, Staged
from dovetail.workers.models.backends.stages.engines import RoundedLayer, TorchEngine
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.checkpoints.context import context_of
from dovetail.workers.models.checkpoints.inflate import inflated_digest
from dovetail.workers.models.checkpoints.loader import open_skeleton
from dovetail.workers.models.families.description import LayerSpec
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import LAST, Kept
from dovetail.workers.models.substitutes.coded import coded_product
from dovetail.workers.models.substitutes.kept import Substitutes, Tell
from dovetail.workers.models.substitutes.quantize import BITS, Codes

CodesOf = Callable[[nn.Module, int, int], Mapping[nn.Linear, Codes]]
"""The codes of every linear of a layer that has its numbers, and is one of so many."""

TORCHS, OWN = "torch-int4", "own-codes"
"""The names of those who compute products of codes."""


@dataclass(frozen=True)
class CodedLayer:
    """A layer of codes on a device."""

    layer: DeviceLayer
    products: Mapping[str, Product]

    def __call__(self, rows: Any, states: Tensor) -> None:
        self.layer.run(rows, states, lambda name, x: self.products[name](x))


class _Nothing(PackedMatrix):
    """Stands in for a matrix that lies elsewhere, with its shape."""

    def __init__(self, n: int, k: int) -> None:
        self.n, self.k = n, k


class DeviceSubstitute(Kernels):
    """The layers of a target in codes on the target's device. A `BackEnd`, whose caches are those
    of the target's own stage."""

    backend = "library"
    kernels = TORCHS
    _computes_here = False

    def __init__(
        self,
        model: Any,
        *,
        context: int,
        target: Staged,
        codes_of: CodesOf,
        capture: Capture | None,
    ) -> None:
        """`capture`: what makes a pass of fixed shapes faster; None: nothing does here, and all
        passes are computed as they come."""
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
        super().__init__(model, Kind.FP32, context=context)
        self.device = target.engine.device
        self._target, self._engine, self._codes_of = target, target.engine, codes_of
        self._embed = target._model.get_input_embeddings()
        self._codes: Mapping[nn.Linear, Codes] = {}
        self._products: list[Product] = []
        self._coded: list[CodedLayer | RoundedLayer] = []
        self._plans: list[LayerPlan] = []
        self.levels: Levels | None = None
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
        """Return how many layers are the target's own."""
        return sum(isinstance(layer, RoundedLayer) for layer in self._coded)

    def _lacking(self, spec: LayerSpec) -> str:
        return why_not_coded_apart(spec)

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        self._codes = (
            {}
            if index in self._target.settled
            else self._codes_of(layer, index, self._model.config.num_hidden_layers)
        )
        taken = super().take_layer(layer, index)
        self._codes = {}
        return taken

    def finish(self, model: Any) -> None:
        """Embedding, norm and head are the target's."""
        model.set_input_embeddings(self._embed)
        self._norm, self._head = self._target._norm, self._target._head

    def new_cache(self, capacity: int) -> KVCache:
        """An empty cache for `capacity` rows."""
        cache = self._engine.new_cache(self._plans, capacity, self._target._cache)
        assert isinstance(cache, KVCache)
        return cache

    def compute(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        rows: Tensor | None,
        kept: Kept,
    ) -> Tensor:
        """Logits [R, V] of a pass, on the device."""
        states = self._embedded(tokens).float()
        if self.levels is not None and self.levels.cover(segments) and not kept.wanted:
            logits = self.levels.compute(states, positions, segments[0])
            return logits if rows is None else logits[rows.to(self.device)]
        states = states.to(self.device)
        seen = self._engine.see(positions, segments)
        for index, layer in enumerate(self._coded):
            kept.keep(index, states)
            layer(seen, states)
        if LAST in kept.wanted:
            kept.keep_last(self._norm(states))
        return self._logits(states if rows is None else states[rows.to(self.device)])

    def _logits(self, states: Tensor) -> Tensor:
        head, states = self._head, self._norm(states)
        logits: Tensor = head.roughly(states) if isinstance(head, DeviceHead) else head(states)
        return self._scaled(logits)

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        outputs, inputs = sum(part.out_features for part in linears), linears[0].in_features
        if self._codes:
            made = coded_product(
                [self._codes[part] for part in linears],
                [part.bias for part in linears],
                self.device,
                self._engine.products,
            )
            self.kernels = OWN if isinstance(made, OwnCodes) else TORCHS
            self._products.append(made)
        for part in linears:
            part.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        return _Nothing(outputs, inputs)

    def _take(self, plan: LayerPlan) -> None:
        """The layer whose matrices have just been laid out, in the order of a plan."""
        if plan.index in self._target.settled:
            self._coded.append(RoundedLayer(self._target.settled[plan.index]))
        else:
            self._engine.take(plan)
            products = dict(zip(("qkv", "output", "gate_up", "down"), self._products, strict=True))
            self._coded.append(
                CodedLayer(DeviceLayer(plan, self.device, self._engine.parts), products)
            )
        self._plans.append(plan)
        self._products.clear()


def load_device_substitute(
    target: LanguageModel,
    capture: Capture | None,
    *,
    weights: str,
    inflate_bytes: int = 0,
    folder: Path | None = None,
    tell: Tell = lambda _done, _all: None,
) -> tuple[LanguageModel, Substitutes, int]:
    """The substitute of a target, on the device that computes that and with all but its codes
    shared, what was quantised for it, and how many layers are the target's own.

    `capture`: see `DeviceSubstitute`. `folder`: of the caches of codes.
    """
    whole, checkpoint = target.back_end, target.checkpoint
    if not isinstance(whole, Staged):
        raise SettingsError(
            "draft.share = true on a GPU needs a target that is made of the kernels' layers, "
            f"and {target.choice}: set draft.share to false"
        )
    device = whole.engine.device
    digest = inflated_digest(checkpoint.digest, inflate_bytes)
    substitutes = Substitutes(digest, BITS[weights], folder, tell, device)

    def open_back_end(model: Any, _plan: Any) -> DeviceSubstitute:
        return DeviceSubstitute(
            model,
            context=context_of(model.config),
            target=whole,
            codes_of=substitutes.of_layer,
            capture=capture,
        )

    model = assemble(
        open_skeleton(checkpoint),
        checkpoint,
        weights=weights,
        choice=f"torch computes it on {device}",
        inflate_bytes=inflate_bytes,
        open_back_end=open_back_end,
    )
    model.device = device
    assert isinstance(model.back_end, DeviceSubstitute)
    return model, substitutes, model.back_end.shared
