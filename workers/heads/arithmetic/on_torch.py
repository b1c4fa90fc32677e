"""The arithmetic of heads by torch's own operations, on any device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from dovetail.workers.heads.arithmetic import (
    TYPES,
    Arithmetic,
    FixedRows,
    Geometry,
    Layer,
    LayerWeights,
    Mix,
    Product,
)
from dovetail.workers.heads.arithmetic.matrices import device_product, ours_on, parts_on
from dovetail.workers.kernels.layer_plan import Norm, NormKind
from dovetail.workers.models.attention import Block, Masks, arrange, attend_blocks, by_torch
from dovetail.workers.models.backends.device.arenas import ArenaCache, Arenas
from dovetail.workers.models.backends.device.attention import takes_width
from dovetail.workers.models.backends.device.fixed import SLOTS
from dovetail.workers.models.backends.device.parts import DeviceNorm, Turning
from dovetail.workers.models.backends.device.rows import PlacedRows
from dovetail.workers.models.cache import HALF, rounded
from dovetail.workers.models.segment import Cache, Segment


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
            return attend_blocks(layer, query, key, value, self.rows, scale, by=attend_as_cached)
        if isinstance(self.rows.memory, PlacedRows):
            self.rows.memory.write(layer, key, value)
            return self.rows.memory.attend(layer, len(key), query, self.rows.mask, scale)
        keys, values = self.rows.memory[layer]
        keys.index_copy_(1, self.rows.slots, rounded(key, keys.dtype))
        values.index_copy_(1, self.rows.slots, rounded(value, values.dtype))
        return attend_as_cached(query, keys, values, self.rows.mask, scale, None, None)

    def attend_turned(self, layer: int, qkv: Tensor, turning: Turning, scale: float) -> Tensor:
        """Return attention as `attend` does, for fixed rows of queries, keys and values [T, (heads
        + 2 kv_heads) head_dim] that are to be rotated."""
        assert isinstance(self.rows, FixedRows)
        memory, mask, angles = self.rows.memory, self.rows.mask, (self.cosines, self.sines)
        if isinstance(memory, PlacedRows):
            query = memory.turned(layer, qkv, angles, turning)
            return memory.attend(layer, turning.kv_heads, query, mask, scale)
        keys, values = memory[layer]
        query = turning(qkv, angles, self.rows.slots, keys, values)
        return attend_as_cached(query, keys, values, mask, scale, None, None)


def attend_as_cached(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention as `by_torch` does, whose arguments these are, but in the type of the keys.
    A draft may round so, and nothing in the cache is widened."""
    narrow, mask = rounded(query, keys.dtype), None if mask is None else mask.to(keys.dtype)
    return by_torch(narrow, keys, values, mask, scale, cap, sinks).to(query.dtype)


class TorchArithmetic:
    """torch's own operations on a GPU or a CPU, and functions of ours on a GPU. States are fp32; on
    a CPU so are weights, after they have been rounded to 16 bits if that is their type."""

    dtype = torch.float32

    def __init__(
        self,
        geometry: Geometry,
        *,
        weights: str,
        device: torch.device,
        cached: torch.dtype,
        table: torch.dtype | None = None,
        exact: bool = False,
    ) -> None:
        """`weights`: a type, which on a GPU is not auto. `cached`: the type of keys and values.
        `table`: that of the embedding; None: as it is stored. `exact`: no product narrows
        states."""
        self._geometry, self._weights, self._exact = geometry, weights, exact
        self.device, self.cached, self.table = device, cached, table
        self._parts = parts_on(device)
        width, halves = geometry.head_dim, cached == HALF
        self.ours = ours_on(device) if halves and takes_width(width) else None
        self.name = f"torch on {device}"
        self._frequencies = geometry.frequencies.to(device)
        self._arenas = Arenas(1 if device.type == "cpu" else SLOTS)
        groups = geometry.heads // geometry.kv_heads
        self._masks = Masks(groups=groups, device=device, dtype=cached)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Product:
        if self.device.type != "cpu" or self._weights in ("int8", "int4"):
            return device_product(weight, bias, self._weights, self.device, exact=self._exact)
        offset = None if bias is None else bias.float()
        matrix = weight.to(TYPES.get(self._weights, weight.dtype)).float().contiguous()
        return lambda x: linear(x, matrix, offset)

    def norm(self, weight: Tensor, epsilon: float) -> Product:
        return DeviceNorm(NormKind.RMS, Norm(weight.float()), epsilon, self.device, self._parts)

    def gated(self, x: Tensor) -> Tensor:
        if self._parts is not None:
            return self._parts.gate(x)
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up

    def _turning(self, weights: LayerWeights) -> Turning | None:
        """Return our rotation of a layer's queries and keys; None: torch rotates them."""
        at, own = self._geometry, self._parts
        if own is None:
            return None
        query, key = (
            None if norm is None else norm.to(self.device, torch.float32)
            for norm in (weights.query_norm, weights.key_norm)
        )
        return Turning(own.program, at.heads, at.kv_heads, query, key, at.epsilon)

    def mix(self, weights: LayerWeights) -> Mix:
        at, index = self._geometry, weights.index
        norms = [
            None if w is None else self.norm(w, at.epsilon)
            for w in (weights.query_norm, weights.key_norm)
        ]
        sizes = [count * at.head_dim for count in (at.heads, at.kv_heads, at.kv_heads)]
        turning, scale = self._turning(weights), at.head_dim**-0.5

        def mix(qkv: Tensor, seen: TorchRows) -> Tensor:
            if turning is not None and isinstance(seen.rows, FixedRows):
                return seen.attend_turned(index, qkv, turning, scale).flatten(1)
            query, key, value = (
                part.reshape(part.shape[0], -1, at.head_dim).transpose(0, 1)
                for part in torch.split(qkv, sizes, dim=-1)
            )
            query, key = (
                part if norm is None else norm(part)
                for part, norm in zip((query, key), norms, strict=True)
            )
            query, key = (rotate(part, seen.cosines, seen.sines) for part in (query, key))
            return seen.attend(index, query, key, value, scale).flatten(1)

        return mix

    def layer(self, weights: LayerWeights) -> Layer:
        return parted_layer(self, weights, self._geometry.epsilon)

    def new_cache(self, capacity: int) -> Cache:
        at = self._geometry
        return ArenaCache(
            self._arenas,
            layers=at.layers,
            kv_heads=at.kv_heads,
            head_dim=at.head_dim,
            capacity=capacity,
            dtype=self.cached,
            device=self.device,
        )

    def arrange(self, positions: Tensor, segments: Sequence[Segment] | FixedRows) -> TorchRows:
        angles = positions.to(self.device).unsqueeze(1) * self._frequencies
        cosines, sines = (
            turn * self._geometry.rope_scaling for turn in (angles.cos(), angles.sin())
        )
        if not isinstance(segments, FixedRows):
            return TorchRows(cosines, sines, arrange(segments, self._masks))
        mask = segments.mask
        if not isinstance(segments.memory, PlacedRows):
            mask = mask.to(self.cached)
        mask = mask.repeat(self._masks.groups, 1)
        return TorchRows(cosines, sines, replace(segments, mask=mask))


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x [heads, T, head_dim]: the pairs (j, j + rotary_dim / 2) are turned by angle j; what lies
    behind rotary_dim is left alone."""
    half = cosines.shape[1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat(
        [first * cosines - second * sines, second * cosines + first * sines, rest], dim=-1
    )
