"""Models in GGUF files: numbers as the `gguf` package has them, families as their checkpoints in
safetensors, and files that are damaged or foreign."""

import json
import os
import re
import struct
import unicodedata
from hashlib import sha256
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.kernels import Isa, Kind
from dovetail.workers.models.backends.packing import pack
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.configured import read_config
from dovetail.workers.models.checkpoints.footprint import PROOF_BYTES, read_tensors, sizes_in
from dovetail.workers.models.checkpoints.gguf.files import read_model
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.placing import placed_in
from dovetail.workers.models.checkpoints.gguf.rows import InFile, Pile, Rows, unpacked
from dovetail.workers.models.checkpoints.gguf.view import (
    blaming_the_file,
    files_of,
    local_folder,
    resolved,
    view_of,
)
from dovetail.workers.models.checkpoints.gguf.vocabulary import read_vocabulary
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.loader import Types, open_skeleton
from dovetail.workers.models.checkpoints.tokenizer import read_tokenizer
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from support.architectures import MAMBA, VARIED, write_tiny
from support.decoded import logits_of
from support.gguf_files import BLOCKED, architecture_of, write_gguf

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

PICKED = torch.tensor([0, 200, 3, 3, *range(64, 128, 2), *range(65, 128, 2)])
"""Places of rows that are far from each other, the same one, and even ones before odd ones."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}
RANKS = {"q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 256, "v_head_dim": 64}
LATENT = {
    **WIDE,
    **RANKS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 6.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
}
GROWING = {"llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LOCAL = {"layer_types": ["sliding_attention", "full_attention"]}
PLAIN_FALCON = {
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    **{f"{part}_multiplier": 1.0 for part in ("embedding", "lm_head", "key")},
    **{f"attention_{part}_multiplier": 1.0 for part in ("in", "out")},
    **{f"ssm_{part}_multiplier": 1.0 for part in ("in", "out")},
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
}
"""Falcon-H1 without multipliers: files have them in the weights."""
NEMOTRON_H = {
    **VARIED["nemotron_h"],
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "mamba_num_heads": 16,
    "mamba_head_dim": 16,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "moe_latent_size": 256,
    "use_bias": False,
    "mlp_bias": False,
}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "mistral": {**WIDE, "sliding_window": None},
    "mixtral": {**WIDE, "num_local_experts": 4},
    "granite": WIDE,
    "smollm3": {**WIDE, "num_hidden_layers": 4},
    "qwen2": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": {
        **WIDE,
        "num_local_experts": 8,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {**WIDE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    "qwen3_5_text": {**WIDE, **DELTA},
    "qwen3_5_moe_text": {
        **WIDE,
        **DELTA,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "olmoe": WIDE,
    "granitemoe": WIDE,
    "glm4_moe": {
        **WIDE,
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 256,
        "use_qk_norm": True,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe bailingmoe2": {
        **WIDE,
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 256,
        "use_qk_norm": True,
    },
    "deepseek_v2": {
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1, "rope_parameters": YARN},
    "glm4_moe_lite": LATENT,
    "ernie4_5_moe": {
        **WIDE,
        "num_hidden_layers": 3,
        "moe_intermediate_size": 256,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
    },
    "minimax_m2": WIDE,
    "lfm2": {
        **WIDE,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        **WIDE,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 256,
        "num_dense_layers": 1,
    },
    "gemma": WIDE,
    "gemma2": {**WIDE, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        **WIDE,
        "num_hidden_layers": 6,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": WIDE,
    "gpt2": {"n_embd": 256, "n_inner": 256, "n_layer": 2},
    "gpt_oss": {**WIDE, "num_local_experts": 4},
    "starcoder2": WIDE,
    "olmo2": WIDE,
    "olmo3": {**WIDE, "num_hidden_layers": 4},
    "ministral3": {**WIDE, "rope_parameters": {**YARN, **GROWING}},
    "seed_oss": WIDE,
    "hunyuan_v1_dense": WIDE,
    "hunyuan_v1_moe": WIDE,
    "glm4": WIDE,
    "ernie4_5": WIDE,
    "arcee": WIDE,
    "exaone4": {**WIDE, "num_hidden_layers": 4},
    "cohere2": {**WIDE, "num_hidden_layers": 4},
    "stablelm": WIDE,
    "phi": {**WIDE, "num_key_value_heads": 4},
    "gpt_neox": WIDE,
    "gpt_bigcode": {"n_embd": 256, "n_inner": 256, "n_layer": 2},
    "nemotron": WIDE,
    "olmo": WIDE,
    "jais2": WIDE,
    "gemma4_text": {**VARIED["gemma4_text"], **WIDE, **LOCAL, "moe_intermediate_size": 256},
    "gemma3n_text": {
        **VARIED["gemma3n_text"],
        "hidden_size": 256,
        "intermediate_size": 256,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 32,
    },
    "gemma4_text small": {
        **VARIED["gemma4_text small"],
        "hidden_size": 256,
        "intermediate_size": 256,
        "hidden_size_per_layer_input": 32,
    },
    "llama4_text": {
        **WIDE,
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "qwen3_next": {
        **WIDE,
        **DELTA,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "granitemoehybrid": {
        **VARIED["granitemoehybrid"],
        **WIDE,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "mamba_n_heads": 32,
        "shared_intermediate_size": 256,
        "position_embedding_type": "nope",
    },
    "granitemoehybrid dense": {
        **VARIED["granitemoehybrid"],
        **WIDE,
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_n_heads": 32,
        "num_local_experts": 0,
        "shared_intermediate_size": 256,
    },
    "bamba": {
        **VARIED["bamba"],
        **WIDE,
        "num_hidden_layers": 4,
        "mamba_n_heads": 32,
        "mamba_proj_bias": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "falcon_h1": {**WIDE, **MAMBA, "mamba_d_ssm": 128, **PLAIN_FALCON},
    "nemotron_h": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    },
    "nemotron_h moe": {
        **NEMOTRON_H,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    },
    "minicpm3": {**WIDE, **RANKS, "scale_depth": 1.4, "dim_model_base": 256},
    "youtu": {**WIDE, **RANKS},
    "afmoe": {
        **WIDE,
        "num_hidden_layers": 4,
        "num_dense_layers": 1,
        "moe_intermediate_size": 256,
        "mup_enabled": True,
        "route_scale": 1.5,
    },
    "apertus": {**WIDE, "rope_parameters": ROPE},
    "cohere": WIDE,
    "exaone": {**WIDE, "rope_parameters": ROPE},
    "exaone_moe": {
        **WIDE,
        **LOCAL,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm": WIDE,
    "granite_swa": {**WIDE, **LOCAL, "layer_rope_theta": [0, 1e4]},
    "granitemoe_swa": {
        **WIDE,
        **LOCAL,
        "layer_rope_theta": [0, 1e4],
        "num_local_experts": 4,
        "shared_intermediate_size": 512,
    },
    "granitemoeshared": {**WIDE, "num_local_experts": 4, "shared_intermediate_size": 512},
    "hy_v3": {**WIDE, "moe_intermediate_size": 256, "router_scaling_factor": 1.5},
    "mellum": {
        **WIDE,
        **LOCAL,
        "moe_intermediate_size": 256,
        "rope_parameters": {
            "full_attention": {**ROPE, "rope_type": "linear", "factor": 8.0},
            "sliding_attention": ROPE,
        },
    },
    "kimi_linear": {
        **WIDE,
        **RANKS,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4,
        "moe_intermediate_size": 256,
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "num_key_value_heads": 4,
    },
}
ALSO: dict[str, dict[str, Any]] = {"glm4_moe bailingmoe2": {"architecture": "bailingmoe2"}}
"""Arguments of `write_gguf` by kind."""
EVERYDAY = (
    *("gpt2", "gpt_oss", "gemma3_text", "qwen3_next", "glm4_moe bailingmoe2"),
    *("apertus", "granitemoe_swa"),
)
"""Families that between them take every way of arranging rows, norms and experts."""
BLOCKS_EVERYDAY = ("llama", "gpt2", "gemma2", "gpt_oss", "qwen3_next", "granitemoehybrid dense")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(folder: Path, kind: str = "llama", **more: Any) -> tuple[Path, Path]:
    """A tiny model as a GGUF file in all types of blocks, and its twin in safetensors."""
    write_tiny(kind.partition(" ")[0], folder / kind, **FIELDS[kind])
    turn = cycle(BLOCKED)

    def kinds(_: str, shape: tuple[int, ...]) -> Type:
        return next(turn) if shape[-1] % 256 == 0 else Type.F16

    file = folder / f"{kind}.gguf"
    more |= ALSO.get(kind, {})
    return file, write_gguf(folder / kind, file, kinds, **more)


def logits(model: LanguageModel, rows: int = 40) -> torch.Tensor:
    """The logits of a text that is read so many rows at a time."""
    return logits_of(model, range(2, 42), rows)


def shapes(folder: Path) -> set[tuple[int, ...]]:
    """The shapes of a folder's tensors. Those of Granite's experts, which are stacks in safetensors
    and tensors of several types in GGUF files, are told one by one, gates apart from ups."""
    found = set()
    for tensor in read_tensors(folder):
        shape = tensor.shape
        if tensor.name.endswith("experts.down_proj"):
            shape = shape[1:]
        if tensor.name.endswith("put_linear.weight") and len(shape) == 3:
            rows = shape[1] // 2 if "input_linear" in tensor.name else shape[1]
            shape = (rows, shape[2])
        found.add(shape)
    return found


def read_all(file: Path) -> None:
    """Read every tensor of a file."""
    checkpoint = open_checkpoint(str(file))
    for name in checkpoint.tensors:
        checkpoint.read(name)


def load(path: Path, weights: str = "fp32", **more: Any) -> LanguageModel:
    return load_language_model(str(path), weights=weights, device="cpu", **more)


@pytest.mark.parametrize("number", [n for n, kind in KINDS.items() if kind.numbers > 1])
def test_blocks_stand_for_the_numbers_of_the_package_bit_for_bit(number: int) -> None:
    kind = KINDS[number]
    blocks = np.random.default_rng(number).integers(0, 256, (3000, kind.size_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, Type(number)).reshape(3000, -1)
    shape = (3000, kind.numbers)
    found = unpacked(bytearray(blocks.tobytes()), number, shape).float().numpy()
    same = found.view(np.uint32) == expected.view(np.uint32)
    assert (same | (np.isnan(found) & np.isnan(expected))).all()


@needs_kernels
@pytest.mark.parametrize(
    "kind", [k if k in EVERYDAY else pytest.param(k, marks=pytest.mark.slow) for k in FIELDS]
)
def test_a_family_computes_what_its_twin_in_safetensors_computes(tmp_path: Path, kind: str) -> None:
    file, twin = write(tmp_path, kind)
    assert torch.equal(logits(load(file)), logits(load(twin)))
    assert shapes(view_of(file)) == shapes(twin)


@needs_kernels
@pytest.mark.parametrize(
    "kind", [k if k in BLOCKS_EVERYDAY else pytest.param(k, marks=pytest.mark.slow) for k in FIELDS]
)
def test_a_family_is_computed_from_blocks_as_from_their_numbers(tmp_path: Path, kind: str) -> None:
    file, twin = write(tmp_path, kind)
    exact = logits(load(twin))
    assert torch.equal(logits(load(file, "file", activations="fp32")), exact)
    moved = (logits(load(file, "file")) - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < float(moved.quantile(0.25)) < 0.2  # some rows go through another expert


@needs_kernels
@pytest.mark.parametrize("kind", ["granite", "qwen2"])
def test_fused_queries_keys_and_values_are_read_apart(tmp_path: Path, kind: str) -> None:
    file, twin = write(tmp_path, kind, fused=True)
    assert torch.equal(logits(load(file, "file", activations="fp32")), logits(load(twin)))


LING_NAMES = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".e_score_correction_bias": ".expert_bias",
}
LING: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config"},
    "num_hidden_layers": 20,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "eos_token_id": 156892,
    "pad_token_id": 156892,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "bailing_moe",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_key_value_heads": 4,
    "rope_theta": 600000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_bias": False,
    "use_rmsnorm": True,
    "rms_norm_eps": 1e-06,
    "head_dim": 128,
    "num_shared_experts": 1,
    "use_cache": True,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "vocab_size": 157184,
    "partial_rotary_factor": 0.5,
    "router_dtype": "fp32",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "use_qk_norm": True,
    "score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 512,
    "num_nextn_predict_layers": 0,
}
"""The config.json of Ling-mini-2.0."""


def as_ling(twin: Path) -> Path:
    """Turn a checkpoint of GLM-4.5 into the published form of Ling 2.0."""
    glm = json.loads((twin / "config.json").read_text())
    own = {name: glm[name] for name in LING.keys() & glm.keys() - {"architectures", "model_type"}}
    own |= {
        "num_experts": glm["n_routed_experts"],
        "num_shared_experts": glm["n_shared_experts"],
        "head_dim": glm["hidden_size"] // glm["num_attention_heads"],
        "rope_theta": glm["rope_parameters"]["rope_theta"],
    }
    own["num_nextn_predict_layers"] = 1
    (twin / "config.json").write_text(json.dumps(LING | own))
    tensors, found = load_file(twin / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            tensor = torch.cat([tensors[name.replace("q_proj", f"{one}_proj")] for one in "qkv"])
            name = name.replace("self_attn.q_proj", "attention.query_key_value")
        for part, ling in LING_NAMES.items():
            name = name.replace(part, ling)
        found[name] = tensor
    layers = glm["num_hidden_layers"]
    found |= {  # a layer for multi-token prediction, which is left out
        name.replace(".0.", f".{layers}.", 1): tensor.clone()
        for name, tensor in found.items()
        if name.startswith("model.layers.0.")
    }
    save_file(found, twin / "model.safetensors", metadata={"format": "pt"})
    return twin


@needs_kernels
def test_the_published_form_of_ling_computes_what_its_gguf_file_computes(tmp_path: Path) -> None:
    file, twin = write(tmp_path, "glm4_moe bailingmoe2")
    expected = logits(load(file))
    assert torch.equal(logits(load(as_ling(twin))), expected)


def test_a_ling_with_a_field_that_is_not_computed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LING))
    config = read_config(file)
    rotated = config.head_dim * config.rope_parameters["partial_rotary_factor"]
    assert (config.model_type, config.n_routed_experts, rotated) == ("sarvam_moe", 256, 64)
    for fields, why in [
        ({"use_bias": True}, "its use_bias is True, which is not supported"),
        ({"score_function": "softmax"}, "its score_function is 'softmax', which"),
        ({"moba_topk": 4}, "its moba_topk is 4, which is not supported"),
        ({"partial_rotary_factor": None}, "its configuration has no partial_rotary_factor"),
        ({"architectures": ["BailingMoeForCausalLM"]}, "needs its own program code"),
    ]:
        file.write_text(json.dumps(LING | fields))
        with pytest.raises(CheckpointError, match=why):
            read_config(file)


@needs_kernels
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("weights", ["file", "int4", "fp32", "half"])
def test_a_table_that_is_the_head_takes_no_memory_beside_it(
    tmp_path: Path, kind: str, weights: str
) -> None:
    dtype = torch.bfloat16 if weights == "half" else torch.float32
    fields = FIELDS[kind] | {"tie_word_embeddings": True}
    write_tiny(kind, tmp_path / "model", dtype=dtype, **fields)
    twin = tmp_path / "model"
    if weights == "file":
        twin = write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.Q8_0)
    model = load(tmp_path / "m.gguf" if weights == "file" else twin, weights)
    table = model.back_end._model.get_input_embeddings()
    assert table.weight.untyped_storage().nbytes() < 64
    ids = torch.tensor([[0, 40, 3], [3, 47, 17]])
    expected = load(twin).back_end._model.get_input_embeddings()(ids)
    if weights == "int4":
        assert float((table(ids) - expected).norm() / expected.norm()) < 0.05
    else:
        assert torch.equal(table(ids), expected)
    with pytest.raises(IndexError):
        table(torch.tensor([table.weight.shape[0]]))


@needs_kernels
@pytest.mark.usefixtures("kernels_as_before")
@pytest.mark.parametrize(
    "types",
    [(Type.F16, Type.Q4_K, Type.Q6_K), (Type.IQ2_S, Type.IQ2_XXS, Type.IQ3_XXS)],
)
def test_a_row_through_experts_of_blocks_has_the_same_bytes_in_any_company(
    tmp_path: Path, types: tuple[Type, ...]
) -> None:
    """Gates of plain numbers stand above blocks in one matrix."""
    names = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    kinds = dict(zip(names, types, strict=True))
    write_tiny("qwen3_moe", tmp_path / "model", **FIELDS["qwen3_moe"], num_experts_per_tok=3)
    file = tmp_path / "model.gguf"

    def kind_of(name: str, _: tuple[int, ...]) -> Type:
        return kinds.get(name.split(".")[-2], Type.Q8_0)

    twin = write_gguf(tmp_path / "model", file, kind_of)
    assert torch.equal(logits(load(file, "file", activations="fp32")), logits(load(twin)))
    model = load(file, "file")
    alone = logits(model, 1)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        for rows in (40,) if isa is Isa.PLAIN else (1, 2, 3, 7, 16, 40):
            kernels.set_threads(1 + rows % 3)
            assert torch.equal(logits(model, rows), alone), (isa, rows)


@needs_kernels
def test_experts_of_blocks_are_read_one_by_one(tmp_path: Path) -> None:
    """Estimates count them so, and of numbers no more than one."""
    file, _ = write(tmp_path, "qwen3_moe")
    skeleton = open_skeleton(open_checkpoint(str(file)))
    assert skeleton.experts is not None
    name = "model.layers.1.mlp.experts.gate_up_proj"
    unread = skeleton.experts(name)
    assert unread.rows is not None
    for index in (0, 7):
        parts = unread.rows(index)
        assert [len(part.content) for part in parts if isinstance(part, Rows)] == [256, 256]
        numbers = torch.cat([part.numbers() for part in parts if isinstance(part, Rows)])
        assert torch.equal(numbers, skeleton.read(name)[index])
        assert torch.equal(numbers, unread.numbers(index))
    tensors = read_tensors(view_of(file))
    beside = sizes_in(view_of(file), tensors, "file", "half").loading
    layer = sum(tensor.stored_bytes for tensor in tensors if ".1.mlp.experts." in tensor.name)
    assert beside - PROOF_BYTES < layer / 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "output.bias"),
        ("llama", "blk.1.attn_q.bias"),
        ("llama", "rope_factors_long.weight"),
        ("gpt2", "rope_freqs.weight"),
        ("qwen3_moe", "output.bias"),
        ("deepseek_v3", "blk.1.attn_v_b.weight"),
    ],
)
def test_a_tensor_that_the_model_does_not_use_is_refused_by_name(
    tmp_path: Path, kind: str, name: str
) -> None:
    write_tiny(kind, tmp_path / "model")
    extra = {name: np.ones(32, np.float32)}
    write_gguf(
        *(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32),
        extra=extra,
        whole_latents=True,
    )
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(name)} (is not|has no)"):
        open_skeleton(open_checkpoint(str(tmp_path / "m.gguf")))


def test_a_tensor_that_one_layer_alone_has_is_missed_in_another_by_name(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model", tie_word_embeddings=True)
    extra = {f"blk.0.attn_{part}.bias": np.ones(64, np.float32) for part in ("q", "output")}
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32, extra=extra)
    with pytest.raises(CheckpointError, match=r"lacks tensors .* such as blk\.0\.attn_k\.bias;"):
        open_skeleton(open_checkpoint(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("llama", "output_norm.weight"),
        ("gpt2", "blk.1.attn_qkv.bias"),
        ("qwen3_moe", "blk.1.ffn_up_exps.weight"),
        ("qwen3_5_text", "blk.0.ssm_a"),
        ("gpt_oss", "blk.1.attn_sinks.weight"),
        ("glm4_moe", "blk.1.exp_probs_b.bias"),
    ],
)
def test_a_tensor_that_is_missing_is_named_as_files_name_it(
    tmp_path: Path, kind: str, name: str
) -> None:
    write_tiny(kind, tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32, without=(name,))
    with pytest.raises(CheckpointError, match=rf"lacks tensor.* {re.escape(name)}[;,] "):
        open_skeleton(open_checkpoint(str(tmp_path / "m.gguf")))


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "gemma3_text"])
def test_a_head_beside_an_embedding_that_is_one_elsewhere_is_the_head(
    tmp_path: Path, kind: str
) -> None:
    """llama.cpp's converter has written one for GPT-2."""
    write_tiny(kind, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    shape = config["vocab_size"], config.get("hidden_size") or config["n_embd"]
    extra = {"output.weight": np.random.default_rng(0).normal(size=shape).astype(np.float32)}
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32, extra=extra)
    skeleton = open_skeleton(open_checkpoint(str(tmp_path / "m.gguf")))
    skeleton.fill(skeleton.model, "", Types(None, None))
    head = skeleton.model.get_output_embeddings().weight
    assert np.array_equal(head.numpy(), extra["output.weight"])
    assert head is not skeleton.model.get_input_embeddings().weight


