"""The rotary frequencies of a config.json, by transformers' own formulas."""

import torch
from torch import Tensor

from dovetail.workers.heads.config import HeadConfig, MisfitError, RotaryConfig
from dovetail.workers.kernels.exact import ExactPowers
from dovetail.workers.models import transformers

THETA = 10000.0  # the base if a configuration has none, as in the EAGLE family's code
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def frequencies(
    config: HeadConfig, *, heads: int, head_dim: int, context: int
) -> tuple[Tensor, float]:
    """Return frequencies [rotary_dim / 2] in fp32 and the factor of cosines and sines; `dynamic`
    keeps its values within the context. Takes `rope_parameters` (transformers 5) or `rope_theta`
    and `rope_scaling` (before). 2 <= rotary_dim <= head_dim; raises `MisfitError` for invalid
    values."""
    rotary = config.rope_parameters or config.rope_scaling or RotaryConfig()
    kind, theta = (
        rotary.rope_type or rotary.type or "default",
        rotary.rope_theta or config.rope_theta or THETA,
    )
    if kind not in TYPES:
        raise MisfitError(f"has rotary positions of type {kind!r}; known are {', '.join(TYPES)}")
    share = rotary.partial_rotary_factor or config.partial_rotary_factor or 1.0
    size = int(head_dim * share)
    if size < 2 or size % 2:
        raise MisfitError(
            f"has partial_rotary_factor {share} in config.json, which rotates {size} of the "
            f"{head_dim} numbers of a head: not an even number"
        )
    if kind == "default":
        with ExactPowers():
            return theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    parameters = rotary.model_dump(exclude={"type"}, exclude_none=True) | {
        "rope_type": kind,
        "rope_theta": theta,
        "partial_rotary_factor": share,
    }
    try:
        layer = transformers.LlamaConfig(
            hidden_size=heads * head_dim,
            num_attention_heads=heads,
            head_dim=head_dim,
            max_position_embeddings=context,
            rope_parameters=parameters,
        )
        with ExactPowers():
            found, scaling = transformers.ROPE_INIT_FUNCTIONS[kind](layer, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise MisfitError(
            f"has rotary positions of type {kind!r} that cannot be computed "
            f"({type(error).__name__}: {error}); see config.json"
        ) from error
    if (
        found.shape != (size // 2,)
        or not bool(found.isfinite().all())
        or not 0.0 < scaling < float("inf")
    ):
        raise MisfitError(
            f"has rotary positions of type {kind!r} whose frequencies are not numbers; see "
            "config.json"
        )
    return found.float(), float(scaling)
