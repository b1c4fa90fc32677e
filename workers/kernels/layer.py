"""The Python face of the layer kernels: what a decoder layer is made of, and one call that computes
it for the rows of a pass.

A caller builds a `DecoderLayer` from a `LayerPlan` once a layer, a `LayerPass` once a forward pass,
and runs every layer on it:

    layers = [DecoderLayer(LayerPlan(index=i, ..., qkv=..., output=..., gate_up=..., down=...)) for
    i in range(n)]
    rows = LayerPass(positions, [CacheRows(keys, values, start=40, count=3, paths=lay_paths(40,
    [[40], [40, 41], [40, 42]]))])
    for layer in layers:
        layer.run(rows, hidden) # float32 [rows, hidden], in place; keys and values of the rows go
        into the caches

Knows tensors, slots and paths, not models or trees. Tensors are contiguous and on the CPU; whatever
a structure points to is kept alive beside it.
"""

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.kernels import MatrixStruct, PackedMatrix, declare, fresh_memory, library

LANES = 16
"""Positions that stand side by side in a block of keys; capacities are multiples of it."""


class NormKind(IntEnum):
    """Root mean square, or mean and variance."""

    RMS = 0
    LAYER_NORM = 1


class Activation(IntEnum):
    """What stands between the two halves of the MLP; the gated ones multiply with the second half
    of `gate_up`."""

    SILU_GATED = 0
    GELU_TANH_GATED = 1
    GELU_TANH = 2


@dataclass(frozen=True)
class Norm:
    """float32 [width]; Gemma's weights come as 1 + weight."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Rotary:
    """The angles of all positions: float32 [context, rotary_dim / 2]; rotary_dim may be less than
    head_dim, and the rest of a head is left alone."""

    cosines: Tensor
    sines: Tensor


@dataclass(frozen=True)
class LayerPlan:
    """A decoder layer: h += o(attention(norm(h))), then h += down(activation(gate_up(norm(h)))),
    with a norm on what is added where there is a post norm."""

    index: int
    """Of the layer in the caches."""
    heads: int
    kv_heads: int
    head_dim: int
    qkv: PackedMatrix
    """[(heads + 2 kv_heads) head_dim, hidden]: all queries, all keys, all values."""
    output: PackedMatrix
    gate_up: PackedMatrix
    """[2 intermediate, hidden], the gate first; without a gate [intermediate, hidden]."""
    down: PackedMatrix
    attention_norm: Norm | None
    """None: attention reads the hidden states as they are, as in the first layer of an EAGLE
    head."""
    mlp_norm: Norm
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None
    query_norm: Norm | None = None
    """[head_dim], RMS, on each head before it is rotated."""
    key_norm: Norm | None = None
    rotary: Rotary | None = None
    norm_kind: NormKind = NormKind.RMS
    activation: Activation = Activation.SILU_GATED
    epsilon: float = 1e-6
    scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """Scores become softcap tanh(score / softcap); 0: they do not."""
    window: int = 0
    """A position sees itself and window - 1 before it; 0: all."""


@dataclass(frozen=True)
class AttentionPlan:
    """The attention of a layer whose other parts are computed one by one; names as in
    `LayerPlan`."""

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    epsilon: float = 1e-6


@dataclass(frozen=True)
class CacheRows:
    """The rows of one session in a pass: they are written to slots start .. start + count - 1 of
    its cache."""

    keys: Tensor
    """float32 [layers, kv_heads, capacity / 16, head_dim, 16] of the whole cache."""
    values: Tensor
    """float32 [layers, kv_heads, capacity, head_dim]."""
    start: int
    count: int
    paths: "Paths | None" = None
    """None: row i sees slots 0 .. start + i."""


@dataclass(frozen=True)
class Paths:
    """What each row sees: slots 0 .. prefix - 1 and behind them its own path, root first and itself
    last, by any slots from prefix on."""

    prefix: int
    offsets: Tensor
    """int32 [rows + 1]: the path of row i is slots[offsets[i] : offsets[i + 1]]."""
    slots: Tensor
    """int32."""


def new_cache(*, layers: int, kv_heads: int, head_dim: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Keys and values for `capacity` slots and what is missing to a whole block, in huge pages
    where the system gives them: a pass reads all of it."""
    blocks = -(-capacity // LANES)
    size = layers * kv_heads * blocks * LANES * head_dim
    keys, values = (
        torch.frombuffer(fresh_memory(4 * size)[0], dtype=torch.float32) if size else torch.empty(0)
        for _ in range(2)
    )
    return keys.view(layers, kv_heads, blocks, head_dim, LANES), values.view(
        layers, kv_heads, blocks * LANES, head_dim
    )


def lay_paths(prefix: int, paths: Sequence[Sequence[int]]) -> Paths:
    """The paths of the rows of a segment, one after the other."""
    offsets = torch.tensor([0, *accumulate(map(len, paths))], dtype=torch.int32)
    return Paths(prefix, offsets, torch.tensor(list(chain.from_iterable(paths)), dtype=torch.int32))


class NormStruct(Structure):
    """`Norm` of native/layer.h."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class LayerStruct(Structure):
    """`Layer` of native/layer.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "index",
                "hidden",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "rotary_dim",
                "window",
                "norm_kind",
                "activation",
            )
        ),
        *((name, c_float) for name in ("epsilon", "scale", "softcap")),
        ("reserved", c_int32),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        *(
            (name, NormStruct)
            for name in (
                "attention_norm",
                "post_attention_norm",
                "mlp_norm",
                "post_mlp_norm",
                "query_norm",
                "key_norm",
            )
        ),
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
    )