@pytest.mark.parametrize(
    "kind", ["gpt_oss", "gpt_neox", "nemotron", "olmo2", "olmoe", "phi", "stablelm"]
)
def test_no_embedding_is_the_head_of_an_architecture_that_has_one_of_its_own(
    tmp_path: Path, kind: str
) -> None:
    """llama.cpp loads none of these without it."""
    write_tiny(kind, tmp_path / "model", tie_word_embeddings=True)
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32)
    with pytest.raises(CheckpointError, match=r"tensor output\.weight is missing"):
        view_of(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")],
)
def test_a_language_model_beside_an_encoder_of_images_is_that_model_alone(
    tmp_path: Path, kind: str, architecture: str
) -> None:
    write_tiny(kind, tmp_path / "model", **FIELDS[kind])
    configs = []
    for name in (None, architecture):
        file = tmp_path / f"{name}.gguf"
        own = architecture_of(json.loads((tmp_path / "model" / "config.json").read_text()))
        sections = {f"{architecture}.rope.dimension_sections": [2, 3, 3, 0]} if name else {}
        if "3vl" in str(name):
            sections |= {f"{architecture}.n_deepstack_layers": 3}
        if name and "moe" in own:
            sections |= {f"{name}.expert_feed_forward_length": 256}
        write_gguf(*(tmp_path / "model", file, lambda *_: Type.F32), architecture=name, **sections)
        configs.append(json.loads((view_of(file) / "config.json").read_text()))
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("llama", "internlm2"), ("granite", "minicpm"), ("llama", "pangu-embedded")],
)
def test_an_architecture_that_computes_as_another_is_read_as_that(
    tmp_path: Path, kind: str, architecture: str
) -> None:
    """Files of openPangu have transformers' order of rotated rows, unlike Llama's."""
    write_tiny(kind, tmp_path / "model", tie_word_embeddings=False)
    found = []
    for name in (kind, architecture):
        file = tmp_path / f"{name}.gguf"
        write_gguf(tmp_path / "model", file, lambda *_: Type.F32, architecture=name)
        changes = {
            own: one.change for own, one in placed_in(read_model(file)).items() if one.change
        }
        found.append(((view_of(file) / "config.json").read_text(), changes))
    assert found[0][0] == found[1][0]
    assert found[1][1] == ({} if "pangu" in architecture else found[0][1])
    assert found[0][1]


