"""StarCoder 2, Jais 2, Nemotron, StableLM, OLMo, Phi, GPT-NeoX and GPT-2, with layer norms."""

from dataclasses import replace
from typing import Any

from dovetail.workers.kernels.layer_plan import NormKind, Score
from dovetail.workers.models.families.description import (
    GATED,
    Experts,
    Family,
    LayerSpec,
    Norms,
    Rope,
    Router,
    activation,
    attention,
    gated,
    slides,
    ungated,
    window,
)
from dovetail.workers.models.families.mixtures import experts_of, shared_mlp
from dovetail.workers.models.parity.following import UnsupportedError

TORCHS_EPSILON = 1e-5  # the epsilon of norms whose configuration has none
OLMO_EPSILON = 1e-5  # the epsilon of OLMo's norms (`OlmoLayerNorm` of transformers)


def _layer_norms(epsilon: float, **fields: Any) -> Norms:
    return Norms(epsilon, kind=NormKind.LAYER_NORM, **fields)


def _starcoder2(config: Any, index: int) -> LayerSpec:
    """All layers have the window, whatever their type."""
    return LayerSpec(
        attention(config, index, window=config.sliding_window or 0),
        ungated(config.hidden_act, "mlp.c_fc", "mlp.c_proj"),
        _layer_norms(config.norm_epsilon),
    )


def _jais2(config: Any, index: int) -> LayerSpec:
    return LayerSpec(
        attention(config, index, window=0),
        ungated(config.hidden_act),
        _layer_norms(config.layer_norm_eps),
    )


def _nemotron(config: Any, index: int) -> LayerSpec:
    """Weights of norms are stored minus one."""
    return LayerSpec(
        attention(config, index, window=0),
        ungated(config.hidden_act),
        _layer_norms(config.norm_eps, plus_one=True),
    )


def _stablelm(config: Any, index: int) -> LayerSpec:
    """The halves are parallel if configured."""
    _refuse_head_norms(config)
    parallel = config.use_parallel_residual
    second = {"pre_mlp": None} if parallel else {}
    return LayerSpec(
        attention(config, index, window=0),
        gated(config.hidden_act),
        _layer_norms(config.layer_norm_eps, **second),
        parallel=parallel,
    )


def _olmo(config: Any, index: int) -> LayerSpec:
    """Norms have no weights."""
    return LayerSpec(
        attention(config, index, window=0, clip=config.clip_qkv or 0.0),
        gated(config.hidden_act),
        _layer_norms(OLMO_EPSILON, plain=config.hidden_size),
    )


def _phi(config: Any, index: int) -> LayerSpec:
    """The halves are parallel, after one norm."""
    _refuse_head_norms(config)
    return LayerSpec(
        attention(config, index, window=0, output="self_attn.dense"),
        ungated(config.hidden_act, "mlp.fc1", "mlp.fc2"),
        _layer_norms(config.layer_norm_eps, pre_mlp=None),
        parallel=True,
    )


