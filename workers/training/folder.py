"""A finished head as a folder in the public format of its kind, and the initialisation of a new one
from its target.

The target's embedding and output head are left out: they are read from the target when a head is
loaded (EAGLE-3 has an output head of its own)."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.training.heads.trainable import HeadShape, TrainableHead
from dovetail.workers.training.recipes import recipe_of
from dovetail.workers.training.target_parts import TargetParts
from dovetail.workers.training.workplace import Workplace

FILES = frozenset(("config.json", "model.safetensors"))


def workplace(out: Path, kind: str, texts: Iterable[str]) -> Workplace:
    """Return where a head of that kind is trained; `texts` are the names of its additional
    files."""
    return Workplace(
        out.resolve(),
        f"{kind} head",
        FILES.union(texts),
        {"architectures": [recipe_of(kind).architecture]},
    )


def shape_for(
    kind: str,
    target: TargetParts,
    *,
    context: int,
    intermediate: int | None = None,
    **choices: Any,
) -> HeadShape:
    """Return the shape of a new head: attention as in the target, the MLP too unless `intermediate`
    is given (a Jakiro expert: as wide as the hidden state)."""
    config = target.config
    vocabulary, hidden = target.frozen.embedding.shape
    heads = int(config["num_attention_heads"])
    recipe = recipe_of(kind)
    return recipe.shape(
        kind=kind,
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=intermediate or recipe.intermediate(hidden, int(config["intermediate_size"])),
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
    """Return the config.json of a head: the public fields of its kind, and ours under
    "dovetail"."""
    kind = recipe_of(shape.kind)
    config: dict[str, Any] = {
        "architectures": [kind.architecture],
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
    return config | kind.fields(shape, taps)


def write_head(
    folder: Path, head: TrainableHead, config: Mapping[str, Any], texts: Mapping[str, str]
) -> None:
    """Write a folder: weights in fp16, the config, and further text files by name."""
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
