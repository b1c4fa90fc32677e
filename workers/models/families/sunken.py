"""gpt-oss: sinks, windows in every other layer, and biased experts with clamped gates."""

from typing import Any

from dovetail.workers.kernels.layer_plan import Activation, Score
from dovetail.workers.models.families.description import (
    Experts,
    Family,
    LayerSpec,
    Norms,
    Router,
    attention,
)


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


FAMILIES = {"gpt_oss": Family(_gpt_oss)}
