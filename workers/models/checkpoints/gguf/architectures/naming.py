"""Names of tensors in GGUF files and in transformers, by llama.cpp's architectures, and their
layouts."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

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
    outside: Mapping[str, str] = field(default_factory=lambda: GLOBAL)  # names of the other tensors
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
    flat: Sequence[str] = ()  # tensors of a layer that have one dimension in transformers
    logarithms: Sequence[str] = ()
    """Tensors of which transformers has the logarithms of the negatives, with their ends."""
    by_heads: Sequence[str] = ()  # stacked queries, keys and values, head by head in the model
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


MERGED = "ffn_gate_up_exps"  # the gate and up matrices of all experts in one, gates first
BOTH_UP, KEYS_UP, VALUES_UP = (f"self_attn.{part}_b_proj" for part in ("kv", "k", "v"))
"""Names of matrices that make keys and values of latents; files alone have the last two."""
UPPER, LOWER = "#upper", "#lower"
"""Suffixes of two tensors of a file that are one of transformers', stacked, or for each key head
its queries, keys and values above its gates."""


ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
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


FINAL = {**GLOBAL, "output_norm": "model.final_layernorm"}
LATENT = {
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
}
AFTER_ROPE = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
