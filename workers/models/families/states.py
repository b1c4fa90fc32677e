"""Families with a state in some layers: Gated DeltaNets, short convolutions, and Mamba-2 in the
place of attention, beside it, or in layers of its own."""

import math
from dataclasses import replace
from typing import Any

from dovetail.workers.kernels.layer_plan import HeadNorm, Score
from dovetail.workers.kernels.states import ScanRule
from dovetail.workers.models.families.description import (
    GATED,
    HEAD_NORMS,
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
from dovetail.workers.models.families.llama import ONLY_POST
from dovetail.workers.models.parity.following import UnsupportedError


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


def _olmo_hybrid(config: Any, index: int) -> LayerSpec:
    """OLMo 3's attention, maybe without rotation, or DeltaNets with norms before both halves."""
    mlp = gated(config.hidden_act)
    if config.layer_types[index] == "full_attention":
        rotates = (config.rope_parameters or {}).get("rope_theta") is not None
        mixed = attention(
            config,
            index,
            window=0,
            norms=HEAD_NORMS,
            norm_place=HeadNorm.WIDE_BEFORE_ROPE,
            rope=Rope() if rotates else None,
        )
        return LayerSpec(mixed, mlp, Norms(config.rms_norm_eps, **ONLY_POST))
    delta = replace(
        _delta(config, (), Given.IN_ORDER),
        given=tuple(f"linear_attn.{name}_proj" for name in "qkvgba"),
        output="linear_attn.o_proj",
        norm="linear_attn.o_norm",
        epsilon=1e-5,
        step_factor=2.0 if config.linear_allow_neg_eigval else 1.0,
    )
    return LayerSpec(delta, mlp, Norms(config.rms_norm_eps))


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


def _lfm3(config: Any, index: int) -> LayerSpec:
    """LFM2 with windows, angles by the type of a layer, gated heads, and norms after halves."""
    spec = _lfm2(config, index)
    mixer: Any = spec.attention
    if (kind := config.layer_types[index]) != "conv":
        gate = "self_attn.g_proj" if config.use_attention_gate else None
        mixer = attention(config, index, norms=HEAD_NORMS, rope=Rope(kind), gate=gate)
    norms = spec.norms
    if config.use_sandwich_norm:
        norms = replace(norms, post_mixer="post_operator_norm", post_mlp="post_ffn_norm")
    return replace(spec, attention=mixer, norms=norms)


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


UNLIMITED = (0.0, math.inf)


def _refuse_limits(config: Any) -> None:
    """`UnsupportedError` for limited steps: transformers limits only those of prompts."""
    limits = config.time_step_limit
    if limits is not None and tuple(limits) != UNLIMITED:
        said = f"time_step_limit {list(limits)}, in prompts and not in single tokens"
        raise UnsupportedError(f"transformers limits the steps of Mamba-2 ({said})")


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
    "lfm2": Family(_lfm2),
    "lfm2_moe": Family(_lfm2_moe),
    "lfm3": Family(_lfm3),
    "olmo_hybrid": Family(_olmo_hybrid),
    "qwen3_next": Family(_qwen3_next),
    "qwen3_5_text": Family(_qwen3_5),
    "qwen3_5_moe_text": Family(_qwen3_5_moe),
    "bamba": Family(_bamba),
    "falcon_h1": Family(_falcon_h1, embeddings="embedding_multiplier", logits="lm_head_multiplier"),
    "granitemoehybrid": Family(
        _granite_hybrid, embeddings="embedding_multiplier", logits="logits_scaling", divides=True
    ),
    "nemotron_h": Family(_nemotron_h),
}
