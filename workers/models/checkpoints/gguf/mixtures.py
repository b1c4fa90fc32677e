"""The configurations of GGUF files of models with experts (see `configurations.py`), and of one
that is as its sister without them.

How experts are chosen stands in llama.cpp's code for most architectures; what a file says beside is
taken where the model of transformers knows it, and refused where it is something else.
"""

from collections.abc import Callable, Mapping

from dovetail.workers.models.checkpoints.gguf.configurations import (
    DENSE,
    FULL,
    SLIDING,
    Configuration,
    common,
    granite,
    with_rms,
)
from dovetail.workers.models.checkpoints.gguf.facts import KV_HEADS, Facts

SOFTMAX, SIGMOID = 1, 2
"""Functions that make scores of a router's logits, by llama.cpp's numbers."""
NOTHING = 0


def _mixture(facts: Facts, score: int = SOFTMAX) -> Configuration:
    """Return the experts that all of these have; `score`: what makes scores."""
    if (said := facts.whole("expert_gating_func", score)) not in (NOTHING, score):
        raise facts.refusal(f"its experts are chosen by gating function {said}")
    return {
        "hidden_act": "silu",
        "num_experts": facts.whole("expert_count"),
        "num_experts_per_tok": facts.whole("expert_used_count"),
    }


def _expert_width(facts: Facts) -> int:
    return facts.whole("expert_feed_forward_length", facts.whole("feed_forward_length"))