class SegmentStruct(Structure):
    """`Segment` of native/layer.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("first_row", "count", "start", "prefix", "capacity", "reserved")
        ),
        *((name, c_void_p) for name in ("keys", "values", "path_offsets", "path_slots")),
    )


class PassStruct(Structure):
    """`Pass` of native/layer.h."""

    _fields_ = (
        ("hidden", c_void_p),
        ("positions", c_void_p),
        ("segments", POINTER(SegmentStruct)),
        ("rows", c_int32),
        ("segment_count", c_int32),
        ("parts", c_void_p),
    )


@cache
def _functions() -> Any:
    """The library with the types of this module's functions."""
    layer, rows = POINTER(LayerStruct), POINTER(PassStruct)
    declare(
        library(),
        {
            "dt_layer": (None, (layer, rows)),
            "dt_place": (None, (layer, rows, c_void_p)),
            "dt_attention": (None, (layer, rows, c_void_p, c_void_p)),
            "dt_norm": (
                None,
                (c_int32, POINTER(NormStruct), c_void_p, c_void_p, c_int64, c_int64, c_float),
            ),
            "dt_gate": (None, (c_int32, c_void_p, c_void_p, c_int64, c_int64)),
            "dt_rotary_table": (None, (c_void_p, c_int64, c_float, c_int64, c_void_p, c_void_p)),
        },
    )
    return library()


def rotary_table(frequencies: Tensor, context: int, *, scaling: float = 1.0) -> Rotary:
    """Cosines and sines of position times frequency [rotary_dim / 2], times scaling, for all
    positions below `context`: the same bytes on every machine."""
    pairs = frequencies.numel()
    table = torch.empty(2, context, pairs)
    start = _address(frequencies.float().contiguous(), (pairs,))
    _functions().dt_rotary_table(
        start, pairs, scaling, context, table[0].data_ptr(), table[1].data_ptr()
    )
    return Rotary(table[0], table[1])


class LayerPass:
    """The rows of a pass, for all layers: their positions, and which slots of which caches they
    write and see."""

    def __init__(self, positions: Tensor, segments: Sequence[CacheRows]) -> None:
        """positions: int64 [rows], those of the segments one after the other."""
        self.rows = sum(segment.count for segment in segments)
        self._held = (positions, segments)
        self._segments = (SegmentStruct * len(segments))()
        first = 0
        for struct, segment in zip(self._segments, segments, strict=True):
            _fill_segment(struct, segment, first)
            first += segment.count
        self.struct = PassStruct(
            None,
            _address(positions, (self.rows,), torch.int64),
            self._segments,
            self.rows,
            len(segments),
        )
        self.reference = byref(self.struct)

    def time_parts(self, address: int | None) -> None:
        """Have the layers add the nanoseconds of their matrices and of attention to two int64 at
        this address from now on; None: no more."""
        self.struct.parts = address