@needs_kernels
def test_factors_of_the_rotation_of_minicpm_4_are_read(tmp_path: Path) -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [4.0] * 8, "attention_factor": 1.0}
    rope = {**ROPE, **factors, "rope_type": "longrope", "original_max_position_embeddings": 48}
    write_tiny("granite", tmp_path / "model", rope_parameters=rope)
    extra = {
        f"rope_factors_{name}.weight": np.array(factors[f"{name}_factor"], np.float32)
        for name in ("short", "long")
    }
    facts = {"scaling.type": "longrope", "scaling.original_context_length": 48}
    twin = write_gguf(
        *(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32),
        extra=extra,
        architecture="minicpm",
        **{f"minicpm.rope.{key}": value for key, value in facts.items()},
    )
    assert torch.equal(logits(load(tmp_path / "m.gguf")), logits(load(twin)))


def test_a_file_of_minicpm_without_its_factors_is_refused(tmp_path: Path) -> None:
    write_tiny("granite", tmp_path / "model")
    facts = {"architecture": "minicpm", "minicpm.residual_scale": None}
    write_gguf(tmp_path / "model", tmp_path / "m.gguf", lambda *_: Type.F32, **facts)
    with pytest.raises(CheckpointError, match=r"key minicpm\.residual_scale is missing"):
        view_of(tmp_path / "m.gguf")


