"""The Python interface of the kernels' experts: the structures of `native/layer.h` for the router,
and the router alone, for parity checks and tests."""

from collections.abc import Sequence
from ctypes import (
    POINTER,
    Array,
    Structure,
    byref,
    c_float,
    c_int32,
    c_int64,
    c_void_p,
    cast,
    memmove,
)
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from dovetail.workers.kernels import (
    ALIGNMENT,
    MatrixStruct,
    PackedMatrix,
    address_of,
    check_matrix,
    declare,
    fresh_memory,
    library,
)
from dovetail.workers.kernels.layer_plan import ExpertsPlan, LayerPlan, Norm, RouterPlan, check_mlp

MatrixT = TypeVar("MatrixT", bound=PackedMatrix)


class NormStruct(Structure):
    """`Norm` of native/layer.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


def norm_struct(norm: Norm | None, width: int) -> NormStruct:
    """Return a norm of this width in the kernels' format, which may be absent."""
    if norm is None:
        return NormStruct()
    weight, bias = (
        None if part is None else address_of(part, (width,), ("float32",))
        for part in (norm.weight, norm.bias)
    )
    return NormStruct(weight, bias)


class RouterStruct(Structure):
    """`Router` of native/layer.h."""

    _fields_ = (
        ("logits", MatrixStruct),
        ("correction", c_void_p),
        *((name, c_int32) for name in ("score", "chosen", "groups", "chosen_groups", "normalised")),
        *((name, c_float) for name in ("least_sum", "scale", "epsilon")),
        *((name, c_int32) for name in ("scales_input", "best_alone")),
        ("added_sum", c_float),
        ("norm", NormStruct),
        ("scales", c_void_p),
        *((name, c_float) for name in ("softcap", "jitter")),
    )


class ExpertsStruct(Structure):
    """`Experts` of native/layer.h, with references to the arrays that it points to."""

    _fields_ = (
        ("router", RouterStruct),
        ("gate_up", POINTER(MatrixStruct)),
        ("down", POINTER(MatrixStruct)),
        ("shared_gate", MatrixStruct),
        *((name, NormStruct) for name in ("input_norm", "output_norm", "shared_norm")),
        *((name, MatrixStruct) for name in ("before", "behind")),
    )


@dataclass(frozen=True)
class Choice:
    """The experts of some rows."""

    ids: Tensor  # int32 [rows, chosen], ascending in each row
    weights: Tensor  # float32 [rows, chosen]
    margins: Tensor
    """float32 [rows]: by how much the last chosen expert is ahead of the next, roughly as a
    difference of logits, even if scores are probabilities or sigmoids."""


