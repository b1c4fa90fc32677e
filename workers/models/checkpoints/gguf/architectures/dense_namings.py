"""The names of tensors of architectures without experts and states. Names alone."""

from collections.abc import Mapping

from dovetail.workers.models.checkpoints.gguf.architectures.naming import (
    AFTER_ROPE,
    ATTENTION,
    FINAL,
    GEMMA2,
    HEAD_NORMS,
    LATENT,
    LLAMA,
    MLP,
    NORMS,
    POST_NORMS,
    Naming,
)

_PHI = {
    **ATTENTION,
    "attn_output": "self_attn.dense",
    "attn_norm": "input_layernorm",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_TRANSFORMER = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_UNGATED = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

DENSE_NAMINGS: Mapping[str, Naming] = {
    "llama": Naming(LLAMA, permuted=True),
    "granite": Naming(LLAMA, permuted=True),
    "smollm3": Naming(LLAMA, permuted=True),
    "mistral3": Naming(LLAMA, permuted=True),
    "arcee": Naming({**ATTENTION, **NORMS, **_UNGATED}, permuted=True),
    "ernie4_5": Naming(LLAMA),
    "hunyuan-dense": Naming({**LLAMA, **AFTER_ROPE}),
    "seed_oss": Naming({**LLAMA, "post_attention_norm": "post_attention_layernorm"}),
    "exaone4": Naming({**ATTENTION, **HEAD_NORMS, **MLP, **POST_NORMS}),
    "glm4": Naming(
        {
            **ATTENTION,
            **NORMS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "cohere2": Naming({**ATTENTION, **MLP, "attn_norm": "input_layernorm"}),
    "qwen2": Naming(LLAMA),
    "qwen2vl": Naming(LLAMA),
    "qwen3vl": Naming({**LLAMA, **HEAD_NORMS}),
    "qwen3": Naming({**LLAMA, **HEAD_NORMS}),
    "gemma": Naming(LLAMA, plus_one=True),
    "gemma2": Naming(GEMMA2, plus_one=True),
    "gemma3": Naming({**GEMMA2, **HEAD_NORMS}, plus_one=True),
    "phi3": Naming(
        {
            **NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "gpt2": Naming(_GPT2, prefix="transformer.h.", outside=_TRANSFORMER, transposed=True),
    "starcoder": Naming(_GPT2, prefix="transformer.h.", outside=_TRANSFORMER),
    "starcoder2": Naming({**ATTENTION, **NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Naming(LLAMA),
    "phi2": Naming(_PHI, outside=FINAL),
    "nemotron": Naming({**ATTENTION, **NORMS, **_UNGATED}, plus_one=True),
    "jais2": Naming({**ATTENTION, **NORMS, **_UNGATED}),
    "olmo": Naming({**ATTENTION, **MLP}, permuted=True),
    "gptneox": Naming(
        {
            **NORMS,
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        prefix="gpt_neox.layers.",
        outside={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
        },
        by_heads=("attn_qkv",),
    ),
    "minicpm3": Naming({**NORMS, **MLP, **LATENT}, latents=True),
    "olmo2": Naming({**ATTENTION, **HEAD_NORMS, **MLP, **POST_NORMS}),
}
"""Architecture of llama.cpp -> its names."""
