"""Small draft heads of every kind with random weights, written exactly in the formats of the public
checkpoints."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from support.models import VOCABULARY


@dataclass(frozen=True)
class Variant:
    """A head to write; what is left alone fits `tiny_llama` in fp32."""

    kind: str
    hidden: int = 64
    target_width: int = 64
    vocabulary: int = VOCABULARY
    draft_vocabulary: int = VOCABULARY
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    blocks: int = 1
    experts: int = 2
    contrast: bool = True
    taps: tuple[int, ...] = (0, 1, 1)
    """() with kind eagle3: it reads the last hidden state."""
    naming: str = "eagle"
    """eagle, vllm (layers.0, prefix) or specforge (outputs counted in eagle_config, ids under
    another name)."""
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    own_embedding: bool = False
    own_output: bool = False
    fc_norm: bool = False
    dtype: torch.dtype = torch.float32
    gain: float = 1.5
    """The factor by which a matrix multiplies lengths. From 1.2 on the states that a head goes on
    from grow at every level, and so does what rounding has left."""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json that are added or changed."""

    @property
    def feature_width(self) -> int:
        """Numbers of one feature row."""
        return (
            self.target_width * max(1, len(self.taps))
            if self.kind == "eagle3"
            else self.target_width
        )


VARIANTS = {
    "eagle": Variant("eagle", fc_bias=True, kv_heads=4, own_embedding=True),
    "eagle-llama3": Variant("eagle", config={"rope_theta": 5e5, "bias": False}),
    "eagle-qwen2": Variant("eagle", qkv_bias=True, kv_heads=4, config={"qkv_bias": True}),
    "eagle-linear-rope": Variant(
        "eagle", config={"rope_scaling": {"type": "linear", "factor": 2.0}}
    ),
    "eagle-prefixed": Variant("eagle", fc_bias=True, naming="vllm"),
    "dovetail": Variant("dovetail", own_embedding=True, own_output=True),
    "dovetail-3": Variant("dovetail", blocks=3),
    "dovetail-paper": Variant(
        "dovetail", blocks=2, config={"dgf_silu": False, "dgf_embed_norm": False}
    ),
    "jakiro": Variant("jakiro", fc_bias=True, intermediate=64),
    "jakiro-3": Variant("jakiro", experts=3, intermediate=64),
    "jakiro-4": Variant("jakiro", experts=4, intermediate=64, fc_bias=True),
    "jakiro-plain": Variant("jakiro", contrast=False, intermediate=64),
    "jakiro-star": Variant("jakiro*", contrast=False, fc_bias=True),
    "jakiro-star-3": Variant("jakiro*", contrast=False, experts=3),
    "eagle3": Variant("eagle3", draft_vocabulary=20),
    "eagle3-whole-vocabulary": Variant("eagle3", config={"head_dim": 16}),
    "eagle3-vllm": Variant(
        "eagle3", draft_vocabulary=20, naming="vllm", head_dim=24, qkv_bias=True, output_bias=True
    ),
    "eagle3-specforge": Variant(
        "eagle3",
        draft_vocabulary=20,
        naming="specforge",
        taps=(1, 1, 1),
        head_norms=True,
        fc_norm=True,
        config={"norm_before_residual": True},
    ),
    "eagle3-normed": Variant(
        "eagle3", draft_vocabulary=20, config={"norm_output": True, "rope_theta": 1e6}
    ),
    "eagle3-narrow": Variant(
        "eagle3",
        hidden=32,
        head_dim=16,
        draft_vocabulary=20,
        own_embedding=True,
        config={"target_hidden_size": 64},
    ),
    "eagle3-last-state": Variant(
        "eagle3",
        taps=(),
        draft_vocabulary=20,
        config={"eagle_config": {"use_aux_hidden_state": False}},
    ),
}
"""One of each of what is out there."""


def head_tensors(variant: Variant, *, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a head by the names of EAGLE's, Dovetail's and Jakiro's own repositories,
    without what it shares with its target."""
    random = _Random(seed, variant.dtype, variant.gain)
    hidden, tensors = variant.hidden, _fusion(variant, random)
    if variant.kind == "eagle3":
        names = [
            f"midlayer.{name}"
            for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        ]
        tensors |= {f"{name}.weight": random.norm(hidden) for name in [*names, "norm"]}
        tensors |= _attention(variant, "midlayer.", 2 * hidden, random) | _mlp(
            "midlayer.mlp.", variant, random
        )
        tensors["lm_head.weight"] = random.matrix(variant.draft_vocabulary, hidden)
        if variant.draft_vocabulary < variant.vocabulary:
            ids = (
                torch.randperm(variant.vocabulary, generator=random.generator)[
                    : variant.draft_vocabulary
                ]
                .sort()
                .values
            )
            tensors["d2t"] = ids - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(variant.vocabulary, dtype=torch.bool).index_fill_(
                0, ids, True
            )
    for index in range(variant.blocks if variant.kind != "eagle3" else 0):
        layer = f"layers.{index}."
        tensors |= _attention(variant, layer, hidden, random)
        tensors[f"{layer}post_attention_layernorm.weight"] = random.norm(hidden)
        if index:
            tensors[f"{layer}input_layernorm.weight"] = random.norm(hidden)
        tensors |= (
            _experts(variant, random)
            if variant.kind.startswith("jakiro")
            else _mlp(f"{layer}mlp.", variant, random)
        )
    if variant.own_embedding:
        tensors["embed_tokens.weight"] = random.matrix(variant.vocabulary, hidden)
    if variant.own_output and variant.kind != "eagle3":
        tensors["lm_head.weight"] = random.matrix(variant.vocabulary, hidden)
    return tensors


def head_config(variant: Variant) -> dict[str, Any]:
    """Return the content of config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": variant.hidden,
        "intermediate_size": variant.intermediate,
        "num_attention_heads": variant.heads,
        "num_key_value_heads": variant.kv_heads,
        "num_hidden_layers": variant.blocks,
        "vocab_size": variant.vocabulary,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-5,
    }
    if variant.kind == "eagle3":
        config["draft_vocab_size"] = variant.draft_vocabulary
        if variant.naming == "specforge":
            config["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in variant.taps]
            }
        elif variant.taps:
            config["eagle_aux_hidden_state_layer_ids"] = list(variant.taps)
    if variant.kind.startswith("jakiro"):
        config |= {"num_local_experts": variant.experts, "num_experts_per_tok": 2}
    return config | variant.config


