"""The names of tensors of architectures of which layers have states. Names alone."""

from collections.abc import Mapping
from typing import Any

from dovetail.workers.models.checkpoints.gguf.architectures.naming import (
    ATTENTION,
    CORRECTION,
    FINAL,
    GATED,
    GRANITE_MLP,
    HEAD_NORMS,
    LOWER,
    MIXTRAL,
    MLP,
    NORMS,
    UPPER,
    Naming,
    Tiled,
    shared_names,
)

_QWEN35 = {
    **ATTENTION,
    **HEAD_NORMS,
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
_SCAN: Mapping[str, Any] = {
    "single": {"ssm_conv1d": 1},
    "flat": ("ssm_a", "ssm_d", "ssm_norm"),
    "logarithms": ("ssm_a",),
}


_MAMBA = ("in", "conv1d", "norm", "out")


def _mamba(part: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The names of Mamba-2: of tensors with suffixes, and of those without."""
    names = ("in_proj", "conv1d", "norm", "out_proj")
    bare = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    ended = {f"ssm_{own}": f"{part}.{name}" for own, name in zip(_MAMBA, names, strict=True)}
    return ended, {own: f"{part}.{name}" for own, name in bare.items()}


_BESIDE, _BARE_BESIDE = _mamba("mamba")
_MIXERS, _BARE_MIXERS = _mamba("mixer")
_FEED_FORWARD = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_NEMOTRON_H = {
    **_MIXERS,
    **{name: part.replace("self_attn", "mixer") for name, part in ATTENTION.items()},
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_BACKBONE = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
_LFM2 = {
    **ATTENTION,
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

STATE_NAMINGS: Mapping[str, Naming] = {
    "qwen3next": Naming(
        {
            **_QWEN35,
            **shared_names("mlp.shared_expert"),
            "attn_qkv": f"linear_attn.in_proj_qkvz{UPPER}",
            "attn_gate": f"linear_attn.in_proj_qkvz{LOWER}",
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        experts=GATED,
        **{**_DELTA, "tiled": {}, "logarithms": ("ssm_a",)},
    ),
    "granitehybrid": Naming(
        {
            **ATTENTION,
            **NORMS,
            **_BESIDE,
            **{f"ffn_{own}": name for own, name in GRANITE_MLP.items()},
            **{f"ffn_{own}_shexp": name for own, name in GRANITE_MLP.items()},
            "ffn_gate_inp": "block_sparse_moe.router",
        },
        permuted=True,
        experts=GATED,
        expert_part="block_sparse_moe",
        bare=_BARE_BESIDE,
        **_SCAN,
    ),
    "bamba": Naming(
        {**ATTENTION, **_BESIDE, **_FEED_FORWARD},
        outside=FINAL,
        permuted=True,
        bare=_BARE_BESIDE,
        **_SCAN,
    ),
    "falcon-h1": Naming(
        {**ATTENTION, **_BESIDE, **_FEED_FORWARD},
        outside=FINAL,
        bare={**_BARE_BESIDE, "ffn_norm": "pre_ff_layernorm.weight"},
        **_SCAN,
    ),
    "nemotron_h": Naming(
        _NEMOTRON_H,
        prefix="backbone.layers.",
        outside=_BACKBONE,
        permuted=True,
        bare=_BARE_MIXERS,
        **_SCAN,
    ),
    "nemotron_h_moe": Naming(
        {
            **_NEMOTRON_H,
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
        },
        prefix="backbone.layers.",
        outside=_BACKBONE,
        permuted=True,
        experts={"ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"},
        expert_part="mixer",
        bare={**_BARE_MIXERS, "exp_probs_b.bias": f"mixer.gate.{CORRECTION}"},
        **_SCAN,
    ),
    "qwen35": Naming({**_QWEN35, **MLP}, **_DELTA),
    "qwen35moe": Naming(
        {
            **_QWEN35,
            **shared_names("mlp.shared_expert"),
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        experts=GATED,
        **_DELTA,
    ),
    "lfm2": Naming(_LFM2, outside=_LFM2_OUTSIDE, single={"shortconv.conv": 1}),
    "lfm2moe": Naming(
        {**_LFM2, "ffn_gate_inp": "feed_forward.gate"},
        outside=_LFM2_OUTSIDE,
        experts=MIXTRAL,
        expert_part="feed_forward",
        bare={"exp_probs_b.bias": "feed_forward.expert_bias"},
        single={"shortconv.conv": 1},
    ),
}
"""Architecture of llama.cpp -> its names; `bamba` is one of `granitehybrid`."""