@needs_kernels
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_of_two_matrices_of_a_file_are_one_in_their_order(mixed: bool, tmp_path: Path) -> None:
    """Queries, keys, values and gates of Qwen3-Next stand together for each head of keys."""
    write_tiny("qwen3_next", tmp_path / "model", **FIELDS["qwen3_next"])

    def kinds(name: str, shape: tuple[int, ...]) -> Type:
        return Type.F16 if (mixed and "attn_gate" in name) or shape[-1] % 256 else Type.Q4_K

    file = tmp_path / "m.gguf"
    write_gguf(tmp_path / "model", file, kinds)
    checkpoint = open_checkpoint(str(file))
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    rows, whole = checkpoint.rows(name, transposed=False), checkpoint.read(name).float()
    assert isinstance(rows, Pile)
    assert rows.count == len(whole) == 2 * 2 * 64 + 2 * 6 * 128
    assert len(rows.runs()) == 4  # of both heads
    assert torch.equal(rows.numbers(), whole)
    picked = PICKED % rows.count
    assert torch.equal(rows.taken(picked).numbers(), whole[picked])
    write_gguf(tmp_path / "model", tmp_path / "half.gguf", kinds, without=("attn_gate",))
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_qkv\.weight has no counterpart"):
        view_of(tmp_path / "half.gguf")