def _fill_segment(struct: SegmentStruct, segment: CacheRows, first: int) -> None:
    layers, kv_heads, capacity, head_dim = segment.values.shape
    struct.first_row, struct.count, struct.start, struct.capacity = (
        first,
        segment.count,
        segment.start,
        capacity,
    )
    if (
        capacity % LANES
        or not 0 <= segment.start <= segment.start + segment.count <= capacity
        or segment.count < 1
    ):
        raise ValueError(
            f"slots {segment.start}..{segment.start + segment.count - 1} in a cache of {capacity}"
        )
    struct.keys = _address(segment.keys, (layers, kv_heads, capacity // LANES, head_dim, LANES))
    struct.values = _address(segment.values, (layers, kv_heads, capacity, head_dim))
    if segment.paths is not None:
        struct.prefix = segment.paths.prefix
        struct.path_offsets = _address(segment.paths.offsets, (segment.count + 1,), torch.int32)
        struct.path_slots = _address(
            segment.paths.slots, tuple(segment.paths.slots.shape), torch.int32
        )


class DecoderLayer:
    """A layer that is ready to run; its parts can be run one by one for tests and measurements."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.struct = _layer_struct(plan)
        self._functions = _functions()
        self._reference = byref(self.struct)

    def use_rotary(self, rotary: Rotary) -> None:
        """Other angles from now on: of more positions."""
        self._rotary = rotary  # the structure only has its address
        _set_rotary(self.struct, rotary)

    def run(self, rows: LayerPass, hidden: Tensor) -> None:
        """The rows' hidden states, float32 [rows, hidden], through this layer in place."""
        rows.struct.hidden = _address(hidden, (rows.rows, self.struct.hidden))
        self._functions.dt_layer(self._reference, rows.reference)

    def run_next(self, rows: LayerPass) -> None:
        """The same hidden states as the layer that ran before on these rows."""
        self._functions.dt_layer(self._reference, rows.reference)

    def place(self, rows: LayerPass, qkv: Tensor) -> None:
        """Head norms and rotation of the queries and keys in qkv [rows, qkv.n], in place; keys and
        values go into the caches."""
        self._functions.dt_place(
            self._reference, rows.reference, _address(qkv, (rows.rows, self.plan.qkv.n))
        )

    def attend(self, rows: LayerPass, qkv: Tensor) -> Tensor:
        """Attention [rows, heads head_dim] of the queries in qkv over the caches."""
        mixed = torch.empty(rows.rows, self.plan.output.k)
        self._functions.dt_attention(
            self._reference,
            rows.reference,
            _address(qkv, (rows.rows, self.plan.qkv.n)),
            mixed.data_ptr(),
        )
        return mixed


class Attention:
    """Head norms, rotation, cache and attention of the rows of a pass: what stands between a
    layer's two matrices."""

    def __init__(self, plan: AttentionPlan) -> None:
        _check_heads(plan)
        self.plan = plan
        self._width = (plan.heads + 2 * plan.kv_heads) * plan.head_dim
        self._struct = LayerStruct(
            norm_kind=NormKind.RMS, epsilon=plan.epsilon, scale=plan.head_dim**-0.5
        )
        for name in ("index", "heads", "kv_heads", "head_dim"):
            setattr(self._struct, name, getattr(plan, name))
        for name in ("query_norm", "key_norm"):
            setattr(self._struct, name, _norm_struct(getattr(plan, name), plan.head_dim))
        self.use_rotary(plan.rotary)
        self._functions = _functions()
        self._reference = byref(self._struct)

    def use_rotary(self, rotary: Rotary) -> None:
        """Other angles from now on: of more positions."""
        self._rotary = rotary  # the structure only has its address
        _set_rotary(self._struct, rotary)

    def run(self, rows: LayerPass, qkv: Tensor) -> Tensor:
        """Attention [rows, heads head_dim] of qkv [rows, (heads + 2 kv_heads) head_dim], which is
        normed and rotated in place; keys and values are cached."""
        start = _address(qkv, (rows.rows, self._width))
        mixed = torch.empty(rows.rows, self.plan.heads * self.plan.head_dim)
        self._functions.dt_place(self._reference, rows.reference, start)
        self._functions.dt_attention(self._reference, rows.reference, start, mixed.data_ptr())
        return mixed


def normalise(kind: NormKind, norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """The rows of x [rows, width], normalised."""
    rows, width = x.shape
    y = torch.empty_like(x)
    _functions().dt_norm(
        kind,
        byref(_norm_struct(norm, width)),
        _address(x, (rows, width)),
        y.data_ptr(),
        rows,
        width,
        epsilon,
    )
    return y


def activate(activation: Activation, x: Tensor) -> Tensor:
    """[rows, width] from x [rows, 2 width], or [rows, width] where there is no gate."""
    rows, width = x.shape[0], x.shape[1] // (1 if activation is Activation.GELU_TANH else 2)
    y = torch.empty(rows, width)
    _functions().dt_gate(activation, _address(x, tuple(x.shape)), y.data_ptr(), rows, width)
    return y


def _layer_struct(plan: LayerPlan) -> LayerStruct:
    _check_shapes(plan)
    struct = LayerStruct(
        hidden=plan.qkv.k,
        intermediate=plan.down.k,
        softcap=plan.softcap,
        window=plan.window,
        epsilon=plan.epsilon,
    )
    for name in ("index", "heads", "kv_heads", "head_dim", "norm_kind", "activation"):
        setattr(struct, name, getattr(plan, name))
    struct.scale = plan.head_dim**-0.5 if plan.scale is None else plan.scale
    if plan.rotary is not None:
        _set_rotary(struct, plan.rotary)
    for name in ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
        setattr(struct, name, _norm_struct(getattr(plan, name), struct.hidden))
    for name in ("query_norm", "key_norm"):
        setattr(struct, name, _norm_struct(getattr(plan, name), plan.head_dim))
    for name in ("qkv", "output", "gate_up", "down"):
        setattr(struct, name, getattr(plan, name).struct)
    return struct


def _set_rotary(struct: LayerStruct, rotary: Rotary) -> None:
    struct.rotary_dim = 2 * rotary.cosines.shape[1]
    struct.cosines, struct.sines = (
        _address(table, tuple(table.shape)) for table in (rotary.cosines, rotary.sines)
    )


def _check_shapes(plan: LayerPlan) -> None:
    hidden, intermediate = plan.qkv.k, plan.down.k
    expected = {
        "qkv": ((plan.heads + 2 * plan.kv_heads) * plan.head_dim, hidden),
        "output": (hidden, plan.heads * plan.head_dim),
        "gate_up": (
            intermediate if plan.activation is Activation.GELU_TANH else 2 * intermediate,
            hidden,
        ),
        "down": (hidden, intermediate),
    }
    for name, shape in expected.items():
        matrix = getattr(plan, name)
        if (matrix.n, matrix.k) != shape:
            raise ValueError(
                f"{name} is a matrix {(matrix.n, matrix.k)}, where the layer needs {shape}"
            )
    _check_heads(plan)


def _check_heads(plan: LayerPlan | AttentionPlan) -> None:
    """ValueError for heads that do not share their keys evenly, or of which more is rotated than
    there is: the kernels do not look."""
    rotated = 0 if plan.rotary is None else 2 * plan.rotary.cosines.shape[1]
    if plan.kv_heads < 1 or plan.heads % plan.kv_heads or rotated > plan.head_dim:
        raise ValueError(
            f"{plan.heads} heads of {plan.head_dim} with {plan.kv_heads} key heads, of which "
            f"{rotated} numbers are rotated"
        )


def _norm_struct(norm: Norm | None, width: int) -> NormStruct:
    if norm is None:
        return NormStruct()
    return NormStruct(
        _address(norm.weight, (width,)),
        None if norm.bias is None else _address(norm.bias, (width,)),
    )


def _address(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Where a contiguous tensor on the CPU of this shape and type starts; ValueError for any
    other."""
    if (
        tensor.shape != shape
        or tensor.dtype != dtype
        or not tensor.is_contiguous()
        or tensor.device.type != "cpu"
    ):
        raise ValueError(
            f"expected a contiguous {dtype} tensor {shape}, got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    return tensor.data_ptr()
