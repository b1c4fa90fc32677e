"""A target as llama.cpp is given it: the type for each of our weights, and which models are written
for it here. Standard library only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LLAMA_TYPES = {
    "fp32": "F32",
    "half": "F16",
    "bf16": "BF16",
    "int8": "Q8_0",
    "int8-per-tensor": "Q8_0",
}
"""Our weights -> llama.cpp's type of as many bytes (Q8_0 has one 16-bit scale for 32 weights, 6 %
more). Half of a bf16 checkpoint is BF16."""

BLOCKS = {"Q8_0": 32}
"""The number of neighbouring inputs of a matrix that share a scale, by the types of llama.cpp that
have scales: every row is of whole blocks."""


def type_of(weights: str, config: Mapping[str, Any]) -> str:
    """llama.cpp's type for our weights of a checkpoint with this config.json."""
    stored = config.get("dtype") or config.get("torch_dtype")
    return "BF16" if weights == "half" and stored == "bfloat16" else LLAMA_TYPES[weights]


def unfit(config: Mapping[str, Any]) -> str:
    """Return what of a model with this config.json is not written as GGUF here; empty if it is a
    Llama with nothing beside."""
    kind = config.get("model_type")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "llama":
        return f"a model of type {kind!r}"
    if rope_kind != "default":
        return f"a rotary embedding of type {rope_kind!r}"
    return "biases" if config.get("attention_bias") or config.get("mlp_bias") else ""


def uncut(config: Mapping[str, Any], kind: str) -> str:
    """Return what of a Llama with this config.json cannot be written in whole blocks of llama.cpp's
    type `kind`; empty: nothing."""
    block, hidden = BLOCKS.get(kind, 1), config["hidden_size"]
    heads = config["num_attention_heads"]
    widths = {
        "a hidden size": hidden,
        "an attention width": heads * (config.get("head_dim") or hidden // heads),
        "an MLP width": config["intermediate_size"],
    }
    wrong = next((f"{name} of {width}" for name, width in widths.items() if width % block), "")
    return f"{wrong}, which the blocks of {block} weights of {kind} do not divide" if wrong else ""


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model; nothing of one that is not a folder here."""
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return config
