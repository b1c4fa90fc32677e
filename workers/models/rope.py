"""The frequencies of rotary positions from a config.json, by transformers' own formulas. Knows configurations; rotates nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dovetail.workers.models.head_spec import MisfitError

THETA = 10000.0
"""Where a configuration names no base: that of the EAGLE family's code."""
TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


def frequencies(config: Mapping[str, Any], *, heads: int, head_dim: int, context: int) -> tuple[Tensor, float]:
    """Frequencies [rotary_dim / 2] in fp32 and what cosines and sines are multiplied by; `dynamic` stays at what it is within the context.

    Takes `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before); `MisfitError` for a type that is not known.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    parameters |= {"rope_type": kind, "rope_theta": float(parameters.get("rope_theta") or config.get("rope_theta") or THETA)}
    if kind not in TYPES:
        raise MisfitError(f"has rotary positions of type {kind!r}; known are {', '.join(TYPES)}")
    if kind == "default":
        size = int(head_dim * float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0))
        return parameters["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    parameters.pop("type", None)
    try:
        layer = LlamaConfig(
            hidden_size=heads * head_dim, num_attention_heads=heads, head_dim=head_dim, max_position_embeddings=context, rope_parameters=parameters
        )
        found, scaling = ROPE_INIT_FUNCTIONS[kind](layer, torch.device("cpu"))
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise MisfitError(f"has rotary positions of type {kind!r} that cannot be computed ({type(error).__name__}: {error}); see config.json") from error
    return found.float(), float(scaling)
