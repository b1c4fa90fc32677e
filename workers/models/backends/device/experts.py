"""A layer's experts computed by torch, or by the CPU for a device: the kernels' function up to
rounding. Experts are chosen in fp32; of equals, the lower index comes first."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu, softplus

from dovetail.workers.kernels.experts import mix
from dovetail.workers.kernels.layer import DecoderLayer
from dovetail.workers.kernels.layer_plan import Activation, LayerPlan, MixerGate, RouterPlan, Score
from dovetail.workers.models.backends.blob import ROUTER, SHARED_GATE

Multiply = Callable[[str, Tensor], Tensor]  # by a matrix's name: x [T, k] fp32 -> x W^T + bias
NormOf = Callable[[Tensor], Tensor]


def plain(x: Tensor) -> Tensor:
    """Return x unchanged: there is no norm."""
    return x


class HostExperts:
    """The experts of a layer that the CPU computes, from weights that stay in its memory."""

    def __init__(self, plan: LayerPlan) -> None:
        self._layer = DecoderLayer(plan)

    def begin(self, x: Tensor, _multiply: Multiply) -> Callable[[], Tensor]:
        """Start on an input [T, hidden] of the experts; return a function for their outputs."""
        rows = x.cpu().contiguous()
        return lambda: mix(self._layer.struct, rows).to(x.device)


class DeviceExperts:
    """The experts of a layer that torch computes."""

    def __init__(
        self, plan: LayerPlan, device: torch.device, norms: tuple[NormOf, NormOf, NormOf]
    ) -> None:
        """`norms`: of the router's input, of the experts' input, and of their sum."""
        assert plan.experts is not None
        self._plan = plan
        self._router_norm, self._input_norm, self._output_norm = norms
        router = plan.experts.router
        self._router, self._around = router, plan.experts.before is not None
        self._correction = None if router.correction is None else router.correction.to(device)
        self._scales = None if router.scales is None else router.scales.to(device)

    def begin(self, x: Tensor, multiply: Multiply) -> Callable[[], Tensor]:
        """Take the experts' input [T, hidden]; return a function for their outputs [T, hidden]."""
        return lambda: self._run(x, multiply)

    def _run(self, x: Tensor, multiply: Multiply) -> Tensor:
        ids, weights = self._choose(multiply(ROUTER, self._router_norm(x)))
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self._router.logits.n).tolist()
        read = self._input_norm(x)
        read = multiply("experts.before", read) if self._around else read
        given = read[order // self._router.chosen]
        shares = weights.flatten()[order].unsqueeze(1)
        if self._router.scales_input:
            given, shares = given * shares, torch.ones_like(shares)
        found, first = torch.empty_like(given), 0
        for index, count in enumerate(counts):
            if count:
                rows = slice(first, first + count)
                both = multiply(f"experts.gate_up.{index}", given[rows])
                found[rows] = multiply(f"experts.down.{index}", activate(self._plan, both))
                first += count
        outputs = torch.empty_like(found)
        outputs[order] = found * shares
        total = outputs.view(*ids.shape, -1).sum(1)
        return self._output_norm(multiply("experts.behind", total) if self._around else total)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [T, chosen] of rows, ascending, and their weights."""
        router = self._router
        if router.softcap:
            logits = router.softcap * torch.tanh(logits / router.softcap)
        scores = logits
        if router.score is Score.SOFTMAX:
            scores = logits.softmax(-1)
        elif router.score is Score.SIGMOID:
            scores = logits.sigmoid()
        values = scores if self._correction is None else scores + self._correction
        if router.groups > 1:
            values = _within_groups(router, values)
        best = values.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen]
        ids = best.sort(dim=-1).values
        weights = scores.gather(-1, ids)
        if router.score is Score.SPARSE_MIXER:
            weights = _sparsely(router, logits, ids)
        elif router.score is Score.SOFTMAX_OF_CHOSEN:
            weights = weights.softmax(-1)
        elif router.score is Score.SIGMOID_OF_CHOSEN:
            weights = weights.sigmoid()
        if router.normalised:
            total = weights.sum(-1, keepdim=True) + router.added_sum
            weights = weights / total.clamp(min=router.least_sum)
        weights = weights * router.scale
        return ids, weights if self._scales is None else weights * self._scales[ids]


def _sparsely(router: RouterPlan, logits: Tensor, ids: Tensor) -> Tensor:
    """Return SparseMixer's weights of the chosen experts [T, chosen]."""
    own, other = logits.gather(-1, ids).unsqueeze(-1), logits.unsqueeze(1)
    lower = torch.arange(logits.shape[-1], device=logits.device) < ids.unsqueeze(-1)
    far = own - other > 2.0 * router.jitter * torch.maximum(other.abs(), own)
    out = far | (other > own) | ((other == own) & lower)
    return 1.0 / (other - own).masked_fill(out, float("-inf")).exp().sum(-1)


def _within_groups(router: RouterPlan, values: Tensor) -> Tensor:
    """values [T, experts], with -inf outside of the best groups."""
    groups = values.view(len(values), router.groups, -1)
    counted = 1 if router.best_alone else min(2, groups.shape[-1])
    worth = groups.topk(counted, dim=-1).values.sum(-1)
    best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : router.chosen_groups]
    closed = torch.ones_like(worth, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)


def gate_shared(shared: Tensor, x: Tensor, plan: LayerPlan, multiply: Multiply) -> Tensor:
    """Return the output of the shared expert [T, hidden], times its gate if it has one."""
    assert plan.experts is not None
    if plan.experts.shared_gate is None:
        return shared
    return shared * multiply(SHARED_GATE, x).sigmoid()


def activate(plan: LayerPlan, x: Tensor) -> Tensor:
    """[T, units] of [T, 2 units], the gate first, or of [T, units]."""
    if plan.activation in (Activation.RELU, Activation.RELU2):
        return relu(x) if plan.activation is Activation.RELU else relu(x).square()
    if plan.activation in (Activation.GELU, Activation.GELU_TANH):
        return gelu(x, approximate="none" if plan.activation is Activation.GELU else "tanh")
    if plan.activation is Activation.XIELU:
        positive, negative = plan.activation_numbers
        beyond = torch.expm1(x.clamp(max=-1e-6)) - x
        return torch.where(x > 0, x * x * positive, beyond * negative) + 0.5 * x
    gate, up = x.chunk(2, dim=1)
    if plan.activation is Activation.SILU_GATED and plan.activation_numbers[0] != 0.0:
        gate = gate * plan.activation_numbers[0]
    if plan.activation is Activation.SWIGLU_CLAMPED:
        factor, limit = plan.activation_numbers
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1.0) * gate * torch.sigmoid(factor * gate)
    if plan.activation is Activation.RELU2_GATED:
        return relu(gate).square() * up
    return (
        silu(gate) if plan.activation is Activation.SILU_GATED else gelu(gate, approximate="tanh")
    ) * up


def gate_mixed(plan: LayerPlan, mixed: Tensor, x: Tensor) -> Tensor:
    """Return attention's result [T, width] times its gates, one per number or per head. x [T,
    gates]: the gates before `gate_kind`."""
    gates = x.sigmoid() if plan.gate_kind is MixerGate.SIGMOID else softplus(x)
    return (mixed.reshape(*gates.shape, -1) * gates.unsqueeze(-1)).view(mixed.shape)
