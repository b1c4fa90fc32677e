"""Tiny checkpoints of every causal model class that the installed transformers has, made by
shrinking the default configuration of each."""

import json
import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.models import write_tokenizer

VOCABULARY = 48
CONTEXT = 96
WINDOW = 7
LARGEST = 6 << 20
"""Numbers that a tiny model may have."""

RULES: tuple[tuple[str, int], ...] = (
    (r".*vocab(_size)?|.*vocab_size.*", VOCABULARY),
    (r"bos_token_id|bos_index|unk_index", 0),
    (r"(pad|cls|sep|mask|unk|image|audio|video|boi|eoi|boa|eoa|vision|eod).*(id|index)", 2),
    (r".*(eos|decoder_start|forced).*(id|index)|pad_index|mask_index|lang_id", 1),
    (r".*window(_size|_len)?|local_attention|attention_chunk_size", WINDOW),
    (r"original_max_position.*", CONTEXT // 2),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length|max_.*_positions|rel_extent",
        CONTEXT,
    ),
    (r"num_(key_value|kv|kv_query|query)_?(heads|groups)|swa_num_key_value_heads", 2),
    (
        r"(encoder_|decoder_|num_|n_|swa_|num_encoder_|num_decoder_)?(attention_|query_)?heads?|n_head|num_attention_heads|index_n_heads",
        4,
    ),
    (r"linear_num_.*heads|linear_num_heads", 4),
    (
        r"(swa_|global_|attention_)?head_(dim|size)|v_head_dim|index_head_dim|linear_.*head_dim|attention_head_(dim|size)|kv_channels|d_head|dim_head",
        16,
    ),
    (r"qk_(nope|rope)_head_dim", 8),
    (r"qk_head_dim", 16),
    (r"[qok]v?_lora_rank|.*_lora_.*|rotary_dim", 8),
    (r"hidden_size_per_layer_input|laurel_rank|.*_rank", 8),
    (
        r"hidden_size|d_model|n_embd|dim|emb_dim|embedding_(size|dim)|word_embed_proj_dim|lru_width|.*_embedding_size|backbone_hidden_size|dim_model_base",
        64,
    ),
    (
        r".*(intermediate_size|expert_ffn_hidden_size|ffn_dim|ffn_hidden_size|feed_forward_size|inner_dim|dim_ff|dff|d_inner|intermediate_size_mlp)",
        96,
    ),
    (r"num_kv_shared_layers|num_nextn_predict_layers", 0),
    (
        r"num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_layers|num_(encoder|decoder)_layers|num_blocks",
        4,
    ),
    (
        r"num_experts_per_tok(en)?|moe_topk|topk_group|n_group|moe_k|top_k_experts|num_expert_group",
        2,
    ),
    (r"(n_routed|num|num_local|moe_num)_experts", 4),
    (r"index_topk.*|altup_num_inputs", 2),
    (r"image_size", 32),
    (r"patch_size", 8),
)
NEEDED = ("head_dim", "num_key_value_heads")
"""Fields that some classes leave at None and cannot do without."""
"""Pattern of a field's whole name -> the number that makes a configuration small; other whole
numbers stay as they are."""


