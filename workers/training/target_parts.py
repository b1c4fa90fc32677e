"""Reads the parts of a target that a draft head uses: embedding, output head and last layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.heads.checkpoint import read_shared
from dovetail.workers.models.checkpoints.checkpoint import open_weights
from dovetail.workers.models.checkpoints.composite import text_part
from dovetail.workers.models.checkpoints.configured import read_config
from dovetail.workers.models.checkpoints.files import read_json
from dovetail.workers.models.checkpoints.hub import find_folder
from dovetail.workers.models.checkpoints.stored import Stored
from dovetail.workers.models.families.description import Norms
from dovetail.workers.models.families.registry import FAMILIES


@dataclass(frozen=True)
class Frozen:
    """The tensors that a head shares with its target, in any type; tied ones are one tensor."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]; the losses get the rows of the head's own vocabulary [Vd, H]


@dataclass(frozen=True)
class TargetParts:
    """The parts of a target that a head uses."""

    source: str
    digest: str
    config: Mapping[str, Any]
    frozen: Frozen
    tensors: Mapping[str, Stored]
    norms: Norms | None = None  # of its last layer; None: a family that is not described

    def read(self, ending: str) -> Tensor:
        """Return the tensor whose name is `ending` behind a prefix such as `model.`. Raises
        `UserError` unless there is exactly one."""
        return _one(self.tensors, ending, self.source)

    def norm(self, ending: str) -> Tensor:
        """Return the factors of a norm; some families store them minus one."""
        return self.read(ending).float() + (self.norms is not None and self.norms.plus_one)

    @property
    def is_plain(self) -> bool:
        """Return whether its last layer has norms like a head's: before attention and MLP only."""
        norms = self.norms
        return norms is None or (norms.post_mixer is None and norms.post_mlp is None)

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
    whole = read_config(folder / "config.json")
    family, last = FAMILIES.get(whole.model_type), int(config["num_hidden_layers"]) - 1
    norms = None if family is None else family.layer(whole, last).norms
    frozen = Frozen(embedding, head)
    return TargetParts(source, weights.digest, config, frozen, weights.tensors, norms)


def _named(tensors: Mapping[str, Stored], ending: str) -> list[str]:
    return [name for name in tensors if name == ending or name.endswith("." + ending)]


def _one(tensors: Mapping[str, Stored], ending: str, source: str) -> Tensor:
    names = _named(tensors, ending)
    if len(names) != 1:
        raise UserError(
            f"{source} has {len(names)} tensors called {ending}, but a head needs a target with "
            "exactly one"
        )
    return read_shared(tensors[names[0]], names[0])
