"""Gemma 1 to 4: from 2 on, norms on both sides of each half; up to 3 (not 3n), their weights are
stored minus one."""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

from dovetail.workers.models.families.description import (
    HEAD_NORMS,
    SEPARATE,
    Experts,
    Family,
    LayerSpec,
    Mlp,
    Norms,
    OwnInput,
    Rope,
    Router,
    Streams,
    TokenInputs,
    attention,
    gated,
    slides,
)
from dovetail.workers.models.parity.following import UnsupportedError


def _gemma(config: Any, index: int) -> LayerSpec:
    return LayerSpec(
        attention(config, index, window=0),
        gated(config.hidden_act),
        Norms(config.rms_norm_eps, plus_one=True),
    )


def _gemma2(config: Any, index: int, *, capped: bool = True, **fields: Any) -> LayerSpec:
    return LayerSpec(
        attention(
            config,
            index,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=(config.attn_logit_softcapping or 0.0) if capped else 0.0,
            **fields,
        ),
        gated(config.hidden_activation),
        Norms(
            config.rms_norm_eps,
            post_mixer="post_attention_layernorm",
            pre_mlp="pre_feedforward_layernorm",
            post_mlp="post_feedforward_layernorm",
            plus_one=True,
        ),
    )


def _gemma3(config: Any, index: int) -> LayerSpec:
    """Windowed and full layers have different angles; attention's configured cap is unused."""
    rope = Rope(config.layer_types[index])
    return _gemma2(config, index, capped=False, norms=HEAD_NORMS, rope=rope)


def _vaultgemma(config: Any, index: int) -> LayerSpec:
    """Gemma 2 without norms on the outputs of the halves."""
    spec = _gemma2(config, index)
    return replace(spec, norms=replace(spec.norms, post_mixer=None, post_mlp=None))


def _gemma4(config: Any, index: int) -> LayerSpec:
    """Full layers have other heads, and values may be unnormed keys; values are normed, results
    scaled. In small models the last layers share keys, and layers have own inputs."""
    both = config.attention_k_eq_v and not slides(config, index)
    spec = _sharing(config, config.per_layer_config[index], index, SEPARATE[1 if both else 2])
    moe = getattr(config, "enable_moe_block", False)
    mlp = _beside(config, spec.mlp) if moe and isinstance(spec.mlp, Mlp) else spec.mlp
    return replace(spec, mlp=mlp, scalar="layer_scalar")


def _gemma3n(config: Any, index: int) -> LayerSpec:
    """Gemma 4's small models with several states per token; gates of some layers are mostly 0."""
    if config.altup_active_idx:
        raise UnsupportedError(f"altup_active_idx {config.altup_active_idx}")
    spec, share = _sharing(config, config, index), config.activation_sparsity_pattern[index]
    cut = (NormalDist().inv_cdf(share) or 1e-9) if share else 0.0  # 0 is none
    mlp = gated(config.hidden_activation, cut=cut)
    return replace(spec, mlp=mlp, streams=Streams(config.altup_correct_scale))


def _sharing(config: Any, own: Any, index: int, values: str = SEPARATE[2]) -> LayerSpec:
    """A layer of Gemma 3n or 4: the last share keys, some have own inputs; `own`: its heads."""
    reads, width = _read_by(config, index), getattr(config, "hidden_size_per_layer_input", 0)
    mixed = attention(
        own,
        index,
        window=config.sliding_window if slides(config, index) else 0,
        scale=1.0,
        norms=HEAD_NORMS if reads is None else (HEAD_NORMS[0], None),
        norms_values=reads is None,
        rope=Rope(config.layer_types[index]),
        qkv=(*SEPARATE[:2], values) if reads is None else SEPARATE[:1],
        reads=reads,
    )
    norms = Norms(
        config.rms_norm_eps,
        post_mixer="post_attention_layernorm",
        pre_mlp="pre_feedforward_layernorm",
        post_mlp="post_feedforward_layernorm",
    )
    own_input = OwnInput(index * width) if width else None
    return LayerSpec(mixed, gated(config.hidden_activation), norms, own_input=own_input)


def _read_by(config: Any, index: int) -> int | None:
    """Return the layer whose keys one of the last layers reads, of the same type; None: its own."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if index < first:
        return None
    kinds = config.layer_types
    found = max((i for i in range(first) if kinds[i] == kinds[index]), default=None)
    if found is None:
        raise UnsupportedError("no layer of this type has keys and values of its own")
    return found


def _beside(config: Any, dense: Mlp) -> Experts:
    """Experts and an MLP that both read the result of attention, each between its own norms."""
    router = Router(
        "router.proj.weight",
        part="router",
        norm_weight="router.scale",
        epsilon=config.rms_norm_eps,
        scales="router.per_expert_scale",
    )
    return Experts(
        config.top_k_experts,
        dense.activation,
        router,
        part="experts",
        shared=dense,
        input_norm="pre_feedforward_layernorm_2",
        output_norm="post_feedforward_layernorm_2",
        shared_norm="post_feedforward_layernorm_1",
    )


FAMILIES = {
    "gemma": Family(_gemma),
    "gemma2": Family(_gemma2),
    "gemma3_text": Family(_gemma3),
    "vaultgemma": Family(_vaultgemma),
    "gemma3n_text": Family(_gemma3n, inputs=TokenInputs()),
    "gemma4_text": Family(_gemma4, inputs=TokenInputs()),
    "gemma4_unified_text": Family(_gemma4, inputs=TokenInputs()),
}
