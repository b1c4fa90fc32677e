"""The names of tensors of architectures with experts, and of Gemma 4. Names alone."""

from collections.abc import Mapping

from dovetail.workers.models.checkpoints.gguf.architectures.naming import (
    AFTER_ROPE,
    ATTENTION,
    CORRECTION,
    GATED,
    GEMMA2,
    GLOBAL,
    GRANITE_MLP,
    HEAD_NORMS,
    LATENT,
    LLAMA,
    MIXTRAL,
    MLP,
    NORMS,
    Naming,
    Stacks,
    shared_names,
)

_GEMMA4 = {
    **GEMMA2,
    **HEAD_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
}

MIXTURE_NAMINGS: Mapping[str, Naming] = {
    "mixtral": Naming(
        {**ATTENTION, **NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        permuted=True,
        experts=MIXTRAL,
        expert_part="block_sparse_moe",
    ),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe", "olmoe"),
        Naming({**ATTENTION, **NORMS, **HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, experts=GATED),
    ),
    "hunyuan-moe": Naming(
        {
            **ATTENTION,
            **NORMS,
            **AFTER_ROPE,
            **shared_names("mlp.shared_mlp"),
            "ffn_gate_inp": "mlp.gate.wg",
        },
        experts=GATED,
    ),
    "llama4": Naming(
        {
            **ATTENTION,
            **NORMS,
            **{name: part.replace("mlp.", "feed_forward.") for name, part in MLP.items()},
            **shared_names("feed_forward.shared_expert"),
            "ffn_gate_inp": "feed_forward.router",
        },
        experts=GATED,
        expert_part="feed_forward",
        stacks=Stacks.TURNED,
    ),
    "qwen2moe": Naming(
        {
            **ATTENTION,
            **NORMS,
            **shared_names("mlp.shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        experts=GATED,
        single={"ffn_gate_inp_shexp": 0},
    ),
    "granitemoe": Naming(
        {
            **ATTENTION,
            **NORMS,
            **{f"ffn_{own}_shexp": name for own, name in GRANITE_MLP.items()},
            "ffn_gate_inp": "block_sparse_moe.router",
        },
        permuted=True,
        experts=GATED,
        expert_part="block_sparse_moe",
    ),
    "glm4moe": Naming(
        {
            **LLAMA,
            **HEAD_NORMS,
            **shared_names("mlp.shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
        },
        experts=GATED,
        bare={"exp_probs_b.bias": f"mlp.gate.{CORRECTION}"},
    ),
    "dots1": Naming(
        {**LLAMA, **HEAD_NORMS, **shared_names("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate"},
        experts=GATED,
        bare={"exp_probs_b.bias": f"mlp.gate.{CORRECTION}"},
    ),
    "deepseek2": Naming(
        {
            **NORMS,
            **MLP,
            **shared_names("mlp.shared_experts"),
            **LATENT,
            "ffn_gate_inp": "mlp.gate",
        },
        experts=GATED,
        bare={"exp_probs_b.bias": f"mlp.gate.{CORRECTION}"},
        latents=True,
    ),
    "ernie4_5-moe": Naming(
        {**LLAMA, **shared_names("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate"},
        experts=GATED,
        bare={"exp_probs_b.bias": f"mlp.moe_statics.{CORRECTION}"},
        single={"exp_probs_b": 0},
    ),
    "minimax-m2": Naming(
        {**ATTENTION, **NORMS, **HEAD_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=MIXTRAL,
        expert_part="block_sparse_moe",
        bare={"exp_probs_b.bias": f"block_sparse_moe.{CORRECTION}"},
    ),
    "gemma4": Naming(
        _GEMMA4,
        outside={
            **GLOBAL,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        experts=GATED,
        expert_part="",
        bare={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
    ),
    "gpt-oss": Naming(
        {
            **ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        experts=GATED,
        stacks=Stacks.WOVEN,
        bare={"attn_sinks.weight": "self_attn.sinks"},
    ),
}
"""Architecture of llama.cpp -> its names; Llama with experts is `mixtral`."""
