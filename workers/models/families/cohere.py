"""Cohere and Cohere 2: attention and MLP side by side behind one layer norm."""

from typing import Any

from dovetail.workers.kernels.layer_plan import NormKind
from dovetail.workers.models.families.description import (
    Family,
    LayerSpec,
    Norms,
    Rope,
    attention,
    gated,
    slides,
)
from dovetail.workers.models.parity.following import UnsupportedError


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


FAMILIES = {
    "cohere": Family(_cohere, logits="logit_scale"),
    "cohere2": Family(_cohere2, logits="logit_scale"),
}
