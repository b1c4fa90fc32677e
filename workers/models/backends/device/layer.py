"""A decoder layer computed by torch: the kernels' function up to rounding. States, norms, attention
and sums are fp32; 16-bit weights are widened some rows at a time, int8 ones use exact integer
products."""

from dataclasses import replace

import torch
from torch import Tensor

from dovetail.workers.kernels.layer_plan import HeadNorm, InputPlan, LayerPlan, Norm, NormKind
from dovetail.workers.models.backends.device.experts import (
    DeviceExperts,
    HostExperts,
    Multiply,
    activate,
    gate_mixed,
    gate_shared,
    plain,
)
from dovetail.workers.models.backends.device.parts import DeviceNorm, Parts
from dovetail.workers.models.backends.device.products import narrowed
from dovetail.workers.models.backends.device.rows import FixedRows, SeenRows
from dovetail.workers.models.backends.device.scan import DeviceScan


class DeviceLayer:
    """The parts of a layer that stay on a device, independent of the source of its matrices."""

    def __init__(
        self,
        plan: LayerPlan,
        device: torch.device,
        parts: Parts | None,
        *,
        host_experts: bool = False,
    ) -> None:
        """`parts`: our functions; None: torch's. `host_experts`: the CPU computes the experts."""
        sinks = None if plan.sinks is None else plan.sinks.to(device)
        self._plan = replace(plan, sinks=sinks)

        def norm(of: Norm | None, kind: NormKind = plan.norm_kind) -> DeviceNorm | None:
            return None if of is None else DeviceNorm(kind, of, plan.epsilon, device, parts)

        self.narrow = narrowed if parts is None else parts.narrow
        self._gates = parts if parts is not None and parts.gates(plan) else None
        self._turning = None if parts is None else parts.turning(plan, device)
        self._attention_norm, self._mlp_norm = norm(plan.attention_norm), norm(plan.mlp_norm)
        self._post_attention_norm, self._post_mlp_norm = (
            norm(plan.post_attention_norm),
            norm(plan.post_mlp_norm),
        )
        self._mixer_norm, self._inner_norm = norm(plan.mixer_norm), norm(plan.inner_norm)
        self._query_norm = norm(plan.query_norm, NormKind.RMS)
        self._key_norm = norm(plan.key_norm, NormKind.RMS)
        self._value_norm = norm(plan.value_norm, NormKind.RMS)
        self._beside_norm = None if plan.beside is None else norm(plan.beside.norm)
        self._input_norm = None if plan.own_input is None else norm(plan.own_input.norm)
        self._scan = None if plan.scan is None else DeviceScan(plan.scan, device)
        self._latent = None if plan.latent is None else DeviceLatents(plan, device)
        self._experts: HostExperts | DeviceExperts | None = None
        self._shared_norm = None
        if plan.experts is not None:
            self._shared_norm = norm(plan.experts.shared_norm)
            self._experts = HostExperts(plan) if host_experts else _experts_of(plan, device)

    def run(
        self, rows: SeenRows, states: Tensor, multiply: Multiply, given: Tensor | None = None
    ) -> None:
        """Compute states [T, hidden] in place, and cache keys and values. `given` [T, plan.given]:
        attention's input instead of the states."""
        plan, normed = self._plan, _through(self._attention_norm, states)
        if given is not None:
            normed = given
        has_mlp = plan.gate_up is not None or plan.experts is not None
        read = None
        if plan.parallel:
            read = normed if self._mlp_norm is None else self._mlp_norm(states)
        if plan.qkv is not None:
            mixed = self._mix(rows, normed, states, multiply)
            mixed = _through(self._post_attention_norm, mixed)
            if has_mlp and read is None and self._mlp_norm is not None and plan.residual == 1.0:
                read = self._mlp_norm.of_sum(states, mixed)
            else:
                _add(states, mixed, plan.residual)
        if has_mlp:
            read = _through(self._mlp_norm, states) if read is None else read
            update = self._mlp(read, states, multiply)
            _add(states, _through(self._post_mlp_norm, update), plan.mlp_residual)
        if plan.own_input is not None:
            states += _through(
                self._input_norm, self._input(rows, plan.own_input, states, multiply)
            )
        if plan.scalar != 1.0:
            states *= plan.scalar

    def _input(self, rows: SeenRows, own: InputPlan, states: Tensor, multiply: Multiply) -> Tensor:
        assert rows.inputs is not None
        inputs = rows.inputs[:, own.first : own.first + own.gate.n]
        both = torch.cat([multiply("own_input.gate", states), inputs], dim=1)
        return multiply("own_input.projection", activate(self._plan, both))

    def _mix(self, rows: SeenRows, x: Tensor, states: Tensor, multiply: Multiply) -> Tensor:
        """Return the output of attention and a mixer with a state for normed rows x [T, hidden]."""
        plan, given = self._plan, multiply("qkv", x)
        if self._latent is not None:
            mixed = self._latent.run(rows, given, multiply)
        elif self._scan is not None and plan.beside is None:
            if plan.scan_gate is not None:
                ends = given[:, -2 * plan.scan_gate.k :].chunk(2, dim=1)
                names = ("scan_gate", "scan_decay")
                made = [multiply(n, x.contiguous()) for n, x in zip(names, ends, strict=True)]
                given = torch.cat([given, *made], dim=1)
            mixed = self._scan.run(rows.stateful, given)
        else:
            mixed = self._attend(rows, given)
        if plan.mixer_gate is not None:
            mixed = gate_mixed(plan, mixed, multiply("mixer_gate", x))
        update = multiply("output", _through(self._mixer_norm, mixed))
        if plan.beside is None or self._scan is None:
            return update
        given = multiply("beside.given", _through(self._beside_norm, states))
        other = multiply("beside.output", self._scan.run(rows.stateful, given))
        return update * plan.beside.attention_factor + other * plan.beside.factor

    def _mlp(self, x: Tensor, states: Tensor, multiply: Multiply) -> Tensor:
        """Return the MLP or experts of x [T, hidden]; the CPU's experts run in parallel to the
        shared MLP."""
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
        both = multiply("gate_up", x)
        gated = activate(self._plan, both) if self._gates is None else self._gates.gate(both)
        return multiply("down", _through(self._inner_norm, gated))

    def _attend(self, rows: SeenRows, qkv: Tensor) -> Tensor:
        plan = self._plan
        if self._turning is not None and isinstance(rows, FixedRows) and rows.turns:
            return rows.attend_turned(plan, qkv, self._turning).flatten(1)
        heads, stop = qkv.view(qkv.shape[0], -1, plan.head_dim), plan.heads
        stop += plan.kv_heads if plan.caches else 0
        turned, value = heads[:, :stop], heads[:, stop:]
        if plan.head_norm is not HeadNorm.HEAD_AFTER_ROPE:
            turned = self._norm_heads(turned)
        if plan.clip:
            turned, value = turned.clamp(-plan.clip, plan.clip), value.clamp(-plan.clip, plan.clip)
        if plan.rotary is not None:
            assert rows.turn is not None
            turned = rows.turn.of(turned, plan.rotary)
        if plan.head_norm is HeadNorm.HEAD_AFTER_ROPE:
            turned = self._norm_heads(turned)
        query, key = turned[:, : plan.heads], turned[:, plan.heads :]
        if plan.rotary is not None and rows.turn is not None:
            query = rows.turn.grow(query, plan.rotary)
        query = query.transpose(0, 1)
        if not plan.caches:
            return rows.attend(plan, query, None, None).flatten(1)
        if plan.key_factor != 1.0:
            key = key * plan.key_factor
        value = _through(self._value_norm, value)
        return rows.attend(plan, query, key.transpose(0, 1), value.transpose(0, 1)).flatten(1)

    def _norm_heads(self, heads: Tensor) -> Tensor:
        """Queries and keys [T, heads + kv_heads, head_dim], or queries alone, with their norms."""
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


