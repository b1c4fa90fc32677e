"""Tiny checkpoints with a layer for multi-token prediction (MTP), in the names of each public
layout, and the slow version of such a layer: transformers' own layer over whole paths."""

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.workers.heads.checkpoint import EMBEDDINGS
from support.architectures import VARIED, tiny_config, write_tiny
from support.gguf_facts import facts_of
from support.gguf_files import _shifted, architecture_of, named, write_gguf

QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", "mtp.layers.0")
NEXTN = tuple(f"model.layers.4.{n}" for n in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
HUNYUAN = (*NEXTN[:3], "model.layers.4.final_layernorm")
ERNIE = tuple(f"model.mtp_{n}.0" for n in ("linear_proj", "emb_norm", "hidden_norm"))
FULL = {"layer_types": ["full_attention"]}
SPARSE = {"mlp_layer_types": ["sparse"]}
NEMOTRON = tuple(
    f"mtp.layers.{n}" for n in ("0.eh_proj", "0.enorm", "0.hnorm", "1.final_layernorm")
)
LAYOUTS: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "qwen3_5_text": (QWEN, FULL),
    "qwen3_5_moe_text": (QWEN, FULL),
    "qwen3_next": (QWEN, FULL | {"mlp_only_layers": []}),
    "glm4_moe": ((*NEXTN, "model.layers.4"), {"first_k_dense_replace": 0}),
    "glm4_moe_lite": ((*NEXTN, "model.layers.4"), SPARSE),
    "deepseek_v3": ((*NEXTN, "model.layers.4"), {"first_k_dense_replace": 0}),
    "llama": ((*NEXTN, "model.layers.4"), {}),
    "qwen3": ((*NEXTN, "model.layers.4"), FULL),
    "hy_v3": ((*HUNYUAN, "model.layers.4"), SPARSE),
    "mellum": (QWEN, {"layer_types": ["sliding_attention"]} | SPARSE),
    "exaone_moe": (QWEN, {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}),
    "exaone4": (QWEN, {"layer_types": ["sliding_attention"]}),
    "cohere2_moe": (
        (*NEXTN, "model.layers.4"),
        {"layer_types": ["sliding_attention"], "sliding_window": 1 << 20} | SPARSE,
    ),
    "cohere2_moe summed": (
        (*NEXTN, "model.layers.4"),
        {"layer_types": ["sliding_attention"], "sliding_window": 1 << 20} | SPARSE,
    ),
    "sarvam_moe": ((*HUNYUAN, "model.layers.4"), {"first_k_dense_replace": 0}),
    "nemotron_h": ((*NEMOTRON, "mtp.layers.0"), {"layers_block_type": ["full_attention", "moe"]}),
    "ernie4_5_moe": (
        (*ERNIE, "", "model.mtp_block.0"),
        {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
}
"""Model type -> names of fusion, norms of embedding and state, norm of the result (empty: none) and
layer; and the fields of a model whose only layer is like it."""
LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.")
PLUS_ONE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def write_mtp(
    kind: str, folder: Path, dtype: torch.dtype = torch.float32, **changed: Any
) -> "Slow":
    """Write a tiny model of a type with an MTP layer, and return the slow version of the layer."""
    names, fields = LAYOUTS[kind]
    varied, kind = VARIED.get(kind, {}) | changed, kind.partition(" ")[0]
    assert write_tiny(kind, folder, dtype=dtype, **varied)
    alone = folder.parent / f"{folder.name}-alone"
    one = {**varied, **fields, "num_hidden_layers": len(fields.get("layers_block_type", "1"))}
    assert write_tiny(kind, alone, dtype=dtype, **one)
    random = torch.Generator().manual_seed(7)
    whole, part = (load_file(at / "model.safetensors") for at in (folder, alone))
    hidden = tiny_config(kind, varied).hidden_size
    added = {f"{names[0]}.weight": torch.randn(hidden, 2 * hidden, generator=random) / 12}
    base = 0.0 if kind in PLUS_ONE else 1.0
    for name in filter(None, names[1:4]):
        added[f"{name}.weight"] = base + 0.2 * torch.randn(hidden, generator=random)
    for name, tensor in part.items():
        if (found := LAYER.match(name)) is not None:
            layer = names[4] if found[1] == "0" else f"mtp.layers.{found[1]}"
            added[f"{layer}.{name[found.end() :]}"] = tensor
    tensors = whole | {name: tensor.to(dtype) for name, tensor in added.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    count = "mtp_num_hidden_layers" if kind in PLUS_ONE else "num_nextn_predict_layers"
    counts = {count: 1, "num_hidden_layers": tiny_config(kind, varied).num_hidden_layers}
    (folder / "config.json").write_text(json.dumps(config | counts))
    return Slow(kind, alone, {name: t.to(dtype).float() for name, t in tensors.items()}, names)


@dataclass
class Slow:
    """An MTP layer by the formulas, without a cache: every row computes its whole path."""

    kind: str
    alone: Path
    tensors: dict[str, Tensor]
    names: Sequence[str]

    def __post_init__(self) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            self.alone, attn_implementation="eager", dtype=torch.float32
        )
        self.base, plus = model.model.eval(), 1.0 if self.kind in PLUS_ONE else 0.0
        config, final = model.config, "norm_f" if self.kind == "nemotron_h" else "norm"
        self.epsilon = getattr(config, "rms_norm_eps", None) or getattr(
            config, "layer_norm_eps" if self.kind == "cohere2_moe" else "layer_norm_epsilon"
        )
        self.centred = type(getattr(self.base, final)).__name__ == "Cohere2MoeLayerNorm"
        self.scale = getattr(config, "logit_scale", 1.0)
        setattr(self.base, final, torch.nn.Identity())
        self.fusion = self.tensors[f"{self.names[0]}.weight"]
        self.norms = [
            self.tensors[f"{name}.weight"] + plus if name else None for name in self.names[1:4]
        ]
        self.embedding = next(self.tensors[one] for one in EMBEDDINGS if one in self.tensors)
        self.output = self.tensors.get("lm_head.weight", self.embedding)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        x = x - x.mean(-1, keepdim=True) if self.centred else x
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * weight

    @torch.inference_mode()
    def __call__(
        self, tokens: Sequence[int], states: Tensor, *, raw: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logits [V] and state [H] of the last row, from states [T, H] and next tokens;
        `raw`: the state before the norm."""
        embedded = self.norm(self.embedding[list(tokens)], self.norms[0])
        both = torch.cat([embedded, self.norm(states, self.norms[1])], dim=-1)
        rows = self.base(inputs_embeds=(both @ self.fusion.t())[None], use_cache=False)
        state = self.norm(rows.last_hidden_state[0, -1], self.norms[2])
        return self.output @ state * self.scale, rows.last_hidden_state[0, -1] if raw else state

    def chain(self, log: Sequence[int], states: Tensor, depth: int) -> list[int]:
        """Return the greedy guesses of what follows a log, of all but whose last token the states
        [n - 1, H] are the target's."""
        tokens, found = list(log[1:]), list[int]()
        for _ in range(depth):
            logits, state = self(tokens, states)
            found.append(int(logits.argmax()))
            tokens, states = [*tokens, found[-1]], torch.cat([states, state[None]])
        return found


def write_mtp_gguf(kind: str, folder: Path, file: Path, *, trunk: bool = True, **more: Any) -> None:
    """Write the checkpoint of `write_mtp` as a GGUF file whose last block is the MTP layer, beside
    embedding and output head the only one without `trunk`."""
    names, _ = LAYOUTS[kind]
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    alone = folder.parent / f"{folder.name}-alone"
    config = json.loads((alone / "config.json").read_text())
    architecture = more.get("architecture") or architecture_of(config)
    weights = load_file(alone / "model.safetensors")
    whole = load_file(folder / "model.safetensors")
    own = [f"nextn.{part}" for part in ("eh_proj", "enorm", "hnorm", "shared_head_norm")]
    own[3:] = ["layer_output_norm"] if architecture == "bailingmoe2" else own[3:]
    extra = {
        f"blk.{layers}.{to}.weight": whole[f"{name}.weight"].float().numpy()
        + (1.0 if kind in PLUS_ONE and "norm" in to else 0.0)
        for to, name in zip(own, names, strict=False)
    }
    for name, (parts, change) in named(config, weights, False, architecture).items():
        if name.startswith("blk."):
            name = "blk.0.post_attention_norm.weight" if name == "blk.1.attn_norm.weight" else name
            numbers = change(torch.cat([weights[part].double().flatten() for part in parts]))
            shift = 1.0 if _shifted(architecture, name) else 0.0
            extra[f"blk.{layers}.{name[6:]}"] = numbers.float().numpy() + shift
    plain = folder.parent / f"{file.stem}-plain"
    shutil.copytree(folder, plain)
    mtp = [name for name in whole if name.startswith(("mtp.", "model.layers.4.", "model.mtp_"))]
    for key in ("attention.head_count_kv", "feed_forward_length"):  # the MTP layer's, too
        if kind == "nemotron_h":
            listed = facts_of(json.loads((folder / "config.json").read_text()), architecture)
            values = listed[f"{architecture}.{key}"]
            more[f"{architecture}.{key}"] = [*values, max(values)]
    kept = {name: tensor for name, tensor in whole.items() if name not in mtp}
    save_file(kept, plain / "model.safetensors", metadata={"format": "pt"})
    more |= {f"{architecture}.block_count": layers + 1, f"{architecture}.nextn_predict_layers": 1}
    types = json.loads((folder / "config.json").read_text()).get("layer_types", ())
    if "linear_attention" in types:  # the list counts the MTP layer, which has no state
        states = [*(of == "linear_attention" for of in types), False]
        more[f"{architecture}.attention.recurrent_layers"] = states
    more["without"] = [f"blk.{at}." for at in range(layers)] if not trunk else []
    write_gguf(plain, file, lambda *_: Type.F32, extra=extra, **more)
