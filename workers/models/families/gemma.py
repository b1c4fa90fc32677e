"""Gemma 1 to 3: weights of norms are stored minus one; from the second on norms stand on both sides
of each half."""

from dataclasses import replace
from typing import Any

from dovetail.workers.models.families.description import (
    HEAD_NORMS,
    Family,
    LayerSpec,
    Norms,
    Rope,
    attention,
    gated,
)


def _gemma(config: Any, index: int) -> LayerSpec:
    return LayerSpec(
        attention(config, index, window=0),
        gated(config.hidden_act),
        Norms(config.rms_norm_eps, plus_one=True),
    )


def _gemma2(config: Any, index: int, **fields: Any) -> LayerSpec:
    return LayerSpec(
        attention(
            config,
            index,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping or 0.0,
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
    """Layers with a window and without have tables of angles of their own."""
    return _gemma2(config, index, norms=HEAD_NORMS, rope=Rope(config.layer_types[index]))


def _vaultgemma(config: Any, index: int) -> LayerSpec:
    """Gemma 2 with no norms on what a half adds."""
    spec = _gemma2(config, index)
    return replace(spec, norms=replace(spec.norms, post_mixer=None, post_mlp=None))


FAMILIES = {
    "gemma": Family(_gemma),
    "gemma2": Family(_gemma2),
    "gemma3_text": Family(_gemma3),
    "vaultgemma": Family(_vaultgemma),
}
