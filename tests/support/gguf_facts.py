"""The facts that llama.cpp's converter writes into a GGUF file, by architecture."""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SCORES = {"deepseek_v2": 1, "youtu": None}
"""Model types of DeepSeek's architecture whose experts are not chosen by sigmoids."""
DELTA_FACTS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
GROUP_FACTS = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
LAYER_NORM_EPSILONS = ("norm_epsilon", "layer_norm_epsilon", "layer_norm_eps")
MAMBA_FACTS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
NEMOTRON_H_FACTS = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}
MIXED_FACTS = {
    "hunyuan-moe": {
        "expert_used_count": "moe_topk",
        "expert_shared_feed_forward_length": "intermediate_size",
    },
    "llama4": {
        "feed_forward_length": "intermediate_size_mlp",
        "expert_feed_forward_length": "intermediate_size",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    },
    "qwen3next": DELTA_FACTS,
    "granitehybrid": {
        **MAMBA_FACTS,
        "expert_shared_feed_forward_length": "shared_intermediate_size",
    },
    "falcon-h1": MAMBA_FACTS,
    "nemotron_h": NEMOTRON_H_FACTS,
    "nemotron_h_moe": {
        **GROUP_FACTS,
        **NEMOTRON_H_FACTS,
        "leading_dense_block_count": "",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "moe_latent_size": "moe_latent_size",
    },
    "minicpm3": {
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length": "",
        "expert_used_count": "",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    "qwen35": DELTA_FACTS,
    "glm4moe": GROUP_FACTS,
    "bailingmoe2": GROUP_FACTS | {"expert_shared_feed_forward_length": "moe_intermediate_size"},
    "dots1": GROUP_FACTS,
    **{
        kind: {"expert_shared_feed_forward_length": "shared_intermediate_size"}
        for kind in ("granitemoe", "granite_swa")
    },
    "deepseek2": {
        **GROUP_FACTS,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
    },
    "kimi-linear": {
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.q_lora_rank": "q_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
        "ssm.conv_kernel": "linear_conv_kernel_dim",
        "kda.head_dim": "linear_head_dim",
        "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "num_expert_group",
        "expert_group_used_count": "topk_group",
    },
    "ernie4_5-moe": {
        "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval",
        "expert_shared_count": "moe_num_shared_experts",
    },
    "qwen35moe": {
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        **DELTA_FACTS,
    },
    "afmoe": {
        "leading_dense_block_count": "num_dense_layers",
        "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "route_scale",
    },
    "exaone-moe": {**GROUP_FACTS, "expert_shared_count": "num_shared_experts"},
    "hy_v3": {
        "expert_weights_scale": "router_scaling_factor",
        "expert_shared_feed_forward_length": "moe_intermediate_size",
    },
    "mellum": {},
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2moe": {
        "leading_dense_block_count": "num_dense_layers",
        "shortconv.l_cache": "conv_L_cache",
    },
}
"""Keys of an architecture and the fields of configurations that they are."""


NO_EXPERTS = (
    *("qwen35", "lfm2", "falcon-h1", "nemotron_h", "minicpm3"),
    *("granitehybrid", "granitemoe", "granite_swa"),
)


