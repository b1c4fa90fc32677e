"""Names of experts in checkpoints, which transformers holds in one tensor a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

BLOCKS, EXPONENTS = "_blocks", "_scales"  # ends of the names of a stack of experts in MXFP4


@dataclass(frozen=True)
class Naming:
    """The names of a checkpoint's tensors, where they differ from the model's."""

    gate_up: Sequence[str] = ("gate_proj", "up_proj")
    """Matrices of one expert that make up `gate_up_proj` of the model, concatenated."""
    down: Sequence[str] = ("down_proj",)
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of the model's names, and what stands for each in the checkpoint's."""
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ends of the model's names -> those of the pieces whose rows are concatenated."""


_MIXTRAL = {".mlp.": ".block_sparse_moe."}
_STATICS = {".mlp.gate.moe_statics.": ".mlp.moe_statics."}
_GRANITE = {
    ".experts.gate_up_proj": ".input_linear.weight",
    ".experts.down_proj": ".output_linear.weight",
    ".router.weight": ".router.layer.weight",
}
_HY = {
    ".mlp.gate.weight": ".mlp.router.gate.weight",
    ".mlp.e_score_correction_bias": ".mlp.expert_bias",
    ".mlp.shared_experts.": ".mlp.shared_mlp.",
}
_LAGUNA = {
    ".mlp.gate.e_score_correction_bias": ".mlp.experts.e_score_correction_bias",
    ".mlp.shared_experts.": ".mlp.shared_expert.",
}
_PHIMOE = {".mlp.router.": ".block_sparse_moe.gate.", ".mlp.": ".block_sparse_moe."}
_ABOVE_GATE = {".mlp.gate.e_score_correction_bias": ".mlp.e_score_correction_bias"}
_CONVOLUTIONS = {".conv1d.weight": [f".{part}_conv1d.weight" for part in "qkv"]}
_OLMO_HYBRID = {
    ".input_layernorm.": ".attention_layer_norm.",
    ".post_attention_layernorm.": ".feedforward_layer_norm.",
}
_SARVAM = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.o_proj.": ".attention.dense.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    ".self_attn.": ".attention.",
    ".e_score_correction_bias": ".expert_bias",
}
_KIMI = {**_MIXTRAL, ".self_attn.forget_gate.": ".self_attn."}
NAMINGS: Mapping[str, Naming] = {
    **dict.fromkeys(("qwen3_moe", "olmoe", "glm4_moe", "hunyuan_v1_moe", "gpt_oss"), Naming()),
    **dict.fromkeys(("qwen2_moe", "gpt_bigcode", "dots1", "solar_open", "mellum"), Naming()),
    **dict.fromkeys(("flex_olmo", "afmoe", "granitemoe_swa", "cohere2_moe"), Naming()),
    **dict.fromkeys(("apertus", "gemma4_text", "gemma4_unified_text", "llama4_text"), Naming()),
    **dict.fromkeys(("mixtral", "minimax_m2"), Naming(("w1", "w3"), ("w2",), _MIXTRAL)),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text"), Naming()),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "sarvam_mla"), Naming()),
    "axk1": Naming(renamed={".mlp.post_mlp_layernorm.": ".post_mlp_layernorm."}),
    "sarvam_moe": Naming(renamed=_SARVAM),
    "ernie4_5_moe": Naming(renamed=_STATICS),
    "exaone_moe": Naming(renamed=_ABOVE_GATE),
    "hy_v3": Naming(renamed=_HY),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), Naming(renamed=_GRANITE)),
    "granitemoehybrid": Naming(renamed=_GRANITE),
    "laguna": Naming(renamed=_LAGUNA),
    "phimoe": Naming(("w1", "w3"), ("w2",), _PHIMOE),
    "lfm2_moe": Naming(("w1", "w3"), ("w2",)),
    "lfm3": Naming(renamed={".self_attn.g_proj.": ".self_attn.gate_proj."}),
    "olmo_hybrid": Naming(renamed=_OLMO_HYBRID, joined=_CONVOLUTIONS),
    "kimi_linear": Naming(("w1", "w3"), ("w2",), _KIMI, _CONVOLUTIONS),
    "nemotron_h": Naming(("up_proj",), renamed={"model.": "backbone."}),
}
"""Model type -> the naming of a model whose tensors are read from pieces."""
