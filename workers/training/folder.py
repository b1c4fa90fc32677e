"""A finished head as a folder in the public format of its kind, and the initialisation of a new one
from its target.

The target's embedding and output head are left out: they are read from the target when a head is
loaded (EAGLE-3, and a head with a reduced vocabulary, have their own output head)."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.heads.config import read_config
from dovetail.workers.heads.files import HeadFiles
from dovetail.workers.heads.matrices import codes_of
from dovetail.workers.heads.registry import kind_of_tensors
from dovetail.workers.heads.spec import TargetShape, plain_name
from dovetail.workers.kernels.blocks import WIDTH
from dovetail.workers.training.heads.trainable import HeadShape, TrainableDraft
from dovetail.workers.training.recipes import recipe_of
from dovetail.workers.training.target_parts import Frozen, TargetParts
from dovetail.workers.training.workplace import Workplace

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": WIDTH,
            },
        }
    },
}
"""The description of 8-bit codes in config.json."""
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
        **recipe.of_target(config),
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
    if shape.own_vocabulary < shape.vocabulary:
        config["draft_vocab_size"] = shape.own_vocabulary
    return config | kind.fields(shape, taps)


def write_head(
    folder: Path,
    head: TrainableDraft,
    config: Mapping[str, Any],
    texts: Mapping[str, str],
    frozen: Frozen,
    *,
    store: str = "fp16",
) -> None:
    """Write a folder: weights, the config, and further text files by name. A reduced output head is
    written even if its rows are the target's. `store`: fp16, or int8 for matrices, with a scale for
    every 32 inputs."""
    state = head.state_dict()
    if head.known is not None:
        state.setdefault("lm_head.weight", frozen.head[head.known.cpu()])
    tensors = {name: _stored_as(value) for name, value in state.items()}
    if store == "int8":
        config = {**config, "quantization_config": INT8}
        for name in [name for name, value in tensors.items() if _is_coded(value)]:
            tensors[name], tensors[f"{name}_scale"] = codes_of(state[name].cpu())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _is_coded(value: Tensor) -> bool:
    return value.ndim == 2 and value.is_floating_point() and value.shape[1] % WIDTH == 0


def read_weights(head: TrainableDraft, files: HeadFiles) -> None:
    """Initialize a head with the weights and the draft vocabulary of a trained one. Raises
    `UserError` if its shape differs."""
    names = head.state_dict().keys()
    try:
        head.load_state_dict({name: files.read(name) for name in files.shapes if name in names})
    except RuntimeError as error:
        why = str(error).splitlines()[1].strip(". \t").partition(": copying")[0]
        raise UserError(
            f"{files.folder} holds a head of another shape ({why}): give its options"
        ) from None


def check_begun(files: HeadFiles, config: Mapping[str, Any], target: TargetParts) -> None:
    """Raise `UserError` if a trained head reads other layers than a new one with this config, or
    computes another function."""
    kind = kind_of_tensors(files.shapes)
    assert kind is not None
    shapes = {kind.rename(plain_name(name)): shape for name, shape in files.shapes.items()}
    rows, width = target.frozen.embedding.shape
    shape = TargetShape("the target", width, int(target.config["num_hidden_layers"]), rows)
    begun, new = (
        asdict(kind.read_spec(read_config(values, kind.config), shapes, shape, "float16"))
        for values in (files.config, config)
    )
    for name in begun:
        if name != "context" and begun[name] != new[name]:
            raise UserError(
                f"{files.folder} holds a head with {name} {begun[name]}, but the features and "
                f"options are for {new[name]}: use those of that head"
            )


def _stored_as(value: Tensor) -> Tensor:
    value = value.detach().cpu().contiguous()
    if not value.is_floating_point():
        return value
    half = value.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise UserError("the trained weights do not fit into fp16: train with a lower --rate")
    return half
