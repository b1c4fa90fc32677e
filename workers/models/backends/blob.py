"""A layer's matrices in one contiguous memory in the kernels' layout, to copy to a device at once.
The CPU kernels read it directly; `unpack` lays a matrix out for torch."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.kernels import ALIGNMENT, Kind, PackedMatrix, fresh_memory
from dovetail.workers.kernels.blocks import BlockMatrix, Part
from dovetail.workers.kernels.layer_plan import (
    BesidePlan,
    ExpertsPlan,
    InputPlan,
    LatentPlan,
    LayerPlan,
    RouterPlan,
    StreamsPlan,
)

NESTED = (BesidePlan, InputPlan, LatentPlan, ExpertsPlan, RouterPlan, StreamsPlan)
"""Parts of a layer's plan that hold matrices, too."""
EXPERTS, ROUTER, SHARED_GATE = "experts.", "experts.router.logits", "experts.shared_gate"
PANEL, VECTOR, STEP = 48, 16, 4  # of `kernels/native/packing.h`: outputs of a panel, of a vector
ELEMENTS: Mapping[IntEnum, torch.dtype] = {
    Kind.FP32: torch.float32,
    Kind.FP16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.INT8: torch.int8,
}


@dataclass(frozen=True)
class Lying:
    """The place of a matrix in a blob."""

    kind: IntEnum
    n: int
    k: int
    offset: int
    size: int
    bias: bool
    parts: Sequence[Part] = ()  # the parts of a matrix of blocks; empty for any other

    @classmethod
    def of(cls, matrix: PackedMatrix, offset: int = 0) -> "Lying":
        """Return the place of a copy of a matrix at an offset."""
        parts = matrix.parts if isinstance(matrix, BlockMatrix) else ()
        bias = bool(matrix.struct.bias)
        return cls(matrix.kind, matrix.n, matrix.k, offset, matrix.nbytes, bias, parts)


@dataclass(frozen=True)
class Blob:
    """The bytes of a layer's matrices, and their offsets."""

    memory: Tensor  # uint8 on the CPU
    matrices: Mapping[str, Lying]


def named(plan: Any, *, experts: bool = True) -> dict[str, PackedMatrix]:
    """Return a layer's matrices by their fields, such as `latent.key_up.0`; `experts`: with those
    of experts and router."""
    found: dict[str, PackedMatrix] = {}
    for name, value in _parts(plan):
        parts = {"": value} if isinstance(value, PackedMatrix) else dict[str, PackedMatrix]()
        if isinstance(value, NESTED):
            parts = {f".{inner}": matrix for inner, matrix in named(value).items()}
        elif isinstance(value, Sequence):
            parts = {f".{index}": matrix for index, matrix in enumerate(value)}
        found |= {f"{name}{inner}": matrix for inner, matrix in parts.items()}
    if experts:
        return found
    rest = (name for name in found if not name.startswith(EXPERTS) or name == SHARED_GATE)
    return {name: found[name] for name in rest}


def _parts(plan: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a plan that are matrices, lists of them, or parts that hold some."""
    for field in fields(plan):
        value = getattr(plan, field.name)
        first = value[0] if isinstance(value, Sequence) and value else value
        if isinstance(first, (PackedMatrix, *NESTED)):
            yield field.name, value


def with_matrices(plan: Any, matrices: Mapping[str, PackedMatrix], path: str = "") -> Any:
    """Return a plan with other matrices in the place of those that are named."""
    moved = dict[str, Any]()
    for name, value in _parts(plan):
        full = f"{path}{name}"
        if isinstance(value, NESTED):
            moved[name] = with_matrices(value, matrices, f"{full}.")
        elif isinstance(value, Sequence):
            moved[name] = [matrices.get(f"{full}.{i}", own) for i, own in enumerate(value)]
        else:
            moved[name] = matrices.get(full, value)
    return replace(plan, **moved)


def alone(matrix: PackedMatrix) -> tuple[Lying, Tensor]:
    """Return a matrix as the only one of a blob: its place, and its bytes, uint8 on the CPU."""
    return Lying.of(matrix), torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes]


def gather(plan: LayerPlan, *, experts: bool = True) -> Blob:
    """The matrices of a layer, copied into new memory; `experts`: including those of experts."""
    matrices: dict[str, Lying] = {}
    end, own = 0, named(plan, experts=experts)
    for name, matrix in own.items():
        matrices[name] = Lying.of(matrix, end)
        end += -(-matrix.nbytes // ALIGNMENT) * ALIGNMENT
    memory = torch.frombuffer(fresh_memory(end)[0], dtype=torch.uint8)
    for name, lying in matrices.items():
        memmove(memory.data_ptr() + lying.offset, own[name].struct.packed, lying.size)
    return Blob(memory, matrices)


def hollow(plan: LayerPlan, names: Collection[str]) -> LayerPlan:
    """Return the layer without its matrices' memory, for `plan_at` and for its shapes."""
    own = named(plan)
    moved = {name: own[name].at(None, own[name].struct.packed) for name in names}
    hollowed: LayerPlan = with_matrices(plan, moved)
    return hollowed


def plan_at(plan: LayerPlan, blob: Blob, memory: Tensor) -> LayerPlan:
    """Return the layer with its matrices in `memory`, a copy of the blob's on the CPU."""
    own, start = named(plan), memory.data_ptr()
    there = blob.matrices.items()
    moved = {name: own[name].at(memory, start + lying.offset) for name, lying in there}
    placed: LayerPlan = with_matrices(plan, moved)
    return placed


@dataclass(frozen=True)
class Matrix:
    """A matrix in torch's layout, on any device."""

    kind: IntEnum
    weight: Tensor  # [n, k]; of INT8 k is padded with zeros to a multiple of 4
    scales: Tensor | None  # [n] of INT8
    bias: Tensor | None


def unpack(lying: Lying, memory: Tensor) -> Matrix:
    """Return a matrix of a blob in `memory` on any device, copied."""
    bytes_of, element = memory[lying.offset : lying.offset + lying.size], ELEMENTS[lying.kind]
    beside = STEP if lying.kind is Kind.INT8 else 1
    columns, steps = -(-lying.n // VECTOR) * VECTOR, -(-lying.k // beside)
    size = columns * steps * beside * element.itemsize
    packed, whole = bytes_of[:size].view(element), columns // PANEL
    weight = torch.empty(columns, steps, beside, dtype=element, device=memory.device)
    first, last = weight[: whole * PANEL], weight[whole * PANEL :]
    first.view(whole, PANEL, steps, beside).copy_(
        packed[: first.numel()].view(whole, steps, PANEL, beside).transpose(1, 2)
    )
    last.copy_(packed[first.numel() :].view(steps, len(last), beside).transpose(0, 1))
    scales = bias = None
    if lying.kind is Kind.INT8:
        size = (
            -(-(size + 4 * columns) // ALIGNMENT) * ALIGNMENT
        )  # after the columns' sums, which only some instructions need
        scales = bytes_of[size : size + 4 * lying.n].view(torch.float32).clone()
        size += 4 * lying.n
    else:
        size = -(-size // ALIGNMENT) * ALIGNMENT
    if lying.bias:
        bias = bytes_of[size : size + 4 * lying.n].view(torch.float32).clone()
    return Matrix(lying.kind, weight.flatten(1)[: lying.n], scales, bias)
