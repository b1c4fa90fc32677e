"""The arithmetic of heads by the C++ kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.workers import kernels
from dovetail.workers.heads.arithmetic import (
    FixedRows,
    Geometry,
    Layer,
    LayerWeights,
    Mix,
    Product,
)
from dovetail.workers.heads.arithmetic.matrices import pack_matrix
from dovetail.workers.kernels.layer import (
    Attention,
    DecoderLayer,
    LayerPass,
    activate,
    normalise,
    rotary_table,
)
from dovetail.workers.kernels.layer_plan import (
    Activation,
    AttentionPlan,
    LayerPlan,
    Norm,
    NormKind,
    Rotary,
)
from dovetail.workers.models.backends.blocked_cache import BlockedCache, cache_rows
from dovetail.workers.models.backends.device.rows import Ours
from dovetail.workers.models.segment import Cache, Segment

LEAST_ANGLES = 1024
"""Positions whose angles are computed at once; more follow as they are asked for."""


class KernelArithmetic:
    """The C++ kernels on the CPU: states are fp32, each matrix is of the kind that is asked for, or
    with `auto` of the one that it is stored in."""

    def __init__(self, geometry: Geometry, *, weights: str) -> None:
        kernels.set_threads(torch.get_num_threads())
        self._geometry, self._weights = geometry, weights
        self.device, self.dtype, self.name = torch.device("cpu"), torch.float32, "the C++ kernels"
        self.cached: torch.dtype = torch.float32
        self.table: torch.dtype | None = None
        self.ours: Ours | None = None
        self._turned: list[Attention | DecoderLayer] = []
        self._rotary = self._angles(LEAST_ANGLES)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        return pack_matrix(weight, bias, self._weights).linear

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        norm = norm_of(weight)
        return lambda x: normalise(NormKind.RMS, norm, x, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        return activate(Activation.SILU_GATED, x)

    def mix(self, weights: LayerWeights) -> Mix:
        at = self._geometry
        norms = {
            "query_norm": norm_or_none(weights.query_norm),
            "key_norm": norm_or_none(weights.key_norm),
        }
        plan = AttentionPlan(
            weights.index,
            at.heads,
            at.kv_heads,
            at.head_dim,
            self._rotary,
            **norms,
            epsilon=at.epsilon,
        )
        attention = Attention(plan)
        self._turned.append(attention)
        return lambda qkv, seen: attention.run(seen, qkv)

    def layer(self, weights: LayerWeights) -> Layer:
        at = self._geometry
        if weights.gate_up is None or weights.down is None:
            raise ValueError(f"layer {weights.index} has no MLP")
        plan = LayerPlan(
            index=weights.index,
            heads=at.heads,
            kv_heads=at.kv_heads,
            head_dim=at.head_dim,
            qkv=pack_matrix(weights.qkv, weights.qkv_bias, self._weights),
            output=pack_matrix(weights.output, weights.output_bias, self._weights),
            gate_up=pack_matrix(weights.gate_up, None, self._weights),
            down=pack_matrix(weights.down, None, self._weights),
            attention_norm=norm_or_none(weights.attention_norm),
            mlp_norm=norm_of(weights.mlp_norm),
            query_norm=norm_or_none(weights.query_norm),
            key_norm=norm_or_none(weights.key_norm),
            rotary=self._rotary,
            epsilon=at.epsilon,
        )
        layer = DecoderLayer(plan)
        self._turned.append(layer)

        def run(states: Tensor, seen: LayerPass) -> Tensor:
            layer.run(seen, states)
            return states

        return run

    def new_cache(self, capacity: int) -> Cache:
        at = self._geometry
        return BlockedCache(
            layers=at.layers, kv_heads=at.kv_heads, head_dim=at.head_dim, capacity=capacity
        )

    def arrange(self, positions: Tensor, segments: Sequence[Segment] | FixedRows) -> LayerPass:
        if isinstance(segments, FixedRows):
            raise TypeError("fixed rows belong to torch's cache")
        if (needed := int(positions.max()) + 1) > self._rotary.cosines.shape[0]:
            self._rotary = self._angles(2 * needed)
            for part in self._turned:
                part.use_rotary(self._rotary)
        return LayerPass(positions, [cache_rows(segment) for segment in segments])

    def _angles(self, count: int) -> Rotary:
        return rotary_table(self._geometry.frequencies, count, scaling=self._geometry.rope_scaling)


def norm_of(weight: Tensor) -> Norm:
    return Norm(weight.float().contiguous())


def norm_or_none(weight: Tensor | None) -> Norm | None:
    return None if weight is None else norm_of(weight)
