"""Mixtures of experts: attention like Llama's up to a detail, and experts in most layers."""

from dataclasses import replace
from typing import Any

from dovetail.workers.kernels.layer_plan import Activation, HeadNorm, MixerGate, Score
from dovetail.workers.models.families.description import (
    GATED,
    HEAD_NORMS,
    Attention,
    Experts,
    Family,
    Growth,
    LayerSpec,
    Mlp,
    Norms,
    Rope,
    Router,
    activation,
    attention,
    gated,
    slides,
)
from dovetail.workers.models.families.llama import ONLY_POST, sunken_granite
from dovetail.workers.models.parity.following import UnsupportedError


def _layer(config: Any, mixed: Attention, mlp: Mlp | Experts) -> LayerSpec:
    return LayerSpec(mixed, mlp, Norms(config.rms_norm_eps))


def experts_of(config: Any, router: Router, chosen: int | None = None, **fields: Any) -> Experts:
    """Experts of which a row uses `chosen`; `UnsupportedError` if that is not a number."""
    chosen = config.num_experts_per_tok if chosen is None else chosen
    if not isinstance(chosen, int):
        raise UnsupportedError(f"its config.json has {chosen} experts per row")
    return Experts(chosen, activation(GATED, config.hidden_act), router, **fields)


SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")


def shared_mlp(config: Any, part: str, within: str = "mlp") -> Mlp | None:
    """Return the shared MLP below `part`; None if no expert is shared."""
    if any(getattr(config, name, None) == 0 for name in SHARED_COUNTS):
        return None
    return _mlp_within(config, part, within)


def _mlp_within(config: Any, part: str, within: str = "mlp") -> Mlp:
    return gated(
        config.hidden_act,
        gate_up=(f"{within}.{part}.gate_proj", f"{within}.{part}.up_proj"),
        down=f"{within}.{part}.down_proj",
    )


def corrected_router(config: Any) -> Router:
    """A router by sigmoids, whose selection has a correction bias and groups."""
    return Router(
        score=Score.SIGMOID,
        correction="mlp.gate.e_score_correction_bias",
        groups=config.n_group,
        chosen_groups=config.topk_group,
        normalised=config.norm_topk_prob,
        least_sum=1e-20,
        scale=config.routed_scaling_factor,
    )


def _routed_among(config: Any, mixed: Attention, *, dense: bool) -> LayerSpec:
    """A layer whose experts are selected as in DeepSeek, next to a shared one; dense: without."""
    if dense:
        return _layer(config, mixed, gated(config.hidden_act))
    shared = shared_mlp(config, "shared_experts")
    return _layer(config, mixed, experts_of(config, corrected_router(config), shared=shared))


def _mixtral(config: Any, index: int) -> LayerSpec:
    """All layers have the window, whatever their type."""
    mixed = attention(config, index, window=config.sliding_window or 0)
    return _layer(config, mixed, experts_of(config, Router(normalised=True)))


def _qwen3_moe(config: Any, index: int) -> LayerSpec:
    """Experts in every `decoder_sparse_step`-th layer but those listed; all layers have the
    window."""
    mixed = attention(config, index, window=config.sliding_window or 0, norms=HEAD_NORMS)
    sparse = (index + 1) % config.decoder_sparse_step == 0 and config.num_experts > 0
    if index in config.mlp_only_layers or not sparse:
        return _layer(config, mixed, gated(config.hidden_act))
    router = Router(normalised=config.norm_topk_prob)
    return _layer(config, mixed, experts_of(config, router))


def _qwen2_moe(config: Any, index: int) -> LayerSpec:
    """Experts are in the same layers as in Qwen 3, next to a shared one with its own gate."""
    mixed = attention(config, index, window=0)
    sparse = (index + 1) % config.decoder_sparse_step == 0 and config.num_experts > 0
    if index in config.mlp_only_layers or not sparse:
        return _layer(config, mixed, gated(config.hidden_act))
    experts = experts_of(
        config,
        Router(normalised=config.norm_topk_prob),
        shared=shared_mlp(config, "shared_expert"),
        shared_gate="mlp.shared_expert_gate",
    )
    return _layer(config, mixed, experts)


