"""A decoder layer computed by torch's operations, on a GPU as anywhere: the function of the
kernels' layer up to rounding.

States, norms, attention and sums are fp32; 16-bit weights are widened some rows at a time, and int8
ones meet inputs that are quantised row by row, in exact integer products, as in the kernels. Knows
a layer by its plan and its matrices, wherever they came from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import (
    layer_norm,
    linear,
    pad,
    rms_norm,
    scaled_dot_product_attention,
)

from dovetail.workers.kernels import Kind
from dovetail.workers.kernels.layer_plan import (
    HeadNorm,
    LayerPlan,
    Norm,
    NormKind,
    Rotary,
)
from dovetail.workers.models.attention import Block, attend_blocks, attend_by_scores
from dovetail.workers.models.backends.blob import Matrix
from dovetail.workers.models.backends.device.experts import (
    DeviceExperts,
    HostExperts,
    Multiply,
    activate,
    gate_shared,
    plain,
)
from dovetail.workers.models.cache import rounded

TILE_WEIGHTS = 1 << 24
"""So many 16-bit weights are widened at a time: 64 MiB of fp32."""
LEAST_ROWS, MULTIPLE = 32, 8
"""torch's integer product on a GPU takes more than 16 rows, and inputs and outputs that are
multiples of 8."""
TINY = 1e-30
"""A row whose largest magnitude is less is all zeros in int8 (`kernels/native/linear.inl`)."""


class Seen(Protocol):
    """The rows of a pass on the device."""

    @property
    def turn(self) -> "Turn | None":
        """The rotation of queries and keys; None if they are not rotated."""

    def attend(self, plan: LayerPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write key and value [kv_heads, T, head_dim], attend with query [heads, T, head_dim];
        returns [T, heads, head_dim]."""


