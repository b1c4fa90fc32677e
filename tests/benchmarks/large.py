"""Checkpoints that are more than layers of one kind of numbers: a mixture of experts, and GGUF
files of blocks."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
VOCABULARY, FEW = 32000, 512
"""Tokens of a model, and of one whose head costs next to nothing."""


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


@dataclass(frozen=True)
class Outline:
    """The contents of a GGUF file of random blocks."""

    architecture: str
    facts: Mapping[str, int | float]
    """Keys of its metadata, without the architecture in front -> their values."""
    vocabulary: int
    tensors: Iterable[tuple[str, tuple[int, ...], Type | None]]
    """The name, shape and type of each tensor; a type of None is fp32: a norm of ones, or a matrix
    of small random numbers."""


def write_blocks(file: Path, shape: Shape, context: int = CONTEXT) -> Path:
    """Write a Llama as a GGUF file of random blocks in the mix of Q4_K_M; inner units are rounded
    up to whole blocks. One that is there already is taken as it is."""
    inner = -(-shape.intermediate // NUMBERS) * NUMBERS
    facts = {
        "block_count": shape.layers,
        "context_length": context,
        "embedding_length": shape.hidden,
        "feed_forward_length": inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "rope.dimension_count": shape.hidden // shape.heads,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCABULARY,
    }
    tensors = _tensors(replace(shape, intermediate=inner))
    return _write(file, Outline("llama", facts, VOCABULARY, tensors))


def write_expert_blocks(file: Path, layers: int) -> Path:
    """Write the shape of `MIXTURE` as a GGUF file of random blocks in the mix of Q4_K_M, with a
    vocabulary that costs next to nothing. One that is there already is taken as it is."""
    facts = {
        "block_count": layers,
        "context_length": CONTEXT,
        "embedding_length": MIXTURE["hidden_size"],
        "feed_forward_length": MIXTURE["intermediate_size"],
        "attention.head_count": MIXTURE["num_attention_heads"],
        "attention.head_count_kv": MIXTURE["num_key_value_heads"],
        "attention.key_length": MIXTURE["head_dim"],
        "attention.value_length": MIXTURE["head_dim"],
        "attention.layer_norm_rms_epsilon": MIXTURE["rms_norm_eps"],
        "rope.freq_base": MIXTURE["rope_parameters"]["rope_theta"],
        "expert_count": MIXTURE["num_experts"],
        "expert_used_count": MIXTURE["num_experts_per_tok"],
        "expert_feed_forward_length": MIXTURE["moe_intermediate_size"],
    }
    return _write(file, Outline("qwen3moe", facts, FEW, _expert_tensors(layers)))


def _write(file: Path, outline: Outline) -> Path:
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_suffix(".new")
    writer = gguf.GGUFWriter(made, outline.architecture)
    for key, value in outline.facts.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{outline.architecture}.{key}", value)
    _add_tokens(writer, outline.vocabulary)
    tensors = list(outline.tensors)
    for name, shape, kind in tensors:
        if kind is None:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
            continue
        *outer, columns = shape
        own = (*outer, columns // NUMBERS * BLOCK_BYTES[kind])
        writer.add_tensor_info(name, own, np.dtype(np.uint8), math.prod(own), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    seeds = np.random.default_rng(0)
    for _, shape, kind in tensors:
        writer.write_tensor_data(_drawn(shape, kind, seeds))
    writer.close()
    return made.rename(file)


def _add_tokens(writer: gguf.GGUFWriter, count: int) -> None:
    """Add a vocabulary of letters in GPT-2's spelling, filled up with words that no text has."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 512))]
    tokens = ["<begin>", "<end>", *letters]
    tokens += [f"word{number}" for number in range(count - 1 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, letters[0] + letters[1]])
    writer.add_token_types([3, 3, *[1] * (count - 2)])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _better(index: int, layers: int) -> Type:
    """Return the type of values and of what leads back from inner units: in half of the layers of
    Q4_K_M it is Q6_K."""
    eighth = layers // 8
    more = index < eighth or index >= layers - eighth or (index - eighth) % 3 == 2
    return Type.Q6_K if more else Type.Q4_K


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], Type | None]]:
    hidden, inner, layers = shape.hidden, shape.intermediate, shape.layers
    keys = hidden // shape.heads * shape.kv_heads
    yield "token_embd.weight", (VOCABULARY, hidden), Type.Q4_K
    yield "output_norm.weight", (hidden,), None
    yield "output.weight", (VOCABULARY, hidden), Type.Q6_K
    for index in range(layers):
        better = _better(index, layers)
        for name, own, kind in (
            ("attn_norm", (hidden,), None),
            ("attn_q", (hidden, hidden), Type.Q4_K),
            ("attn_k", (keys, hidden), Type.Q4_K),
            ("attn_v", (keys, hidden), better),
            ("attn_output", (hidden, hidden), Type.Q4_K),
            ("ffn_norm", (hidden,), None),
            ("ffn_gate", (inner, hidden), Type.Q4_K),
            ("ffn_up", (inner, hidden), Type.Q4_K),
            ("ffn_down", (hidden, inner), better),
        ):
            yield f"blk.{index}.{name}.weight", own, kind


def _expert_tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], Type | None]]:
    hidden, units, experts = (
        MIXTURE[name] for name in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    width = MIXTURE["head_dim"]
    heads, keys = (width * MIXTURE[name] for name in ("num_attention_heads", "num_key_value_heads"))
    yield "token_embd.weight", (FEW, hidden), Type.Q4_K
    yield "output_norm.weight", (hidden,), None
    yield "output.weight", (FEW, hidden), Type.Q6_K
    for index in range(layers):
        better = _better(index, layers)
        for name, own, kind in (
            ("attn_norm", (hidden,), None),
            ("attn_q", (heads, hidden), Type.Q4_K),
            ("attn_k", (keys, hidden), Type.Q4_K),
            ("attn_v", (keys, hidden), better),
            ("attn_q_norm", (width,), None),
            ("attn_k_norm", (width,), None),
            ("attn_output", (hidden, heads), Type.Q4_K),
            ("ffn_norm", (hidden,), None),
            ("ffn_gate_inp", (experts, hidden), None),
            ("ffn_gate_exps", (experts, units, hidden), Type.Q4_K),
            ("ffn_up_exps", (experts, units, hidden), Type.Q4_K),
            ("ffn_down_exps", (experts, hidden, units), better),
        ):
            yield f"blk.{index}.{name}.weight", own, kind


def _drawn(shape: tuple[int, ...], kind: Type | None, seeds: np.random.Generator) -> np.ndarray:
    """Draw a tensor: of blocks uint8 [..., bytes], else fp32 as the shape is."""
    if kind is None:
        if len(shape) == 1:
            return np.ones(shape, np.float32)
        return (seeds.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
    count = math.prod(shape) // NUMBERS
    drawn = seeds.integers(0, 256, (count, BLOCK_BYTES[kind]), dtype=np.uint8)
    for offset, scale in SCALES[kind].items():
        drawn[:, offset : offset + 2] = np.array([scale], np.float16).view(np.uint8)
    return drawn.reshape(*shape[:-1], -1)
