"""A layer's matrices in one contiguous memory in the kernels' layout, to copy to a device at once.
The CPU kernels read it directly; `unpack` lays a matrix out for torch."""

from collections.abc import Collection, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.kernels import ALIGNMENT, Kind, PackedMatrix, fresh_memory
from dovetail.workers.kernels.blocks import BlockMatrix, Part
from dovetail.workers.kernels.layer_plan import ExpertsPlan, LayerPlan

MATRICES = ("qkv", "output", "gate_up", "down", "mixer_gate")  # the matrices of all rows, by name
PARTS = {
    "beside_given": ("beside", "given"),
    "beside_output": ("beside", "output"),
    "query_up": ("latent", "query_up"),
    "input_gate": ("own_input", "gate"),
    "input_projection": ("own_input", "projection"),
}
"""Other matrices, by their part of a plan and their names in it."""
BY_HEAD = ("key_up", "value_up")  # the matrices of the heads of attention over latents
ROUTER, SHARED_GATE, EXPERTS = "router", "shared_gate", ("gate_up", "down")
AROUND = {"before_experts": "before", "behind_experts": "behind"}
"""The matrices before and after experts of another width, by their names in the experts' plan."""
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


def numbered(part: str, index: int) -> str:
    """Return the name of a matrix of an expert, or of a head."""
    return f"{part}.{index}"


def named(plan: LayerPlan, *, experts: bool = True) -> dict[str, PackedMatrix]:
    """Return a layer's matrices by name; `experts`: with those of experts and router."""
    found = {name: part for name in MATRICES if (part := getattr(plan, name)) is not None}
    for name, (owner, field) in PARTS.items():
        if (matrix := getattr(getattr(plan, owner), field, None)) is not None:
            found[name] = matrix
    if plan.latent is not None:
        found |= _listed(plan.latent, BY_HEAD)
    if plan.experts is not None and plan.experts.shared_gate is not None:
        found[SHARED_GATE] = plan.experts.shared_gate
    if plan.experts is None or not experts:
        return found
    found[ROUTER] = plan.experts.router.logits
    for name, field in AROUND.items():
        if (matrix := getattr(plan.experts, field)) is not None:
            found[name] = matrix
    return found | _listed(plan.experts, EXPERTS)


def _listed(owner: Any, parts: Sequence[str]) -> dict[str, PackedMatrix]:
    return {
        numbered(part, index): matrix
        for part in parts
        for index, matrix in enumerate(getattr(owner, part))
    }


def _with(plan: LayerPlan, matrices: Mapping[str, PackedMatrix]) -> LayerPlan:
    moved: dict[str, Any] = {name: matrices[name] for name in MATRICES if name in matrices}
    for name, (owner, field) in PARTS.items():
        if name in matrices:
            part = moved.get(owner, getattr(plan, owner))
            moved[owner] = replace(part, **{field: matrices[name]})
    if plan.latent is not None:
        latent = moved.get("latent", plan.latent)
        moved["latent"] = replace(latent, **_lists(plan.latent, BY_HEAD, matrices))
    if plan.experts is not None:
        moved["experts"] = _with_experts(plan.experts, matrices)
    return replace(plan, **moved)


def _with_experts(plan: ExpertsPlan, matrices: Mapping[str, PackedMatrix]) -> ExpertsPlan:
    if SHARED_GATE in matrices:
        plan = replace(plan, shared_gate=matrices[SHARED_GATE])
    if ROUTER not in matrices:
        return plan
    around: dict[str, Any] = {field: matrices.get(name) for name, field in AROUND.items()}
    router = replace(plan.router, logits=matrices[ROUTER])
    return replace(plan, router=router, **around, **_lists(plan, EXPERTS, matrices))


def _lists(owner: Any, parts: Sequence[str], matrices: Mapping[str, PackedMatrix]) -> Any:
    return {
        part: [matrices[numbered(part, index)] for index in range(len(getattr(owner, part)))]
        for part in parts
    }


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
    return _with(plan, {name: own[name].at(None, own[name].struct.packed) for name in names})


def plan_at(plan: LayerPlan, blob: Blob, memory: Tensor) -> LayerPlan:
    """Return the layer with its matrices in `memory`, a copy of the blob's on the CPU."""
    own = named(plan)
    return _with(
        plan,
        {
            name: own[name].at(memory, memory.data_ptr() + lying.offset)
            for name, lying in blob.matrices.items()
        },
    )


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