def _olmoe(config: Any, index: int) -> LayerSpec:
    """Queries are normed together, and so are keys."""
    mixed = attention(
        config,
        index,
        window=0,
        norms=HEAD_NORMS,
        norm_place=HeadNorm.WIDE_BEFORE_ROPE,
        clip=config.clip_qkv or 0.0,
    )
    router = Router(normalised=config.norm_topk_prob)
    return _layer(config, mixed, experts_of(config, router))


def _granitemoe(config: Any, index: int) -> LayerSpec:
    """Weights are the softmax of the chosen logits; both halves are multiplied as in Granite."""
    router = Router("block_sparse_moe.router.weight", Score.SOFTMAX_OF_CHOSEN, normalised=False)
    experts = experts_of(config, router, part="block_sparse_moe.experts")
    mixed = attention(config, index, window=0, scale=config.attention_multiplier)
    return replace(_layer(config, mixed, experts), residual_scale=config.residual_multiplier)


def _granitemoeshared(config: Any, index: int) -> LayerSpec:
    """All rows share an MLP, if it has a width."""
    spec = _granitemoe(config, index)
    if config.shared_intermediate_size == 0:
        return spec
    assert isinstance(spec.mlp, Experts)
    names = ("shared_mlp.input_linear",)
    shared = gated(config.hidden_act, gate_up=names, down="shared_mlp.output_linear")
    return replace(spec, mlp=replace(spec.mlp, shared=shared))


def _granitemoe_swa(config: Any, index: int) -> LayerSpec:
    return replace(_granitemoeshared(config, index), attention=sunken_granite(config, index))


def _glm4_moe(config: Any, index: int) -> LayerSpec:
    """The first layers are dense; others have a shared expert, and a corrected, grouped
    selection."""
    norms = HEAD_NORMS if config.use_qk_norm else None
    mixed = attention(config, index, window=0, norms=norms)
    return _routed_among(config, mixed, dense=index < config.first_k_dense_replace)


def _dots1(config: Any, index: int) -> LayerSpec:
    """GLM-4.5's experts after Qwen 3's attention, with a window in some layers."""
    mixed = attention(config, index, norms=HEAD_NORMS)
    return _routed_among(config, mixed, dense=index < config.first_k_dense_replace)


def _solar_open(config: Any, index: int) -> LayerSpec:
    """GLM-4.5's experts in all layers, after Llama's attention."""
    return _routed_among(config, attention(config, index, window=0), dense=False)


def _exaone_moe(config: Any, index: int) -> LayerSpec:
    """GLM-4.5's experts; full layers do not rotate if others have a window."""
    rotates = config.sliding_window is None or slides(config, index)
    mixed = attention(config, index, norms=HEAD_NORMS, rope=Rope() if rotates else None)
    return _routed_among(config, mixed, dense=config.mlp_layer_types[index] != "sparse")


def _afmoe(config: Any, index: int) -> LayerSpec:
    """Gates after attention, rotation only in windows; norms on both sides; a shared expert."""
    mixed = attention(
        config,
        index,
        norms=HEAD_NORMS,
        rope=Rope() if slides(config, index) else None,
        gate="self_attn.gate_proj",
    )
    norms = Norms(
        config.rms_norm_eps,
        post_mixer="post_attention_layernorm",
        pre_mlp="pre_mlp_layernorm",
        post_mlp="post_mlp_layernorm",
    )
    if index < config.num_dense_layers:
        return LayerSpec(mixed, gated(config.hidden_act), norms)
    router = Router(
        "mlp.router.gate.weight",
        Score.SIGMOID,
        correction="mlp.expert_bias",
        added_sum=1e-20,
        scale=config.route_scale,
    )
    shared = shared_mlp(config, "shared_experts")
    experts = experts_of(config, router, shared=shared)
    return LayerSpec(mixed, experts, norms)


