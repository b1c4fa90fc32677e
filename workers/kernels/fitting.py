"""Checks of a layer's plan: the kernels do not check that matrices and heads fit together."""

from dovetail.workers.kernels import PackedMatrix, check_matrix
from dovetail.workers.kernels.layer_plan import Activation, LayerPlan


def check_shapes(plan: LayerPlan) -> None:
    """Raise ValueError for matrices that do not fit together."""
    hidden = plan.hidden
    if plan.qkv is not None and plan.output is not None:
        _check_mixers(plan, plan.qkv, plan.output)
    elif plan.qkv is not None or plan.scan is not None or plan.beside is not None:
        raise ValueError("a mixer with a state, or attention, lacks a matrix")
    if plan.gate_up is not None and plan.down is not None:
        check_mlp(plan.gate_up, plan.down, hidden, plan.activation)
    if (own := plan.own_input) is not None:
        check_matrix("gate of the input", own.gate, own.projection.k, hidden)
        check_matrix("projection of the input", own.projection, hidden, own.projection.k)


def _check_mixers(plan: LayerPlan, qkv: PackedMatrix, output: PackedMatrix) -> None:
    """Raise ValueError if attention and a mixer with a state do not fit their matrices."""
    hidden, cached = plan.hidden, 2 * plan.kv_heads if plan.reads is None else 0
    given, taken = (plan.heads + cached) * plan.head_dim, plan.heads * plan.head_dim
    if plan.beside is not None:
        if plan.scan is None or plan.parallel:
            raise ValueError("a parallel mixer without attention, or together with an MLP")
        widths = plan.scan.widths
        check_matrix("given", plan.beside.given, widths[0], hidden)
        check_matrix("output beside attention", plan.beside.output, hidden, widths[1])
    elif plan.scan is not None:
        given, taken = plan.scan.widths
    elif plan.latent is not None:
        rotated = 0 if plan.rotary is None else 2 * plan.rotary.cosines.shape[1]
        given, taken = plan.latent.widths(plan.heads, rotated)
        if (plan.kv_heads, plan.head_dim) != (1, plan.latent.rank + rotated):
            raise ValueError(f"latents in {plan.kv_heads} rows of {plan.head_dim}")
    if plan.given and (plan.attention_norm is not None or plan.parallel or plan.beside is not None):
        raise ValueError("attention has its own input, but a norm, an MLP or a mixer reads it")
    check_matrix("qkv", qkv, given, plan.given or hidden)
    check_matrix("output", output, hidden, taken)
    if plan.mixer_gate is not None:
        check_matrix("mixer_gate", plan.mixer_gate, taken, plan.given or hidden)
    if plan.attends:
        check_heads(plan)


def check_mlp(gate_up: PackedMatrix, down: PackedMatrix, hidden: int, how: Activation) -> None:
    """Raise ValueError if the matrices of an MLP or an expert do not fit together."""
    check_matrix("gate_up", gate_up, down.k * (2 if how.gated else 1), hidden)
    check_matrix("down", down, hidden, down.k)


def check_heads(plan: LayerPlan) -> None:
    """Raise ValueError if heads cannot share their keys evenly, or more of a head is rotated than
    it has."""
    rotated = 0 if plan.rotary is None else 2 * plan.rotary.cosines.shape[1]
    if plan.kv_heads < 1 or plan.heads % plan.kv_heads or rotated > plan.head_dim:
        raise ValueError(
            f"{plan.heads} heads of {plan.head_dim} with {plan.kv_heads} key heads, of which "
            f"{rotated} numbers are rotated"
        )
