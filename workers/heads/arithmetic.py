"""What computes a draft head: its matrices, norms and attention by the C++ kernels on a CPU that
has them, by torch elsewhere.

Both give the same functions of tensors, from which `heads` puts a head together. Rows are T,
positions are those of the rotary embedding, slots those of a session's cache. Knows decoder layers
and their parts, not what a head makes of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import (
    Activation,
    Attention,
    AttentionPlan,
    DecoderLayer,
    LayerPass,
    LayerPlan,
    Norm,
    NormKind,
    Rotary,
    activate,
    normalise,
    rotary_table,
)
from dovetail.workers.models.attention import Block, Masks, arrange, attend_blocks
from dovetail.workers.models.backends.fused import DTYPES, PIECE_WEIGHTS, BlockedCache, cache_rows
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.models.substitutes import quantised

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""
Mix = Callable[[Tensor, Any], Tensor]
"""Queries, keys and values [T, (heads + 2 kv_heads) head_dim] and the rows of a pass -> attention
[T, heads head_dim]."""
Layer = Callable[[Tensor, Any], Tensor]
"""States [T, H], which may be overwritten, and the rows of a pass -> states behind a decoder
layer."""

KINDS = {"fp32": Kind.FP32, "fp16": Kind.FP16, "bf16": Kind.BF16, "int8": Kind.INT8}
STORED = {torch.float16: Kind.FP16, torch.bfloat16: Kind.BF16}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LEAST_ANGLES = 1024
"""Positions whose angles are computed at once; more follow as they are asked for."""


@dataclass(frozen=True)
class Geometry:
    """The attention of a head's layers."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    frequencies: Tensor
    """float32 [rotary_dim / 2]."""
    rope_scaling: float
    """What cosines and sines are multiplied by."""


@dataclass(frozen=True)
class LayerWeights:
    """The numbers of a decoder layer; the MLP's are None where its place is taken by something
    else."""

    index: int
    qkv: Tensor
    """[(heads + 2 kv_heads) head_dim, inputs]."""
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_norm: Tensor | None
    """None: attention reads the states as they are."""
    mlp_norm: Tensor
    gate_up: Tensor | None
    """[2 intermediate, H], the gate first."""
    down: Tensor | None


@dataclass(frozen=True)
class FixedRows:
    """Rows of a pass in shapes that do not depend on what is in the cache, for CUDA graphs: what is
    written and seen is told by tensors."""

    cache: KVCache
    slots: Tensor
    """int64 [T]: where the rows' keys and values are written; rows of padding may share a slot that
    nobody sees."""
    mask: Tensor
    """[T, capacity], added to scores: 0 or -inf; no row may see nothing."""


