"""Llama, and families that differ from it in a detail, such as norms on the outputs of the
halves."""

from dataclasses import replace
from typing import Any

from dovetail.workers.kernels.layer_plan import HeadNorm
from dovetail.workers.models.families.description import (
    HEAD_NORMS,
    Attention,
    Family,
    Growth,
    LayerSpec,
    Norms,
    Rope,
    attention,
    gated,
    slides,
    ungated,
)
from dovetail.workers.models.parity.following import UnsupportedError

BETA, PERIOD = "llama_4_scaling_beta", "original_max_position_embeddings"


def _llama(config: Any, index: int, **fields: Any) -> LayerSpec:
    return LayerSpec(
        attention(config, index, **fields), gated(config.hidden_act), Norms(config.rms_norm_eps)
    )


def _full(config: Any, index: int) -> LayerSpec:
    return _llama(config, index, window=0)


def _head_norms(config: Any, index: int) -> LayerSpec:
    return _llama(config, index, norms=HEAD_NORMS)


def _smollm3(config: Any, index: int) -> LayerSpec:
    """Every fourth layer rotates nothing; windows are used only if configured."""
    fields: dict[str, Any] = {"rope": Rope() if config.no_rope_layers[index] else None}
    if not config.use_sliding_window:
        fields["window"] = 0
    return _llama(config, index, **fields)


def _ministral3(config: Any, index: int) -> LayerSpec:
    """Queries grow with their position, in steps of the first training's length."""
    rope = config.rope_parameters
    if missing := {BETA, PERIOD} - rope.keys():
        raise UnsupportedError(f"rope_parameters lack {min(missing)}, by which queries grow")
    growth = Growth(rope[BETA], rope[PERIOD])
    return _llama(config, index, growth=growth)


def _neighbours(config: Any, index: int) -> LayerSpec:
    return _llama(config, index, window=0, rope=Rope(interleaved=True))


def _hunyuan(config: Any, index: int) -> LayerSpec:
    """Queries and keys are normed after they are rotated."""
    return _llama(
        config,
        index,
        window=0,
        norms=("self_attn.query_layernorm", "self_attn.key_layernorm"),
        norm_place=HeadNorm.HEAD_AFTER_ROPE,
    )


def _granite(config: Any, index: int) -> LayerSpec:
    return LayerSpec(
        attention(config, index, window=0, scale=config.attention_multiplier),
        gated(config.hidden_act),
        Norms(config.rms_norm_eps),
        residual_scale=config.residual_multiplier,
    )


def sunken_granite(config: Any, index: int) -> Attention:
    """Return attention with sinks, some windows, and a rotation base for each layer (0: none)."""
    bases, base = config.layer_rope_theta, config.layer_rope_theta[index]
    part = f"rotary_embs.{sorted({one for one in bases if one}).index(base)}" if base else ""
    return attention(
        config,
        index,
        scale=config.attention_multiplier,
        rope=Rope(part=part) if base else None,
        sinks="self_attn.sinks",
    )


def _granite_swa(config: Any, index: int) -> LayerSpec:
    return replace(_granite(config, index), attention=sunken_granite(config, index))


def _hyperclovax(config: Any, index: int) -> LayerSpec:
    """Granite, with norms on the result of a half if configured."""
    spec = _granite(config, index)
    if not config.use_post_norm:
        return spec
    return replace(spec, norms=replace(spec.norms, post_mixer="post_norm1", post_mlp="post_norm2"))


def _glm(config: Any, index: int) -> LayerSpec:
    return LayerSpec(
        attention(config, index, window=0, rope=Rope(interleaved=True)),
        gated(config.hidden_act, gate_up=("mlp.gate_up_proj",)),
        Norms(config.rms_norm_eps),
    )


def _arcee(config: Any, index: int) -> LayerSpec:
    """No gate; the activation is the square of positive values."""
    return LayerSpec(
        attention(config, index, window=0), ungated(config.hidden_act), Norms(config.rms_norm_eps)
    )


def _apertus(config: Any, index: int) -> LayerSpec:
    """No gate, and an activation with two learned numbers in each layer."""
    return LayerSpec(
        attention(config, index, window=0, norms=HEAD_NORMS),
        ungated(config.hidden_act, function="mlp.act_fn"),
        Norms(
            config.rms_norm_eps, pre_mixer="attention_layernorm", pre_mlp="feedforward_layernorm"
        ),
    )