def _hy_v3(config: Any, index: int) -> LayerSpec:
    """Sigmoid scores with a correction bias, and a shared expert."""
    mixed = attention(config, index, window=0, norms=HEAD_NORMS)
    if config.mlp_layer_types[index] != "sparse":
        return _layer(config, mixed, gated(config.hidden_act))
    router = Router(
        score=Score.SIGMOID,
        correction="mlp.e_score_correction_bias",
        added_sum=1e-20,
        scale=config.router_scaling_factor,
    )
    shared = _mlp_within(config, "shared_experts")
    return _layer(config, mixed, experts_of(config, router, shared=shared))


def _laguna(config: Any, index: int) -> LayerSpec:
    """The number of heads depends on the layer; gates are per head or per number."""
    mixed = attention(
        config,
        index,
        heads=config.num_attention_heads_per_layer[index],
        norms=HEAD_NORMS,
        rope=Rope(config.layer_types[index]),
        gate="self_attn.g_proj",
        gate_kind=MixerGate.SOFTPLUS,
    )
    if config.mlp_layer_types[index] != "sparse":
        return _layer(config, mixed, gated(config.hidden_act))
    router = Router(
        score=Score.SIGMOID,
        correction="mlp.gate.e_score_correction_bias",
        softcap=config.moe_router_logit_softcapping,
        scale_after=config.moe_routed_scaling_factor,
    )
    shared = _mlp_within(config, "shared_experts")
    return _layer(config, mixed, experts_of(config, router, shared=shared))


def _mellum(config: Any, index: int) -> LayerSpec:
    """Qwen 3's experts, with windows and angles by the type of a layer."""
    mixed = attention(config, index, norms=HEAD_NORMS, rope=Rope(config.layer_types[index]))
    if config.mlp_layer_types[index] != "sparse":
        return _layer(config, mixed, gated(config.hidden_act))
    router = Router(normalised=config.norm_topk_prob)
    return _layer(config, mixed, experts_of(config, router))


def _flex_olmo(config: Any, index: int) -> LayerSpec:
    """OLMoE's experts, with norms on the outputs of both halves."""
    mixed = attention(
        config, index, window=0, norms=HEAD_NORMS, norm_place=HeadNorm.WIDE_BEFORE_ROPE
    )
    router = Router(normalised=config.norm_topk_prob)
    experts = experts_of(config, router)
    return LayerSpec(mixed, experts, Norms(config.rms_norm_eps, **ONLY_POST))


def _ernie4_5_moe(config: Any, index: int) -> LayerSpec:
    """Experts in a range of layers, in steps; the selection has a correction bias."""
    mixed = attention(config, index, window=0, rope=Rope(interleaved=True))
    among = config.moe_layer_start_index <= index <= config.moe_layer_end_index
    if not among or (index + 1) % config.moe_layer_interval:
        return _layer(config, mixed, gated(config.hidden_act))
    router = Router(
        correction="mlp.gate.moe_statics.e_score_correction_bias",
        normalised=True,
        least_sum=config.moe_norm_min,
    )
    shared = shared_mlp(config, "shared_experts")
    return _layer(config, mixed, experts_of(config, router, shared=shared))


def _hunyuan_v1_moe(config: Any, index: int) -> LayerSpec:
    """Queries and keys are normed after rotation; layers may choose different numbers of
    experts."""
    mixed = attention(
        config,
        index,
        window=0,
        norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        norm_place=HeadNorm.HEAD_AFTER_ROPE,
    )
    many = config.moe_topk
    chosen = many if isinstance(many, int) else many[index]
    router, shared = Router("mlp.gate.wg.weight"), shared_mlp(config, "shared_mlp")
    return _layer(config, mixed, experts_of(config, router, chosen, shared=shared))


