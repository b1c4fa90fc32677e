"""A finished head as a folder in the public format of its kind, and what a new one takes over from
its target.

Embedding and output head of the target are left out: who loads a head takes them from the target
(EAGLE-3's own output head is the head's). Knows checkpoints; trains nothing.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.models.checkpoints.checkpoint import Stored, open_weights, read_json
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.training.heads import Head, HeadShape, Kind
from dovetail.workers.training.losses import Frozen
from dovetail.workers.training.workplace import Workplace

ARCHITECTURES: dict[Kind, str] = {
    "eagle": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "dovetail": "LlamaForCausalLMDovetail",
    "jakiro": "LlamaForCausalLMJakiro",
}
"""The first two are SGLang's names; the others are nobody's yet."""
FILES = frozenset(("config.json", "model.safetensors"))


def workplace(out: Path, kind: Kind, texts: Iterable[str]) -> Workplace:
    """Where a head of that kind is trained; `texts` are the names of the further files that it will
    have."""
    return Workplace(
        out.resolve(), f"{kind} head", FILES.union(texts), {"architectures": [ARCHITECTURES[kind]]}
    )


@dataclass(frozen=True)
class TargetParts:
    """What a head takes from its target."""

    source: str
    digest: str
    config: Mapping[str, Any]
    frozen: Frozen
    tensors: Mapping[str, Stored]

    def read(self, ending: str) -> Tensor:
        """The tensor whose name is `ending` behind a prefix such as `model.`; `UserError` unless
        there is exactly one."""
        return _one(self.tensors, ending, self.source)

    def parts(self, beginning: str) -> list[str]:
        """How the names go on that have `beginning` behind a prefix such as `model.`."""
        return [
            name.split(beginning, 1)[1]
            for name in self.tensors
            if name.startswith(beginning) or f".{beginning}" in name
        ]


def read_target(source: str) -> TargetParts:
    """Embedding, output head and shapes of a target (a folder or a hub id)."""
    folder = find_folder(source)
    weights, config = open_weights(folder), read_json(folder / "config.json")
    config = {**config, **config.get("text_config", {})}
    embedding = _one(weights.tensors, "embed_tokens.weight", source)
    head = (
        embedding
        if config.get("tie_word_embeddings") and not _named(weights.tensors, "lm_head.weight")
        else _one(weights.tensors, "lm_head.weight", source)
    )
    return TargetParts(source, weights.digest, config, Frozen(embedding, head), weights.tensors)


def _named(tensors: Mapping[str, Stored], ending: str) -> list[str]:
    return [name for name in tensors if name == ending or name.endswith("." + ending)]


def _one(tensors: Mapping[str, Stored], ending: str, source: str) -> Tensor:
    names = _named(tensors, ending)
    if len(names) != 1:
        raise UserError(
            f"{source} has {len(names)} tensors called {ending}, and a head is trained for a "
            "target that has one"
        )
    return tensors[names[0]].read(names[0])


def shape_for(
    kind: Kind,
    target: TargetParts,
    *,
    context: int,
    intermediate: int | None = None,
    **choices: Any,
) -> HeadShape:
    """The shape of a new head: attention as in the target, the MLP too unless `intermediate` says
    otherwise (a Jakiro expert: as wide as the hidden state)."""
    config = target.config
    vocabulary, hidden = target.frozen.embedding.shape
    heads = int(config["num_attention_heads"])
    return HeadShape(
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=intermediate
        or (hidden if kind == "jakiro" else int(config["intermediate_size"])),
        vocabulary=vocabulary,
        rope_theta=float(
            config.get("rope_theta")
            or (config.get("rope_parameters") or {}).get("rope_theta")
            or 10000.0
        ),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        context=context,
        **choices,
    )


def config_of(shape: HeadShape, *, trained_for: str, taps: tuple[int, ...]) -> dict[str, Any]:
    """The config.json of a head: the public fields of its kind, and ours under "dovetail"."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.kind]],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.blocks,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": shape.vocabulary,
        "dovetail": {"trained_for": trained_for},
    }
    if shape.kind in ("eagle", "jakiro"):
        config |= {"bias": shape.bias, "qkv_bias": False}
    if shape.kind == "jakiro":
        config |= {"num_local_experts": shape.experts, "num_experts_per_tok": 2}
    if shape.kind == "dovetail":
        config |= {"dgf_silu": shape.dgf_silu, "dgf_embed_norm": shape.dgf_embed_norm}
    if shape.kind == "eagle3":
        config |= {
            "draft_vocab_size": shape.own_vocabulary,
            "eagle_aux_hidden_state_layer_ids": list(taps),
        }
    return config


def write_head(
    folder: Path, head: Head, config: Mapping[str, Any], texts: Mapping[str, str]
) -> None:
    """Fill in a folder: weights in fp16, the config, and further text files by name."""
    tensors = {name: _stored_as(value) for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _stored_as(value: Tensor) -> Tensor:
    value = value.detach().cpu().contiguous()
    if not value.is_floating_point():
        return value
    half = value.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise UserError("the trained weights do not fit into fp16: train with a lower --rate")
    return half
