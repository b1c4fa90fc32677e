"""Draft heads written as GGUF files by the `gguf` package, as llama.cpp's converter would from a
head's folder, and a folder of the same numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from support.gguf_files import _add, _permuted, _tokens, coded

EAGLE3 = {
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "midlayer.input_layernorm": "blk.0.attn_norm",
    "midlayer.hidden_norm": "blk.0.attn_norm_2",
    "midlayer.post_attention_layernorm": "blk.0.ffn_norm",
    **{f"midlayer.self_attn.{part}_proj": f"blk.0.attn_{part}" for part in "qkv"},
    "midlayer.self_attn.o_proj": "blk.0.attn_output",
    **{f"midlayer.mlp.{part}_proj": f"blk.0.ffn_{part}" for part in ("gate", "up", "down")},
}
"""The names of EAGLE's repository -> those in files, without `.weight` and `.bias`."""


def write_gguf_head(
    folder: Path,
    file: Path,
    kind: Type = Type.F32,
    *,
    rope_freqs: list[float] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    architecture: str = "eagle3",
    block: str = "0",
    **more: Any,
) -> Path:
    """Write the EAGLE-3 head of a folder as a GGUF file, matrices of whole blocks as `kind`; return
    a folder of a head of the same numbers. `more`: keys to add or replace; None removes one.
    `tensors`: those to add or replace."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    rope = config.get("rope_scaling") or {}
    facts = {
        "block_count": 1,
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config.get("rope_theta", 10000.0)),
        "rope.scaling.type": rope.get("type"),
        "rope.scaling.factor": rope.get("factor"),
        "vocab_size": config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size", config["hidden_size"]),
        "target_layers": config["eagle_aux_hidden_state_layer_ids"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": config.get("norm_before_fc", False),
    }
    own = {f"{architecture}.{key}": value for key, value in (facts | more).items()}
    writer, same, seeds = gguf.GGUFWriter(file, architecture), {}, np.random.default_rng(0)
    for key, value in {**_tokens(config), **own}.items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in weights.items():
        stem, _, end = name.rpartition(".")
        if name == "d2t":
            ids = tensor + torch.arange(len(tensor))
            writer.add_tensor("d2t", (tensors or {}).get("d2t", ids.numpy()))
        if stem not in EAGLE3:
            same[name] = tensor
            continue
        heads = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(stem[-6:-5], "")
        moved = _permuted(tuple(tensor.shape), config[heads]) if heads else torch.Tensor.clone
        whole = tensor.ndim == 2 and tensor.shape[1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        own = kind if whole else Type.F32
        data, found = coded(moved(tensor.float()).numpy(), own, seeds)
        if (public := f"{EAGLE3[stem]}.{end}".replace("blk.0.", f"blk.{block}.")) not in (
            tensors or {}
        ):
            writer.add_tensor(public, data, raw_dtype=own)
        places = moved(torch.arange(tensor.numel()).view(tensor.shape)).long().flatten()
        flat = torch.empty(tensor.numel())
        flat[places] = torch.from_numpy(np.ascontiguousarray(found)).flatten()
        same[name] = flat.view(tensor.shape)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_freqs, dtype=np.float32))
    for name, numbers in (tensors or {}).items():
        if name != "d2t":
            writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    twin = file.with_suffix(".twin")
    shutil.copytree(folder, twin)
    save_file(
        {name: tensor.contiguous() for name, tensor in same.items()}, twin / "model.safetensors"
    )
    return twin