def first_of(config: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that says something."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def layers_of(config: Mapping[str, Any]) -> int:
    """The number of layers of a configuration."""
    kinds = config.get("layers_block_type") or ()
    return int(first_of(config, "num_hidden_layers", "n_layer") or len(kinds))


def facts_of(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The facts that llama.cpp's converter writes, by the end of its keys."""

    def has(*names: str) -> Any:
        return first_of(config, *names)

    hidden, heads = has("hidden_size", "n_embd"), has("num_attention_heads", "n_head")
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    found = {
        "block_count": layers_of(config),
        "context_length": has("max_position_embeddings", "n_positions", "model_max_length"),
        "embedding_length": hidden,
        "feed_forward_length": has("intermediate_size", "n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": has("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": has("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": has(*LAYER_NORM_EPSILONS),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": full.get("rope_theta"),
        "expert_count": has(*EXPERT_COUNTS),
        "expert_used_count": has("num_experts_per_tok", "moe_k", "num_experts_per_token"),
        "attn_logit_softcapping": has("attn_logit_softcapping"),
        "final_logit_softcapping": has("final_logit_softcapping"),
        "attention.scale": has("attention_multiplier"),
        "embedding_scale": has("embedding_multiplier"),
        "residual_scale": has("residual_multiplier"),
        "logit_scale": has("logits_scaling"),
    }
    if "rope.freq_base" in found and full.get("partial_rotary_factor"):
        head = config.get("head_dim") or hidden // heads
        found["rope.dimension_count"] = int(head * full["partial_rotary_factor"])
    if full.get("rope_type") in ("yarn", "linear"):
        found["rope.scaling.type"] = full["rope_type"]
        found["rope.scaling.factor"] = float(full["factor"])
        found["rope.scaling.original_context_length"] = full.get("original_max_position_embeddings")
    if architecture in ("gemma2", "gemma3", "gemma4", "phi3", "gpt-oss", "exaone4", "cohere2"):
        found["attention.sliding_window"] = has("sliding_window")
    if architecture in ("qwen3moe", "qwen2moe", "gpt-oss", "minimax-m2", *MIXED_FACTS):
        found["expert_feed_forward_length"] = has("moe_intermediate_size", "intermediate_size")
    if architecture in NO_EXPERTS:
        del found["expert_feed_forward_length"]
    found |= {key: has(name) for key, name in MIXED_FACTS.get(architecture, {}).items()}
    if architecture == "qwen3next":
        width = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        found |= {"ssm.inner_size": width, "full_attention_interval": 4}
        found["attention.recurrent_layers"] = [
            kind == "linear_attention" for kind in config["layer_types"]
        ]
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    found |= _of_states(config, architecture) | _of_others(config, architecture, full)
    if architecture.startswith("qwen35"):
        width = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        found |= {"ssm.inner_size": width, "rope.dimension_sections": [2, 1, 1, 0]}
        found["attention.recurrent_layers"] = [
            kind == "linear_attention" for kind in config["layer_types"]
        ]
    if architecture == "kimi-linear":
        rotated = config["qk_rope_head_dim"]
        found |= {
            "expert_gating_func": 2,
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "attention.key_length": config["kv_lora_rank"] + rotated,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "attention.head_count_kv": _where(config["layer_types"], "full_attention", 1),
            "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        }
    if architecture == "deepseek2" and "qk_rope_head_dim" in config:
        rotated, log = config["qk_rope_head_dim"], full.get("mscale_all_dim")
        found |= {
            "attention.head_count_kv": 1,
            "expert_gating_func": SCORES.get(config["model_type"], 2),
            "attention.key_length": config["kv_lora_rank"] + rotated,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "rope.scaling.yarn_log_multiplier": None if log is None else 0.1 * log,
        }
        if config.get("mlp_layer_types"):
            found["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if architecture in ("bailingmoe2", "dots1", "exaone-moe", "hy_v3", "lfm2moe", "minimax-m2"):
        found["expert_gating_func"] = 2
    if architecture.startswith("lfm2"):
        heads = config["num_key_value_heads"]
        kinds = config["layer_types"]
        found["attention.head_count_kv"] = [0 if kind == "conv" else heads for kind in kinds]
    return {f"{architecture}.{key}": value for key, value in found.items()}


def _of_states(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the keys of GGUF files with Mamba-2 layers, and those of layers without attention."""
    key_heads = config.get("num_key_value_heads") or 0
    if architecture in ("granitehybrid", "falcon-h1"):
        inner = config["mamba_n_heads"] * config["mamba_d_head"]
        if architecture == "falcon-h1":
            return {"ssm.inner_size": inner, "embedding_scale": None}
        kinds = config.get("layer_types") or [
            "full_attention" if at in config["attn_layer_indices"] else "linear_attention"
            for at in range(config["num_hidden_layers"])
        ]
        rotates = config.get("position_embedding_type", "rope") == "rope"
        return {
            "ssm.inner_size": inner,
            "attention.head_count_kv": _where(
                kinds, "full_attention", config["num_key_value_heads"]
            ),
            "rope.scaling.finetuned": rotates,
        }
    if not architecture.startswith("nemotron_h"):
        return {}
    kinds = config["layers_block_type"]
    half = "moe" if "moe" in kinds else "mlp"
    width = config["moe_intermediate_size" if half == "moe" else "intermediate_size"]
    return {
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "attention.head_count_kv": _where(kinds, "full_attention", key_heads),
        "feed_forward_length": _where(kinds, half, width),
    }


def _where(kinds: list[str], kind: str, number: int) -> list[int]:
    return [number if own == kind else 0 for own in kinds]


def _of_others(
    config: Mapping[str, Any], architecture: str, full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of GGUF files that a single architecture has."""
    kinds = [kind == "sliding_attention" for kind in config.get("layer_types") or ()]
    if architecture == "mistral3":
        return {
            "attention.temperature_scale": full["llama_4_scaling_beta"],
            "rope.scaling.yarn_log_multiplier": full["mscale_all_dim"],
        }
    if config["model_type"] == "olmo3":
        return {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": kinds,
            "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        }
    if architecture in ("stablelm", "gptneox"):
        return {"use_parallel_residual": config["use_parallel_residual"]}
    windows = {
        "attention.sliding_window": config.get("sliding_window"),
        "attention.sliding_window_pattern": kinds,
    }
    if architecture == "mellum":
        base = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        return {**windows, "rope.freq_base_swa": base}
    if architecture == "granite_swa":
        return {**windows, "attention.rope_pattern": [*map(bool, config["layer_rope_theta"])]}
    if architecture == "exaone-moe":
        dense = config["mlp_layer_types"].count("dense")
        return {**windows, "rope.scaling.type": "none", "leading_dense_block_count": dense}
    if architecture in ("afmoe", "hy_v3"):
        return {
            "attention.sliding_window": config.get("sliding_window"),
            "expert_weights_norm": True,
        }
    if architecture in ("cohere2", "command-r"):
        return {"logit_scale": config["logit_scale"], "rope.scaling.type": "none"}
    if architecture == "starcoder":
        return {"attention.head_count_kv": 1}
    if architecture == "nemotron":
        return {"attention.layer_norm_epsilon": config["norm_eps"]}
    if architecture == "olmo":
        return {"attention.layer_norm_epsilon": 1e-5}
    if architecture == "minicpm3":
        return {"attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"]}
    if config["model_type"] == "youtu":
        return {"leading_dense_block_count": config["num_hidden_layers"], "expert_shared_count": 0}
    if architecture == "gemma3n":
        shares = config["activation_sparsity_pattern"]
        return {
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": kinds,
            "attention.shared_kv_layers": config["num_kv_shared_layers"],
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "activation_sparsity_scale": [
                NormalDist().inv_cdf(share) if share else -math.inf for share in shares
            ],
            "altup.active_idx": config["altup_active_idx"],
            "altup.num_inputs": config["altup_num_inputs"],
        }
    return _of_gemma4(config, kinds) if architecture == "gemma4" else {}


def _of_gemma4(config: Mapping[str, Any], kinds: list[bool]) -> dict[str, Any]:
    wide = next(iter(config["per_layer_config"].values()))
    key_heads = config["num_key_value_heads"]
    full_heads, shared = wide.get("num_key_value_heads", key_heads), config["num_kv_shared_layers"]
    width, layers = config["intermediate_size"], len(kinds)
    doubled = 2 if config["use_double_wide_mlp"] else 1
    experts = config["enable_moe_block"]
    return {
        "attention.sliding_window_pattern": kinds,
        "attention.shared_kv_layers": shared,
        "attention.key_length": wide["head_dim"],
        "attention.value_length": wide["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [key_heads if window else full_heads for window in kinds],
        "rope.dimension_count": wide["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "feed_forward_length": [width] * (layers - shared) + [width * doubled] * shared,
        "expert_count": config["num_experts"] if experts else None,
        "expert_used_count": config["top_k_experts"] if experts else None,
        "expert_feed_forward_length": config["moe_intermediate_size"] if experts else None,
    }
