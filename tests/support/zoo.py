"""Tiny random checkpoints of many families, and what becomes of each: it is computed, or
refused."""

from pathlib import Path
from typing import Any

import torch
import transformers

from support.models import CONTEXT, SHAPE, save_random

ORIGINAL = 16
"""The context that a stretched model was trained with."""
TOKENS = torch.randint(2, 48, (CONTEXT - 2,), generator=torch.Generator().manual_seed(3)).tolist()


def rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


def longrope(long: float, original: int = ORIGINAL) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [long] * 8}
    return rope("longrope", factor=6.0, original_max_position_embeddings=original, **factors)


YARN = rope("yarn", factor=6.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=ORIGINAL,
)
SCALED = rope(
    "yarn", factor=6.0, original_max_position_embeddings=ORIGINAL, llama_4_scaling_beta=0.1
)
WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
NO_ROPE_AT = {"no_rope_layers": [1, 0, 0, 1]}
BY_LAYERS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}

COMPUTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "smollm3": ("SmolLM3", {}, "kernels"),
    "smollm3 by a list": ("SmolLM3", NO_ROPE_AT, "kernels"),
    "smollm3 with windows": ("SmolLM3", WINDOWED, "kernels"),
    "ministral3": ("Ministral3", {"sliding_window": None, **SCALED}, "kernels"),
    "llama linear": ("Llama", rope("linear", factor=4.0), "kernels"),
    "llama dynamic": ("Llama", rope("dynamic", factor=4.0), "kernels"),
    "llama yarn": ("Llama", YARN, "kernels"),
    "llama llama3": ("Llama", LLAMA3, "kernels"),
    "llama longrope of one table": ("Llama", longrope(1.0), "kernels"),
    "llama rotated in part": ("Llama", rope("default", partial_rotary_factor=0.5), "kernels"),
    "gemma2 window 1": ("Gemma2", {"sliding_window": 1}, "kernels"),
    "gemma2 window beyond the context": ("Gemma2", {"sliding_window": 1000}, "kernels"),
    "gemma3": ("Gemma3", {"sliding_window": 6, "num_hidden_layers": 6}, "kernels"),
    "qwen2 by layers": ("Qwen2", BY_LAYERS, "kernels"),
    "mistral window 1": ("Mistral", {"sliding_window": 1}, "kernels"),
    "mistral window 40": ("Mistral", {"sliding_window": 40}, "kernels"),
    "cohere2": ("Cohere2", {"sliding_window": 6}, "kernels"),
    "exaone4": ("Exaone4", {"sliding_window": 6, "sliding_window_pattern": 4}, "kernels"),
    "olmo2": ("Olmo2", {}, "kernels"),
    "olmo3": ("Olmo3", {"sliding_window": 6}, "kernels"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 6}, "kernels"),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "kernels"),
    "granite": ("Granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.3}, "kernels"),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}, "kernels"),
}
"""Family, what is changed of its configuration, and what computes it where the kernels are
built."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "doge": (
        "Doge",
        {},
        "layer 0 .DogeDecoderLayer. .*attention with its own mask is not supported",
    ),
    "stablelm with head norms": (
        "StableLm",
        {"qk_layernorm": True},
        "layer 0 .*some of the model.s inputs do not reach its attention",
    ),
    "diffllama": ("DiffLlama", {}, "layer 0 .*computes 2 attentions|layer 0"),
}
"""Family, changes and what the refusal says."""


def write(
    folder: Path, family: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32
) -> Path:
    """A tiny random checkpoint of a family."""
    configuration = {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config")
    shape = {**SHAPE, "vocab_size": 48, "num_hidden_layers": 4, "head_dim": 16, **changes}
    config = getattr(transformers, configuration)(**shape)
    return save_random(folder, getattr(transformers, f"{family}ForCausalLM"), config, 0, dtype)