class Arithmetic(Protocol):
    """The functions that a head is put together from."""

    device: torch.device
    dtype: torch.dtype
    """Of states between the matrices."""
    name: str
    """What computes, as it stands in a log line."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        """x W^T + b for weight [out, in], laid out in the type of weights of this head."""

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        """The root-mean-square norm of rows."""

    def gated(self, x: Tensor) -> Tensor:
        """silu(first half) * second half of rows [T, 2 width]."""

    def mix(self, weights: LayerWeights) -> Mix:
        """The attention of a layer between its two matrices: head norms, rotation, cache,
        attention."""

    def layer(self, weights: LayerWeights) -> Layer:
        """A whole decoder layer with its MLP."""

    def new_cache(self, capacity: int) -> Cache:
        """An empty cache for `capacity` rows."""

    def arrange(self, positions: Tensor, segments: Sequence[Segment] | FixedRows) -> Any:
        """The rows of a pass, positions int64 [T], ready for every layer."""


@dataclass(frozen=True)
class PartedLayer:
    """A decoder layer from its parts."""

    attention_norm: Product | None
    qkv: Product
    mix: Mix
    output: Product
    mlp_norm: Product
    gate_up: Product
    gated: Product
    down: Product

    def __call__(self, states: Tensor, seen: Any) -> Tensor:
        inputs = states if self.attention_norm is None else self.attention_norm(states)
        states = states + self.output(self.mix(self.qkv(inputs), seen))
        return states + self.down(self.gated(self.gate_up(self.mlp_norm(states))))


def parted_layer(arithmetic: Arithmetic, weights: LayerWeights, epsilon: float) -> PartedLayer:
    """A decoder layer whose parts are those of `arithmetic`."""
    if weights.gate_up is None or weights.down is None:
        raise ValueError(f"layer {weights.index} has no MLP")
    return PartedLayer(
        attention_norm=None
        if weights.attention_norm is None
        else arithmetic.norm(weights.attention_norm, epsilon),
        qkv=arithmetic.linear(weights.qkv, weights.qkv_bias),
        mix=arithmetic.mix(weights),
        output=arithmetic.linear(weights.output, weights.output_bias),
        mlp_norm=arithmetic.norm(weights.mlp_norm, epsilon),
        gate_up=arithmetic.linear(weights.gate_up),
        gated=arithmetic.gated,
        down=arithmetic.linear(weights.down),
    )


@dataclass(frozen=True)
class TorchRows:
    """The rows of a pass for torch: their angles, and how they attend."""

    cosines: Tensor
    """[T, rotary_dim / 2]."""
    sines: Tensor
    rows: tuple[Block, ...] | FixedRows

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query [heads, T, head_dim], key and value [kv_heads, T, head_dim] -> [T, heads,
        head_dim]; keys and values are cached."""
        if not isinstance(self.rows, FixedRows):
            return attend_blocks(layer, query, key, value, self.rows, scale)
        keys, values = self.rows.cache.rows[layer]
        keys.index_copy_(1, self.rows.slots, key)
        values.index_copy_(1, self.rows.slots, value)
        heads, count, size = query.shape
        packed = query.reshape(1, keys.shape[0], -1, size)
        mask = self.rows.mask.to(query.dtype).repeat(packed.shape[2] // count, 1)
        mixed = scaled_dot_product_attention(
            packed, keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=scale
        )
        return mixed.reshape(heads, count, size).transpose(0, 1)


class TorchArithmetic:
    """torch's own operations, on a GPU or on a CPU. On a CPU states are fp32, and so are weights of
    16 bits once they have been rounded to these."""

    def __init__(
        self, geometry: Geometry, *, weights: str, device: torch.device, dtype: torch.dtype
    ) -> None:
        """`dtype`: of states, and of the weights where `weights` is auto."""
        self._geometry, self._weights = geometry, weights
        self.device, self.dtype, self.name = device, dtype, f"torch on {device}"
        self._frequencies = geometry.frequencies.to(device)
        groups = geometry.heads // geometry.kv_heads
        self._masks = Masks(groups=groups, device=device, dtype=dtype)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        weight = weight.to(self.device)
        offset = None if bias is None else bias.to(self.device, self.dtype)
        if self._weights == "int8":
            return quantised.int8(weight, offset, self.dtype)
        if self._weights == "int4":
            return quantised.int4(weight, offset, self.dtype)
        matrix = weight.to(TYPES.get(self._weights, weight.dtype)).to(self.dtype).contiguous()
        return lambda x: linear(x, matrix, offset)

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        scale = weight.to(self.device, self.dtype)
        return lambda x: rms_norm(x, scale.shape, scale, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    def mix(self, weights: LayerWeights) -> Mix:
        at, index = self._geometry, weights.index
        norms = [
            None if w is None else self.norm(w, at.epsilon)
            for w in (weights.query_norm, weights.key_norm)
        ]
        sizes = [count * at.head_dim for count in (at.heads, at.kv_heads, at.kv_heads)]

        def mix(qkv: Tensor, seen: TorchRows) -> Tensor:
            query, key, value = (
                part.reshape(len(part), -1, at.head_dim).transpose(0, 1)
                for part in torch.split(qkv, sizes, dim=-1)
            )
            query, key = (
                part if norm is None else norm(part)
                for part, norm in zip((query, key), norms, strict=True)
            )
            query, key = (rotate(part, seen.cosines, seen.sines) for part in (query, key))
            return seen.attend(index, query, key, value, at.head_dim**-0.5).flatten(1)

        return mix

    def layer(self, weights: LayerWeights) -> Layer:
        return parted_layer(self, weights, self._geometry.epsilon)

    def new_cache(self, capacity: int) -> Cache:
        at = self._geometry
        cache = KVCache(
            layers=at.layers,
            kv_heads=at.kv_heads,
            head_dim=at.head_dim,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )
        # a masked slot is multiplied by 0, and what memory held before may be no number
        cache.rows.zero_()
        return cache

    def arrange(self, positions: Tensor, segments: Sequence[Segment] | FixedRows) -> TorchRows:
        angles = positions.to(self.device).unsqueeze(1) * self._frequencies
        cosines, sines = (
            (turn * self._geometry.rope_scaling).to(self.dtype)
            for turn in (angles.cos(), angles.sin())
        )
        return TorchRows(
            cosines,
            sines,
            segments if isinstance(segments, FixedRows) else arrange(segments, self._masks),
        )


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [heads, T, head_dim]: the pairs (j, j + rotary_dim / 2) are turned by angle j; what lies
    behind rotary_dim is left alone."""
    half = cosines.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat(
        [first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1
    )


class KernelArithmetic:
    """The C++ kernels on the CPU: states are fp32, each matrix is of the kind that is asked for, or
    with `auto` of the one that it is stored in."""

    def __init__(self, geometry: Geometry, *, weights: str) -> None:
        kernels.set_threads(torch.get_num_threads())
        self._geometry, self._weights = geometry, weights
        self.device, self.dtype, self.name = torch.device("cpu"), torch.float32, "the C++ kernels"
        self._turned: list[Attention | DecoderLayer] = []
        self._rotary = self._angles(LEAST_ANGLES)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if self._weights == "int4":
            return quantised.int4(weight, None if bias is None else bias.float(), self.dtype)
        return self._pack(weight, bias).linear

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        norm = _norm(weight)
        return lambda x: normalise(NormKind.RMS, norm, x, epsilon)

    def gated(self, x: Tensor) -> Tensor:
        return activate(Activation.SILU_GATED, x)

    def mix(self, weights: LayerWeights) -> Mix:
        at = self._geometry
        norms = {
            "query_norm": _norm_or_none(weights.query_norm),
            "key_norm": _norm_or_none(weights.key_norm),
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
        if self._weights == "int4":
            return parted_layer(self, weights, at.epsilon)
        if weights.gate_up is None or weights.down is None:
            raise ValueError(f"layer {weights.index} has no MLP")
        plan = LayerPlan(
            index=weights.index,
            heads=at.heads,
            kv_heads=at.kv_heads,
            head_dim=at.head_dim,
            qkv=self._pack(weights.qkv, weights.qkv_bias),
            output=self._pack(weights.output, weights.output_bias),
            gate_up=self._pack(weights.gate_up, None),
            down=self._pack(weights.down, None),
            attention_norm=_norm_or_none(weights.attention_norm),
            mlp_norm=_norm(weights.mlp_norm),
            query_norm=_norm_or_none(weights.query_norm),
            key_norm=_norm_or_none(weights.key_norm),
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

    def _pack(self, weight: Tensor, bias: Tensor | None) -> PackedMatrix:
        """A matrix of the kernels; a big one is converted piece by piece."""
        kind = (
            KINDS[self._weights] if self._weights != "auto" else STORED.get(weight.dtype, Kind.FP32)
        )
        rows, inputs = weight.shape
        matrix = PackedMatrix(
            kind, rows, inputs, bias=None if bias is None else bias.float().contiguous()
        )
        piece = max(1, PIECE_WEIGHTS // inputs)
        for start in range(0, rows, piece):
            matrix.pack(weight[start : start + piece].to(DTYPES[kind]).contiguous(), start)
        return matrix


def _norm(weight: Tensor) -> Norm:
    return Norm(weight.float().contiguous())


def _norm_or_none(weight: Tensor | None) -> Norm | None:
    return None if weight is None else _norm(weight)
