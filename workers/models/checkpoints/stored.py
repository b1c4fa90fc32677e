"""The place of a tensor's numbers in a weight file, and their types."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.digests import (
    Identity,
    all_finite,
    read_full,
    refuse_changed,
)
from dovetail.workers.models.checkpoints.files import damaged, unreadable
from dovetail.workers.progress import count_bytes

FLOAT_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
COUNT_TYPES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool}
"""Types of tables of token ids, which some draft heads have."""
CODE_TYPES = {"U8": torch.uint8}  # types of codes
QUANTISED_TYPES = {"I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}
"""Types of quantised numbers that need scales."""
POWER_TYPES = {"F8_E8M0": torch.float8_e8m0fnu}  # types of scales that are powers of two
READABLE = {**FLOAT_TYPES, **COUNT_TYPES, **CODE_TYPES, **QUANTISED_TYPES, **POWER_TYPES}


@dataclass(frozen=True)
class Stored:
    """The place of one tensor's numbers in a safetensors file."""

    file: Path
    kind: str  # safetensors' name of the type: F32, F16, BF16, ..
    shape: tuple[int, ...]
    offset: int  # offset in bytes from the beginning of the file
    size_bytes: int
    identity: Identity  # the file's identity when its header was read; a changed file is refused

    def read(self, name: str, *, checked: bool = False) -> Tensor:
        """Return the tensor in its stored type, called `name` in errors. `checked`: refuse NaN and
        infinity, which no digest has checked."""
        if (kind := READABLE.get(self.kind)) is None:
            raise self._unreadable(name)
        content = self.content(name)
        if not content:
            return torch.empty(self.shape, dtype=kind)
        if checked and not all_finite(content, self.kind):
            raise self.not_finite(name)
        return torch.frombuffer(content, dtype=kind).view(self.shape)

    @property
    def reads_one(self) -> bool:
        """Return whether `read_one` is possible."""
        return True

    def read_one(self, name: str, index: int) -> Tensor:
        """Return the tensor at an index of the first dimension; the others are not read."""
        return self.one(index).read(name)

    def one(self, index: int) -> "Stored":
        """Return the place of the tensor at an index of the first dimension of this one."""
        return replace(self.some(index, 1), shape=self.shape[1:])

    def some(self, first: int, count: int) -> "Stored":
        """Return the place of `count` tensors along the first dimension, from `first` on."""
        size = self.size_bytes // self.shape[0]
        return replace(
            self,
            shape=(count, *self.shape[1:]),
            offset=self.offset + first * size,
            size_bytes=count * size,
        )

    def content(self, name: str) -> bytearray:
        """Return the bytes of the tensor, called `name` in errors."""
        content = bytearray(self.size_bytes)
        self.read_into(memoryview(content), name)
        count_bytes(self.size_bytes)
        return content

    def read_into(self, block: memoryview, name: str, start: int = 0) -> None:
        """Fill a block with the bytes from `start` on of the tensor, called `name` in errors."""
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.offset + start)
                count = read_full(file, block)
                refuse_changed(self.file, self.identity, file)
        except OSError as error:
            raise unreadable(self.file, error) from None
        if count != len(block):
            raise self._unreadable(name)

    def refuse_shape(self, name: str, shape: Sequence[int], folder: Path) -> None:
        """`CheckpointError` if the tensor, called `name`, has another shape than config.json's."""
        if self.shape != tuple(shape):
            text = f"{folder}: tensor {name} has the shape {list(self.shape)}"
            raise damaged(f"{text}, where config.json calls for {list(shape)}")

    def refuse_kind(self, name: str, kinds: Collection[str] = FLOAT_TYPES) -> None:
        """`CheckpointError` if the numbers of the tensor, called `name`, are of another type."""
        if self.kind not in kinds:
            text = f"{self.file}: tensor {name} has numbers of type {self.kind}"
            raise CheckpointError(f"{text}; take weights of type {', '.join(kinds)}")

    def _unreadable(self, name: str) -> CheckpointError:
        return damaged(f"{self.file}: tensor {name} of type {self.kind} cannot be read as numbers")

    def not_finite(self, name: str) -> CheckpointError:
        """Return the error for NaN or infinite values."""
        return CheckpointError(f"{self.file}: tensor {name} holds NaN or infinite values")