ROPE = {"rope_type": "default", "rope_theta": 1e4}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
LATENT = (
    *("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    *("minicpm3", "sarvam_mla", "youtu"),
)
"""Model types of attention over latents on the kernels."""
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64},
    },
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim")},
        "swa_qk_nope_head_dim": 8,
    },
    **{
        kind: {"attention_multiplier": 0.2}  # at 1.0 the least rounding turns choices
        for kind in ("granitemoe", "granitemoeshared", "granitemoe_swa", "granite_swa")
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "attention_multiplier": 0.2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "gemma3n_text": {
        "intermediate_size": 96,
        "altup_num_inputs": 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        }
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"head_dim": 32},
    "qwen4_exp": {"text_config": {"model_type": "qwen4_exp_text", **_INDEXER}},
    "qwen4_exp_text": _INDEXER,
    **{
        kind: {"num_key_value_heads": 4, "head_dim": 8, "num_experts_per_tok": 2} for kind in LATENT
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 12], "axial_pos_embds_dim": [32, 32]},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"]
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that the rules leave in contradiction with each other, or that have no default that
works."""


DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 12}
LATENT_SIZES = {"q_lora_rank": 20, "kv_lora_rank": 28, "v_head_dim": 12, "qk_nope_head_dim": 10}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 6.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 16,
}
GROUPS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2}
GRANITE = {
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
}
SHARED = {"num_local_experts": 8, "shared_intermediate_size": 40}
BASES = {
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
    "layer_rope_theta": [1e4, 1e4, 0, 100.0],
}
VARIED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "mlp_only_layers": [2], "norm_topk_prob": True},
    "glm4_moe": {
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "sarvam_moe": GROUPS | {"first_k_dense_replace": 1},
    "dots1": GROUPS | {"n_shared_experts": 2, "first_k_dense_replace": 1, "max_window_layers": 2},
    "solar_open": GROUPS,
    "exaone_moe": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts": 8,
        "n_group": 4,
        "topk_group": 2,
    },
    "afmoe": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_experts": 8,
        "route_scale": 1.5,
        "mup_enabled": True,
    },
    "hy_v3": {"num_experts": 8, "router_scaling_factor": 1.5},
    "laguna": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_attention_heads_per_layer": [2, 4, 6, 4],
        "num_experts": 8,
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 2.0,
    },
    "laguna wide": {"gating": "per-element"},
    "cohere2_moe": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "prefix_dense_intermediate_size": 80,
        "num_experts": 8,
        "num_shared_experts": 2,
        "logit_scale": 0.5,
    },
    "cohere2_moe summed": {
        "first_k_dense_replace": 1,
        "prefix_dense_sliding_window_pattern": 2,
        "expert_selection_fn": "sigmoid",
        "shared_expert_combination_strategy": "sum",
        "num_shared_experts": 1,
        "rms_norm_eps": 1e-5,
    },
    "phimoe": {
        "num_local_experts": 8,
        "sliding_window": CONTEXT,
        "attention_bias": True,
        "lm_head_bias": True,
        "router_jitter_noise": 0.3,
    },
    "phimoe long": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.5] * 8,
            "long_factor": [4.0] * 8,
            "short_mscale": 1.3,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 64,
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "olmo": {"clip_qkv": 1.0},
    "olmoe": {"clip_qkv": 0.8},
    "mellum": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts": 8,
    },
    "flex_olmo": {"num_experts": 8, "norm_topk_prob": True},
    "granitemoeshared": GRANITE | SHARED,
    "granitemoe_swa": GRANITE | SHARED | BASES,
    "deepseek_v3": LATENT_SIZES | GROUPS | {"first_k_dense_replace": 1, "rope_parameters": YARN},
    "deepseek_v2": LATENT_SIZES
    | GROUPS
    | {"q_lora_rank": None, "topk_method": "group_limited_greedy", "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT_SIZES | GROUPS | {"rope_interleave": False},
    "sarvam_mla": LATENT_SIZES | GROUPS | {"q_lora_rank": None, "first_k_dense_replace": 1},
    "axk1": LATENT_SIZES | GROUPS,
    "minicpm3": LATENT_SIZES | {"scale_depth": 0.9, "dim_model_base": 32},
    "youtu": LATENT_SIZES,
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_layer_start_index": 1, "moe_layer_interval": 2},
    "gemma3_text": {"num_hidden_layers": 6},
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 8,
        "global_head_dim": 24,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        "head_dim": 8,
        "global_head_dim": 24,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 40,
        "final_logit_softcapping": 30.0,
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 12,
        "vocab_size_per_layer_input": 40,
        "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.0, 0.0, 0.0],
        "laurel_rank": 9,
        "altup_num_inputs": 3,
        "final_logit_softcapping": 30.0,
    },
    "gemma4_text small": {
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 12,
        "head_dim": 8,
        "global_head_dim": 24,
        "final_logit_softcapping": 30.0,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 6.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "granite": GRANITE,
    "granite_swa": GRANITE | BASES,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | {"num_experts": 8},
    "qwen3_next": DELTA | {"num_experts": 8, "mlp_only_layers": [1]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "kimi_linear": LATENT_SIZES
    | {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_experts": 8,
        "num_expert_group": 4,
        "topk_group": 2,
        "num_key_value_heads": 4,
        "linear_num_heads": 3,
        "linear_head_dim": 20,
    },
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "olmo_hybrid": DELTA | {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2_moe": {"num_experts": 8, "num_dense_layers": 1, "conv_bias": True},
    "bamba": MAMBA | {"attn_layer_indices": [1], "mamba_proj_bias": True, "attention_bias": True},
    "falcon_h1": MAMBA
    | {
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.25,
        "key_multiplier": 0.6,
        "mlp_multipliers": [1.3, 0.7],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.3],
    },
    "nemotron_h": {
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention", "mlp"),
            *("linear_attention", "moe"),
        ],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 20,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 32,
        "routed_scaling_factor": 1.5,
        "use_bias": True,
        "mlp_bias": True,
    },
    "granitemoehybrid": MAMBA
    | {
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 40,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "position_embedding_type": "rope",
    },
    "hyperclovax": {"residual_multiplier": 0.5, "attention_multiplier": 0.3},
    "llama4_text": {
        "attention_chunk_size": 9,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 6.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        }
    },
}
"""Fields of configurations by which a tiny model takes every branch of its description."""


@cache
def configurations() -> dict[str, type[PreTrainedConfig]]:
    """Model type -> configuration class, of every causal model of the installed transformers; the
    modules of the models themselves are not imported."""
    found = [CONFIG_MAPPING[kind] for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    return {config.model_type: config for config in found}


def shrunk(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration that are whole numbers and have a rule, and the same of the
    configurations within it."""
    small: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = {**shrunk(value), "model_type": value["model_type"]}
        elif type(value) is int or (value is None and name in NEEDED):
            small[name] = value if (size := _size_of(name)) is None else size
    return small


