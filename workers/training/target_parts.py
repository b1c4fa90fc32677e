"""Reads the parts of a target that a draft head uses: embedding, output head and last layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.models.checkpoints.checkpoint import open_weights
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.stored import Stored


@dataclass(frozen=True)
class Frozen:
    """The tensors that a head shares with its target."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]


@dataclass(frozen=True)
class TargetParts:
    """The parts of a target that a head uses."""

    source: str
    digest: str
    config: Mapping[str, Any]
    frozen: Frozen
    tensors: Mapping[str, Stored]

    def read(self, ending: str) -> Tensor:
        """Return the tensor whose name is `ending` behind a prefix such as `model.`. Raises
        `UserError` unless there is exactly one."""
        return _one(self.tensors, ending, self.source)

    def parts(self, beginning: str) -> list[str]:
        """Return the rests of the names that have `beginning` behind a prefix such as `model.`."""
        return [
            name.split(beginning, 1)[1]
            for name in self.tensors
            if name.startswith(beginning) or f".{beginning}" in name
        ]


def read_target(source: str) -> TargetParts:
    """Read embedding, output head and shapes of a target (a folder or a hub id)."""
    folder = find_folder(source)
    weights, config = open_weights(folder), text_part(read_json(folder / "config.json"))
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
            f"{source} has {len(names)} tensors called {ending}, but a head needs a target with "
            "exactly one"
        )
    return tensors[names[0]].read(names[0])
