"""The facts that llama.cpp's converter writes into a GGUF file, by architecture."""

from collections.abc import Mapping
from typing import Any

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
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
MIXED_FACTS = {
    "qwen35": DELTA_FACTS,
    "glm4moe": GROUP_FACTS,
    "deepseek2": {
        **GROUP_FACTS,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "attention.value_length": "kv_lora_rank",
        "attention.value_length_mla": "v_head_dim",
        "rope.dimension_count": "qk_rope_head_dim",
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
    "lfm2": {"shortconv.l_cache": "conv_L_cache"},
    "lfm2moe": {
        "leading_dense_block_count": "num_dense_layers",
        "shortconv.l_cache": "conv_L_cache",
    },
}
"""Keys of an architecture and the fields of configurations that they are."""


def first_of(config: Mapping[str, Any], *names: str) -> Any:
    """The first of these fields that says something."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def facts_of(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The facts that llama.cpp's converter writes, by the end of its keys."""

    def has(*names: str) -> Any:
        return first_of(config, *names)

    hidden, heads = has("hidden_size", "n_embd"), has("num_attention_heads", "n_head")
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    found = {
        "block_count": has("num_hidden_layers", "n_layer"),
        "context_length": has("max_position_embeddings", "n_positions"),
        "embedding_length": hidden,
        "feed_forward_length": has("intermediate_size", "n_inner") or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": has("num_key_value_heads"),
        "attention.layer_norm_rms_epsilon": has("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": has("norm_epsilon", "layer_norm_epsilon"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
        "rope.freq_base": full.get("rope_theta"),
        "expert_count": has(*EXPERT_COUNTS),
        "expert_used_count": has("num_experts_per_tok", "moe_k"),
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
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        found["attention.sliding_window"] = has("sliding_window")
    if architecture in ("qwen3moe", "qwen2moe", "gpt-oss", "minimax-m2", *MIXED_FACTS):
        found["expert_feed_forward_length"] = has("moe_intermediate_size", "intermediate_size")
    if architecture in ("qwen35", "lfm2"):
        del found["expert_feed_forward_length"]
    found |= {key: has(name) for key, name in MIXED_FACTS.get(architecture, {}).items()}
    if architecture.startswith("qwen35"):
        width = config["linear_value_head_dim"] * config["linear_num_value_heads"]
        found |= {"ssm.inner_size": width, "rope.dimension_sections": [2, 1, 1, 0]}
        found["attention.recurrent_layers"] = [
            kind == "linear_attention" for kind in config["layer_types"]
        ]
    if architecture == "deepseek2":
        rotated, log = config["qk_rope_head_dim"], full.get("mscale_all_dim")
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": config["kv_lora_rank"] + rotated,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
            "rope.scaling.yarn_log_multiplier": None if log is None else 0.1 * log,
        }
        if "mlp_layer_types" in config:
            found["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if architecture.startswith("lfm2"):
        heads = config["num_key_value_heads"]
        kinds = config["layer_types"]
        found["attention.head_count_kv"] = [0 if kind == "conv" else heads for kind in kinds]
    return {f"{architecture}.{key}": value for key, value in found.items()}