def _size_of(name: str) -> int | None:
    return next((size for pattern, size in RULES if re.fullmatch(pattern, name)), None)


def tiny_config(kind: str, fields: dict[str, Any]) -> PreTrainedConfig:
    """The smallest configuration of a model type, with `fields` set: copies, since transformers
    writes into what it is given."""
    config, special = configurations()[kind], EXCEPTIONS.get(kind, {})
    try:
        default = config()
    except ValueError:
        default = config(**special)
    return config(**deepcopy({**_merged(shrunk(default.to_dict()), special), **fields}))


def _merged(fields: dict[str, Any], special: dict[str, Any]) -> dict[str, Any]:
    """`fields` with those of `special` in their place, within parts too."""
    return {
        **fields,
        **{
            name: _merged(fields.get(name, {}), value) if name.endswith("_config") else value
            for name, value in special.items()
        },
    }


def write_tiny(
    kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, **fields: Any
) -> bool:
    """A checkpoint of random numbers of a model type, `fields` of its configuration set; False: one
    that transformers itself cannot build, with hardly any."""
    try:
        config = tiny_config(kind, fields)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except (
        Exception
    ):  # a package that is missing, or a class that does not fit its own configuration
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({"model_type": kind, "vocab_size": VOCABULARY})
        )
        save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
        write_tokenizer(folder, VOCABULARY)
        return False
    assert size <= LARGEST, f"{kind} has {size} numbers; add a rule"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, VOCABULARY)
    return True


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    """Numbers that make logits lie far apart and that show when one is lost: no bias and no norm is
    all zeros or all ones."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise: Tensor = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(parameter.nan_to_num() + 0.2 * noise)
    for name, parameter in model.named_parameters():
        if name.endswith("router.scale"):  # a choice among logits near 0 is one of rounding
            parameter.mul_(8.0)
        if name.endswith("A_log"):  # states neither vanish nor stay
            parameter.uniform_(-1.0, 1.0, generator=generator)
        if name.endswith("dt_bias"):
            parameter.uniform_(-2.0, 2.0, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)


def write_varied(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of random numbers of a model type, with the fields of `VARIED`, where a word
    behind the type may name another one of it."""
    assert write_tiny(kind.split()[0], folder, dtype=dtype, **VARIED.get(kind, {}))
    return folder
