"""OLMo 2 and 3, EXAONE 4 and GLM-4: norms on the outputs of the halves."""

from typing import Any

from dovetail.workers.kernels.layer_plan import HeadNorm
from dovetail.workers.models.families.description import (
    HEAD_NORMS,
    Family,
    LayerSpec,
    Norms,
    Rope,
    attention,
    gated,
    slides,
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
    "olmo2": Family(_olmo2),
    "olmo3": Family(_olmo3),
    "exaone4": Family(_exaone4),
    "glm4": Family(_glm4),
}