@cache
def _functions() -> Any:
    router = POINTER(RouterStruct)
    types = (router, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
    mix = (c_void_p, c_void_p, c_void_p, c_int64)
    declare(library(), {"dt_route": (None, types), "dt_experts": (None, mix)})
    return library()


def mix(layer: Structure, x: Tensor) -> Tensor:
    """Return the output of a layer's experts for each row of x [rows, hidden]: the MLP's input, or
    the states before its norm if experts have a norm of their own."""
    y, shape = torch.empty_like(x), (x.shape[0], layer.hidden)
    addresses = (address_of(part, shape, ("float32",)) for part in (x, y))
    _functions().dt_experts(byref(layer), *addresses, x.shape[0])
    return y


def route(router: RouterPlan, x: Tensor) -> Choice:
    """Return the experts of the rows of x [rows, hidden]."""
    rows = x.shape[0]
    ids = torch.empty(rows, router.chosen, dtype=torch.int32)
    weights, margins = torch.empty(rows, router.chosen), torch.empty(rows)
    _functions().dt_route(
        byref(_router_struct(router)),
        address_of(x, (rows, router.logits.k), ("float32",)),
        rows,
        *(part.data_ptr() for part in (ids, weights, margins)),
    )
    return Choice(ids, weights, margins)


def experts_struct(experts: ExpertsPlan, layer: LayerPlan) -> ExpertsStruct:
    """Return the experts of a layer in the kernels' format; raise ValueError for matrices that do
    not fit together."""
    count, hidden = experts.router.logits.n, layer.hidden
    if not len(experts.gate_up) == len(experts.down) == count:
        raise ValueError(f"a router of {count} experts, but matrices of {len(experts.down)}")
    width = hidden if experts.before is None else experts.before.n
    for gate_up, down in zip(experts.gate_up, experts.down, strict=True):
        check_mlp(gate_up, down, width, layer.activation)
    _check_width(experts, hidden, width)
    struct = ExpertsStruct(router=_router_struct(experts.router))
    for name in ("input_norm", "output_norm", "shared_norm"):
        setattr(struct, name, norm_struct(getattr(experts, name), hidden))
    struct.gate_up, struct.down = matrix_array(experts.gate_up), matrix_array(experts.down)
    if experts.shared_gate is not None:
        struct.shared_gate = experts.shared_gate.struct
    for name in ("before", "behind"):
        if (matrix := getattr(experts, name)) is not None:
            setattr(struct, name, matrix.struct)
    return struct


def _check_width(experts: ExpertsPlan, hidden: int, width: int) -> None:
    """Raise ValueError for matrices around experts that do not lead to their width and back."""
    if experts.before is None and experts.behind is None:
        return
    if experts.before is None or experts.behind is None or experts.input_norm is not None:
        raise ValueError("experts of another width need a matrix on both sides, and no input norm")
    check_matrix("before", experts.before, width, hidden)
    check_matrix("behind", experts.behind, hidden, width)


def matrix_array(matrices: Sequence[PackedMatrix]) -> Any:
    """Return the structures of matrices as an array."""
    array: Array[MatrixStruct] = (MatrixStruct * len(matrices))(*(m.struct for m in matrices))
    return cast(array, POINTER(MatrixStruct))


def _router_struct(router: RouterPlan) -> RouterStruct:
    """Return a router in the kernels' format; raise ValueError for an impossible choice."""
    count = router.logits.n
    grouped = router.groups if count % router.groups == 0 else 0
    within = count // router.groups * router.chosen_groups if grouped else 0
    if not 1 <= router.chosen_groups <= grouped or not 1 <= router.chosen <= within:
        raise ValueError(
            f"{router.chosen} of {count} experts in {router.chosen_groups} of {router.groups} "
            "groups cannot be chosen"
        )
    struct = RouterStruct(logits=router.logits.struct)
    numbers = ("normalised", "least_sum", "added_sum", "scale", "epsilon", "softcap", "jitter")
    how = ("scales_input", "best_alone")
    for name in ("score", "chosen", "groups", "chosen_groups", *numbers, *how):
        setattr(struct, name, getattr(router, name))
    struct.norm = norm_struct(router.norm, router.logits.k)
    for name in ("correction", "scales"):
        if (values := getattr(router, name)) is not None:
            setattr(struct, name, address_of(values, (count,), ("float32",)))
    return struct


def stacked_matrices(
    kind: IntEnum, count: int, n: int, k: int, biases: Tensor | None = None
) -> list[PackedMatrix]:
    """Return `count` empty matrices [n, k] contiguous in memory, to be packed, with their biases
    [count, n]."""
    bias = None if biases is None else biases[0]
    return stacked(PackedMatrix(kind, n, k, bias=bias), count, biases)


def stacked(one: MatrixT, count: int, biases: Tensor | None = None) -> list[MatrixT]:
    """Return `count` empty matrices like `one` contiguous in memory, to be packed, with their
    biases [count, n]."""
    stride = -(-one.nbytes // ALIGNMENT) * ALIGNMENT
    memory, start = fresh_memory(count * stride, count)
    matrices = [one.at(memory, start + index * stride) for index in range(count)]
    for matrix in matrices:
        memmove(matrix.struct.packed, one.head, len(one.head))
    matrices[0].spread(count, stride)
    if biases is not None:
        for matrix, bias in zip(matrices, biases, strict=True):
            memmove(matrix.struct.bias, address_of(bias, (one.n,), ("float32",)), one.n * 4)
    return matrices
