"""A Llama checkpoint written as GGUF in one of llama.cpp's own types.

Runs under a Python that has gguf; imports nothing that needs torch or is not in the standard
library but numpy, which gguf brings.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from peers.llama.kinds import read_config

TYPES = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "BF16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""A tensor's name in a Llama checkpoint of transformers -> in GGUF (there within blk.N)."""


def write_gguf(folder: Path, kind: str, file: Path) -> None:
    """The Llama checkpoint in `folder` with matrices of type `kind`; norms stay fp32, as
    llama.cpp's own tools leave them."""
    config = read_config(folder)
    writer = gguf.GGUFWriter(file, "llama")
    _describe(writer, config, TYPES[kind][1])
    for name, values in (
        tensor for shard in sorted(folder.glob("*.safetensors")) for tensor in _tensors(shard)
    ):
        for projection, heads in (
            ("q_proj", config["num_attention_heads"]),
            ("k_proj", config["num_key_value_heads"]),
        ):
            values = _interleave(values, heads) if projection in name else values
        kept = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else TYPES[kind][0]
        writer.add_tensor(_translate(name), gguf.quants.quantize(values, kept), raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(
    writer: gguf.GGUFWriter, config: Mapping[str, Any], file_type: gguf.LlamaFileType
) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(file_type)


def _tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a safetensors file as fp32; numpy knows no bf16, so the header (JSON behind
    its length) is read by hand."""
    content = np.memmap(file, mode="r", dtype=np.uint8)
    size = int(content[:8].view("<u8")[0])
    for name, entry in json.loads(bytes(content[8 : 8 + size])).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            yield (
                name,
                _as_fp32(content[8 + size + start : 8 + size + stop], entry["dtype"]).reshape(
                    entry["shape"]
                ),
            )


def _as_fp32(raw: Any, dtype: str) -> Any:
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F32": "<f4", "F16": "<f2"}[dtype]).astype(np.float32)


def _interleave(weight: Any, heads: int) -> Any:
    """llama.cpp rotates neighbouring outputs of a Llama, transformers those half a head apart."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _translate(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{number}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


def write_once(folder: Path, kind: str, file: Path) -> None:
    """Write the file, unless the file is there; it is there whole or not at all."""
    if not file.exists():
        unfinished = file.with_suffix(".unfinished")
        write_gguf(folder, kind, unfinished)
        unfinished.rename(file)