@dataclass(frozen=True)
class Rows:
    """The rows of several sessions, in the shapes that their caches have."""

    turn: "Turn | None"
    blocks: Sequence[Block]

    def attend(self, plan: LayerPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_blocks(
            plan.index,
            query,
            key,
            value,
            self.blocks,
            scale_of(plan),
            plan.window or None,
            plan.softcap or None,
            plan.sinks,
        )


@dataclass(frozen=True)
class FixedRows:
    """The rows of one session, in shapes that depend on nothing but how many rows and slots there
    are: what is written and seen is told by tensors, for CUDA graphs."""

    turn: "Turn | None"
    cached: Tensor
    """The rows of a `KVCache`."""
    slots: Tensor
    """int64 [T]: where the rows are written; rows that are the same may share one."""
    masks: Mapping[int, Tensor]
    """Window of a layer (0: none) -> [groups * T, S] of 0 and -inf for the first S slots, once for
    each query head of a key head."""

    def attend(self, plan: LayerPlan, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.cached[plan.index, 0], self.cached[plan.index, 1]
        keys.index_copy_(1, self.slots, rounded(key, keys.dtype))
        values.index_copy_(1, self.slots, rounded(value, values.dtype))
        heads, rows, size = query.shape
        mask = self.masks[plan.window]
        keys, values = (
            keys[:, : mask.shape[1]].to(query.dtype).unsqueeze(0),
            values[:, : mask.shape[1]].to(query.dtype).unsqueeze(0),
        )
        packed = query.reshape(1, plan.kv_heads, -1, size)
        if plan.softcap:
            output = attend_by_scores(packed, keys, values, mask, scale_of(plan), plan.softcap)
        else:
            output = scaled_dot_product_attention(
                packed, keys, values, attn_mask=mask, scale=scale_of(plan)
            )
        return output.reshape(heads, rows, -1).transpose(0, 1)


def scale_of(plan: LayerPlan) -> float:
    """Return what the scores of a layer are multiplied by."""
    scale: float = plan.head_dim**-0.5 if plan.scale is None else plan.scale
    return scale


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
        return rms_norm(x, x.shape[-1:], self._weight, self._epsilon)


def product(matrix: Matrix, x: Tensor) -> Tensor:
    """x [T, k] fp32 -> x W^T + bias [T, n] fp32."""
    if matrix.kind is Kind.FP32:
        return linear(x, matrix.weight, matrix.bias)
    y = (
        _integer_product(matrix, x)
        if matrix.kind is Kind.INT8
        else _widened_product(matrix.weight, x)
    )
    return y if matrix.bias is None else y + matrix.bias


def rounded_product(matrix: Matrix, x: Tensor) -> Tensor:
    """Return the layer for a draft, which may round: inputs meet 16-bit weights in their own type,
    and nothing is widened."""
    if matrix.kind not in (Kind.FP16, Kind.BF16):
        return product(matrix, x)
    limit = torch.finfo(matrix.weight.dtype).max
    y = linear(x.clamp(-limit, limit).to(matrix.weight.dtype), matrix.weight).float()
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
    turned = torch.full_like(most, 127.0) / most  # 127.0 / most is 127 times a rounded reciprocal
    to = torch.where(most < TINY, torch.zeros_like(most), turned)
    scales = torch.where(most < TINY, torch.zeros_like(most), most / 127.0)
    scales = torch.where(most.isfinite(), scales, torch.full_like(most, float("nan")))
    quantised = torch.where(most.isfinite(), x * to, torch.zeros_like(x)).round().to(torch.int8)
    rows, inputs, outputs = (
        x.shape[0],
        -(-matrix.weight.shape[1] // MULTIPLE) * MULTIPLE,
        -(-matrix.weight.shape[0] // MULTIPLE) * MULTIPLE,
    )
    left = pad(quantised, (0, inputs - x.shape[1], 0, max(0, LEAST_ROWS - rows)))
    right = (
        matrix.weight
        if matrix.weight.shape == (outputs, inputs)
        else _padded(matrix.weight, outputs, inputs)
    )
    sums = torch._int_mm(left, right.t())[:rows, : matrix.weight.shape[0]]
    return sums.float() * (scales * matrix.scales)


def _padded(weight: Tensor, outputs: int, inputs: int) -> Tensor:
    return pad(weight, (0, inputs - weight.shape[1], 0, outputs - weight.shape[0]))


class Angles:
    """The rotary tables of a model on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, tuple[Rotary, Tensor, Tensor]] = {}
        self._alike: dict[int, tuple[Rotary, int]] = {}
        """Tables with the numbers of another one, and the id of that."""
        self._factors: dict[int, Tensor] = {}
        """The factors of queries of those tables that have any."""

    def add(self, rotary: Rotary) -> None:
        """Take a table over, if it is a new one; one with the same numbers is not copied again."""
        if id(rotary) in self._tables or id(rotary) in self._alike:
            return
        for key, (known, _, _) in self._tables.items():
            if _equal(known, rotary):
                self._alike[id(rotary)] = (rotary, key)
                return
        tables = rotary.cosines.to(self._device), rotary.sines.to(self._device)
        self._tables[id(rotary)] = (rotary, *tables)
        if rotary.factors is not None:
            self._factors[id(rotary)] = rotary.factors.to(self._device)

    def at(self, positions: Tensor) -> "Turn | None":
        """Return the angles of rows, for all layers of a pass: positions int64 [T]; None without
        tables."""
        found = {
            key: (cosines[positions].unsqueeze(1), sines[positions].unsqueeze(1))
            for key, (_, cosines, sines) in self._tables.items()
        }
        grown = {key: table[positions].view(-1, 1, 1) for key, table in self._factors.items()}
        for key, (_, of) in self._alike.items():
            found[key] = found[of]
            if of in grown:
                grown[key] = grown[of]
        return Turn(found, grown) if found else None


@dataclass(frozen=True)
class Turn:
    """The angles of the rows of a pass."""

    angles: Mapping[int, tuple[Tensor, Tensor]]
    """Cosines and sines [T, 1, rotary_dim / 2], by the id of their table."""
    factors: Mapping[int, Tensor] = field(default_factory=dict)
    """The factors of queries [T, 1, 1], by the id of their table."""

    def of(self, heads: Tensor, rotary: Rotary) -> Tensor:
        """heads [T, H, head_dim], the first part of each turned by the angles that a table has for
        its row's position."""
        cosines, sines = self.angles[id(rotary)]
        half = cosines.shape[-1]
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        first, second = (
            torch.addcmul(a * cosines, b, sines, value=-1),
            torch.addcmul(b * cosines, a, sines),
        )
        return torch.cat([first, second, rest] if rest.shape[-1] else [first, second], dim=-1)

    def grow(self, query: Tensor, rotary: Rotary) -> Tensor:
        """query [T, heads, head_dim] times the factors that a table has for its rows' positions."""
        factors = self.factors.get(id(rotary))
        return query if factors is None else query * factors


def _equal(one: Rotary, other: Rotary) -> bool:
    """Return whether two tables have the same numbers."""
    pairs = (
        (one.cosines, other.cosines),
        (one.sines, other.sines),
        (one.factors, other.factors),
    )
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


class DeviceLayer:
    """The parts of a layer that stay on a device, however its matrices come there."""

    def __init__(
        self, plan: LayerPlan, device: torch.device, *, host_experts: bool = False
    ) -> None:
        """`host_experts`: the CPU computes the experts, whose matrices the plan has."""
        sinks = None if plan.sinks is None else plan.sinks.to(device)
        self._plan = replace(plan, sinks=sinks)

        def norm(of: Norm | None, kind: NormKind = plan.norm_kind) -> DeviceNorm | None:
            return None if of is None else DeviceNorm(kind, of, plan.epsilon, device)

        self._attention_norm, self._mlp_norm = norm(plan.attention_norm), norm(plan.mlp_norm)
        self._post_attention_norm, self._post_mlp_norm = (
            norm(plan.post_attention_norm),
            norm(plan.post_mlp_norm),
        )
        self._query_norm = norm(plan.query_norm, NormKind.RMS)
        self._key_norm = norm(plan.key_norm, NormKind.RMS)
        self._value_norm = norm(plan.value_norm, NormKind.RMS)
        self._experts: HostExperts | DeviceExperts | None = None
        self._shared_norm = None
        if plan.experts is not None:
            self._shared_norm = norm(plan.experts.shared_norm)
            self._experts = HostExperts(plan) if host_experts else _experts_of(plan, device)

    def run(self, rows: Seen, states: Tensor, multiply: Multiply) -> None:
        """states [T, hidden] through the layer, in place; keys and values of the rows go into the
        caches. Each matrix is asked for once."""
        plan, normed = self._plan, _through(self._attention_norm, states)
        read = normed if self._mlp_norm is None else _through(self._mlp_norm, states)
        mixed = self._attend(rows, multiply("qkv", normed))
        self._add(states, _through(self._post_attention_norm, multiply("output", mixed)))
        read = read if plan.parallel else _through(self._mlp_norm, states)
        self._add(states, _through(self._post_mlp_norm, self._mlp(read, states, multiply)))
        if plan.scalar != 1.0:
            states *= plan.scalar

    def _mlp(self, x: Tensor, states: Tensor, multiply: Multiply) -> Tensor:
        """The MLP of x [T, hidden], or the experts of it, which may read the states before its
        norm; while the CPU computes those the device computes what all rows share."""
        plan, experts = self._plan, self._experts
        if plan.experts is None or experts is None:
            return self._dense(x, multiply)
        read = x if plan.experts.input_norm is None else states
        routed = experts.begin(read, multiply)
        if plan.gate_up is None:
            return routed()
        shared = gate_shared(self._dense(x, multiply), x, plan, multiply)
        return _through(self._shared_norm, shared) + routed()

    def _dense(self, x: Tensor, multiply: Multiply) -> Tensor:
        return multiply("down", activate(self._plan, multiply("gate_up", x)))

    def _add(self, states: Tensor, update: Tensor) -> None:
        states += update if self._plan.residual == 1.0 else update * self._plan.residual

    def _attend(self, rows: Seen, qkv: Tensor) -> Tensor:
        plan = self._plan
        heads = qkv.view(qkv.shape[0], -1, plan.head_dim)
        turned, value = (
            heads[:, : plan.heads + plan.kv_heads],
            heads[:, plan.heads + plan.kv_heads :],
        )
        if plan.head_norm is not HeadNorm.HEAD_AFTER_ROPE:
            turned = self._norm_heads(turned)
        if plan.rotary is not None:
            assert rows.turn is not None
            turned = rows.turn.of(turned, plan.rotary)
        if plan.head_norm is HeadNorm.HEAD_AFTER_ROPE:
            turned = self._norm_heads(turned)
        query, key = turned[:, : plan.heads], turned[:, plan.heads :]
        value = _through(self._value_norm, value)
        if plan.rotary is not None and rows.turn is not None:
            query = rows.turn.grow(query, plan.rotary)
        return rows.attend(
            plan, query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        ).flatten(1)

    def _norm_heads(self, heads: Tensor) -> Tensor:
        """Queries and keys [T, heads + kv_heads, head_dim] with their norms."""
        if self._query_norm is None and self._key_norm is None:
            return heads
        parts = []
        for norm, part in (
            (self._query_norm, heads[:, : self._plan.heads]),
            (self._key_norm, heads[:, self._plan.heads :]),
        ):
            wide = self._plan.head_norm is HeadNorm.WIDE_BEFORE_ROPE
            parts.append(_through(norm, part.flatten(1) if wide else part).view(part.shape))
        return torch.cat(parts, dim=1)


def _experts_of(plan: LayerPlan, device: torch.device) -> DeviceExperts:
    """Return the experts of a layer on a device that computes them."""
    assert plan.experts is not None
    router = plan.experts.router
    norms = (
        (router.norm, NormKind.RMS, router.epsilon),
        (plan.experts.input_norm, plan.norm_kind, plan.epsilon),
        (plan.experts.output_norm, plan.norm_kind, plan.epsilon),
    )
    first, second, third = (
        plain if norm is None else DeviceNorm(kind, norm, epsilon, device)
        for norm, kind, epsilon in norms
    )
    return DeviceExperts(plan, device, (first, second, third))


def _through(norm: DeviceNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