def qwen3moe(facts: Facts) -> Configuration:
    return {
        **with_rms(facts),
        **_mixture(facts),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def qwen2moe(facts: Facts) -> Configuration:
    """Experts beside a shared one; the weights of the chosen are not normalised."""
    shared = facts.need("blk.0.ffn_up_shexp.weight").shape[0]
    return {
        **with_rms(facts),
        **_mixture(facts),
        "model_type": "qwen2_moe",
        "qkv_bias": "blk.0.attn_q.bias" in facts.tensors,
        "moe_intermediate_size": _expert_width(facts),
        "shared_expert_intermediate_size": facts.whole("expert_shared_feed_forward_length", shared),
        "norm_topk_prob": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }


def qwen35(facts: Facts) -> Configuration:
    """Gated DeltaNets, and attention with a gate behind it in every so many layers."""
    found = with_rms(facts)
    layers, every = range(found["num_hidden_layers"]), facts.whole("full_attention_interval", 4)
    sections = facts.numbers("rope.dimension_sections", [0, 0, 0])
    values = facts.whole("ssm.time_step_rank")
    if "attention.recurrent_layers" in facts:
        states = facts.numbers("attention.recurrent_layers")[: len(layers)]
    else:
        states = [int((index + 1) % max(1, every) > 0) for index in layers]
    if values < 1 or len(states) != len(layers):
        raise facts.refusal("it does not say which layers have a state, or of how many heads")
    found["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return {
        **found,
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "layer_types": ["linear_attention" if state else FULL for state in states],
        "linear_conv_kernel_dim": facts.whole("ssm.conv_kernel"),
        "linear_key_head_dim": facts.whole("ssm.state_size"),
        "linear_num_key_heads": facts.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": facts.whole("ssm.inner_size") // values,
    }


def qwen35moe(facts: Facts) -> Configuration:
    """Layers as those without experts have them, and experts beside a shared one."""
    return {
        **qwen35(facts),
        **_mixture(facts),
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": facts.whole("expert_shared_feed_forward_length"),
        "mlp_only_layers": [],
    }


def gpt_oss(facts: Facts) -> Configuration:
    """Layers with a window and without by turns; the ramp of its yarn is not rounded."""
    found = with_rms(facts)
    found["rope_parameters"]["truncate"] = False
    layers = range(found["num_hidden_layers"])
    return {
        **found,
        "model_type": "gpt_oss",
        "hidden_act": "silu",
        "attention_bias": True,
        "intermediate_size": facts.whole("expert_feed_forward_length"),
        "num_local_experts": facts.whole("expert_count"),
        "num_experts_per_tok": facts.whole("expert_used_count"),
        "sliding_window": facts.whole("attention.sliding_window"),
        "layer_types": [FULL if index % 2 else SLIDING for index in layers],
        "swiglu_limit": 7.0,
    }


def olmoe(facts: Facts) -> Configuration:
    return {
        **with_rms(facts),
        **_mixture(facts),
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "pad_token_id": None,
    }


def granitemoe(facts: Facts) -> Configuration:
    found = {**granite(facts), **_mixture(facts), "model_type": "granitemoe"}
    return {**found, "num_local_experts": found.pop("num_experts")}


def glm4moe(facts: Facts) -> Configuration:
    """The first layers have no experts, the others a shared one beside them; the choice is
    corrected, and made among groups where the file has any."""
    found = {**with_rms(facts), **_mixture(facts, SIGMOID)}
    return {
        **found,
        "model_type": "glm4_moe",
        "n_routed_experts": found.pop("num_experts"),
        "attention_bias": "blk.0.attn_q.bias" in facts.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in facts.tensors,
        "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        "n_shared_experts": facts.whole("expert_shared_count"),
        "first_k_dense_replace": facts.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": facts.real("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": facts.truth("expert_weights_norm", True),
        "n_group": facts.whole("expert_group_count", 1),
        "topk_group": facts.whole("expert_group_used_count", 1),
        "num_nextn_predict_layers": 0,
    }


def ernie4_5_moe(facts: Facts) -> Configuration:
    """Experts from a layer on, in steps; neighbours are rotated together."""
    found = {**with_rms(facts), **_mixture(facts)}
    count, width = facts.whole("expert_shared_count", 0), facts.whole("expert_feed_forward_length")
    facts.whole("expert_shared_feed_forward_length", 0)  # transformers has `count` times `width`
    return {
        **found,
        "model_type": "ernie4_5_moe",
        "use_bias": "blk.0.attn_q.bias" in facts.tensors,
        "moe_num_experts": found.pop("num_experts"),
        "moe_k": found.pop("num_experts_per_tok"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": count,
        "moe_layer_start_index": facts.whole("leading_dense_block_count", 0),
        "moe_layer_end_index": found["num_hidden_layers"] - 1,
        "moe_layer_interval": facts.whole("interleave_moe_layer_step", 1),
    }


def minimax_m2(facts: Facts) -> Configuration:
    """All layers have experts; the choice is corrected."""
    found = {**with_rms(facts), **_mixture(facts, SIGMOID), "model_type": "minimax_m2"}
    return {
        **found,
        "intermediate_size": _expert_width(facts),
        "num_local_experts": found.pop("num_experts"),
    }


def lfm2moe(facts: Facts) -> Configuration:
    """Layers without key heads are convolutions; the first have no experts."""
    heads = facts.numbers(KV_HEADS)
    if len({count for count in heads if count}) != 1 or len(heads) != facts.layers:
        raise facts.refusal("its layers have several numbers of key heads, or none")
    found = common(facts, max(heads))
    return {
        **found,
        **_mixture(facts, SIGMOID),
        "model_type": "lfm2_moe",
        "norm_eps": facts.real("attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if count else "conv" for count in heads],
        "conv_L_cache": facts.whole("shortconv.l_cache"),
        "conv_bias": False,
        "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        "num_dense_layers": facts.whole("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


CONFIGURATIONS: Mapping[str, Callable[[Facts], Configuration]] = {
    **DENSE,
    "qwen3moe": qwen3moe,
    "qwen2moe": qwen2moe,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "gpt-oss": gpt_oss,
    "olmoe": olmoe,
    "granitemoe": granitemoe,
    "glm4moe": glm4moe,
    "ernie4_5-moe": ernie4_5_moe,
    "minimax-m2": minimax_m2,
    "lfm2moe": lfm2moe,
}
"""Architecture of llama.cpp -> function that makes its configuration."""
