"""The tensors of a quantised checkpoint as matrices, decoded as they are read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.digests import all_finite
from dovetail.workers.models.checkpoints.files import damaged
from dovetail.workers.models.checkpoints.quantised import codes
from dovetail.workers.models.checkpoints.quantised.schemes import (
    WHOLE,
    Matrix,
    Scheme,
    UnfitError,
    bits_of,
    block_of,
    matrices,
    scheme_of,
    unlike,
)
from dovetail.workers.models.checkpoints.stored import Stored


@dataclass(frozen=True)
class CodedTensor(Stored):
    """[out, in] or [experts, out, in] of codes and scales; `kind` and `shape` are the numbers'."""

    scheme: Scheme
    parts: Mapping[str, tuple[str, Stored]]  # a part, as `schemes.py` calls it -> name and place

    @property
    def in_8_bits(self) -> bool:
        """Return whether each number is one whole code of 8 bits."""
        return "codes" in self.parts and self.parts["codes"][1].kind == WHOLE

    @property
    def reads_one(self) -> bool:
        return "codes" in self.parts

    def read(self, name: str, *, checked: bool = True) -> Tensor:
        """Return the numbers in fp32; `CheckpointError` where one is NaN or infinite."""
        found = self._decoded({part: at.read(full) for part, (full, at) in self.parts.items()})
        if not all_finite(found.view(-1).view(torch.uint8).numpy(), "F32"):
            raise self.not_finite(name)
        return found

    def read_one(self, name: str, index: int) -> Tensor:
        parts = {
            part: (full, at.one(index) if len(at.shape) == len(self.shape) else at)
            for part, (full, at) in self.parts.items()
        }
        return replace(self, shape=self.shape[1:], parts=parts).read(name)

    def _decoded(self, found: Mapping[str, Tensor]) -> Tensor:
        if "codes" in self.parts:
            block = block_of(self.shape, self.parts["scales"][1].shape, self.scheme)
            assert block is not None
            scales, zeros = found["scales"], found.get("zeros")
            width = len(self.shape)
            return codes.scaled(
                found["codes"],
                _wide(scales, width),
                None if zeros is None else _wide(zeros, width),
                block,
            )
        words, scales, zeros = found["words"], found["scales"], found.get("zeros")
        groups, bits = found.get("groups"), bits_of(self.parts, self.scheme)
        packed = self.scheme.method == "compressed-tensors"
        if groups is not None:
            # compressed-tensors takes groups with a -1 as not set: inputs follow each other
            if packed and bool((groups == -1).any()):
                groups = None
            else:
                self._check_groups(groups, scales.shape[1 if packed else 0])
        if packed:
            if "shape" in found and tuple(found["shape"].tolist()) != self.shape:
                raise CheckpointError(f"{self.file}: {unlike(self.parts['shape'][0])}")
            return codes.packed(words, scales, zeros, groups, bits)
        assert zeros is not None
        if self.scheme.method == "awq":
            return codes.awq(words, zeros, scales)
        if groups is None:
            groups = torch.arange(self.shape[1]) // (self.shape[1] // len(scales))
        below, symmetric = self.scheme.below, self.scheme.symmetric
        return codes.gptq(words, zeros, scales, groups, bits, below=below, symmetric=symmetric)

    def _check_groups(self, groups: Tensor, count: int) -> None:
        low, high = int(groups.min()), int(groups.max())
        if low < 0 or high >= count:
            text = f"names group {low if low < 0 else high}, and its matrix has 0 to {count - 1}"
            raise damaged(f"{self.file}: tensor {self.parts['groups'][0]} {text}")


def decoded(content: Mapping[str, Any], tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors by the names of their matrices, decoded if config.json says so;
    `CheckpointError` for parts that are missing or misshapen."""
    if not tensors or (scheme := scheme_of(content)) is None:
        return dict(tensors)
    try:
        found, plain = matrices(scheme, tensors)
    except UnfitError as error:
        file = (tensors.get(error.name) or next(iter(tensors.values()))).file
        where = f"{file}: " if error.name else f"{file.parent}: "
        raise CheckpointError(f"{where}{error}") from None
    return {**plain, **{name: _coded(scheme, matrix) for name, matrix in found.items()}}


def _coded(scheme: Scheme, matrix: Matrix[Stored]) -> CodedTensor:
    first = matrix.parts[matrix.main][1]
    size = sum(stored.size_bytes for _, stored in matrix.parts.values())
    plain = (first.file, "F32", matrix.shape, first.offset, size, first.identity)
    return CodedTensor(*plain, scheme, matrix.parts)


def _wide(scales: Tensor, dimensions: int) -> Tensor:
    """Scales of a matrix or of matrices with as many dimensions as these have."""
    if scales.numel() == 1:
        return scales.view((1,) * dimensions)
    return scales[..., None] if scales.ndim < dimensions else scales
