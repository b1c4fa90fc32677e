"""The files of a GGUF model: one, or the parts of a split one (`llama-gguf-split`), checked against
each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.digests import refuse_changed
from dovetail.workers.models.checkpoints.files import unreadable
from dovetail.workers.models.checkpoints.gguf.kinds import F32, KINDS, UNREAD
from dovetail.workers.models.checkpoints.gguf.names import AGAIN, parts_of
from dovetail.workers.models.checkpoints.gguf.reader import FileHead, read_head

MOST_NUMBERS = 1 << 16


@dataclass(frozen=True)
class Model:
    """The heads of a model's files."""

    heads: Sequence[FileHead]

    @property
    def file(self) -> Path:
        """Return the file that names the model: its first."""
        return self.heads[0].file

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the model's metadata."""
        return self.heads[0].facts


def read_model(file: Path, *, texts: bool = True) -> Model:
    """Return the heads of a model by any of its files, with its vocabulary if `texts`;
    `CheckpointError` for parts that are missing or foreign."""
    parts = parts_of(file)
    if missing := next((part for part in parts if not part.is_file()), None):
        if len(parts) == 1:
            raise CheckpointError(f"{file}: there is no such file; check the path")
        raise CheckpointError(f"{missing} is missing, a part of {file.name}; fetch it, too")
    heads = [read_head(part, texts=texts) for part in parts]
    for number, head in enumerate(heads):
        _refuse_part(head, number, len(heads))
    _refuse_kind(heads[0])
    for head in heads:
        _refuse_places(head)
    names = [place.name for head in heads for place in head.tensors]
    counted = heads[0].facts.get("split.tensors.count", len(names))
    if len(set(names)) != len(names) or (len(heads) > 1 and counted != len(names)):
        raise CheckpointError(
            f"{file}: its parts have {len(names)} tensors, {len(set(names))} of them different, "
            f"where {str(counted)[:50]} are called for; {AGAIN}"
        )
    return Model(heads)


def numbers_of(model: Model, name: str) -> list[float]:
    """Return the numbers of a small fp32 tensor, such as the factors of a rotation."""
    head, place = next((h, p) for h in model.heads for p in h.tensors if p.name == name)
    if place.kind != F32 or len(place.shape) != 1 or place.shape[0] > MOST_NUMBERS:
        raise CheckpointError(f"{head.file}: tensor {name} is no short list of F32; {AGAIN}")
    try:
        with head.file.open("rb") as file:
            file.seek(place.offset)
            found = np.frombuffer(file.read(place.size_bytes), dtype="<f4")
            refuse_changed(head.file, head.identity, file)
    except OSError as error:
        raise unreadable(head.file, error) from None
    if not np.isfinite(found).all():
        raise CheckpointError(f"{head.file}: tensor {name} holds NaN or infinite values")
    return [float(number) for number in found]


def _refuse_places(head: FileHead) -> None:
    """`CheckpointError` for tensors of an unread type, beyond the file's end, or overlapping."""
    end, before = head.size_bytes, ""
    for place in sorted(head.tensors, key=lambda place: place.offset):
        if place.kind not in KINDS:
            kind = UNREAD.get(place.kind, f"number {place.kind}")
            raise CheckpointError(
                f"{head.file}: tensor {place.name} is of type {kind}, which is not read here; take "
                f"a file of another quantisation, such as Q4_K_M or Q8_0"
            )
        try:
            size = place.size_bytes
        except ValueError as error:
            raise CheckpointError(f"{head.file}: tensor {place.name} {error}; {AGAIN}") from None
        if place.offset < end:
            within = f"tensor {before}" if before else "the head"
            raise CheckpointError(f"{head.file}: {place.name} begins within {within}; {AGAIN}")
        end, before = place.offset + size, place.name
        if end > head.identity.size:
            raise CheckpointError(f"{head.file} ends within tensor {place.name}; {AGAIN}")


def _refuse_part(head: FileHead, number: int, count: int) -> None:
    """`CheckpointError` for a part whose metadata contradicts its name."""
    said = tuple(head.facts.get(f"split.{key}", usual) for key, usual in (("no", 0), ("count", 1)))
    if not all(isinstance(value, int) for value in said):
        raise CheckpointError(f"{head.file}: split.no or split.count is no whole number; {AGAIN}")
    place, parts = said[0], said[1] or 1
    if (place, parts) != (number, count):
        raise CheckpointError(
            f"{head.file} says that it is part {place + 1} of {parts}, and by its name "
            f"is {number + 1} of {count}; give it the name that it had"
        )


def _refuse_kind(head: FileHead) -> None:
    """Return a `CheckpointError` for a file that is not a complete model."""
    kind = head.facts.get("general.type", "model")
    architecture = head.facts.get("general.architecture")
    if not isinstance(kind, str):
        raise CheckpointError(f"{head.file}: general.type is no text; {AGAIN}")
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{head.file} does not name its architecture; {AGAIN}")
    if kind == "adapter":
        raise CheckpointError(f"{head.file} holds a LoRA adapter; merge it into its model")
    if kind == "mmproj" or architecture == "clip":
        raise CheckpointError(
            f"{head.file} holds an encoder of images or sound (mmproj); name the file of the "
            "language model beside it"
        )
    if kind != "model":
        raise CheckpointError(
            f"{head.file} holds no model (general.type is {str(kind)[:50]}); name the file of a "
            "model"
        )
