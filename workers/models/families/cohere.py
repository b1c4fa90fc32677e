"""Cohere 2: attention and MLP side by side behind one layer norm."""

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


def _cohere2(config: Any, index: int) -> LayerSpec:
    """Layers without a window rotate nothing."""
    rotates = config.sliding_window is not None and slides(config, index)
    return LayerSpec(
        attention(config, index, rope=Rope(interleaved=True) if rotates else None),
        gated(config.hidden_act),
        Norms(config.layer_norm_eps, pre_mlp=None, kind=NormKind.LAYER_NORM),
        parallel=True,
    )


FAMILIES = {"cohere2": Family(_cohere2, logits="logit_scale")}