@needs_kernels
@pytest.mark.parametrize(("kind", "kept"), [(Type.Q8_0, True), (Type.Q4_K, False)])
def test_what_reads_value_heads_stays_blocks_where_these_are_whole_blocks(
    kind: Type, kept: bool, tmp_path: Path
) -> None:
    """Heads of 128 stand in another order in a file; blocks of 256 are of two of them."""
    write_tiny("qwen3_5_text", tmp_path / "model", **FIELDS["qwen3_5_text"])
    file = tmp_path / "m.gguf"
    write_gguf(tmp_path / "model", file, lambda name, _: kind if "ssm_out" in name else Type.F16)
    checkpoint, name = open_checkpoint(str(file)), "model.layers.0.linear_attn.out_proj.weight"
    rows, whole = checkpoint.rows(name, transposed=False), checkpoint.read(name).float()
    described = next(one for one in read_tensors(view_of(file)) if one.name == name)
    assert (rows is not None, described.packed_bytes > 0) == (kept, kept)
    if rows is not None:
        assert torch.equal(rows.numbers(), whole)
        assert torch.equal(rows.taken(PICKED).numbers(), whole[PICKED])


@needs_kernels
@pytest.mark.slow
def test_latents_of_an_older_file_are_one_matrix_and_one_of_two_kinds_is_refused(
    tmp_path: Path,
) -> None:
    """Without gating functions, corrections say which; widths of heads stand where newer files
    have those of latents."""
    write_tiny("deepseek_v3", tmp_path / "model", **FIELDS["deepseek_v3"])
    older = {
        "deepseek2.attention.key_length": 264,
        "deepseek2.attention.value_length": 64,
        "deepseek2.attention.head_count_kv": 4,
        **{f"deepseek2.attention.{part}_length_mla": None for part in ("key", "value")},
    }

    def wrote(name: str, **more: Any) -> tuple[Path, Path]:
        file = tmp_path / f"{name}.gguf"
        return file, write_gguf(tmp_path / "model", file, lambda *_: Type.Q8_0, **more)

    file, twin = wrote("old", whole_latents=True, **older)
    assert torch.equal(logits(load(file, "file", activations="fp32")), logits(load(twin)))
    both = {"blk.0.attn_kv_b.weight": np.ones((4 * 320, 256), np.float32)}
    file, _ = wrote("both", extra=both)
    with pytest.raises(CheckpointError, match="or attn_kv_b is also there"):
        view_of(file)
    file, _ = wrote("softmax", **{"deepseek2.expert_gating_func": 1})
    with pytest.raises(CheckpointError, match="by gating function 1 with corrections"):
        view_of(file)


