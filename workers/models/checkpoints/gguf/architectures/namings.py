"""Names of tensors in GGUF files and in transformers, by llama.cpp's architectures, and their
layouts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
NOT_READ = frozenset(("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"))
"""Factors of the rotation, which become part of the configuration."""

ONE_EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.(.+)")  # the end of the name of one expert's matrix


class Tiled(Enum):
    """Where value heads are in a tensor: a file has one for each key head, then the next for
    each."""

    ROWS = auto()
    BEHIND_KEYS = auto()  # rows behind those of queries and keys
    INPUTS = auto()
    DECAYS = auto()


class Stacks(Enum):
    """The matrices of all experts of a layer in transformers' model."""

    APART = auto()  # read as a checkpoint's, expert by expert
    TURNED = auto()  # [experts, in, out], gates before ups
    WOVEN = auto()  # [experts, in, out], gates and ups by turns


@dataclass(frozen=True)
class Naming:
    """The names of an architecture, without the ends `.weight` and `.bias`."""

    layer: Mapping[str, str]  # names of a layer's tensors, after `blk.N.` and `prefix` and `N.`
    prefix: str = "model.layers."
    outside: Mapping[str, str] = field(default_factory=lambda: GLOBAL)
    """Names of the other tensors; a list of matrices is one tensor in files."""
    permuted: bool = False  # True if rows that are rotated together are neighbours
    plus_one: bool = False  # True if weights of norms include the 1 that transformers adds
    plain_norms: Sequence[str] = ()  # norms of a layer whose weights do not include that 1
    tiled: Mapping[str, Tiled] = field(default_factory=dict)  # tensors of a layer with value heads
    transposed: bool = False  # True if transformers has the matrices of layers as [in, out]
    experts: Mapping[str, str] = field(default_factory=dict)
    """Matrices of all experts of a layer, and the name of one expert's after `experts.N.`."""
    expert_part: str = "mlp"
    stacks: Stacks = Stacks.APART
    bare: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a layer, with their ends, that have no counterpart in transformers."""
    single: Mapping[str, int] = field(default_factory=dict)
    """Tensors of a layer that have one dimension more in transformers, of one number, and which."""
    boxed: Sequence[str] = ()  # tensors of a layer that are [1, 1, heads, 1] in transformers
    flat: Sequence[str] = ()  # tensors of a layer that have one dimension in transformers
    logarithms: Sequence[str] = ()
    """Tensors of which transformers has the logarithms of the negatives, with their ends."""
    by_heads: Sequence[str] = ()  # stacked queries, keys and values, head by head in the model
    tables: Sequence[str] = ()  # tables of token ids, which checkpoints have as offsets
    latents: bool = False
    """Matrices that make keys and values of latents are numbers, in files of one or two tensors."""

    def in_file(self, name: str) -> str | None:
        """Return a file's name for a tensor of transformers, or an expert's matrix; None if not
        just one."""
        stem, _, end = name.rpartition(".")
        index, _, rest = name.removeprefix(self.prefix).partition(".")
        if not name.startswith(self.prefix) or not index.isdecimal():
            return _only(f"{own}.{end}" for own, theirs in self.outside.items() if theirs == stem)
        stem = rest.rpartition(".")[0]
        expert = ONE_EXPERT.search(stem)
        names, wanted = (self.layer, stem) if expert is None else (self.experts, expert[1])
        found = [own for own, theirs in self.bare.items() if theirs == rest]
        found = found or [f"{own}.{end}" for own, theirs in names.items() if theirs == wanted]
        return _only(f"blk.{index}.{own}" for own in found)


def _only(names: Iterable[str]) -> str | None:
    """The name, if there is one."""
    found = [*names]
    return found[0] if len(found) == 1 else None


MTP = {
    **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
}
"""Names of an MTP layer's own tensors in files, of every architecture, and in checkpoints."""
MERGED = "ffn_gate_up_exps"  # the gate and up matrices of all experts in one, gates first
BOTH_UP, KEYS_UP, VALUES_UP = (f"self_attn.{part}_b_proj" for part in ("kv", "k", "v"))
"""Names of matrices that make keys and values of latents; files alone have the last two."""
UPPER, LOWER = "#upper", "#lower"
"""Suffixes of two tensors of a file that are one of transformers', stacked, or for each key head
its queries, keys and values above its gates."""


def _under(part: str, **names: str) -> Mapping[str, str]:
    """Return the names of tensors of a part of a layer, by those in a file."""
    return {own: f"{part}.{name}" for own, name in names.items()}


