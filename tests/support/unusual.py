"""Unusual configurations of the families that the kernels compute, drawn at random: each takes
some of the values that published models rarely have, as far as its configuration knows them."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.workers.models.families.registry import FAMILIES
from support.architectures import VARIED, configurations, tiny_config

ROPE = {"rope_theta": 1e4}
ORIGINAL = {"original_max_position_embeddings": 16}


def _kinds(of: random.Random, count: int, names: Sequence[str]) -> list[str]:
    return [of.choice(names) for _ in range(count)]


def _heads(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    if "kv_lora_rank" in config:
        return {}
    kv_heads = of.choice((1, 1, 2, 3))
    heads = kv_heads * of.choice((1, 2, 5))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": of.choice((2, 6, 10, 12, 20, 34, 80)),
        "hidden_size": heads * of.choice((6, 8, 10, 14)),
    }


def _widths(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
        *("shared_intermediate_size", "moe_shared_expert_intermediate_size", "n_inner"),
        *("block_ff_dim", "intermediate_size_mlp", "moe_latent_size"),
    )
    return {name: of.choice((1, 7, 8, 30, 31, 33, 52, 130)) for name in names if config.get(name)}


def _windows(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    window = of.choice((1, 2, 5, 17, 43, 200))
    found: dict[str, Any] = {
        "sliding_window": window,
        "use_sliding_window": True,
        "attention_chunk_size": window,
    }
    kinds = config.get("layer_types")
    if kinds and set(kinds) <= {"full_attention", "sliding_attention"}:
        found["layer_types"] = _kinds(of, len(kinds), ("full_attention", "sliding_attention"))
    return found


def _rope(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    said = config.get("rope_parameters")
    if not isinstance(said, Mapping) or "rope_theta" not in said:
        return {}
    return {
        "rope_parameters": of.choice(
            (
                {"rope_type": "default", "rope_theta": of.choice((10.0, 1e6))},
                {"rope_type": "default", **ROPE, "partial_rotary_factor": of.choice((0.25, 0.5))},
                {"rope_type": "linear", **ROPE, "factor": 3.0},
                {"rope_type": "yarn", **ROPE, **ORIGINAL, "factor": 6.0},
                {"rope_type": "yarn", **ROPE, **ORIGINAL, "factor": 2.5, "attention_factor": 1.7},
                {
                    "rope_type": "llama3",
                    **ROPE,
                    **ORIGINAL,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                },
            )
        )
    }


def _experts(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    count = of.choice((1, 2, 5, 8, 12))
    chosen = of.choice((1, min(2, count), count))
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    actives = ("num_experts_per_tok", "moe_k", "top_k_experts")
    found = dict.fromkeys(counts, count) | dict.fromkeys(actives, chosen)
    groups = of.choice([g for g in (1, 2, 4) if count % g == 0 and count // g > 1] or [1])
    taken = of.randint(1, groups)
    if chosen > count // groups * taken:
        taken = groups
    return {
        **found,
        "n_group": groups,
        "topk_group": taken,
        "norm_topk_prob": of.random() < 0.5,
        "routed_scaling_factor": of.choice((1.0, 2.5)),
        "n_shared_experts": of.choice((1, 2)),
        "moe_num_shared_experts": of.choice((0, 1, 3)),
        "first_k_dense_replace": of.choice((0, 1, 3)),
        "mlp_only_layers": of.choice(([], [0], [1, 3])),
        "decoder_sparse_step": of.choice((1, 2)),
        "num_dense_layers": of.choice((0, 2)),
    }


def _scales(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attn_logit_softcapping": of.choice((None, 1.5, 20.0)),
        "final_logit_softcapping": of.choice((None, 2.0, 30.0)),
        "query_pre_attn_scalar": of.choice((3, 24, 300)),
        "attention_multiplier": of.choice((0.1, 0.4)),
        "residual_multiplier": of.choice((0.3, 1.4)),
        "embedding_multiplier": of.choice((0.5, 7.0)),
        "logits_scaling": of.choice((0.5, 3.0)),
        "logit_scale": of.choice((0.1, 2.0)),
        "attn_scale": of.choice((0.1, 1.5)),
        "swiglu_limit": of.choice((0.3, 7.0)),
        "rms_norm_eps": of.choice((1e-6, 1e-3)),
        "layer_norm_eps": of.choice((1e-6, 1e-3)),
        "scale_depth": of.choice((0.4, 1.4)),
        "lm_head_multiplier": of.choice((0.5, 2.0)),
        "key_multiplier": of.choice((0.3, 1.6)),
    }


def _flags(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "conv_bias"),
        *("mamba_proj_bias", "mamba_conv_bias", "bias", "attention_out_bias", "use_qk_norm"),
        *("mamba_rms_norm", "mamba_norm_before_gate", "enable_moe_block", "attention_k_eq_v"),
        *("rope_interleave", "use_parallel_residual", "parallel_attn", "qkv_bias"),
    )
    return {name: of.random() < 0.5 for name in names if config.get(name) is not None}


def _states(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    keys = of.choice((1, 2, 3))
    values, size = keys * of.choice((1, 2, 4)), of.choice((4, 5, 12, 18))
    groups = of.choice((1, 2))
    heads = groups * of.choice((1, 3, 4))
    width = of.choice((4, 12, 16, 18))
    inner = heads * width
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": size,
        "linear_value_head_dim": of.choice((4, 7, 20)),
        "linear_conv_kernel_dim": of.choice((2, 3, 4)),
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "ssm_state_size": of.choice((3, 16, 20)),
        "mamba_n_groups": groups,
        "n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_head": width,
        "mamba_d_ssm": inner,
        "mamba_d_state": of.choice((3, 12, 16)),
        "mamba_d_conv": of.choice((2, 3, 4)),
        "conv_kernel": of.choice((2, 3, 4)),
        "conv_L_cache": of.choice((1, 2, 3, 5)),
    }


def _latents(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = of.choice((1, 3, 4))
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": of.choice((None, 6, 21)),
        "kv_lora_rank": of.choice((5, 16, 29)),
        "qk_nope_head_dim": of.choice((3, 8, 10)),
        "qk_rope_head_dim": of.choice((2, 6, 8)),
        "v_head_dim": of.choice((3, 12, 17)),
    }


def _sizes(of: random.Random, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"vocab_size": of.choice((49, 50, 63)), "num_hidden_layers": of.choice((1, 2, 3))}


DRAWS = (_heads, _widths, _windows, _rope, _experts, _scales, _flags, _states, _latents, _sizes)
OF_LAYERS = ("layer_types", "layers_block_type", "mlp_only_layers", "layer_rope_theta")
"""Fields with an entry for each layer, beside which the number of layers stays."""


def unusual(number: int) -> tuple[str, dict[str, Any]]:
    """Return the model type and the fields of a configuration, the same for the same number; not
    every one is one that transformers can build."""
    of = random.Random(number)
    kinds = sorted(FAMILIES.keys() & configurations().keys())
    kind = kinds[number % len(kinds)]
    fields = dict(VARIED.get(kind, {})) if of.random() < 0.7 else {}
    known = tiny_config(kind, fields).to_dict()
    for draw in of.sample(DRAWS, of.randint(1, 4)):
        drawn = draw(of, known)
        if any(known.get(name) for name in OF_LAYERS) and "num_hidden_layers" in drawn:
            del drawn["num_hidden_layers"]
        fields |= {name: value for name, value in drawn.items() if name in known}
    return kind, fields
