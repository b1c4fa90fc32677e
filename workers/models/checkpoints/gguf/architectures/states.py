"""The configurations of GGUF files of models some or all of whose layers have a state."""

from typing import Any

from dovetail.workers.models.checkpoints.gguf.architectures.dense import (
    FULL,
    Configuration,
    common,
    granite_factors,
    has_bias,
    rotation,
    sizes_of,
    with_rms,
)
from dovetail.workers.models.checkpoints.gguf.architectures.mixtures import (
    SHARED,
    SIGMOID,
    experts_of,
    latents_of,
    routing_of,
    shared_width,
)
from dovetail.workers.models.checkpoints.gguf.facts import KV_HEADS, Facts
from dovetail.workers.models.checkpoints.gguf.placing import is_bamba

LINEAR = "linear_attention"


def _delta(facts: Facts) -> Configuration:
    """Gated DeltaNets, and gated attention in every n-th layer."""
    found = with_rms(facts)
    layers, every = range(found["num_hidden_layers"]), facts.whole("full_attention_interval", 4)
    values = facts.whole("ssm.time_step_rank")
    if "attention.recurrent_layers" in facts:
        states = facts.numbers("attention.recurrent_layers")[: len(layers)]
    else:
        states = [int((index + 1) % max(1, every) > 0) for index in layers]
    if values < 1 or len(states) != len(layers):
        raise facts.refusal("it does not list the layers with a state, or their numbers of heads")
    return {
        **found,
        "hidden_act": "silu",
        "attention_bias": has_bias(facts, "attn_q"),
        "layer_types": [LINEAR if state else FULL for state in states],
        "linear_conv_kernel_dim": facts.whole("ssm.conv_kernel"),
        "linear_key_head_dim": facts.whole("ssm.state_size"),
        "linear_num_key_heads": facts.whole("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": facts.whole("ssm.inner_size") // values,
    }


def qwen35(facts: Facts) -> Configuration:
    found = {**_delta(facts), "model_type": "qwen3_5_text"}
    sections = facts.numbers("rope.dimension_sections")
    found["rope_parameters"] |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return found


def qwen35moe(facts: Facts) -> Configuration:
    """Layers as in models without experts, and experts next to a shared one."""
    return {
        **qwen35(facts),
        **experts_of(facts),
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": facts.whole("expert_shared_feed_forward_length"),
        "mlp_only_layers": [],
    }


def with_convolutions(facts: Facts) -> Configuration:
    """Return what architectures have in common whose layers without key heads are convolutions."""
    heads = _key_heads(facts)
    return {
        **common(facts, max(heads)),
        "norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "layer_types": [FULL if count else "conv" for count in heads],
        "conv_L_cache": facts.whole("shortconv.l_cache"),
        "conv_bias": False,
    }


def lfm2(facts: Facts) -> Configuration:
    """The file has the final width of MLPs; it needs no adjustment."""
    found = with_convolutions(facts)
    return {**found, "model_type": "lfm2", "block_auto_adjust_ff_dim": False}


def lfm2moe(facts: Facts) -> Configuration:
    """Layers without key heads are convolutions; the first have no experts."""
    return {
        **with_convolutions(facts),
        **experts_of(facts, SIGMOID),
        "model_type": "lfm2_moe",
        "num_dense_layers": facts.whole("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
    }


def qwen3next(facts: Facts) -> Configuration:
    """Layers of Qwen 3.5, whose rotation has no sections, and experts next to a shared one."""
    return {
        **_delta(facts),
        **experts_of(facts),
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": shared_width(facts),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _mamba(facts: Facts, hidden: int, prefix: str = "mamba") -> Configuration:
    """The sizes of Mamba-2, and which of its parts have biases."""
    heads, inner = facts.whole("ssm.time_step_rank"), facts.whole("ssm.inner_size")
    if heads < 1 or inner % heads:
        raise facts.refusal(f"its states have {inner} values for {heads} heads")
    names = [name for name in facts.tensors if name.endswith((".ssm_in.bias", ".ssm_conv1d.bias"))]
    return {
        f"{prefix}_n_heads": heads,
        f"{prefix}_d_head": inner // heads,
        f"{prefix}_n_groups": facts.whole("ssm.group_count"),
        f"{prefix}_d_state": facts.whole("ssm.state_size"),
        f"{prefix}_d_conv": facts.whole("ssm.conv_kernel"),
        f"{prefix}_expand": max(1, inner // hidden),
        f"{prefix}_conv_bias": any("conv1d" in name for name in names),
        f"{prefix}_proj_bias": any("ssm_in" in name for name in names),
    }


def _key_heads(facts: Facts) -> list[int]:
    """The number of key heads of each layer; those without any have no attention."""
    heads = facts.numbers(KV_HEADS)[: facts.layers]
    if len({count for count in heads if count}) != 1 or len(heads) != facts.layers:
        raise facts.refusal("its layers have several numbers of key heads, or none")
    return heads


def granitehybrid(facts: Facts) -> Configuration:
    """Granite's factors and a shared MLP, beside experts if any. Bamba has neither."""
    heads = _key_heads(facts)
    found = {
        **common(facts, max(heads)),
        "rms_norm_eps": facts.epsilon("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": False,
    }
    found |= _mamba(facts, found["hidden_size"])
    layers = [FULL if count else LINEAR for count in heads]
    if is_bamba(facts):
        indices = [at for at, count in enumerate(heads) if count]
        return {**found, "model_type": "bamba", "attn_layer_indices": indices, "mlp_bias": False}
    rotates = facts.truth("rope.scaling.finetuned", True)
    experts = facts.whole("expert_count", 0)
    used, width = facts.whole("expert_used_count", 0), found["intermediate_size"]
    return {
        **found,
        **granite_factors(facts, found["head_dim"], 1.0),
        "model_type": "granitemoehybrid",
        "layer_types": layers,
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": experts,
        "num_experts_per_tok": used,
        "shared_intermediate_size": facts.whole("expert_shared_feed_forward_length", width),
    }


def kimi_linear(facts: Facts) -> Configuration:
    """Attention over latents, without rotation, in layers with a key head, and KDA in the others;
    the first layers are dense."""
    found = {**latents_of(facts), **experts_of(facts, SIGMOID)}
    rotated = ("rope_parameters", "rope_interleave", "head_dim")
    dense = facts.whole("leading_dense_block_count", 0)
    if not facts.truth("expert_weights_norm", True):
        raise facts.refusal("its experts' weights are not normalised (expert_weights_norm)")
    return {
        **{name: value for name, value in found.items() if name not in (*rotated, "num_experts")},
        "model_type": "kimi_linear",
        "pad_token_id": None,
        "num_local_experts": found["num_experts"],
        "intermediate_size": facts.whole("feed_forward_length"),
        "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        "n_shared_experts": facts.whole("expert_shared_count"),
        **routing_of(facts),
        "norm_topk_prob": True,
        "layer_types": [FULL if count else LINEAR for count in _key_heads(facts)],
        "mlp_layer_types": ["sparse" if at >= dense else "dense" for at in range(facts.layers)],
        "linear_num_heads": found["num_attention_heads"],
        "linear_head_dim": facts.whole("kda.head_dim"),
        "linear_conv_kernel_dim": facts.whole("ssm.conv_kernel"),
    }


def falcon_h1(facts: Facts) -> Configuration:
    """Mamba-2 next to attention in every layer. Multipliers are part of the weights."""
    found = with_rms(facts)
    sizes = _mamba(facts, found["hidden_size"])
    names = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return {
        **found,
        **sizes,
        "model_type": "falcon_h1",
        "hidden_act": "silu",
        "mamba_d_ssm": sizes["mamba_n_heads"] * sizes["mamba_d_head"],
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in facts.tensors,
        "mamba_norm_before_gate": False,
        "attention_bias": has_bias(facts, "attn_q"),
        **{f"{name}_multiplier": 1.0 for name in names},
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


def nemotron_h(facts: Facts) -> Configuration:
    """Layers of one half: attention, an MLP or experts by their sizes, else Mamba-2."""
    widths, sparse = facts.each("feed_forward_length"), facts.architecture.endswith("moe")
    half = "moe" if sparse else "mlp"
    heads, wide = _key_heads(facts), sorted({width for width in widths if width})
    if len(wide) > 1:
        raise facts.refusal(f"its layers have the widths {wide}")
    kinds = [
        FULL if count else half if width else LINEAR
        for count, width in zip(heads, widths, strict=True)
    ]
    sizes = sizes_of(facts)
    rotation(facts, sizes["head_dim"])  # files have it, although nothing is rotated
    states = _mamba(facts, sizes["hidden_size"])
    epsilon = facts.epsilon("attention.layer_norm_epsilon")  # of layers that predict further tokens
    epsilon = facts.epsilon("attention.layer_norm_rms_epsilon", epsilon)
    found: dict[str, Any] = {
        **sizes,
        "model_type": "nemotron_h",
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": max(wide, default=0),
        "layer_norm_epsilon": epsilon,
        "attention_bias": False,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "mamba_num_heads": states["mamba_n_heads"],
        "mamba_head_dim": states["mamba_d_head"],
        "n_groups": states["mamba_n_groups"],
        "ssm_state_size": states["mamba_d_state"],
        "conv_kernel": states["mamba_d_conv"],
        "expand": states["mamba_expand"],
        "use_conv_bias": states["mamba_conv_bias"],
        "use_bias": states["mamba_proj_bias"],
        "num_nextn_predict_layers": 0,
    }
    if sparse:
        return {**found, **_nemotron_experts(facts)}
    for key in ("count", "used_count", "group_count", "group_used_count"):
        facts.whole(f"expert_{key}", 0)  # transformers sets it for all
    return found


def _nemotron_experts(facts: Facts) -> Configuration:
    """Experts next to a shared one; the choice is corrected."""
    found = experts_of(facts, SIGMOID)
    latent, shared = facts.whole("moe_latent_size", 0), facts.whole("expert_shared_count", 0)
    if shared or any(name.endswith(SHARED) for name in facts.tensors):
        width = shared_width(facts)
    else:  # transformers always has one: one unit of zeros (`placing.py`)
        width = facts.whole("expert_shared_feed_forward_length", 0) or 1
    return {
        **found,
        "n_routed_experts": found.pop("num_experts"),
        "moe_shared_expert_intermediate_size": width,
        "n_shared_experts": shared or 1,
        "moe_latent_size": latent or None,
        **routing_of(facts),
    }
