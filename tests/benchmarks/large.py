"""Checkpoints for the command `loading` that are more than layers of one kind of numbers: a mixture
of experts, and a GGUF file of blocks."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from benchmarks.models import CONTEXT, Shape
from support.models import write_tokenizer

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "hidden_act": "silu",
    "vocab_size": 16384,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "dtype": "bfloat16",
}
"""The shape of Qwen3-30B-A3B with a smaller vocabulary: 1.25 GB a layer in bf16."""
BLOCK_BYTES = {Type.Q4_K: 144, Type.Q6_K: 210}
NUMBERS = 256
"""The numbers of a block."""
SCALES = {Type.Q4_K: {0: 6e-5, 2: 4.5e-4}, Type.Q6_K: {208: 1e-5}}
"""The 16-bit scales of a block, by their offsets in bytes: weights are about 1e-2 then."""
VOCABULARY = 32000


def write_mixture(folder: Path, layers: int, experts: int = 128) -> Path:
    """Write a mixture of experts of random bf16 weights, a file for each layer and one for the
    rest; one that is there already is taken as it is."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return folder
    config = MIXTURE | {"num_hidden_layers": layers, "num_experts": experts}
    folder.mkdir(parents=True, exist_ok=True)
    hidden, units = config["hidden_size"], config["moe_intermediate_size"]
    heads, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    generator, where = torch.Generator().manual_seed(0), {}

    def random(rows: int, columns: int) -> torch.Tensor:
        numbers = torch.randn(rows, columns, generator=generator)
        return (numbers / columns**0.5).bfloat16()

    def ones(width: int) -> torch.Tensor:
        return torch.ones(width, dtype=torch.bfloat16)

    def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, {"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        at, tensors = f"model.layers.{layer}", dict[str, torch.Tensor]()
        for name, shape in (
            ("self_attn.q_proj", (heads, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, heads)),
            ("mlp.gate", (experts, hidden)),
        ):
            tensors[f"{at}.{name}.weight"] = random(*shape)
        for name, width in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", config["head_dim"]),
            ("self_attn.k_norm", config["head_dim"]),
        ):
            tensors[f"{at}.{name}.weight"] = ones(width)
        for expert in range(experts):
            one = f"{at}.mlp.experts.{expert}"
            tensors[f"{one}.gate_proj.weight"] = random(units, hidden)
            tensors[f"{one}.up_proj.weight"] = random(units, hidden)
            tensors[f"{one}.down_proj.weight"] = random(hidden, units)
        save(f"model-{layer + 1:05d}.safetensors", tensors)
    rest = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden),
        "lm_head.weight": random(config["vocab_size"], hidden),
        "model.norm.weight": ones(hidden),
    }
    save("model-00000.safetensors", rest)
    write_tokenizer(folder, config["vocab_size"])
    (folder / "config.json").write_text(json.dumps(config))
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_blocks(file: Path, shape: Shape) -> Path:
    """Write a Llama as a GGUF file of random blocks in the mix of Q4_K_M: of values and of what
    leads back from the inner units half the layers are Q6_K, and so is the head; inner units are
    rounded up to whole blocks. One that is there already is taken as it is."""
    if file.is_file():
        return file
    inner = -(-shape.intermediate // NUMBERS) * NUMBERS
    shape = replace(shape, intermediate=inner)
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(".new")
    writer = gguf.GGUFWriter(made, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    _add_tokens(writer)
    tensors = list(_tensors(shape))
    for name, rows, columns, kind in tensors:
        if kind is None:
            writer.add_tensor_info(name, (rows,), np.dtype(np.float32), 4 * rows)
        else:
            width = columns // NUMBERS * BLOCK_BYTES[kind]
            dtype = np.dtype(np.uint8)
            writer.add_tensor_info(name, (rows, width), dtype, rows * width, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    seeds = np.random.default_rng(0)
    for _, rows, columns, kind in tensors:
        drawn = np.ones(rows, np.float32) if kind is None else _blocks(rows, columns, kind, seeds)
        writer.write_tensor_data(drawn)
    writer.close()
    return made.rename(file)


def _add_tokens(writer: gguf.GGUFWriter) -> None:
    """Add a vocabulary of letters in GPT-2's spelling, filled up with words that no text has."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 512))]
    tokens = ["<begin>", "<end>", *letters]
    tokens += [f"word{number}" for number in range(VOCABULARY - 1 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, letters[0] + letters[1]])
    writer.add_token_types([3, 3, *[1] * (VOCABULARY - 2)])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _tensors(shape: Shape) -> Iterator[tuple[str, int, int, Type | None]]:
    """Yield name, rows, columns and type of each tensor; None: fp32, a norm."""
    hidden, inner, layers = shape.hidden, shape.intermediate, shape.layers
    keys = hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", VOCABULARY, hidden, Type.Q4_K
    yield "output_norm.weight", hidden, 0, None
    yield "output.weight", VOCABULARY, hidden, Type.Q6_K
    for index in range(layers):
        eighth = layers // 8
        more = index < eighth or index >= layers - eighth or (index - eighth) % 3 == 2
        better = Type.Q6_K if more else Type.Q4_K
        for name, rows, columns, kind in (
            ("attn_norm", hidden, 0, None),
            ("attn_q", hidden, hidden, Type.Q4_K),
            ("attn_k", keys, hidden, Type.Q4_K),
            ("attn_v", keys, hidden, better),
            ("attn_output", hidden, hidden, Type.Q4_K),
            ("ffn_norm", hidden, 0, None),
            ("ffn_gate", inner, hidden, Type.Q4_K),
            ("ffn_up", inner, hidden, Type.Q4_K),
            ("ffn_down", hidden, inner, better),
        ):
            yield f"blk.{index}.{name}.weight", rows, columns, kind


def _blocks(rows: int, columns: int, kind: Type, seeds: np.random.Generator) -> np.ndarray:
    """Draw rows of blocks, uint8 [rows, bytes]."""
    drawn = seeds.integers(0, 256, (rows * columns // NUMBERS, BLOCK_BYTES[kind]), dtype=np.uint8)
    for offset, scale in SCALES[kind].items():
        drawn[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return drawn.reshape(rows, -1)