def write_head(folder: Path, variant: Variant | str, *, seed: int = 0, **otherwise: Any) -> Path:
    """A head in `folder`: a `Variant` or the name of one of `VARIANTS`, changed where something is
    said otherwise."""
    chosen = replace(VARIANTS[variant] if isinstance(variant, str) else variant, **otherwise)
    tensors = {
        _public(name, chosen): tensor for name, tensor in head_tensors(chosen, seed=seed).items()
    }
    write_files(folder, tensors, head_config(chosen))
    return folder


def write_files(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """model.safetensors and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))


def _public(name: str, variant: Variant) -> str:
    if variant.naming == "vllm":
        return (
            "model." + name.replace("midlayer.", "layers.0.") if name != "lm_head.weight" else name
        )
    if variant.naming == "specforge":
        return {"d2t": "draft_id_to_target_id"}.get(name, name.replace("fc_norm.", "fc_norms."))
    return name


class _Random:
    """Weights as they might be: matrices that multiply lengths by `gain`, norms around one."""

    def __init__(self, seed: int, dtype: torch.dtype, gain: float) -> None:
        self.generator, self._dtype, self._gain = torch.Generator().manual_seed(seed), dtype, gain

    def matrix(self, rows: int, inputs: int) -> Tensor:
        return (
            torch.randn(rows, inputs, generator=self.generator) * (self._gain / inputs**0.5)
        ).to(self._dtype)

    def norm(self, size: int) -> Tensor:
        return (1.0 + 0.2 * torch.randn(size, generator=self.generator)).to(self._dtype)

    def bias(self, size: int) -> Tensor:
        return (0.3 * torch.randn(size, generator=self.generator)).to(self._dtype)


def _fusion(variant: Variant, random: _Random) -> dict[str, Tensor]:
    hidden = variant.hidden
    if variant.kind == "dovetail":  # these are [in, out]
        shapes = {"W_1": (hidden, hidden), "W_2": (hidden, hidden), "W_z": (2 * hidden, hidden)}
        return {
            "input_layernorm.weight": random.norm(hidden),
            **{name: random.matrix(*shape) for name, shape in shapes.items()},
        }
    if variant.kind == "eagle3":
        tensors = {"fc.weight": random.matrix(hidden, variant.feature_width)}
        norms = {
            f"fc_norm.{i}.weight": random.norm(variant.target_width)
            for i in range(len(variant.taps))
        }
        return {**tensors, **(norms if variant.fc_norm else {})}
    return {
        "fc.weight": random.matrix(hidden, 2 * hidden),
        **({"fc.bias": random.bias(hidden)} if variant.fc_bias else {}),
    }


def _attention(variant: Variant, layer: str, width: int, random: _Random) -> dict[str, Tensor]:
    sizes = {
        "q": variant.heads * variant.head_dim,
        "k": variant.kv_heads * variant.head_dim,
        "v": variant.kv_heads * variant.head_dim,
    }
    at = f"{layer}self_attn."
    tensors = {
        f"{at}{name}_proj.weight": random.matrix(size, width) for name, size in sizes.items()
    }
    tensors[f"{at}o_proj.weight"] = random.matrix(variant.hidden, sizes["q"])
    if variant.qkv_bias:
        tensors |= {f"{at}{name}_proj.bias": random.bias(size) for name, size in sizes.items()}
    if variant.output_bias:
        tensors[f"{at}o_proj.bias"] = random.bias(variant.hidden)
    if variant.head_norms:
        tensors |= {f"{at}{name}_norm.weight": random.norm(variant.head_dim) for name in "qk"}
    return tensors


def _mlp(prefix: str, variant: Variant, random: _Random) -> dict[str, Tensor]:
    hidden, wide = variant.hidden, variant.intermediate
    return {
        f"{prefix}gate_proj.weight": random.matrix(wide, hidden),
        f"{prefix}up_proj.weight": random.matrix(wide, hidden),
        f"{prefix}down_proj.weight": random.matrix(hidden, wide),
    }


def _experts(variant: Variant, random: _Random) -> dict[str, Tensor]:
    at, hidden, wide = "layers.0.mlp_moe.", variant.hidden, variant.intermediate
    tensors = {f"{at}gate.weight": random.matrix(variant.experts + 2 * variant.contrast, hidden)}
    for index in range(variant.experts):
        expert = f"{at}experts.{index}."
        if variant.kind == "jakiro":
            tensors |= _mlp(expert, variant, random)
        else:
            tensors |= {
                f"{expert}fc.weight": random.matrix(wide, hidden),
                f"{expert}proj.weight": random.matrix(hidden, wide),
            }
    return tensors
