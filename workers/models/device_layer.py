"""A decoder layer computed by torch's operations, on a GPU as anywhere: the function of the kernels' layer up to rounding.

States, norms, attention and sums are fp32; 16-bit weights are widened some rows at a time, and int8 ones meet inputs that are quantised row by row, in exact
integer products, as in the kernels. Knows a layer by its plan and its matrices, wherever they came from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, pad, silu

from dovetail.workers.kernels import Kind
from dovetail.workers.kernels.layer import Activation, LayerPlan, Norm, NormKind, Rotary
from dovetail.workers.models.attention import Block, attend_blocks
from dovetail.workers.models.blob import Matrix

TILE_WEIGHTS = 1 << 24
"""So many 16-bit weights are widened at a time: 64 MiB of fp32."""
LEAST_ROWS, MULTIPLE = 32, 8
"""torch's integer product on a GPU takes more than 16 rows, and inputs and outputs that are multiples of 8."""
TINY = 1e-30
"""A row whose largest magnitude is less is all zeros in int8 (`kernels/native/linear.inl`)."""


@dataclass(frozen=True)
class Rows:
    """The rows of a pass on the device."""

    positions: Tensor
    """int64 [T]."""
    blocks: Sequence[Block]


class DeviceNorm:
    """A norm with its weights on a device."""

    def __init__(self, kind: NormKind, norm: Norm, epsilon: float, device: torch.device) -> None:
        self._kind, self._epsilon = kind, epsilon
        self._weight = norm.weight.to(device)
        self._bias = None if norm.bias is None else norm.bias.to(device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., width], normalised."""
        if self._kind is NormKind.LAYER_NORM:
            return layer_norm(x, x.shape[-1:], self._weight, self._bias, self._epsilon)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._epsilon) * self._weight


def product(matrix: Matrix, x: Tensor) -> Tensor:
    """x [T, k] fp32 -> x W^T + bias [T, n] fp32."""
    if matrix.kind is Kind.FP32:
        return linear(x, matrix.weight, matrix.bias)
    y = _integer_product(matrix, x) if matrix.kind is Kind.INT8 else _widened_product(matrix.weight, x)
    return y if matrix.bias is None else y + matrix.bias


def _widened_product(weight: Tensor, x: Tensor) -> Tensor:
    rows = max(1, TILE_WEIGHTS // weight.shape[1])
    y = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, weight.shape[0], rows):
        torch.mm(x, weight[first : first + rows].float().t(), out=y[:, first : first + rows])
    return y


def _integer_product(matrix: Matrix, x: Tensor) -> Tensor:
    """The inputs quantised with a scale of each row; what is not finite makes its row so."""
    assert matrix.scales is not None
    most = x.abs().amax(1, keepdim=True)
    to = torch.where(most < TINY, torch.zeros_like(most), 127.0 / most)
    scales = torch.where(most < TINY, torch.zeros_like(most), most / 127.0)
    scales = torch.where(most.isfinite(), scales, torch.full_like(most, float("nan")))
    quantised = torch.where(most.isfinite(), x * to, torch.zeros_like(x)).round().to(torch.int8)
    rows, inputs, outputs = x.shape[0], -(-matrix.weight.shape[1] // MULTIPLE) * MULTIPLE, -(-matrix.weight.shape[0] // MULTIPLE) * MULTIPLE
    left = pad(quantised, (0, inputs - x.shape[1], 0, max(0, LEAST_ROWS - rows)))
    right = pad(matrix.weight, (0, inputs - matrix.weight.shape[1], 0, outputs - matrix.weight.shape[0]))
    sums = torch._int_mm(left, right.t())[:rows, : matrix.weight.shape[0]]
    return sums.float() * (scales * matrix.scales)


class Angles:
    """The rotary table of a model on a device."""

    def __init__(self, rotary: Rotary, device: torch.device) -> None:
        self._cosines, self._sines = rotary.cosines.to(device), rotary.sines.to(device)

    def turn(self, heads: Tensor, positions: Tensor) -> Tensor:
        """heads [T, H, head_dim], the first part of each turned by the angles of its row's position."""
        cosines, sines = self._cosines[positions].unsqueeze(1), self._sines[positions].unsqueeze(1)
        half = cosines.shape[-1]
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat([a * cosines - b * sines, b * cosines + a * sines, rest], dim=-1)


class DeviceLayer:
    """What of a layer stays on a device, however its matrices come there."""

    def __init__(self, plan: LayerPlan, angles: Angles | None, device: torch.device) -> None:
        self._plan, self._angles = plan, angles

        def norm(of: Norm | None, kind: NormKind = plan.norm_kind) -> DeviceNorm | None:
            return None if of is None else DeviceNorm(kind, of, plan.epsilon, device)

        self._attention_norm, self._mlp_norm = norm(plan.attention_norm), norm(plan.mlp_norm)
        self._post_attention_norm, self._post_mlp_norm = norm(plan.post_attention_norm), norm(plan.post_mlp_norm)
        self._query_norm, self._key_norm = norm(plan.query_norm, NormKind.RMS), norm(plan.key_norm, NormKind.RMS)

    def run(self, rows: Rows, states: Tensor, matrix: Callable[[str], Matrix]) -> None:
        """states [T, hidden] through the layer, in place; keys and values of the rows go into the caches. `matrix`: each by its name, asked for once."""
        mixed = self._attend(rows, product(matrix("qkv"), _through(self._attention_norm, states)))
        states += _through(self._post_attention_norm, product(matrix("output"), mixed))
        inner = _activate(self._plan.activation, product(matrix("gate_up"), _through(self._mlp_norm, states)))
        states += _through(self._post_mlp_norm, product(matrix("down"), inner))

    def _attend(self, rows: Rows, qkv: Tensor) -> Tensor:
        plan = self._plan
        sizes = [plan.heads, plan.kv_heads, plan.kv_heads]
        query, key, value = torch.split(qkv.view(qkv.shape[0], -1, plan.head_dim), sizes, dim=1)
        query, key = _through(self._query_norm, query), _through(self._key_norm, key)
        if self._angles is not None:
            query, key = self._angles.turn(query, rows.positions), self._angles.turn(key, rows.positions)
        scale = plan.head_dim**-0.5 if plan.scale is None else plan.scale
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        return attend_blocks(plan.index, query, key, value, rows.blocks, scale, plan.window or None, plan.softcap or None).flatten(1)


def _through(norm: DeviceNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _activate(activation: Activation, x: Tensor) -> Tensor:
    """[T, units] of [T, 2 units], the gate first, or of [T, units]."""
    if activation is Activation.GELU_TANH:
        return gelu(x, approximate="tanh")
    gate, up = x.chunk(2, dim=1)
    return (silu(gate) if activation is Activation.SILU_GATED else gelu(gate, approximate="tanh")) * up