ATTENTION = _under(
    "self_attn", attn_q="q_proj", attn_k="k_proj", attn_v="v_proj", attn_output="o_proj"
)
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, **NORMS, **MLP}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GEMMA2 = {**LLAMA, **POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
GATED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
MIXTRAL = {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}
CORRECTION = "e_score_correction_bias"
GRANITE_MLP = {
    "gate": f"shared_mlp.input_linear{UPPER}",
    "up": f"shared_mlp.input_linear{LOWER}",
    "down": "shared_mlp.output_linear",
}
"""The MLP that all rows of a Granite with experts share."""


def shared_names(part: str) -> Mapping[str, str]:
    """Return the names of the MLP of shared experts."""
    linears = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    return {f"ffn_{name}_shexp": f"{part}.{linear}" for name, linear in linears.items()}


_SHARED_EXPERTS = {**shared_names("mlp.shared_experts"), "ffn_gate_inp": "mlp.gate"}
_SHARED_EXPERT = {
    **shared_names("mlp.shared_expert"),
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_CORRECTED = {"exp_probs_b.bias": f"mlp.gate.{CORRECTION}"}


FINAL = {**GLOBAL, "output_norm": "model.final_layernorm"}
_QUERIES = {"attn_q": "q_proj", "attn_q_a": "q_a_proj", "attn_q_a_norm": "q_a_layernorm"}
_KEYS = {"attn_kv_a_mqa": "kv_a_proj_with_mqa", "attn_kv_a_norm": "kv_a_layernorm"}
LATENT = {
    **_under("self_attn", **_QUERIES, **_KEYS, attn_q_b="q_b_proj", attn_output="o_proj"),
    "attn_kv_b": BOTH_UP,
    "attn_k_b": KEYS_UP,
    "attn_v_b": VALUES_UP,
}
AFTER_ROPE = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}


_PHI = {
    **ATTENTION,
    "attn_output": "self_attn.dense",
    "attn_norm": "input_layernorm",
    **_under("mlp", ffn_up="fc1", ffn_down="fc2"),
}
_C_MLP = _under("mlp", ffn_up="c_fc", ffn_down="c_proj")
_GPT2 = {
    **_under("attn", attn_qkv="c_attn", attn_output="c_proj"),
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    **_C_MLP,
}
_TRANSFORMER = {
    **_under("transformer", token_embd="wte", position_embd="wpe", output_norm="ln_f"),
    "output": "lm_head",
}
_UNGATED = _under("mlp", ffn_up="up_proj", ffn_down="down_proj")
_JOINED_UP = {**_UNGATED, "ffn_up": "mlp.gate_up_proj"}


_OWN_INPUTS = {
    **GEMMA2,
    **HEAD_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = {
    **_OWN_INPUTS,
    **_under("altup", altup_router="modality_router", altup_router_norm="router_norm"),
    **_under("altup", altup_predict_coef="prediction_coefs", altup_correct_coef="correction_coefs"),
    **_under("laurel", laurel_l="linear_left", laurel_r="linear_right"),
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **_OWN_INPUTS,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
}


_QWEN35 = {
    **ATTENTION,
    **HEAD_NORMS,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    **_under("linear_attn", attn_qkv="in_proj_qkv", attn_gate="in_proj_z", ssm_norm="norm"),
    **_under("linear_attn", ssm_beta="in_proj_b", ssm_alpha="in_proj_a", ssm_conv1d="conv1d"),
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
    **{name: part.replace("mlp.", "feed_forward.") for name, part in MLP.items()},
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
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    **_under("feed_forward", ffn_gate="w1", ffn_up="w3", ffn_down="w2"),
}
_LFM2_OUTSIDE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
}


_KIMI = {
    **_under("self_attn", ssm_beta="b_proj", ssm_g_a="g_a_proj", ssm_g_b="g_b_proj"),
    **_under("self_attn.forget_gate", ssm_f_a="f_a_proj", ssm_f_b="f_b_proj"),
    **_under("self_attn", ssm_norm="o_norm"),
}
_KIMI_CONVOLUTIONS = {f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"}
_WITH_INPUTS = {
    **GLOBAL,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


NAMINGS: Mapping[str, Naming] = {
    **dict.fromkeys(
        ("llama", "granite", "smollm3", "mistral3", "internlm2", "minicpm"),
        Naming(LLAMA, permuted=True),
    ),
    "granite_swa": Naming(
        {
            **LLAMA,
            "ffn_gate_inp": "block_sparse_moe.router",
            **_under("shared_mlp", ffn_up_shexp="input_linear", ffn_down_shexp="output_linear"),
        },
        permuted=True,
        experts=GATED,
        expert_part="block_sparse_moe",
        bare={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "apertus": Naming(
        {
            **ATTENTION,
            **HEAD_NORMS,
            **_UNGATED,
            "attn_norm": "attention_layernorm",
            "ffn_norm": "feedforward_layernorm",
        },
    ),
    "arcee": Naming({**ATTENTION, **NORMS, **_UNGATED}, permuted=True),
    "ernie4_5": Naming(LLAMA),
    "hunyuan-dense": Naming({**LLAMA, **AFTER_ROPE}),
    "seed_oss": Naming({**LLAMA, "post_attention_norm": "post_attention_layernorm"}),
    "exaone4": Naming({**ATTENTION, **HEAD_NORMS, **MLP, **POST_NORMS}),
    "chatglm": Naming({**ATTENTION, **NORMS, **_JOINED_UP}),
    "glm4": Naming(
        {
            **ATTENTION,
            **NORMS,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **_JOINED_UP,
        }
    ),
    **dict.fromkeys(
        ("cohere2", "command-r"),
        Naming({**ATTENTION, **HEAD_NORMS, **MLP, "attn_norm": "input_layernorm"}),
    ),
    **dict.fromkeys(("qwen2", "qwen2vl", "exaone", "pangu-embedded"), Naming(LLAMA)),
    "qwen3vl": Naming({**LLAMA, **HEAD_NORMS}),
    "qwen3": Naming({**LLAMA, **HEAD_NORMS}),
    "gemma": Naming(LLAMA, plus_one=True),
    "gemma2": Naming(GEMMA2, plus_one=True),
    "gemma3": Naming({**GEMMA2, **HEAD_NORMS}, plus_one=True),
    "phi3": Naming(
        {
            **NORMS,
            **_JOINED_UP,
            **_under("self_attn", attn_qkv="qkv_proj", attn_output="o_proj"),
        }
    ),
    "gpt2": Naming(_GPT2, prefix="transformer.h.", outside=_TRANSFORMER, transposed=True),
    "starcoder": Naming(_GPT2, prefix="transformer.h.", outside=_TRANSFORMER),
    "starcoder2": Naming({**ATTENTION, **NORMS, **_C_MLP}),
    "stablelm": Naming(LLAMA),
    "phi2": Naming(_PHI, outside=FINAL),
    "nemotron": Naming({**ATTENTION, **NORMS, **_UNGATED}, plus_one=True),
    "jais2": Naming({**ATTENTION, **NORMS, **_UNGATED}),
    "olmo": Naming({**ATTENTION, **MLP}, permuted=True),
    "gptneox": Naming(
        {
            **NORMS,
            **_under("attention", attn_qkv="query_key_value", attn_output="dense"),
            **_under("mlp", ffn_up="dense_h_to_4h", ffn_down="dense_4h_to_h"),
        },
        prefix="gpt_neox.layers.",
        outside={
            **_under("gpt_neox", token_embd="embed_in", output_norm="final_layer_norm"),
            "output": "lm_head",
        },
        by_heads=("attn_qkv",),
    ),
    "minicpm3": Naming({**NORMS, **MLP, **LATENT}, latents=True),
    "olmo2": Naming({**ATTENTION, **HEAD_NORMS, **MLP, **POST_NORMS}),
    "mixtral": Naming(
        {**ATTENTION, **NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        permuted=True,
        experts=MIXTRAL,
        expert_part="block_sparse_moe",
    ),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe", "olmoe", "mellum"),
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
        {**ATTENTION, **NORMS, **_SHARED_EXPERT},
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
            **_SHARED_EXPERTS,
            "post_attention_norm": "post_attention_layernorm",
        },
        experts=GATED,
        bare=_CORRECTED,
    ),
    **dict.fromkeys(
        ("dots1", "exaone-moe"),
        Naming({**LLAMA, **HEAD_NORMS, **_SHARED_EXPERTS}, experts=GATED, bare=_CORRECTED),
    ),
    "bailingmoe2": Naming(
        {**LLAMA, **HEAD_NORMS, **_SHARED_EXPERTS, "layer_output_norm": "final_layernorm"},
        experts=GATED,
        bare=_CORRECTED,
    ),
    "hy_v3": Naming(
        {**LLAMA, **HEAD_NORMS, **_SHARED_EXPERTS},
        experts=GATED,
        bare={"exp_probs_b": f"mlp.{CORRECTION}"},
    ),
    "afmoe": Naming(
        {
            **LLAMA,
            **HEAD_NORMS,
            **shared_names("mlp.shared_experts"),
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_gate_inp": "mlp.router.gate",
        },
        experts=GATED,
        bare={"exp_probs_b.bias": "mlp.expert_bias"},
    ),
    "deepseek2": Naming(
        {**NORMS, **MLP, **_SHARED_EXPERTS, **LATENT}, experts=GATED, bare=_CORRECTED, latents=True
    ),
    "kimi-linear": Naming(
        {**LLAMA, **LATENT, **_SHARED_EXPERTS, **_KIMI, **_KIMI_CONVOLUTIONS},
        experts=MIXTRAL,
        expert_part="block_sparse_moe",
        bare={
            **_CORRECTED,
            "ssm_a": "self_attn.forget_gate.A_log",
            "ssm_dt.bias": "self_attn.forget_gate.dt_bias",
        },
        single=dict.fromkeys(_KIMI_CONVOLUTIONS, 1),
        boxed=("ssm_a",),
        logarithms=("ssm_a",),
        latents=True,
    ),
    "ernie4_5-moe": Naming(
        {**LLAMA, **_SHARED_EXPERTS},
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
    "gemma3n": Naming(
        _GEMMA3N,
        outside={
            **_WITH_INPUTS,
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
        bare={"altup_correct_scale.weight": "altup.correct_output_scale"},
    ),
    "gemma4": Naming(
        _GEMMA4,
        outside=_WITH_INPUTS,
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
    "qwen3next": Naming(
        {
            **_QWEN35,
            **_SHARED_EXPERT,
            "attn_qkv": f"linear_attn.in_proj_qkvz{UPPER}",
            "attn_gate": f"linear_attn.in_proj_qkvz{LOWER}",
            **_under("linear_attn", ssm_in="in_proj_qkvz", ssm_ba="in_proj_ba"),
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
            "post_attention_norm": "post_norm",
            "ffn_gate_inp": "mixer.gate",
            **_under("mixer.shared_experts", ffn_up_shexp="up_proj", ffn_down_shexp="down_proj"),
            **_under("mixer", ffn_latent_down="fc1_latent_proj", ffn_latent_up="fc2_latent_proj"),
        },
        prefix="backbone.layers.",
        outside=_BACKBONE,
        permuted=True,
        experts={"ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"},
        expert_part="mixer",
        bare={**_BARE_MIXERS, "exp_probs_b.bias": f"mixer.gate.{CORRECTION}"},
        **_SCAN,
    ),
    "eagle3": Naming(
        {**LLAMA, "attn_norm_2": "hidden_norm"},
        prefix="layers.",
        outside={
            "fc": "fc",
            "enc.output_norm": "input_norm",
            **{own: name.removeprefix("model.") for own, name in GLOBAL.items()},
        },
        permuted=True,
        tables=("d2t",),
    ),
    "dflash": Naming(
        {
            **LLAMA,
            **HEAD_NORMS,
            "attn_conv_proj": "attention_conv.kernel_projection",
            "ffn_conv_proj": "mlp_conv.kernel_projection",
        },
        prefix="layers.",
        outside={
            "fc": "fc",
            "enc.output_norm": "hidden_norm",
            **{own: name.removeprefix("model.") for own, name in GLOBAL.items()},
            **{f"markov_w{number}": f"markov_head.markov_w{number}" for number in (1, 2)},
            "conf_proj": "confidence_head.proj",
            "selector_predecessor": "candidate_selector.predecessor_codebook",
            "selector_successor": "candidate_selector.successor_codebook",
            "selector_hidden": "candidate_selector.hidden_projection",
        },
        bare={
            "attn_conv_base": "attention_conv.base_kernel",
            "ffn_conv_base": "mlp_conv.base_kernel",
        },
        tables=("d2t",),
    ),
    "qwen35": Naming({**_QWEN35, **MLP}, **_DELTA),
    "qwen35moe": Naming({**_QWEN35, **_SHARED_EXPERT}, experts=GATED, **_DELTA),
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
"""Architecture of llama.cpp -> its names; Llama with experts is `mixtral`; `bamba` is a
`granitehybrid`."""