def _add(states: Tensor, update: Tensor, factor: float) -> None:
    states += update if factor == 1.0 else update * factor


def _through(norm: DeviceNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class DeviceLatents:
    """Attention over latents: queries pass through the matrix of keys, results through that of
    values."""

    def __init__(self, plan: LayerPlan, device: torch.device) -> None:
        assert plan.latent is not None
        self._plan, self._own = plan, plan.latent

        def norm(weight: Tensor) -> DeviceNorm:
            return DeviceNorm(NormKind.RMS, Norm(weight), self._own.epsilon, device)

        self._latent_norm = norm(self._own.latent_norm)
        query_norm = self._own.query_norm
        self._query_norm = plain if query_norm is None else norm(query_norm)

    def run(self, rows: SeenRows, given: Tensor, multiply: Multiply) -> Tensor:
        """Return [T, heads value_dim], given the first matrix's output [T, ...]; caches latents and
        keys."""
        plan, own = self._plan, self._own
        first = given.shape[1] - plan.head_dim
        queries, latent, key = torch.split(
            given, [first, own.rank, plan.head_dim - own.rank], dim=1
        )
        if own.query_up is not None:
            queries = multiply("latent.query_up", self._query_norm(queries))
        heads, key = queries.reshape(len(given), plan.heads, -1), key.unsqueeze(1)
        if plan.rotary is not None:
            assert rows.turn is not None
            heads = rows.turn.grow(heads, plan.rotary)
            key = rows.turn.of(key, plan.rotary)
        ends = heads[..., own.plain :]
        if plan.rotary is not None and rows.turn is not None:
            ends = rows.turn.of(ends, plan.rotary)
        absorbed = [
            multiply(f"latent.key_up.{head}", heads[:, head, : own.plain].contiguous())
            for head in range(plan.heads)
        ]
        query = torch.cat([torch.stack(absorbed, dim=1), ends], dim=-1).transpose(0, 1)
        row = torch.cat([self._latent_norm(latent), key.squeeze(1)], dim=-1).unsqueeze(0)
        mixed = rows.attend(plan, query, row, row)
        values = [
            multiply(f"latent.value_up.{head}", mixed[:, head].contiguous())
            for head in range(plan.heads)
        ]
        return torch.cat(values, dim=1)
