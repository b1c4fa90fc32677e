"""Ling 2.0 and Ring 2.0. Their config.json names program code, which is never run: transformers'
sarvam_moe computes the same from tensors of the same names."""

from collections.abc import Mapping
from typing import Any

from dovetail.workers.models.checkpoints.files import shown

_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
    *("moe_intermediate_size", "num_experts", "num_shared_experts", "num_experts_per_tok"),
    *("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor", "use_qk_norm"),
    *("rope_theta", "partial_rotary_factor"),
)
_READ = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "hidden_act"),
    *("quantization_config", "compression_config", "rope_scaling", "tie_word_embeddings"),
)
_ONLY = {
    **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_head", "norm_softmax"), False),
    **dict.fromkeys(("use_sliding_window", "using_split_qkv_in_self_attention"), False),
    **dict.fromkeys(("use_rmsnorm", "norm_topk_prob", "moe_router_enable_expert_bias"), True),
    "score_function": "sigmoid",
    "router_dtype": "fp32",
}
"""Fields of which one value is supported: that of the published models."""
_UNREAD = (
    *("_name_or_path", "architectures", "auto_map", "model_type", "transformers_version"),
    *("attention_dropout", "embedding_dropout", "output_dropout", "initializer_range"),
    *("max_window_layers", "mtp_loss_scaling_factor", "output_router_logits", "use_cache"),
    *("moe_shared_expert_intermediate_size", "num_nextn_predict_layers", "rotary_dim"),
)
"""Fields that do not affect replies."""
_RENAMED = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def is_ling(content: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of Ling 2.0 or Ring 2.0."""
    named = content.get("model_type"), content.get("architectures")
    return named == ("bailing_moe", ["BailingMoeV2ForCausalLM"])


def why_not_ling(content: Mapping[str, Any]) -> str:
    """Return which field of a Ling is missing or not supported; empty if none is."""
    for name in _NEEDED:
        if content.get(name) is None:
            return f"its configuration has no {name}"
    for name, value in content.items():
        known = name in _ONLY or name in _NEEDED or name in _READ or name in _UNREAD
        if value is not None and (not known or value != _ONLY.get(name, value)):
            return f"its {name} is {shown(value)}, which is not supported"
    return ""


def from_ling(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of a Ling as transformers' sarvam_moe."""
    read = {name: content[name] for name in (*_NEEDED, *_READ) if name in content}
    return {
        "model_type": "sarvam_moe",
        "norm_topk_prob": content["num_experts_per_tok"] != 1,
        **{_RENAMED.get(name, name): value for name, value in read.items()},
    }
