"""The arithmetic of a draft head: its matrices, norms and attention by the C++ kernels on a CPU
that has them, by torch elsewhere.

Both give the same functions of tensors, from which `heads` puts a head together. Rows are T,
positions are those of the rotary embedding, slots those of a session's cache. Knows decoder layers
and their parts, not what a head makes of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dovetail.workers.kernels import Kind
from dovetail.workers.models.backends.device.rows import Ours, PlacedRows
from dovetail.workers.models.segment import Cache, Segment

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> [T, out]."""
Mix = Callable[[Tensor, Any], Tensor]
"""Queries, keys and values [T, (heads + 2 kv_heads) head_dim] and the rows of a pass -> attention
[T, heads head_dim]."""
Layer = Callable[[Tensor, Any], Tensor]
"""States [T, H], which may be overwritten, and the rows of a pass -> states behind a decoder
layer."""

KINDS = {"fp32": Kind.FP32, "fp16": Kind.FP16, "bf16": Kind.BF16, "int8": Kind.INT8}
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


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
    """The factor of cosines and sines."""


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
    """The norm before attention; None: attention reads the states as they are."""
    mlp_norm: Tensor
    gate_up: Tensor | None
    """[2 intermediate, H], the gate first."""
    down: Tensor | None


@dataclass(frozen=True)
class FixedRows:
    """Rows of a pass in shapes that do not depend on what is in the cache, for CUDA graphs: what is
    written and attended to is in tensors."""

    memory: Tensor | PlacedRows
    """Rows of a `KVCache`, S of each layer, or the caches of the rows of several sessions."""
    slots: Tensor
    """int64 [T]: where the rows' keys and values are written; rows of padding may share a slot that
    no row attends to."""
    mask: Tensor
    """[T, S], added to scores: 0 or -inf; no row may see nothing."""


class Arithmetic(Protocol):
    """The functions that a head is put together from."""

    device: torch.device
    dtype: torch.dtype
    """The type of states between the matrices."""
    cached: torch.dtype
    """The type of keys and values."""
    table: torch.dtype | None
    """The type of the embedding; None: as it is stored."""
    name: str
    """The library that computes, as it stands in a log line."""
    ours: Ours | None
    """Our functions for levels with rows of several sessions; None: it has none."""

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
