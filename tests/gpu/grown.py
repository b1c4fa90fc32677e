"""A target of the shape of a 7B model that computes the same function as the embedded one: its
matrices stand in the corner of larger ones.

States are wider, and what is beyond the real width stays zero: every matrix that writes to it has
zeros there, and norms make up for the larger mean. Heads and MLP units beyond the real ones compute
seeded numbers and are multiplied by zeros; so do whole layers between the real ones. Heads are
wider too: the numbers of a real one stand where the same angles turn them. So acceptance is that of
the embedded target and its substitute, at the cost of a large model. Tensors are made one layer at
a time on the device, and written once.
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

from dovetail.launch.settings.models import DEMO_FOLDER

SOURCE = DEMO_FOLDER / "target"
CONTEXT = 4096
"""Positions beyond the embedded target's 512 have angles, and no training."""


@dataclass(frozen=True)
class Shape:
    """The sizes that the model is grown to."""

    hidden: int
    units: int
    layers: int
    head: int
    """Numbers of a head."""

    @property
    def bytes(self) -> int:
        """The size of its decoder layers in 16 bits."""
        return 2 * self.layers * (3 * self.hidden * self.hidden + 3 * self.hidden * self.units)


SEVEN = Shape(4096, 11008, 32, 128)
"""Llama-2-7B's, with half as many key heads: 12.1 GB."""
SMALL = Shape(512, 768, 9, 64)


def grow(shape: Shape, folder: Path, device: torch.device) -> int:
    """Write the model to a folder; how many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((SOURCE / "config.json").read_text(encoding="utf-8"))
    factor, wider = shape.hidden / config["hidden_size"], shape.head / config["head_dim"]
    rope = config["rope_parameters"]
    real = {"layers": config["num_hidden_layers"], "head": config["head_dim"]}
    config |= {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.units,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": int(config["num_attention_heads"] * factor / wider),
        "num_key_value_heads": int(config["num_key_value_heads"] * factor / wider),
        "head_dim": shape.head,
        "rope_parameters": rope | {"rope_theta": rope["rope_theta"] ** wider},
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
            heads = Heads(real["head"], shape.head)
            grown = _layer(tensors, shape, heads, index, device, real=index in stand)
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


@dataclass(frozen=True)
class Heads:
    """Heads that stand in wider ones."""

    width: int
    wider: int

    def turned(self, count: int) -> Tensor:
        """Return the places of the first `count` numbers of queries or keys: a half of a head is
        turned with the other half, number by number, so that each begins one."""
        halves = torch.arange(count).view(-1, self.width // 2)
        return (halves + self._apart(len(halves), self.width // 2, self.wider // 2)).flatten()

    def plain(self, count: int) -> Tensor:
        """Return the places of the first `count` numbers of values."""
        heads = torch.arange(count).view(-1, self.width)
        return (heads + self._apart(len(heads), self.width, self.wider)).flatten()

    @staticmethod
    def _apart(count: int, width: int, wider: int) -> Tensor:
        return torch.arange(count)[:, None] * (wider - width)


def _layer(
    tensors: Mapping[str, Tensor],
    shape: Shape,
    heads: Heads,
    index: int,
    device: torch.device,
    *,
    real: bool,
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
            whole = torch.zeros(rows, inputs, dtype=tensor.dtype)
            if real:
                count = tensor.shape[1]
                columns = heads.plain(count) if part == "o_proj" else torch.arange(count)
                whole[: len(tensor), columns] = tensor
            grown[name] = whole
            continue
        noise = torch.randn(
            rows, inputs, generator=generator, device=device, dtype=torch.float32
        ) / math.sqrt(inputs)
        whole = noise.to(tensor.dtype)
        if real:
            _set_rows(whole, tensor.to(device), part, heads)
        grown[name] = whole.cpu()
    return grown


def _set_rows(whole: Tensor, tensor: Tensor, part: str, heads: Heads) -> None:
    """Put the rows of a real matrix into the larger one."""
    count, inputs = tensor.shape
    places = torch.arange(count)
    if part == "q_proj":  # what is between counts for nothing, and scores are divided by more
        whole[: count * heads.wider // heads.width, :inputs] = 0.0
        tensor = (tensor.float() * math.sqrt(heads.wider / heads.width)).to(tensor.dtype)
    if part in ("q_proj", "k_proj"):
        places = heads.turned(count)
    elif part == "v_proj":
        places = heads.plain(count)
    whole[places.to(whole.device), :inputs] = tensor


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
