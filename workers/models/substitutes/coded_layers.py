"""A model of described layers with codes in place of matrices, the base of substitutes."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

from torch import nn

from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.coded import KINDS
from dovetail.workers.kernels.layer_plan import ExpertsPlan
from dovetail.workers.models.backends.experts import ExpertParts
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import LayerParts
from dovetail.workers.models.substitutes.coded import pack_codes, pack_stack
from dovetail.workers.models.substitutes.kept import Substitutes
from dovetail.workers.models.substitutes.quantize import Codes


class CodedLayers(Kernels):
    """Takes over layers as codes of their linears and experts."""

    def __init__(self, model: Any, kind: Kind, *, substitutes: Substitutes, **more: Any) -> None:
        """`kind`: of the head. `more`: arguments of the back end that computes the layers."""
        super().__init__(model, kind, **more)
        self._substitutes = substitutes
        self._codes: Mapping[nn.Linear, Codes] = {}

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        self._codes = self._codes_of(layer, index)
        taken = super().take_layer(layer, index)
        self._codes = {}
        return taken

    def _codes_of(self, layer: nn.Module, index: int) -> Mapping[nn.Linear, Codes]:
        return self._substitutes.of_layer(layer, index, self._model.config.num_hidden_layers)

    @property
    def _layers_kind(self) -> IntEnum:
        return KINDS[self._substitutes.bits]

    def _expert_plan(self, experts: ExpertParts) -> ExpertsPlan:
        codes = self._substitutes.of_experts(experts, self._taken)

        def packed(name: str) -> Sequence[PackedMatrix]:
            return pack_stack(
                lambda expert: codes(name, expert), experts.count, experts.biases(name)
            )

        return experts.plan(packed)

    def _arrange(self, parts: LayerParts) -> None:
        """Reorder codes from the order of the checkpoint's rows to that of the linears."""
        super()._arrange(parts)
        if not self._codes:
            return
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

    def _pack_layer(self, kind: Kind, linears: Sequence[nn.Linear]) -> PackedMatrix:
        return pack_codes([self._codes[part] for part in linears], [part.bias for part in linears])
