"""Families with Gated DeltaNets or short convolutions in place of some attention."""

from dataclasses import replace
from typing import Any

from dovetail.workers.kernels.layer_plan import Score
from dovetail.workers.kernels.states import ScanRule
from dovetail.workers.models.families.description import (
    GATED,
    HEAD_NORMS,
    Attention,
    Experts,
    Family,
    Given,
    LayerSpec,
    Mlp,
    Norms,
    Router,
    StateMixer,
    activation,
    attention,
    gated,
)


def _delta(config: Any, given: tuple[str, ...], order: Given) -> StateMixer:
    return StateMixer(
        ScanRule.GATED_DELTA,
        tuple(f"linear_attn.in_proj_{name}" for name in given),
        "linear_attn.out_proj",
        "linear_attn.conv1d",
        order,
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        decay="linear_attn.A_log",
        step_bias="linear_attn.dt_bias",
        norm="linear_attn.norm",
        norm_width=config.linear_value_head_dim,
        epsilon=config.rms_norm_eps,
        query_scale=config.linear_key_head_dim**-0.5,
    )


def _qwen(config: Any, index: int, delta: StateMixer, mlp: Mlp | Experts) -> LayerSpec:
    """Most layers have a state; the others have gated attention."""
    mixer: Attention | StateMixer = delta
    if config.layer_types[index] == "full_attention":
        mixer = attention(config, index, window=0, norms=HEAD_NORMS, gated=True)
    return LayerSpec(mixer, mlp, Norms(config.rms_norm_eps, plus_one=True))


def _shared_experts(config: Any, *, normalised: bool) -> Experts:
    act = config.hidden_act
    return Experts(
        config.num_experts_per_tok,
        activation(GATED, act),
        Router(score=Score.SOFTMAX, normalised=normalised),
        shared=gated(
            act,
            gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            down="mlp.shared_expert.down_proj",
        ),
        shared_gate="mlp.shared_expert_gate",
    )


def _qwen3_next(config: Any, index: int) -> LayerSpec:
    """Queries, keys, values and gates of a key head are stored together."""
    mlp: Mlp | Experts = gated(config.hidden_act)
    sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    if sparse and index not in config.mlp_only_layers:
        mlp = _shared_experts(config, normalised=config.norm_topk_prob)
    return _qwen(config, index, _delta(config, ("qkvz", "ba"), Given.BY_KEY_HEAD), mlp)


APART = ("qkv", "z", "b", "a")


def _qwen3_5(config: Any, index: int) -> LayerSpec:
    delta = _delta(config, APART, Given.IN_ORDER)
    return _qwen(config, index, delta, gated(config.hidden_act))


def _qwen3_5_moe(config: Any, index: int) -> LayerSpec:
    delta = _delta(config, APART, Given.IN_ORDER)
    return _qwen(config, index, delta, _shared_experts(config, normalised=True))


def _lfm2(config: Any, index: int) -> LayerSpec:
    """Most layers are gated convolutions of a few rows."""
    mixer: Attention | StateMixer = StateMixer(
        ScanRule.SHORT_CONVOLUTION, ("conv.in_proj",), "conv.out_proj", "conv.conv"
    )
    if config.layer_types[index] != "conv":
        norms = ("self_attn.q_layernorm", "self_attn.k_layernorm")
        output = "self_attn.out_proj"
        mixer = attention(config, index, window=0, norms=norms, output=output)
    return LayerSpec(
        mixer, LFM2_MLP, Norms(config.norm_eps, pre_mixer="operator_norm", pre_mlp="ffn_norm")
    )


LFM2_MLP = gated("silu", gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2")


def _lfm2_moe(config: Any, index: int) -> LayerSpec:
    """The first layers have an MLP, the others experts, maybe with a corrected selection."""
    spec = _lfm2(config, index)
    if index < config.num_dense_layers:
        return spec
    router = Router(
        "feed_forward.gate.weight",
        Score.SIGMOID,
        correction="feed_forward.expert_bias" if config.use_expert_bias else None,
        normalised=config.norm_topk_prob,
        added_sum=1e-6,
        scale=config.routed_scaling_factor,
    )
    part = "feed_forward.experts"
    experts = Experts(config.num_experts_per_tok, GATED["silu"], router, part=part)
    return replace(spec, mlp=experts)


FAMILIES = {
    "lfm2": Family(_lfm2),
    "lfm2_moe": Family(_lfm2_moe),
    "qwen3_next": Family(_qwen3_next),
    "qwen3_5_text": Family(_qwen3_5),
    "qwen3_5_moe_text": Family(_qwen3_5_moe),
}
