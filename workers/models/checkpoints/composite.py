"""The language model within a checkpoint of several parts: its configuration, and its tensors by
their usual names. Only kinds that compute the same alone are listed, which a test checks: not
PaliGemma, whose prompts are bidirectional, nor Aya Vision, whose logits are not scaled."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from dovetail.workers.models.checkpoints.files import damaged
from dovetail.workers.models.checkpoints.ling import from_ling, is_ling, why_not_ling

T = TypeVar("T")

KINDS = (
    *("deepseek_vl", "exaone4_5", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2"),
    *("idefics3", "internvl", "llama4", "llava", "llava_next"),
    *("llava_onevision", "mistral3", "ovis2", "qwen3_5", "qwen3_5_moe"),
    *("smolvlm", "vipllava"),
)
"""Model types of checkpoints with a language model for one of their parts."""
RENAMED = {
    r"^language_model\.model\.": "model.",
    r"^model\.(language_model|text_model)\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Prefixes of the language model's tensors, of any version of transformers, and those it has
alone."""
SHARED = (
    *("bos_token_id", "compression_config", "dtype", "eos_token_id", "quantization_config"),
    *("torch_dtype", "transformers_weights"),
)
"""Fields that hold for all parts unless the language model overrides them."""


VOCABULARIES = {
    "gemma3_text": 262_208,
    "gemma3n_text": 262_400,
    "gemma4_text": 262_144,
    "gemma4_unified_text": 262_144,
    "llama4_text": 202_048,
    "qwen3_5_text": 248_320,
    "qwen3_5_moe_text": 248_320,
}
"""transformers' default vocabulary sizes, which Gemma 3's published checkpoints rely on."""


def is_composite(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json has a language model that can be decoded alone."""
    return content.get("model_type") in KINDS and isinstance(content.get("text_config"), dict)


def text_part(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a config.json's language model. It is `content` if there are no
    other parts; a head of the speculators library gets that of its layers, and a supported Ling
    that of sarvam_moe."""
    if is_ling(content) and not why_not_ling(content):
        return from_ling(content)
    if isinstance(layer := content.get("transformer_layer_config"), dict):
        return {**layer, **content}
    if not is_composite(content):
        return content
    shared = {name: content[name] for name in SHARED if name in content}
    text = {**shared, **content["text_config"]}
    if "tie_word_embeddings" in content:
        text["tie_word_embeddings"] = content["tie_word_embeddings"]
    if (known := VOCABULARIES.get(str(text.get("model_type")))) is not None:
        text.setdefault("vocab_size", known)
    return text


def of_language_model(content: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor of a checkpoint of this config.json is the language model's."""
    beginnings = (*RENAMED, r"^lm_head\.")
    return not is_composite(content) or any(re.match(one, name) for one in beginnings)


def renaming(content: Mapping[str, Any]) -> Mapping[str, str]:
    """Return regular expressions of tensor name prefixes, and their replacements."""
    return RENAMED if is_composite(content) else {}


def renamed(content: Mapping[str, Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """Return tensors by the language model's own names; others keep theirs. `CheckpointError` for a
    duplicate name."""
    beginnings, found = renaming(content), dict[str, T]()
    for stored, tensor in tensors.items():
        name = stored
        for beginning, alone in beginnings.items():
            name = re.sub(beginning, alone, name)
        if name in found:
            raise damaged(f"tensor {name} of the language model is there twice, once as {stored}")
        found[name] = tensor
    return found
