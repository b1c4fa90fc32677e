"""DeepSeek's families with attention over latents, with experts in most layers or in none."""

import math
from dataclasses import replace
from typing import Any

from dovetail.workers.kernels.states import ScanRule
from dovetail.workers.models.families.description import (
    Experts,
    Family,
    Growth,
    Latent,
    LayerSpec,
    Mlp,
    Norms,
    Rope,
    Router,
    StateMixer,
    gated,
)
from dovetail.workers.models.families.mixtures import corrected_router, experts_of, shared_mlp


def _attention(config: Any, *, interleaved: bool, growth: Growth | None = None) -> Latent:
    plain, rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
    mixed = Latent(
        config.num_attention_heads,
        config.kv_lora_rank,
        plain,
        rotated,
        config.v_head_dim,
        (plain + rotated) ** -0.5 * _stretch(getattr(config, "rope_parameters", None) or {}),
        Rope(interleaved=interleaved),
        growth,
    )
    if config.q_lora_rank is None:
        return mixed
    return replace(
        mixed,
        query="self_attn.q_a_proj",
        query_norm="self_attn.q_a_layernorm",
        query_up="self_attn.q_b_proj",
    )


def _stretch(rope: Any) -> float:
    """The factor of scores when angles are stretched (yarn)."""
    factor, magnitude = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") == "default" or not magnitude or factor <= 1:
        return 1.0
    return float((0.1 * magnitude * math.log(factor) + 1.0) ** 2)


def _layer(config: Any, mixed: Latent, mlp: Mlp | Experts, **norms: Any) -> LayerSpec:
    return LayerSpec(mixed, mlp, Norms(config.rms_norm_eps, **norms))


def _mixture(config: Any, router: Router) -> Experts:
    shared = shared_mlp(config, "shared_experts")
    return experts_of(config, router, shared=shared)


def _deepseek_v2(config: Any, index: int) -> LayerSpec:
    """Experts are chosen by softmax, in the groups of the best experts if configured."""
    mixed = _attention(config, interleaved=True)
    if index < config.first_k_dense_replace:
        return _layer(config, mixed, gated(config.hidden_act))
    grouped = config.topk_method == "group_limited_greedy"
    router = Router(
        groups=config.n_group if grouped else 1,
        chosen_groups=config.topk_group if grouped else 1,
        best_alone=True,
        normalised=False,
        scale=config.routed_scaling_factor,
    )
    return _layer(config, mixed, _mixture(config, router))


def _deepseek_v3(config: Any, index: int) -> LayerSpec:
    """The first layers are dense; the selection of experts has a correction bias, and groups."""
    mixed = _attention(config, interleaved=config.rope_interleave)
    if index < config.first_k_dense_replace:
        return _layer(config, mixed, gated(config.hidden_act))
    return _layer(config, mixed, _mixture(config, corrected_router(config)))


def _glm4_moe_lite(config: Any, index: int) -> LayerSpec:
    """DeepSeek-V3, with a list of the layers with experts."""
    mixed = _attention(config, interleaved=config.rope_interleave)
    if config.mlp_layer_types[index] != "sparse":
        return _layer(config, mixed, gated(config.hidden_act))
    return _layer(config, mixed, _mixture(config, corrected_router(config)))


def _axk1(config: Any, index: int) -> LayerSpec:
    """GLM's, with a norm of the experts' output."""
    mixed = _attention(config, interleaved=config.rope_interleave)
    if config.mlp_layer_types[index] != "sparse":
        return _layer(config, mixed, gated(config.hidden_act))
    mixture = _mixture(config, corrected_router(config))
    return _layer(config, mixed, mixture, post_mlp="mlp.post_mlp_layernorm")


def _youtu(config: Any, index: int) -> LayerSpec:
    mixed = _attention(config, interleaved=config.rope_interleave)
    return _layer(config, mixed, gated(config.hidden_act))


def _minicpm3(config: Any, index: int) -> LayerSpec:
    """The outputs of halves have a factor that depends on the number of layers."""
    return LayerSpec(
        _attention(config, interleaved=False),
        gated(config.hidden_act),
        Norms(config.rms_norm_eps),
        residual_scale=config.scale_depth / math.sqrt(config.num_hidden_layers),
    )


def _kimi_linear(config: Any, index: int) -> LayerSpec:
    """Attention over latents, without rotation, or DeltaNets with a decay for each number of a key;
    the first layers are dense."""
    mlp: Mlp | Experts = gated(config.hidden_act)
    if config.mlp_layer_types[index] == "sparse":
        mlp = _mixture(config, corrected_router(config))
    norms = Norms(config.rms_norm_eps)
    if config.layer_types[index] == "full_attention":
        return LayerSpec(replace(_attention(config, interleaved=False), rope=None), mlp, norms)
    heads, width = config.linear_num_heads, config.linear_head_dim
    names = ("q_proj", "k_proj", "v_proj", "b_proj", "g_a_proj", "forget_gate.f_a_proj")
    delta = StateMixer(
        ScanRule.CHANNEL_DELTA,
        tuple(f"self_attn.{name}" for name in names),
        "self_attn.o_proj",
        "self_attn.conv1d",
        behind=("self_attn.g_b_proj", "self_attn.forget_gate.f_b_proj"),
        key_heads=heads,
        value_heads=heads,
        key_dim=width,
        value_dim=width,
        decay="self_attn.forget_gate.A_log",
        step_bias="self_attn.forget_gate.dt_bias",
        norm="self_attn.o_norm",
        norm_width=width,
        epsilon=config.rms_norm_eps,
        query_scale=width**-0.5,
    )
    return LayerSpec(delta, mlp, norms)


FAMILIES = {
    "deepseek_v2": Family(_deepseek_v2),
    "deepseek_v3": Family(_deepseek_v3),
    "kimi_linear": Family(_kimi_linear),
    "sarvam_mla": Family(_deepseek_v3),
    "glm4_moe_lite": Family(_glm4_moe_lite),
    "axk1": Family(_axk1),
    "youtu": Family(_youtu),
    "minicpm3": Family(_minicpm3),
}
