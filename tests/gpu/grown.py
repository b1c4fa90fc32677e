"""A target of the shape of a 7B model that computes the same function as the embedded one: its
matrices stand in the corner of larger ones.

States are wider, and what is beyond the real width stays zero: every matrix that writes to it has
zeros there, and norms make up for the larger mean. Heads and MLP units beyond the real ones compute
seeded numbers and are multiplied by zeros; so do whole layers between the real ones. So acceptance
is that of the embedded target and its substitute, at the cost of a large model. Tensors are made
one layer at a time on the device, and written once.
"""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dovetail.launch.settings.embedded import DEMO_FOLDER

SOURCE = DEMO_FOLDER / "target"
CONTEXT = 4096
"""Positions beyond the embedded target's 512 have angles, and no training."""


@dataclass(frozen=True)
class Shape:
    """The sizes that the model is grown to."""

    hidden: int
    units: int
    layers: int

    @property
    def bytes(self) -> int:
        """The size of its decoder layers in 16 bits."""
        return 2 * self.layers * (3 * self.hidden * self.hidden + 3 * self.hidden * self.units)


SEVEN = Shape(4096, 11008, 32)
"""Llama-2-7B's, with half as many key heads: 12.1 GB."""
SMALL = Shape(320, 768, 9)


def grow(shape: Shape, folder: Path, device: torch.device) -> int:
    """Write the model to a folder; how many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    factor = shape.hidden / config["hidden_size"]
    real = {"layers": config["num_hidden_layers"], "hidden": config["hidden_size"]}
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.units,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": int(config["num_attention_heads"] * factor),
        "num_key_value_heads": int(config["num_key_value_heads"] * factor),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": config["rms_norm_eps"] / factor,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in (
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        shutil.copyfile(SOURCE / name, folder / name)
    stand = {index * shape.layers // real["layers"]: index for index in range(real["layers"])}
    where: dict[str, str] = {}
    with safe_open(SOURCE / "model.safetensors", "pt") as source:
        names = set(source.keys())
        for index in range(shape.layers):
            prefix = f"model.layers.{stand.get(index, 0)}."
            tensors = {
                name.removeprefix(prefix): source.get_tensor(name)
                for name in names
                if name.startswith(prefix)
            }
            grown = _layer(tensors, shape, index, device, real=index in stand)
            _save(
                folder,
                f"model-{index:05}.safetensors",
                {f"model.layers.{index}.{name}": tensor for name, tensor in grown.items()},
                where,
            )
        embedding, norm = (
            source.get_tensor("model.embed_tokens.weight"),
            source.get_tensor("model.norm.weight"),
        )
        others = {
            "model.embed_tokens.weight": _corner(embedding, (len(embedding), shape.hidden)),
            "model.norm.weight": _norm(norm, shape.hidden),
        }
        _save(folder, "model-others.safetensors", others, where)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where}), encoding="utf-8"
    )
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _layer(
    tensors: Mapping[str, Tensor], shape: Shape, index: int, device: torch.device, *, real: bool
) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(20_260_101 + index)
    hidden = tensors["self_attn.o_proj.weight"].shape[0]
    grown: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if tensor.dim() == 1:
            grown[name] = _norm(tensor, shape.hidden)
            continue
        rows, inputs = (
            _grown(size, hidden, shape, first)
            for size, first in zip(tensor.shape, _names(part), strict=True)
        )
        if part in ("o_proj", "down_proj"):
            grown[name] = _corner(tensor if real else tensor[:0], (rows, inputs))
            continue
        noise = torch.randn(
            rows, inputs, generator=generator, device=device, dtype=torch.float32
        ) / math.sqrt(inputs)
        whole = noise.to(tensor.dtype)
        if real:
            whole[: tensor.shape[0], : tensor.shape[1]] = tensor.to(device)
        grown[name] = whole.cpu()
    return grown


def _names(part: str) -> tuple[str, str]:
    """Return what the rows and the inputs of a matrix are."""
    return {
        "gate_proj": ("units", "hidden"),
        "up_proj": ("units", "hidden"),
        "down_proj": ("hidden", "units"),
    }.get(part, ("hidden", "hidden"))


def _grown(size: int, hidden: int, shape: Shape, what: str) -> int:
    """The new size of one side: that of keys and values grows as that of the states does."""
    return shape.units if what == "units" else size * shape.hidden // hidden


def _corner(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    whole = torch.zeros(shape, dtype=tensor.dtype)
    whole[: tensor.shape[0], : tensor.shape[1]] = tensor
    return whole


def _norm(weight: Tensor, hidden: int) -> Tensor:
    """A root-mean-square norm over more numbers, the others of which are zero."""
    whole = torch.ones(hidden)
    whole[: len(weight)] = weight.float() * math.sqrt(len(weight) / hidden)
    return whole.to(weight.dtype)


def _save(folder: Path, file: str, tensors: Mapping[str, Tensor], where: dict[str, str]) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / file,
        metadata={"format": "pt"},
    )
    where.update(dict.fromkeys(tensors, file))
