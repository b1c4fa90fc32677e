"""The names of tensors in GGUF files and in transformers' models, by llama.cpp's architectures, and
how their numbers are arranged. Names alone; needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_ATTENTION, **_NORMS, **_MLP}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA2 = {**_LLAMA, **_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
NOT_READ = frozenset(("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"))
"""Factors of the rotation, which become part of the configuration."""


class Tiled(Enum):
    """The place of value heads in a tensor. A file has one of each key head there, then the next of
    each."""

    ROWS = auto()
    BEHIND_KEYS = auto()
    """Rows behind those of queries and keys."""
    INPUTS = auto()
    DECAYS = auto()
    """Numbers of which transformers has the logarithm of the negative."""


@dataclass(frozen=True)
class Naming:
    """The names of an architecture, without the ends `.weight` and `.bias`."""

    layer: Mapping[str, str]
    """Names of a layer's tensors, after `blk.N.` and after `prefix` and `N.`."""
    prefix: str = "model.layers."
    outside: Mapping[str, str] = field(default_factory=lambda: _GLOBAL)
    """Names of the tensors that are of no layer."""
    permuted: bool = False
    """True if rows of queries and keys that are rotated together are neighbours."""
    plus_one: bool = False
    """True if weights of norms include the 1 that transformers adds."""
    plain_norms: Sequence[str] = ()
    """Norms of a layer whose weights do not include that 1."""
    tiled: Mapping[str, Tiled] = field(default_factory=dict)
    """Tensors of a layer with value heads."""
    transposed: bool = False
    """True if transformers has the matrices of layers as [in, out]."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Matrices of all experts of a layer, and the name of one expert's after `experts.N.`."""
    expert_part: str = "mlp"
    woven: bool = False
    """True if transformers has the gates and ups of all experts in one tensor [experts, in, out],
    by turns."""
    bare: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer, with their ends, whose names have none in transformers."""
    single: Mapping[str, int] = field(default_factory=dict)
    """Tensors of a layer that have one dimension more in transformers, of one number, and which."""
    latents: bool = False
    """Matrices that make keys and values of latents are numbers, in files of one or two tensors."""


_GATED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MERGED = "ffn_gate_up_exps"
"""The gate and up matrices of all experts of a layer in one tensor, those of gates first."""
_MIXTRAL = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
BOTH_UP, KEYS_UP, VALUES_UP = (f"self_attn.{part}_b_proj" for part in ("kv", "k", "v"))
"""Names of matrices that make keys and values of latents; files alone have the last two."""
_CORRECTION = "e_score_correction_bias"


def _shared(part: str) -> Mapping[str, str]:
    """The names of the MLP of shared experts."""
    linears = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {f"ffn_{name}_shexp": f"{part}.{linear}" for name, linear in linears.items()}


_QWEN35 = {
    **_ATTENTION,
    **_HEAD_NORMS,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA: Mapping[str, Any] = {
    "plus_one": True,
    "plain_norms": ("ssm_norm",),
    "tiled": {
        "attn_qkv": Tiled.BEHIND_KEYS,
        "ssm_conv1d": Tiled.BEHIND_KEYS,
        **dict.fromkeys(("attn_gate", "ssm_beta", "ssm_alpha", "ssm_dt"), Tiled.ROWS),
        "ssm_a": Tiled.DECAYS,
        "ssm_out": Tiled.INPUTS,
    },
    "bare": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    "single": {"ffn_gate_inp_shexp": 0, "ssm_conv1d": 1},
}
_LFM2 = {
    **_ATTENTION,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}
NAMINGS: Mapping[str, Naming] = {
    "llama": Naming(_LLAMA, permuted=True),
    "granite": Naming(_LLAMA, permuted=True),
    "smollm3": Naming(_LLAMA, permuted=True),
    "mixtral": Naming(
        {**_ATTENTION, **_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        permuted=True,
        experts=_MIXTRAL,
        expert_part="block_sparse_moe",
    ),
    "qwen2": Naming(_LLAMA),
    "qwen3": Naming({**_LLAMA, **_HEAD_NORMS}),
    "qwen3moe": Naming(
        {**_ATTENTION, **_NORMS, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, experts=_GATED
    ),
    "qwen2moe": Naming(
        {
            **_ATTENTION,
            **_NORMS,
            **_shared("mlp.shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        experts=_GATED,
        single={"ffn_gate_inp_shexp": 0},
    ),
    "qwen35": Naming({**_QWEN35, **_MLP}, **_DELTA),
    "qwen35moe": Naming(
        {
            **_QWEN35,
            **_shared("mlp.shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        experts=_GATED,
        **_DELTA,
    ),
    "olmoe": Naming(
        {**_ATTENTION, **_NORMS, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"}, experts=_GATED
    ),
    "granitemoe": Naming(
        {**_ATTENTION, **_NORMS, "ffn_gate_inp": "block_sparse_moe.router"},
        permuted=True,
        experts=_GATED,
        expert_part="block_sparse_moe",
    ),
    "glm4moe": Naming(
        {
            **_LLAMA,
            **_HEAD_NORMS,
            **_shared("mlp.shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
        },
        experts=_GATED,
        bare={"exp_probs_b.bias": f"mlp.gate.{_CORRECTION}"},
    ),
    "deepseek2": Naming(
        {
            **_NORMS,
            **_MLP,
            **_shared("mlp.shared_experts"),
            "attn_q": "self_attn.q_proj",
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": BOTH_UP,
            "attn_k_b": KEYS_UP,
            "attn_v_b": VALUES_UP,
            "attn_output": "self_attn.o_proj",
            "ffn_gate_inp": "mlp.gate",
        },
        experts=_GATED,
        bare={"exp_probs_b.bias": f"mlp.gate.{_CORRECTION}"},
        latents=True,
    ),
    "ernie4_5-moe": Naming(
        {**_LLAMA, **_shared("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate"},
        experts=_GATED,
        bare={"exp_probs_b.bias": f"mlp.moe_statics.{_CORRECTION}"},
        single={"exp_probs_b": 0},
    ),
    "minimax-m2": Naming(
        {**_ATTENTION, **_NORMS, **_HEAD_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts=_MIXTRAL,
        expert_part="block_sparse_moe",
        bare={"exp_probs_b.bias": f"block_sparse_moe.{_CORRECTION}"},
    ),
    "lfm2": Naming(_LFM2, outside=_LFM2_OUTSIDE, single={"shortconv.conv": 1}),
    "lfm2moe": Naming(
        {**_LFM2, "ffn_gate_inp": "feed_forward.gate"},
        outside=_LFM2_OUTSIDE,
        experts=_MIXTRAL,
        expert_part="feed_forward",
        bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
        single={"shortconv.conv": 1},
    ),
    "gemma": Naming(_LLAMA, plus_one=True),
    "gemma2": Naming(_GEMMA2, plus_one=True),
    "gemma3": Naming({**_GEMMA2, **_HEAD_NORMS}, plus_one=True),
    "phi3": Naming(
        {
            **_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "gpt2": Naming(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        prefix="transformer.h.",
        outside={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        transposed=True,
    ),
    "gpt-oss": Naming(
        {
            **_ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        experts=_GATED,
        woven=True,
        bare={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "starcoder2": Naming({**_ATTENTION, **_NORMS, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "olmo2": Naming({**_ATTENTION, **_HEAD_NORMS, **_MLP, **_POST_NORMS}),
}
"""Architecture of llama.cpp -> its names; Llama with experts is `mixtral`."""
