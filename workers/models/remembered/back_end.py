"""The kernels of a model whose proof is cached: layers are packed by description and by the proof's
facts, without comparison."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.models.attention import Noted
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.backends.layer_parts import LayerParts, plan_of
from dovetail.workers.models.backends.packing import KernelNorm
from dovetail.workers.models.backends.rotary_tables import KnownTables
from dovetail.workers.models.families.registry import FAMILIES


class Recalled(Kernels):
    """Takes over layers that were proved before."""

    def __init__(
        self,
        model: Any,
        kind: Kind,
        *,
        context: int,
        cache: torch.dtype,
        noted: Sequence[Noted],
        angles: Mapping[str, tuple[Sequence[float], float]],
    ) -> None:
        """`noted`: attention of each layer; `angles`: frequencies and factor of each table."""
        kernels.set_threads(torch.get_num_threads())
        self._begin(model, kind, KnownTables(angles, context), cache)
        self._family = FAMILIES[model.config.model_type]
        self._known, self._inputs = noted, None

    def take_layer(self, layer: nn.Module, index: int) -> nn.Module:
        """Pack a layer."""
        assert self._family is not None
        parts = LayerParts(layer, self._family.layer(self._model.config, index))
        self._arrange(parts)
        matrices = {
            name: self._pack_layer(self._kind, linears) for name, linears in parts.linears.items()
        }
        experts, noted = self._pack_experts(parts, matrices), self._known[index]
        plan = plan_of(parts, index, noted, matrices, self._tables, self._kind)
        self._take(replace(plan, experts=experts))
        self.noted.append(noted)
        self._taken += 1
        return nn.Identity()

    def _loop(self, layers: nn.Module) -> nn.Module:
        """Return the layers as they are: transformers' own forward is not run."""
        return layers

    def _prove_end(self, norm: KernelNorm, head: nn.Linear, matrix: PackedMatrix) -> None:
        """Prove nothing: the remembered proof covers it."""

    def _prove_cache(self) -> None:
        """Nothing is to be proved."""

    def _nothing_else(self) -> bool:
        """Return True: only such models are remembered."""
        return True
