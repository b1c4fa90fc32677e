"""Families with Mamba-2 instead of attention, beside it, or in separate layers."""

import math
from typing import Any

from dovetail.workers.kernels.layer_plan import Score
from dovetail.workers.kernels.states import ScanRule
from dovetail.workers.models.families.description import (
    GATED,
    UNGATED,
    Attention,
    Beside,
    Experts,
    Family,
    Given,
    LayerSpec,
    Mlp,
    Norms,
    Rope,
    Router,
    StateMixer,
    activation,
    attention,
    gated,
    ungated,
)
from dovetail.workers.models.parity.following import UnsupportedError

UNLIMITED = (0.0, math.inf)


def _refuse_limits(config: Any) -> None:
    """`UnsupportedError` for limited steps: transformers limits only those of prompts."""
    limits = config.time_step_limit
    if limits is not None and tuple(limits) != UNLIMITED:
        raise UnsupportedError(
            f"transformers limits the steps of Mamba-2 (time_step_limit {list(limits)}) in prompts "
            "and not in single tokens, so that there are two functions"
        )


def _selective(
    part: str, act: str, *, heads: int, head_dim: int, groups: int, **fields: Any
) -> StateMixer:
    """Return a Mamba-2 with parts below `part`; `act`: after its convolution."""
    if act not in ("silu", "swish"):
        raise UnsupportedError(f"the kernels have no convolution with {act!r}")
    given: dict[str, Any] = {
        "norm": f"{part}.norm",
        "norm_width": heads * head_dim // groups,
        "gate_first": True,
    }
    return StateMixer(
        ScanRule.SELECTIVE,
        (f"{part}.in_proj",),
        f"{part}.out_proj",
        f"{part}.conv1d",
        Given.GATE_FIRST,
        key_heads=groups,
        value_heads=heads,
        value_dim=head_dim,
        decay=f"{part}.A_log",
        step_bias=f"{part}.dt_bias",
        skip=f"{part}.D",
        **(given | fields),
    )


def _bamba_mixer(config: Any, **fields: Any) -> StateMixer:
    _refuse_limits(config)
    return _selective(
        "mamba",
        config.hidden_act,
        heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        groups=config.mamba_n_groups,
        key_dim=config.mamba_d_state,
        epsilon=config.rms_norm_eps,
        **fields,
    )


FEED_FORWARD = {
    "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "down": "feed_forward.down_proj",
}


def _bamba(config: Any, index: int) -> LayerSpec:
    """Most layers are Mamba-2; in the others half of a head is rotated."""
    mixer: Attention | StateMixer = _bamba_mixer(config)
    if config.layers_block_type[index] == "full_attention":
        mixer = attention(config, index, window=0)
    norms = Norms(config.rms_norm_eps, pre_mlp="pre_ff_layernorm")
    return LayerSpec(mixer, gated(config.hidden_act, **FEED_FORWARD), norms)


def _granite_hybrid(config: Any, index: int) -> LayerSpec:
    """Granite's multipliers; all rows share an MLP, next to experts if there are any."""
    mixer: Attention | StateMixer = _bamba_mixer(config)
    if config.layers_block_type[index] != "linear_attention":
        rope = Rope() if config.position_embedding_type == "rope" else None
        scale = config.attention_multiplier
        mixer = attention(config, index, window=0, scale=scale, rope=rope)
    shared = gated(
        config.hidden_act, gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"
    )
    mlp: Mlp | Experts = shared
    if config.num_local_experts > 0:
        mlp = Experts(
            config.num_experts_per_tok,
            activation(GATED, config.hidden_act),
            Router("block_sparse_moe.router.weight", Score.SOFTMAX_OF_CHOSEN, normalised=False),
            part="block_sparse_moe.experts",
            shared=shared,
        )
    norms = Norms(config.rms_norm_eps)
    return LayerSpec(mixer, mlp, norms, residual_scale=config.residual_multiplier)


def _falcon_h1(config: Any, index: int) -> LayerSpec:
    """Mamba-2 and attention side by side in every layer, with multipliers almost everywhere."""
    gate, value, key, query, step = config.ssm_multipliers
    mixer = _bamba_mixer(
        config,
        factors=(gate, value, key, query, step),
        gate_first=not config.mamba_norm_before_gate,
        **({} if config.mamba_rms_norm else {"norm": None, "norm_width": 0}),
    )
    beside = Beside(
        mixer,
        config.ssm_in_multiplier,
        config.ssm_out_multiplier,
        config.attention_in_multiplier,
        config.attention_out_multiplier,
    )
    of_gate, of_down = config.mlp_multipliers
    mlp = gated(config.hidden_act, **FEED_FORWARD, gate_factor=of_gate, factor=of_down)
    return LayerSpec(
        attention(config, index, window=0, key_factor=config.key_multiplier),
        mlp,
        Norms(config.rms_norm_eps, pre_mlp="pre_ff_layernorm"),
        beside,
    )


def _nemotron_h(config: Any, index: int) -> LayerSpec:
    """Layers of one half: Mamba-2, attention without rotation, an MLP or experts without a gate."""
    kind, eps = config.layers_block_type[index], config.layer_norm_epsilon
    if kind in ("mlp", "moe"):
        mlp = _nemotron_experts(config) if kind == "moe" else _nemotron_mlp(config, "mixer")
        return LayerSpec(None, mlp, Norms(eps, pre_mixer=None, pre_mlp="norm"))
    mixer: Attention | StateMixer
    if kind == "full_attention":
        mixer = attention(
            config,
            index,
            window=0,
            rope=None,
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            output="mixer.o_proj",
        )
    else:
        _refuse_limits(config)
        mixer = _selective(
            "mixer",
            config.mamba_hidden_act,
            heads=config.mamba_num_heads,
            head_dim=config.mamba_head_dim,
            groups=config.n_groups,
            key_dim=config.ssm_state_size,
            epsilon=eps,
            limited="mixer",
        )
    return LayerSpec(mixer, None, Norms(eps, pre_mixer="norm", pre_mlp=None))


def _nemotron_mlp(config: Any, part: str) -> Mlp:
    return ungated(config.mlp_hidden_act, f"{part}.up_proj", f"{part}.down_proj")


def _nemotron_experts(config: Any) -> Experts:
    """Return experts next to a shared one, which may be of another width than states."""
    latent = config.moe_latent_size is not None
    return Experts(
        config.num_experts_per_tok,
        activation(UNGATED, config.mlp_hidden_act),
        Router(
            "mixer.gate.weight",
            Score.SIGMOID,
            correction="mixer.gate.e_score_correction_bias",
            groups=config.n_group,
            chosen_groups=config.topk_group,
            normalised=config.norm_topk_prob,
            added_sum=1e-20,
            scale=config.routed_scaling_factor,
            part="mixer.gate",
        ),
        part="mixer.experts",
        stacks=("up_proj", "down_proj"),
        shared=_nemotron_mlp(config, "mixer.shared_experts"),
        around=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj") if latent else None,
    )


FAMILIES = {
    "bamba": Family(_bamba),
    "falcon_h1": Family(_falcon_h1, embeddings="embedding_multiplier", logits="lm_head_multiplier"),
    "granitemoehybrid": Family(
        _granite_hybrid, embeddings="embedding_multiplier", logits="logits_scaling", divides=True
    ),
    "nemotron_h": Family(_nemotron_h),
}