def _minimax_m2(config: Any, index: int) -> LayerSpec:
    """Scores are sigmoids, corrected for the selection; queries are normed together."""
    mixed = attention(
        config, index, window=0, norms=HEAD_NORMS, norm_place=HeadNorm.WIDE_BEFORE_ROPE
    )
    router = Router(score=Score.SIGMOID, correction="mlp.e_score_correction_bias", normalised=True)
    return _layer(config, mixed, experts_of(config, router))


def _llama4(config: Any, index: int) -> LayerSpec:
    """Rotated layers see chunks, and may norm heads; others have growing queries. Experts' inputs
    are multiplied by sigmoids of logits; some layers have a wider MLP instead."""
    rotates, growth = bool(config.no_rope_layers[index]), None
    if config.attn_temperature_tuning and not rotates:
        growth = Growth(config.attn_scale, int(config.floor_scale), ahead=1)
    chunked = config.layer_types[index] == "chunked_attention"
    mixed = attention(
        config,
        index,
        window=0,
        chunk=config.attention_chunk_size if chunked else 0,
        rope=Rope(interleaved=True) if rotates else None,
        growth=growth,
        norms_heads=config.use_qk_norm and rotates,
        norm_place=HeadNorm.HEAD_AFTER_ROPE,
    )
    if index not in config.moe_layers:
        names = ("feed_forward.gate_proj", "feed_forward.up_proj")
        dense = gated(config.hidden_act, gate_up=names, down="feed_forward.down_proj")
        return _layer(config, mixed, dense)
    router = Router(
        "feed_forward.router.weight",
        Score.SIGMOID_OF_CHOSEN,
        normalised=False,
        scales_input=True,
        part="feed_forward.router",
    )
    experts = experts_of(
        config,
        router,
        part="feed_forward.experts",
        transposed=True,
        shared=shared_mlp(config, "shared_expert", within="feed_forward"),
    )
    return _layer(config, mixed, experts)


GRANITE: dict[str, Any] = {
    "embeddings": "embedding_multiplier",
    "logits": "logits_scaling",
    "divides": True,
}
"""The factors of embeddings and logits."""


def _gpt_oss(config: Any, index: int) -> LayerSpec:
    """Weights are the softmax of the chosen logits."""
    router = Router(
        "mlp.router.weight", Score.SOFTMAX_OF_CHOSEN, normalised=False, bias="mlp.router.bias"
    )
    experts = Experts(
        config.num_experts_per_tok,
        Activation.SWIGLU_CLAMPED,
        router,
        numbers=(config.swiglu_alpha, config.swiglu_limit),
    )
    return LayerSpec(
        attention(config, index, sinks="self_attn.sinks"), experts, Norms(config.rms_norm_eps)
    )


FAMILIES = {
    "mixtral": Family(_mixtral),
    "qwen3_moe": Family(_qwen3_moe),
    "qwen2_moe": Family(_qwen2_moe),
    "olmoe": Family(_olmoe),
    "granitemoe": Family(_granitemoe, **GRANITE),
    "granitemoeshared": Family(_granitemoeshared, **GRANITE),
    "granitemoe_swa": Family(_granitemoe_swa, **GRANITE),
    "glm4_moe": Family(_glm4_moe),
    "sarvam_moe": Family(_glm4_moe),
    "dots1": Family(_dots1),
    "solar_open": Family(_solar_open),
    "exaone_moe": Family(_exaone_moe),
    "afmoe": Family(_afmoe),
    "hy_v3": Family(_hy_v3),
    "laguna": Family(_laguna),
    "mellum": Family(_mellum),
    "flex_olmo": Family(_flex_olmo),
    "ernie4_5_moe": Family(_ernie4_5_moe),
    "hunyuan_v1_moe": Family(_hunyuan_v1_moe),
    "minimax_m2": Family(_minimax_m2),
    "llama4_text": Family(_llama4),
    "gpt_oss": Family(_gpt_oss),
}