def test_layers_that_guess_the_tokens_that_follow_are_left_out(tmp_path: Path) -> None:
    write_tiny("glm4_moe", tmp_path / "model", **FIELDS["glm4_moe"])
    write_gguf(
        tmp_path / "model",
        tmp_path / "m.gguf",
        lambda _, shape: Type.F32,
        extra={f"blk.3.{name}.weight": np.ones(256, np.float32) for name in ("x", "nextn.enorm")},
        **{"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1},
    )
    own = open_checkpoint(str(tmp_path / "m.gguf"))
    assert own.tensors.keys() == open_checkpoint(str(tmp_path / "model")).tensors.keys()
    assert json.loads((own.folder / "config.json").read_text())["num_hidden_layers"] == 3


@needs_kernels
def test_weights_file_are_refused_where_there_are_no_blocks_and_where_they_are_not_computed(
    tmp_path: Path,
) -> None:
    file, twin = write(tmp_path)
    with pytest.raises(CheckpointError, match=r"it has no blocks .*: use weights fp32"):
        load(twin, "file")
    with pytest.raises(CheckpointError, match=r"file weights .* leave target\.backend out"):
        load(file, "file", backend="library")


@needs_kernels
def test_16_bits_are_exact_as_half_and_blocks_are_refused(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model", **WIDE)
    file = tmp_path / "m-F16.gguf"
    write_gguf(tmp_path / "model", file, lambda _, shape: Type.F16)
    assert torch.equal(logits(load(file, "half")), logits(load(file)))
    blocks, _ = write(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        load(view_of(blocks), "half")  # as a worker's settings name it
    assert str(refused.value) == (
        f"{blocks}: half weights need a checkpoint of 16-bit weights, this one has blocks: use "
        "weights file, fp32 or int8"
    )


@needs_kernels
def test_factors_of_the_rotation_are_obeyed(tmp_path: Path) -> None:
    """Llama 3.1 and later have them in a tensor of their own, made by this formula."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    fields = {**WIDE, "rope_parameters": {**rope, **scaling}}
    write_tiny("llama", tmp_path / "model", **fields)
    head = int(json.loads((tmp_path / "model" / "config.json").read_text())["head_dim"])
    waves = 2 * np.pi * 1e4 ** (np.arange(0, head, 2) / head)
    smooth = np.clip((32 / waves - 1) / 3, 0, 1)
    factors = (1 / ((1 - smooth) / 8 + smooth)).astype(np.float32)
    twin = write_gguf(
        tmp_path / "model",
        tmp_path / "m.gguf",
        lambda _, shape: Type.F32,
        extra={"rope_freqs.weight": factors},
    )
    difference = (logits(load(tmp_path / "m.gguf")) - logits(load(twin))).abs().max()
    assert difference < 1e-4


def test_parts_of_a_split_file_are_one_model_and_a_missing_one_is_named(tmp_path: Path) -> None:
    file, _ = write(tmp_path)
    one = read_model(file)
    parts = split(file, tmp_path / "parts")
    assert {p.name for h in read_model(parts[1]).heads for p in h.tensors} == {
        place.name for place in one.heads[0].tensors
    }
    assert view_of(parts[1]) == view_of(parts[0]) == local_folder(tmp_path / "parts")
    assert (
        open_checkpoint(str(parts[1])).tensors.keys() == open_checkpoint(str(file)).tensors.keys()
    )
    twice = next(p.name for p in read_model(parts[1]).heads[0].tensors if "blk.0" in p.name)
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole.replace(twice.replace("0", "1").encode(), twice.encode()))
    with pytest.raises(CheckpointError, match=f"its parts have the tensor {twice} twice"):
        read_model(parts[1])
    parts[1].write_bytes(whole)
    parts[0].rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"m-00001-of-00002\.gguf is missing"):
        read_model(parts[1])


def test_a_file_in_the_cache_of_the_hub_is_found_by_its_name_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write(tmp_path)
    model = tmp_path / "models--some-one--m-GGUF"
    for folder in ("refs", "blobs", f"snapshots/{'0' * 40}"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    file.rename(model / "blobs" / "f00d")
    (model / "snapshots" / ("0" * 40) / "m.Q8_0.gguf").symlink_to("../../blobs/f00d")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = find_folder("some-one/m-GGUF/m.Q8_0.gguf")
    assert folder.name == "m.Q8_0.gguf"
    assert open_checkpoint(str(folder)).vocabulary.size > 0


@needs_kernels
@pytest.mark.parametrize("count", [None, 0])
def test_a_mixture_without_a_shared_expert_equals_one_with_zeros(
    tmp_path: Path, count: int | None
) -> None:
    facts = {"nemotron_h_moe.expert_shared_count": count}
    facts["nemotron_h_moe.expert_shared_feed_forward_length"] = count
    file, twin = write(tmp_path, "nemotron_h moe", without=("_shexp",), **facts)
    weights = load_file(twin / "model.safetensors")
    for name in weights:
        if "shared_experts.down_proj" in name:
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, twin / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(logits(load(file)), logits(load(twin)), rtol=1e-4, atol=1e-4)
    assert logits(load(file, "file")).isfinite().all()


def test_a_split_file_in_the_cache_of_the_hub_is_found_by_any_part_and_by_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write(tmp_path)
    model, plain = tmp_path / "models--some-one--m-GGUF", open_checkpoint(str(file))
    snapshot = model / "snapshots" / ("0" * 40)
    for folder in (model / "refs", model / "blobs", snapshot / "Q8_0"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    links = []
    for part in split(file, tmp_path / "parts"):
        blob = part.rename(model / "blobs" / sha256(part.name.encode()).hexdigest())
        for folder in (snapshot, snapshot / "Q8_0"):
            links.append(folder / part.name)
            links[-1].symlink_to(os.path.relpath(blob, folder))
    (named := tmp_path / "named.gguf").symlink_to(links[0])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ids = ["some-one/m-GGUF", *(f"some-one/m-GGUF/{link.name}" for link in links[::2])]
    ids.append(f"some-one/m-GGUF/Q8_0/{links[0].name}")
    for source in (*map(str, links), str(snapshot), str(named), *ids):
        folder = find_folder(source)
        assert {*files_of(folder)} in ({*links[::2]}, {*links[1::2]})
        assert open_checkpoint(source).tensors.keys() == plain.tensors.keys()
        assert read_tensors(folder)


def test_a_folder_of_several_models_lists_them_without_what_is_none(tmp_path: Path) -> None:
    for name in ("a-Q8_0.gguf", "b-Q4_0.gguf", "mmproj-a.gguf", "c-00001-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "c-00002-of-00002.gguf").touch()
    with pytest.raises(CheckpointError, match="has 3 models in GGUF files: name one of a-Q8_0"):
        local_folder(tmp_path)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"general.type": "adapter"}, "holds a LoRA adapter"),
        ({"general.type": "mmproj"}, "encoder of images"),
        ({"llama.attention.new_thing": 2.0}, "key llama.attention.new_thing is not known"),
        ({"llama.block_count": None}, "key llama.block_count is missing"),
        ({"llama.rope.scaling.type": "su"}, "scaled in the way 'su'"),
        ({"llama.block_count": 1 << 30}, "declares 1073741824 layers, and has fewer tensors"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan, no finite"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0, below 0"),
        ({"general.type": ["model"]}, "general.type is no text"),
        ({"split.no": "first"}, "split.no or split.count is no whole number"),
        ({"split.count": [1, 2]}, "split.no or split.count is no whole number"),
        ({"tokenizer.ggml.pre": ["gpt-2"]}, "is .*gpt-2.*, not known here"),
        ({"llama.block_count": 1}, "tensor blk.1.* is of a layer beyond its 1"),
        ({"llama.nextn_predict_layers": 1}, "nextn_predict_layers is 1, but such layers"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 numbers of a head of .*not all"),
        ({"llama.rope.dimension_count": 0}, "rotates 0 numbers of a head"),
        ({"llama.rope.dimension_count": 3}, "rotates 3 numbers of a head"),
        ({"llama.rope.dimension_count": 1000}, "rotates 1000 numbers of a head"),
        ({"llama.rope.freq_base": 0.0}, "rope.freq_base is 0.0, no positive finite number"),
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base is nan, no finite"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0},
            "rope.scaling.factor is 0.0, no positive",
        ),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": -2.0},
            "rope.scaling.factor is -2.0, no positive",
        ),
        ({"llama.embedding_length": "wide"}, "is wide, no whole number"),
        ({"llama.context_length": [-1, -1]}, "context_length is -1, no number from 0"),
        ({"tokenizer.ggml.pre": "new-splitting"}, "is 'new-splitting', not known here"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model is 'bert'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "is no pair of tokens"),
        ({"tokenizer.ggml.merges": ["no token"]}, "which are no tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "has 48 items for 2 tokens"),
    ],
)
def test_what_a_file_says_and_is_not_known_is_refused_by_name(
    tmp_path: Path, facts: dict[str, Any], words: str
) -> None:
    file, _ = write(tmp_path, **facts)
    with pytest.raises(CheckpointError, match=words):
        view_of(file)


def test_a_width_that_its_tensors_have_not_is_told_of_the_file(tmp_path: Path) -> None:
    """The folder in the cache that stands for it is nothing that its user could correct."""
    for width, words in ((0, "intermediate_size is 0"), (3, r"where its metadata calls for \[3")):
        file, _ = write(tmp_path / str(width), **{"llama.feed_forward_length": width})
        with pytest.raises(CheckpointError, match=words) as refused:
            load(file)
        assert str(refused.value).startswith(f"{file}: ")
        assert str(refused.value).endswith(
            "another file of this model, or its folder of safetensors"
        )


def test_what_transformers_cannot_compute_is_told_of_the_file(tmp_path: Path) -> None:
    file, _ = write(tmp_path)
    said = "LlamaForCausalLM fails with this config.json: a is 1; correct it, or use another"
    with (
        pytest.raises(CheckpointError, match=r"with its metadata: a is 1; use another file of"),
        blaming_the_file(view_of(file)),
    ):
        raise CheckpointError(f"{file}: {said}")


def test_a_file_that_does_not_say_where_an_mlp_reads_is_refused(tmp_path: Path) -> None:
    """Both orders have the same tensors, and llama.cpp has no usual one."""
    file, _ = write(tmp_path, "gpt_neox", **{"gptneox.use_parallel_residual": None})
    with pytest.raises(CheckpointError, match=r"key gptneox\.use_parallel_residual is missing"):
        view_of(file)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_a_base_of_rotation_that_a_file_does_not_say_is_that_of_llama_cpp(
    tmp_path: Path, kind: str
) -> None:
    """10000 whatever the architecture, also where transformers has another for full attention."""
    key = f"{kind.removesuffix('_text')}.rope.freq_base"
    file, _ = write(tmp_path, kind, **{key: None})
    rotations = json.loads((view_of(file) / "config.json").read_text())["rope_parameters"]
    assert rotations["full_attention"]["rope_theta"] == 10000.0


def test_scales_of_0_are_those_that_a_file_does_not_say(tmp_path: Path) -> None:
    scales = ("attention.scale", "embedding_scale", "residual_scale")
    found = []
    for value in (0.0, None):
        file, _ = write(
            tmp_path / str(value), "granite", **{f"granite.{key}": value for key in scales}
        )
        found.append(json.loads((view_of(file) / "config.json").read_text()))
    assert found[0] == found[1]
    for kind in ("granite", "cohere2"):
        file, _ = write(tmp_path / f"{kind} logits", kind, **{f"{kind}.logit_scale": 0.0})
        with pytest.raises(CheckpointError, match=r"scale is 0\.0, no positive finite number"):
            view_of(file)


@pytest.mark.parametrize(("every", "windows"), [(None, "1110"), (0, "1111"), (1, "0000")])
def test_every_so_many_layers_have_no_window(
    tmp_path: Path, every: int | None, windows: str
) -> None:
    file, _ = write(tmp_path, "cohere2", **{"cohere2.attention.sliding_window_pattern": every})
    kinds = json.loads((view_of(file) / "config.json").read_text())["layer_types"]
    assert [kind == "sliding_attention" for kind in kinds] == [mark == "1" for mark in windows]


def test_ends_template_and_sampling_are_those_of_the_file(tmp_path: Path) -> None:
    file, _ = write(
        tmp_path,
        **{
            "tokenizer.ggml.eot_token_id": 5,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.chat_template": "{{ messages }}",
            "general.sampling.temp": 0.7,
            "general.sampling.top_k": 20,
        },
    )
    tokenizer, facts = read_tokenizer(view_of(file))
    assert (facts.begin, facts.end, facts.template) == (0, (1, 5), "{{ messages }}")
    assert json.loads(tokenizer)["post_processor"]["special_tokens"]["<begin>"]["ids"] == [0]
    generation = json.loads((view_of(file) / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"]) == (0.7, 20)


def test_the_default_of_several_chat_templates_is_taken(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["rag"], "tokenizer.chat_template.rag": "{{ documents }}"}
    file, _ = write(tmp_path, **named)
    assert "several (rag)" in read_tokenizer(view_of(file))[1].template
    file, _ = write(tmp_path / "more", **named, **{"tokenizer.chat_template": "{{ messages }}"})
    assert read_tokenizer(view_of(file))[1].template == "{{ messages }}"


def test_a_view_is_made_anew_when_its_file_is_another(tmp_path: Path) -> None:
    file, _ = write(tmp_path)
    before = Path(resolved(str(file)))
    assert resolved(f"{file}/") == str(before)
    assert before.name == file.name
    assert before == view_of(file)
    digest = open_checkpoint(str(before)).digest
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="was changed while it was loaded"):
        open_checkpoint(str(before))
    assert view_of(file) != before
    assert open_checkpoint(str(file)).digest != digest


def test_a_folder_that_only_says_that_it_is_a_view_is_none(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model", **WIDE)
    before = open_checkpoint(str(tmp_path / "model")).digest
    (tmp_path / "model" / "gguf.json").write_text('{"files": [{"path": "/etc/passwd"}]}')
    assert open_checkpoint(str(tmp_path / "model")).digest == before
    assert resolved(str(tmp_path / "model")) == str(tmp_path / "model")


def test_infinite_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    file, _ = write(tmp_path)
    place = next(p for p in read_model(file).heads[0].tensors if KINDS[p.kind].name == "Q8_0")
    content = bytearray(file.read_bytes())
    content[place.offset : place.offset + 2] = b"\x00\x7c"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="holds NaN or infinite values"):
        read_all(file)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_rows_read_a_few_at_a_time_are_those_of_the_whole_tensor(kind: str, tmp_path: Path) -> None:
    """Rows in turn, of heads whose halves are put apart and of value heads, taken once more too."""
    file, _ = write(tmp_path, kind)
    checkpoint = open_checkpoint(str(file))
    orders = 0
    for name in checkpoint.tensors:
        if (rows := checkpoint.rows(name, transposed=False)) is None:
            continue
        expected, picked = checkpoint.read(name), PICKED % rows.count
        for own, numbers in ((rows, expected), (rows.taken(picked), expected[picked])):
            assert isinstance(own.source, InFile)
            assert own.count == len(numbers)
            read = own.source.pieces()
            pieces = [
                read(first, min(24, own.count - first)).clone() for first in range(0, own.count, 24)
            ]
            assert torch.equal(Rows(own.kind, torch.cat(pieces)).numbers(), numbers.float())
            assert torch.equal(own.numbers(), numbers.float())
        orders += rows.source.order is not None
    assert orders


@needs_kernels
@pytest.mark.parametrize("cut", [False, True])
def test_a_file_that_is_damaged_before_its_rows_are_read_is_refused(
    cut: bool, tmp_path: Path
) -> None:
    file, _ = write(tmp_path)
    skeleton = open_skeleton(open_checkpoint(str(file)))
    skeleton.fill(skeleton.model, "", Types(None, None, blocks=True))
    if cut:
        os.truncate(file, file.stat().st_size // 4)
    else:
        file.write_bytes(b"\x00" * file.stat().st_size)
    head = skeleton.model.model.layers[1].mlp.down_proj
    with pytest.raises(CheckpointError, match="was changed while it was loaded"):
        pack(Kind.BLOCKS, [head])


def mutations() -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Places in the head of a file, and the whole numbers that are written there, in bytes."""
    values = st.sampled_from([0, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
    return st.lists(st.tuples(st.integers(4, 3000), values, st.sampled_from([1, 4, 8])), max_size=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    write_tiny("llama", folder / "llama", hidden_size=32, intermediate_size=32)
    write_gguf(folder / "llama", folder / "m.gguf", lambda _, shape: Type.Q4_0)
    return folder / "m.gguf"


@settings(max_examples=80, deadline=None, derandomize=True)
@given(changed=mutations(), cut=st.none() | st.integers(0, 60000))
def test_a_hostile_file_ends_in_one_sentence(
    whole: Path, changed: list[tuple[int, int, int]], cut: int | None
) -> None:
    content = bytearray(whole.read_bytes())
    for place, value, size in changed:
        content[place : place + size] = (value % 256**size).to_bytes(size, "little")
    file = whole.with_name("hostile.gguf")
    file.write_bytes(content if cut is None else content[:cut])
    refused = ""
    try:
        read_all(file)
    except CheckpointError as error:
        refused = str(error)
    assert "\n" not in refused
    assert len(refused) < 1000


def split(file: Path, folder: Path) -> list[Path]:
    """The model of a file in two parts, as llama.cpp's `llama-gguf-split` makes them."""
    folder.mkdir()
    reader = gguf.GGUFReader(file)
    half = len(reader.tensors) // 2
    parts = []
    for number, tensors in enumerate((reader.tensors[:half], reader.tensors[half:])):
        parts.append(folder / f"m-0000{number + 1}-of-00002.gguf")
        writer = gguf.GGUFWriter(parts[-1], "llama")
        for key, field in reader.fields.items() if not number else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                sub = field.types[1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


def test_a_file_of_a_big_endian_machine_or_an_old_one_is_refused(tmp_path: Path) -> None:
    for version, words in ((1, "of version 1"), (0x03000000, "big-endian")):
        file = tmp_path / "m.gguf"
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(CheckpointError, match=words):
            read_model(file)


@pytest.mark.skipif("LLAMA_CPP" not in os.environ, reason="LLAMA_CPP names no llama.cpp sources")
def test_tokenizers_give_the_tokens_of_llama_cpp() -> None:
    """Sources of llama.cpp have vocabularies, texts, and the tokens of these."""
    tried = 0
    for texts in sorted((Path(os.environ["LLAMA_CPP"]) / "models").glob("ggml-vocab-*.gguf.inp")):
        model = read_model(texts.with_suffix(""))
        if model.facts["tokenizer.ggml.model"] == "bert":
            continue
        tokenizer = Tokenizer.from_str(json.dumps(read_vocabulary(model).content))
        lines = texts.with_suffix(".out").read_text().splitlines()
        parts = texts.read_text().split("\n__ggml_vocab_test__\n")
        for text, line in zip(parts, lines, strict=False):
            if "qwen35" in texts.name and not unicodedata.is_normalized("NFC", text):
                continue  # composed here, as by its own tokenizer
            expected = [int(token) for token in line.split()]
            assert tokenizer.encode(text, add_special_tokens=False).ids == expected, (texts, text)
        tried += 1
    assert tried