def _bitnet(config: Any, index: int) -> LayerSpec:
    """Norms before the last linear of each half; squared ReLU with a gate."""
    return LayerSpec(
        attention(config, index, window=0, output_norm="self_attn.attn_sub_norm"),
        gated(config.hidden_act, norm="mlp.ffn_sub_norm"),
        Norms(config.rms_norm_eps),
    )


def _nanochat(config: Any, index: int) -> LayerSpec:
    """Norms without weights, heads rotated backward and then normed, MLPs without gates."""
    return LayerSpec(
        attention(
            config,
            index,
            window=0,
            rope=Rope(backward=True),
            norms_heads=True,
            norm_place=HeadNorm.HEAD_AFTER_ROPE,
        ),
        ungated(config.hidden_act, "mlp.fc1", "mlp.fc2"),
        Norms(config.rms_norm_eps, plain=config.hidden_size),
    )


def _phi3(config: Any, index: int) -> LayerSpec:
    """All layers have the window, whatever their type."""
    return LayerSpec(
        attention(config, index, window=config.sliding_window or 0, qkv=("self_attn.qkv_proj",)),
        gated(config.hidden_act, gate_up=("mlp.gate_up_proj",)),
        Norms(config.rms_norm_eps),
    )


ONLY_POST: dict[str, Any] = {
    "pre_mixer": None,
    "post_mixer": "post_attention_layernorm",
    "pre_mlp": None,
    "post_mlp": "post_feedforward_layernorm",
}
"""The norms of layers in which only the outputs of the halves have one."""


def _only_post(config: Any, index: int, **fields: Any) -> LayerSpec:
    return LayerSpec(
        attention(config, index, norms=HEAD_NORMS, **fields),
        gated(config.hidden_act),
        Norms(config.rms_norm_eps, **ONLY_POST),
    )


def _olmo2(config: Any, index: int) -> LayerSpec:
    return _only_post(config, index, window=0, norm_place=HeadNorm.WIDE_BEFORE_ROPE)


def _olmo3(config: Any, index: int) -> LayerSpec:
    return _only_post(
        config, index, norm_place=HeadNorm.WIDE_BEFORE_ROPE, rope=Rope(config.layer_types[index])
    )


def _exaone4(config: Any, index: int) -> LayerSpec:
    """If some layers have a window, layers with full attention rotate nothing."""
    rotates = config.sliding_window is None or slides(config, index)
    return _only_post(config, index, rope=Rope() if rotates else None)


def _glm4(config: Any, index: int) -> LayerSpec:
    return LayerSpec(
        attention(config, index, window=0, rope=Rope(interleaved=True)),
        gated(config.hidden_act, gate_up=("mlp.gate_up_proj",)),
        Norms(
            config.rms_norm_eps,
            post_mixer="post_self_attn_layernorm",
            post_mlp="post_mlp_layernorm",
        ),
    )


FAMILIES = {
    "llama": Family(_full),
    "exaone": Family(_full),
    "mistral": Family(_llama),
    "ministral": Family(_llama),
    "ministral3": Family(_ministral3),
    "cwm": Family(_llama),
    "qwen2": Family(_llama),
    "qwen3": Family(_head_norms),
    "seed_oss": Family(_full),
    "phi3": Family(_phi3),
    "phi4_multimodal": Family(_phi3),
    "internlm3": Family(_full),
    "iquestcoder": Family(_full),
    "smollm3": Family(_smollm3),
    "ernie4_5": Family(_neighbours),
    "helium": Family(_neighbours),
    "glm": Family(_glm),
    "hunyuan_v1_dense": Family(_hunyuan),
    "granite": Family(
        _granite, embeddings="embedding_multiplier", logits="logits_scaling", divides=True
    ),
    "granite_swa": Family(
        _granite_swa, embeddings="embedding_multiplier", logits="logits_scaling", divides=True
    ),
    "hyperclovax": Family(_hyperclovax, embeddings="embedding_multiplier", logits="logits_scaling"),
    "arcee": Family(_arcee),
    "apertus": Family(_apertus),
    "bitnet": Family(_bitnet),
    "nanochat": Family(_nanochat),
    "olmo2": Family(_olmo2),
    "olmo3": Family(_olmo3),
    "exaone4": Family(_exaone4),
    "glm4": Family(_glm4),
}