def _gpt_neox(config: Any, index: int) -> LayerSpec:
    """The halves are parallel, each after its norm, if configured."""
    fields: dict[str, Any] = {"qkv": ("attention.query_key_value",), "output": "attention.dense"}
    return LayerSpec(
        attention(config, index, window=0, by_head=True, **fields),
        ungated(config.hidden_act, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        _layer_norms(config.layer_norm_eps),
        parallel=config.use_parallel_residual,
    )


def _gpt2(config: Any, index: int) -> LayerSpec:
    """Positions are embedded, and nothing is rotated."""
    depth = index + 1 if config.scale_attn_by_inverse_layer_idx else 1
    return _gpt2_like(config, depth)


def _gpt2_like(config: Any, depth: int = 1, **fields: Any) -> LayerSpec:
    fields |= {"qkv": ("attn.c_attn",), "output": "attn.c_proj", "rope": None, "window": 0}
    scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
    return LayerSpec(
        attention(config, 0, scale=scale / depth, **fields),
        ungated(config.activation_function, "mlp.c_fc", "mlp.c_proj"),
        _layer_norms(config.layer_norm_epsilon, pre_mixer="ln_1", pre_mlp="ln_2"),
    )


def _gpt_bigcode(config: Any, index: int) -> LayerSpec:
    """GPT-2 with one key head for all, or fused by heads."""
    one = config.multi_query
    return _gpt2_like(config, kv_heads=1 if one else config.n_head, by_head=not one)


def _refuse_head_norms(config: Any) -> None:
    if config.qk_layernorm:
        raise UnsupportedError("the kernels have no layer norms of queries and keys (qk_layernorm)")


def _parallel(config: Any, index: int, **fields: Any) -> LayerSpec:
    return LayerSpec(
        attention(config, index, **fields),
        gated(config.hidden_act),
        Norms(config.layer_norm_eps, pre_mlp=None, kind=NormKind.LAYER_NORM),
        parallel=True,
    )


def _cohere(config: Any, index: int) -> LayerSpec:
    if config.use_qk_norm:
        raise UnsupportedError("the kernels have no layer norms of queries and keys (use_qk_norm)")
    return _parallel(config, index, window=0, rope=Rope(interleaved=True))


def _cohere2(config: Any, index: int) -> LayerSpec:
    """Layers without a window rotate nothing."""
    rotates = config.sliding_window is not None and slides(config, index)
    return _parallel(config, index, rope=Rope(interleaved=True) if rotates else None)


def _cohere2_moe(config: Any, index: int) -> LayerSpec:
    """Layers without a window are not rotated, except for dense ones on request. Norms may be RMS
    norms; experts' weights depend on the chosen logits alone."""
    dense = config.mlp_layer_types[index] == "dense"
    forced = dense and config.prefix_dense_sliding_window_pattern == 1
    rotates = forced or window(config, index) > 0
    spec = _parallel(config, index, rope=Rope(interleaved=True) if rotates else None)
    if config.rms_norm_eps is not None:
        spec = replace(spec, norms=Norms(config.rms_norm_eps, pre_mlp=None))
    if dense:
        return spec
    router = (
        Router(score=Score.SIGMOID_OF_CHOSEN, normalised=config.norm_topk_prob)
        if config.expert_selection_fn == "sigmoid"
        else Router(score=Score.SOFTMAX_OF_CHOSEN, normalised=False)
    )
    shared = shared_mlp(config, "shared_experts")
    averaged = shared is not None and config.shared_expert_combination_strategy == "average"
    factor = 0.5 if averaged else 1.0
    return replace(spec, mlp=experts_of(config, router, shared=shared, factor=factor))


def _phimoe(config: Any, index: int) -> LayerSpec:
    """Two experts, whatever the configuration, chosen and weighted by SparseMixer."""
    router = Router(
        "mlp.router.weight",
        Score.SPARSE_MIXER,
        normalised=False,
        jitter=config.router_jitter_noise,
    )
    return LayerSpec(
        attention(config, index, window=0),
        experts_of(config, router, chosen=2),
        _layer_norms(config.rms_norm_eps),
    )


def _dbrx(config: Any, index: int) -> LayerSpec:
    """Queries, keys and values are clipped; matrices of experts are concatenated."""
    attends, mixes = config.attn_config, config.ffn_config
    if mixes.moe_normalize_expert_weights not in (None, 1):
        raise UnsupportedError(
            "the kernels divide experts' weights by their sum only "
            f"(moe_normalize_expert_weights = {mixes.moe_normalize_expert_weights})"
        )
    router = Router(
        "ffn.router.layer.weight", normalised=mixes.moe_normalize_expert_weights is not None
    )
    return LayerSpec(
        attention(
            config,
            index,
            qkv=("norm_attn_norm.attn.Wqkv",),
            output="norm_attn_norm.attn.out_proj",
            clip=attends.clip_qkv or 0.0,
        ),
        Experts(
            mixes.moe_top_k,
            activation(GATED, mixes.ffn_act_fn.get("name", "silu")),
            router,
            part="ffn.experts",
            transposed=False,
            flat="mlp",
        ),
        _layer_norms(
            TORCHS_EPSILON, pre_mixer="norm_attn_norm.norm_1", pre_mlp="norm_attn_norm.norm_2"
        ),
    )


def _opt(config: Any, index: int) -> LayerSpec:
    """Positions are embedded; transformers scales queries instead of scores."""
    if not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size:
        raise UnsupportedError(
            "the kernels have no norms after residual sums, and no projections of embeddings "
            "(do_layer_norm_before, word_embed_proj_dim)"
        )
    scale = (config.hidden_size // config.num_attention_heads) ** -0.5
    return LayerSpec(
        attention(
            config, index, window=0, rope=None, query_factor=scale, output="self_attn.out_proj"
        ),
        ungated(config.activation_function, "fc1", "fc2"),
        _layer_norms(
            TORCHS_EPSILON,
            pre_mixer="self_attn_layer_norm",
            pre_mlp="final_layer_norm",
            plain=0 if config.layer_norm_elementwise_affine else config.hidden_size,
        ),
    )


FAMILIES = {
    "starcoder2": Family(_starcoder2),
    "jais2": Family(_jais2),
    "nemotron": Family(_nemotron),
    "stablelm": Family(_stablelm),
    "olmo": Family(_olmo),
    "phi": Family(_phi),
    "gpt_neox": Family(_gpt_neox),
    "gpt2": Family(_gpt2),
    "gpt_bigcode": Family(_gpt_bigcode),
    "cohere": Family(_cohere, logits="logit_scale"),
    "cohere2": Family(_cohere2, logits="logit_scale"),
    "cohere2_moe": Family(_cohere2_moe, logits="logit_scale"),
    "phimoe": Family(_phimoe),
    "dbrx": Family(_dbrx),
    "opt": Family(_opt),
}
