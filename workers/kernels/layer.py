"""The Python interface of the layer kernels: a decoder layer, computed in one call for the rows of
a pass.

Build a `DecoderLayer` from a `LayerPlan` once for each layer and a `LayerPass` once for each
forward pass, and run every layer on it:

    layers = [DecoderLayer(LayerPlan(index=i, ..., qkv=..., down=...)) for i in range(n)]
    # a root and its two children behind 40 slots: their paths are [40], [40, 41] and [40, 42]
    paths = Paths(40, int32([0, 1, 3, 5]), int32([40, 40, 41, 40, 42]))
    rows = LayerPass(positions, [CacheRows(keys, values, start=40, count=3, paths=paths)])
    for layer in layers:  # float32 [rows, hidden], in place; writes keys and values to the caches
        layer.run(rows, hidden)

Tensors are contiguous and on the CPU; whatever a structure points to is kept alive with it."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.kernels import BUILD, Kind, MatrixStruct, address_of, declare, library
from dovetail.workers.kernels.experts import NormStruct, experts_struct, matrix_array, norm_struct
from dovetail.workers.kernels.layer_plan import (
    CODES,
    LANES,
    STREAM_MATRICES,
    Activation,
    BesidePlan,
    CacheRows,
    HeadNorm,
    LatentPlan,
    LayerPlan,
    Norm,
    NormKind,
    Rotary,
    SharedRows,
    StreamsPlan,
    check_shapes,
)


class ActivatorStruct(Structure):
    """`Activator` of native/layer.h."""

    _fields_ = (("kind", c_int32), ("first", c_float), ("second", c_float), ("reserved", c_int32))


class LayerStruct(Structure):
    """`Layer` of native/layer.h."""

    _fields_ = (
        *((name, c_int64) for name in ("before", "codes_before")),
        *(
            (name, c_int32)
            for name in (
                *("hidden", "heads", "kv_heads", "head_dim"),
                *("intermediate", "rotary_dim", "window", "norm_kind"),
            )
        ),
        ("activation", ActivatorStruct),
        *((name, c_float) for name in ("epsilon", "scale", "softcap")),
        ("scalar", c_float),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        *(
            (name, NormStruct)
            for name in (
                *("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"),
                *("query_norm", "key_norm"),
            )
        ),
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
        ("residual", c_float),
        *((name, c_int32) for name in ("head_norm", "parallel", "chunk")),
        ("experts", c_void_p),
        ("query_factors", c_void_p),
        ("sinks", c_void_p),
        ("value_norm", NormStruct),
        *((name, c_void_p) for name in ("scan", "beside", "latent")),
        ("mixer_gate", MatrixStruct),
        *((name, c_float) for name in ("key_factor", "mlp_residual")),
        *((name, MatrixStruct) for name in ("input_gate", "input_projection")),
        ("input_norm", NormStruct),
        *((name, c_int32) for name in ("input_first", "reads")),
        ("clip", c_float),
        ("gate_kind", c_int32),
        *((name, MatrixStruct) for name in ("scan_gate", "scan_decay")),
        *((name, NormStruct) for name in ("mixer_norm", "inner_norm")),
        ("streams", c_void_p),
        ("cut", c_float),
    )


class StreamsStruct(Structure):
    """`Streams` of native/layer.h."""

    _fields_ = (
        *((name, c_int32) for name in ("count", "reserved")),
        *((name, MatrixStruct) for name in STREAM_MATRICES),
        *((name, NormStruct) for name in ("router_norm", "norm")),
        ("scale", c_void_p),
    )


class BesideStruct(Structure):
    """`Beside` of native/layer.h."""

    _fields_ = (
        ("norm", NormStruct),
        *((name, MatrixStruct) for name in ("given", "output")),
        *((name, c_float) for name in ("factor", "attention_factor")),
    )


class SegmentStruct(Structure):
    """`Segment` of native/layer.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in ("first_row", "count", "start", "prefix", "capacity", "kind")
        ),
        *((name, c_void_p) for name in ("keys", "values", "shared_keys", "shared_values")),
        *((name, c_int32) for name in ("shared", "shared_capacity")),
        *((name, c_void_p) for name in ("path_offsets", "path_slots", "states")),
    )


class PassStruct(Structure):
    """`Pass` of native/layer.h."""

    _fields_ = (
        ("hidden", c_void_p),
        ("positions", c_void_p),
        ("segments", POINTER(SegmentStruct)),
        ("rows", c_int32),
        ("segment_count", c_int32),
        ("inputs", c_void_p),
        ("input_stride", c_int64),
        ("parts", c_void_p),
    )


class LatentStruct(Structure):
    """`Latent` of native/layer.h, with references to the arrays that it points to."""

    _fields_ = (
        *((name, c_int32) for name in ("rank", "plain", "value_dim")),
        ("epsilon", c_float),
        *((name, NormStruct) for name in ("query_norm", "latent_norm")),
        ("query_up", MatrixStruct),
        *((name, POINTER(MatrixStruct)) for name in ("key_up", "value_up")),
    )


def latent_struct(plan: LatentPlan) -> LatentStruct:
    """Return a plan of attention over latents in the kernels' format."""
    struct = LatentStruct(
        rank=plan.rank,
        plain=plan.plain,
        value_dim=plan.value_dim,
        epsilon=plan.epsilon,
        latent_norm=norm_struct(Norm(plan.latent_norm), plan.rank),
        key_up=matrix_array(plan.key_up),
        value_up=matrix_array(plan.value_up),
    )
    if (up := plan.query_up) is not None:
        struct.query_up = up.struct
        norm = None if plan.query_norm is None else Norm(plan.query_norm)
        struct.query_norm = norm_struct(norm, up.k)
    return struct


CACHE_KINDS = {torch.float32: Kind.FP32, torch.float16: Kind.FP16, CODES: Kind.INT8}
"""Type of a cache -> the kernels' kind."""


@cache
def _functions() -> Any:
    """Return the library with the types of this module's functions. Raises `UserError` if it was
    built from other sources."""
    if library().dt_layer_bytes() != sizeof(LayerStruct):
        raise UserError(
            "the C++ kernels were built from other sources than this program; rebuild them: "
            f"{BUILD}"
        )
    layer, rows = POINTER(LayerStruct), POINTER(PassStruct)
    declare(
        library(),
        {
            "dt_layer": (None, (layer, rows)),
            "dt_place": (None, (layer, rows, c_void_p)),
            "dt_attention": (None, (layer, rows, c_void_p, c_void_p)),
            "dt_latent": (None, (layer, rows, c_void_p, c_void_p, c_void_p)),
            "dt_norm": (
                None,
                (c_int32, POINTER(NormStruct), c_void_p, c_void_p, c_int64, c_int64, c_float),
            ),
            "dt_gate": (None, (POINTER(ActivatorStruct), c_void_p, c_void_p, c_int64, c_int64)),
            "dt_tanh": (None, (c_void_p, c_int64)),
            "dt_match": (None, (c_void_p, c_void_p, c_int64, c_int64, c_float)),
            "dt_rotary_table": (None, (c_void_p, c_int64, c_float, c_int64, c_void_p, c_void_p)),
        },
    )
    return library()


class LayerPass:
    """The rows of a pass, for all layers: their positions, and which slots of which caches they
    write and attend to."""

    def __init__(self, positions: Tensor, segments: Sequence[CacheRows]) -> None:
        """positions: int64 [rows], concatenated over the segments; without segments the rows are
        for layers without attention."""
        self.rows = sum(segment.count for segment in segments) if segments else len(positions)
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

    def use_inputs(self, inputs: Tensor) -> None:
        """Let layers with their own inputs read them from float32 [rows, width of all]."""
        self._inputs = inputs  # keeps it alive: the structure only has its address
        self.struct.inputs = _address(inputs, (self.rows, inputs.shape[1]))
        self.struct.input_stride = inputs.shape[1]

    def time_parts(self, address: int | None) -> None:
        """Have the layers add their times to three int64 at this address: nanoseconds of matrices
        and of attention, and the number of experts used; None: stop."""
        self.struct.parts = address


def _fill_segment(struct: SegmentStruct, segment: CacheRows, first: int) -> None:
    capacity = slots_of(segment.values)
    begins = 0 if segment.shared is None else segment.shared.rows
    struct.first_row, struct.count, struct.start, struct.capacity = (
        first,
        segment.count,
        segment.start,
        capacity,
    )
    if (
        capacity % LANES
        or begins % LANES
        or not begins <= segment.start <= segment.start + segment.count <= begins + capacity
        or segment.count < 1
    ):
        raise ValueError(
            f"slots {segment.start}..{segment.start + segment.count - 1} in a cache of {capacity} "
            f"slots from {begins} on"
        )
    keys, values = _cache_shapes(segment.keys, segment.values)
    dtype = segment.values.dtype
    if segment.shared is not None:
        _fill_shared(struct, segment.shared, dtype)
    struct.kind = CACHE_KINDS[dtype]
    struct.keys = _address(segment.keys, keys, dtype)
    struct.values = _address(segment.values, values, dtype)
    struct.states = None if segment.states is None else addressof(segment.states.struct)
    if segment.paths is not None:
        struct.prefix = segment.paths.prefix
        offsets, slots = segment.paths.offsets, segment.paths.slots
        struct.path_offsets = address_of(offsets, (segment.count + 1,), ("int32",))
        struct.path_slots = address_of(slots, slots.shape, ("int32",))


def _fill_shared(struct: SegmentStruct, shared: SharedRows, dtype: torch.dtype) -> None:
    keys, values = _cache_shapes(shared.keys, shared.values)
    struct.shared, struct.shared_capacity = shared.rows, slots_of(shared.values)
    if not shared.rows <= struct.shared_capacity:
        raise ValueError(f"{shared.rows} shared rows in a cache of {struct.shared_capacity}")
    struct.shared_keys = _address(shared.keys, keys, dtype)
    struct.shared_values = _address(shared.values, values, dtype)


def slots_of(values: Tensor) -> int:
    """Return the number of slots of a cache with these values."""
    return values.shape[-1 if values.ndim == 2 else 2]


def _cache_shapes(keys: Tensor, values: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of keys and values that belong together; latents have no keys."""
    if values.ndim == 2:
        return tuple(values.shape), tuple(values.shape)
    layers, kv_heads, capacity, head_dim = values.shape
    key_dim = 0 if keys.ndim == 5 and keys.shape[3] == 0 else head_dim
    return (layers, kv_heads, capacity // LANES, key_dim, LANES), tuple(values.shape)


class DecoderLayer:
    """A layer that is ready to run; its parts can be run separately for tests and measurements."""

    def __init__(self, plan: LayerPlan) -> None:
        self.plan = plan
        self.struct = _layer_struct(plan)
        self._experts = None if plan.experts is None else experts_struct(plan.experts, plan)
        if self._experts is not None:
            self.struct.experts = addressof(self._experts)
        if plan.scan is not None:
            self.struct.scan = addressof(plan.scan.struct)
        self._beside = None if plan.beside is None else _beside_struct(plan.beside, plan.hidden)
        if self._beside is not None:
            self.struct.beside = addressof(self._beside)
        self._latent = None if plan.latent is None else latent_struct(plan.latent)
        if self._latent is not None:
            self.struct.latent = addressof(self._latent)
        self._streams = None if plan.streams is None else _streams_struct(plan.streams, plan.hidden)
        if self._streams is not None:
            self.struct.streams = addressof(self._streams)
        self.width = plan.hidden * (1 if plan.streams is None else plan.streams.count)
        self._functions = _functions()
        self._reference = byref(self.struct)

    def use_rotary(self, rotary: Rotary) -> None:
        """Use a rotary table with more positions from now on."""
        self._rotary = rotary  # keeps it alive: the structure only has its address
        _set_rotary(self.struct, rotary)

    def run(self, rows: LayerPass, hidden: Tensor, given: Tensor | None = None) -> None:
        """Run the rows' hidden states, float32 [rows, width], through this layer in place. `given`
        [rows, plan.given]: what attention reads instead of the states."""
        if self.plan.given:  # attention alone, part by part
            assert given is not None
            assert self.plan.qkv is not None
            assert self.plan.output is not None
            qkv = self.plan.qkv.linear(given)
            self.place(rows, qkv)
            hidden += self.plan.output.linear(self.attend(rows, qkv))
            return
        rows.struct.hidden = _address(hidden, (rows.rows, self.width))
        self._functions.dt_layer(self._reference, rows.reference)

    def run_next(self, rows: LayerPass) -> None:
        """Run on the hidden states of the layer that last ran on these rows."""
        self._functions.dt_layer(self._reference, rows.reference)

    def place(self, rows: LayerPass, qkv: Tensor) -> None:
        """Apply head norms and rotation to the queries and keys in qkv [rows, qkv.n], in place, and
        write keys and values to the caches."""
        self._functions.dt_place(self._reference, rows.reference, self._queries(rows, qkv))

    def attend(self, rows: LayerPass, qkv: Tensor) -> Tensor:
        """Return attention [rows, heads head_dim] of the queries in qkv over the caches."""
        mixed = torch.empty(rows.rows, self.plan.heads * self.plan.head_dim)
        self._functions.dt_attention(
            self._reference, rows.reference, self._queries(rows, qkv), mixed.data_ptr()
        )
        return mixed

    def _queries(self, rows: LayerPass, qkv: Tensor) -> int:
        """Return where queries, keys and values start; raise ValueError for a layer without
        them."""
        if self.plan.qkv is None:
            raise ValueError("a layer without attention")
        return _address(qkv, (rows.rows, self.plan.qkv.n))

    def attend_latents(self, rows: LayerPass, given: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [rows, heads, head_dim] over latents from the first matrix's output
        `given` [rows, qkv.n], and attention [rows, heads value_dim]; latents and keys go into the
        caches."""
        queries = torch.empty(rows.rows, self.plan.heads, self.plan.head_dim)
        if self.plan.latent is None:
            raise ValueError("a layer without latents")
        mixed = torch.empty(rows.rows, self.plan.heads * self.plan.latent.value_dim)
        addresses = (self._queries(rows, given), queries.data_ptr(), mixed.data_ptr())
        self._functions.dt_latent(self._reference, rows.reference, *addresses)
        return queries, mixed


def normalise(kind: NormKind, norm: Norm, x: Tensor, epsilon: float) -> Tensor:
    """Normalise the rows of x [rows, width]."""
    rows, width = x.shape
    y = torch.empty_like(x)
    _functions().dt_norm(
        kind,
        byref(norm_struct(norm, width)),
        _address(x, (rows, width)),
        y.data_ptr(),
        rows,
        width,
        epsilon,
    )
    return y


def activate(activation: Activation, x: Tensor, numbers: tuple[float, float] = (0, 0)) -> Tensor:
    """Return [rows, width] from x [rows, 2 width], or from [rows, width] without a gate; `numbers`:
    as in `LayerPlan.activation_numbers`."""
    rows, width = x.shape[0], x.shape[1] // (2 if activation.gated else 1)
    y = torch.empty(rows, width)
    how = ActivatorStruct(activation, *numbers)
    _functions().dt_gate(byref(how), _address(x, tuple(x.shape)), y.data_ptr(), rows, width)
    return y


def tanh(x: Tensor) -> Tensor:
    """Return tanh x, the same bytes on every CPU."""
    y = x.contiguous().clone()
    _functions().dt_tanh(_address(y, tuple(y.shape)), y.numel())
    return y


def match(x: Tensor, y: Tensor, least: float) -> Tensor:
    """Return y [rows, width], whose rows are scaled, in place, to the root mean square of those of
    x; their own mean square counts as at least `least`. The same bytes on every CPU."""
    rows, width = x.shape
    addresses = (_address(part, (rows, width)) for part in (x, y))
    _functions().dt_match(*addresses, rows, width, least)
    return y


def _layer_struct(plan: LayerPlan) -> LayerStruct:
    check_shapes(plan)
    struct = LayerStruct(
        hidden=plan.hidden,
        intermediate=0 if plan.down is None else plan.down.k,
        softcap=plan.softcap,
        clip=plan.clip,
        gate_kind=plan.gate_kind,
        window=plan.window,
        chunk=plan.chunk,
        before=plan.before(torch.float32),
        codes_before=plan.before(CODES),
        activation=ActivatorStruct(plan.activation, *plan.activation_numbers),
        scalar=0.0 if plan.scalar == 1.0 else plan.scalar,
        epsilon=plan.epsilon,
        residual=0.0 if plan.residual == 1.0 else plan.residual,
        mlp_residual=0.0 if plan.mlp_residual == 1.0 else plan.mlp_residual,
        key_factor=0.0 if plan.key_factor == 1.0 else plan.key_factor,
        head_norm=plan.head_norm,
        parallel=plan.parallel,
        reads=plan.reads is not None,
        cut=plan.cut,
    )
    for name in ("heads", "kv_heads", "head_dim", "norm_kind"):
        setattr(struct, name, getattr(plan, name))
    if plan.sinks is not None:
        struct.sinks = _address(plan.sinks, (plan.heads,))
    struct.value_norm = norm_struct(plan.value_norm, plan.head_dim)
    struct.scale = plan.head_dim**-0.5 if plan.scale is None else plan.scale
    if plan.rotary is not None:
        _set_rotary(struct, plan.rotary)
    for name in ("attention_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
        setattr(struct, name, norm_struct(getattr(plan, name), struct.hidden))
    struct.mixer_norm = norm_struct(plan.mixer_norm, 0 if plan.output is None else plan.output.k)
    struct.inner_norm = norm_struct(plan.inner_norm, struct.intermediate)
    wide = plan.head_norm is HeadNorm.WIDE_BEFORE_ROPE
    for name, heads in (("query_norm", plan.heads), ("key_norm", plan.kv_heads)):
        width = plan.head_dim * (heads if wide else 1)
        setattr(struct, name, norm_struct(getattr(plan, name), width))
    if plan.latent is not None:
        struct.rotary_dim = plan.latent.rotated
    for name in ("qkv", "output", "gate_up", "down", "mixer_gate", "scan_gate", "scan_decay"):
        if (matrix := getattr(plan, name)) is not None:
            setattr(struct, name, matrix.struct)
    if (own := plan.own_input) is not None:
        struct.input_gate, struct.input_projection = own.gate.struct, own.projection.struct
        struct.input_norm, struct.input_first = norm_struct(own.norm, struct.hidden), own.first
    return struct


def _streams_struct(plan: StreamsPlan, hidden: int) -> StreamsStruct:
    matrices = (getattr(plan, name).struct for name in STREAM_MATRICES)
    norms = (norm_struct(norm, hidden) for norm in (plan.router_norm, plan.norm))
    return StreamsStruct(plan.count, 0, *matrices, *norms, _address(plan.scale, (hidden,)))


def _beside_struct(plan: BesidePlan, hidden: int) -> BesideStruct:
    return BesideStruct(
        norm_struct(plan.norm, hidden),
        plan.given.struct,
        plan.output.struct,
        plan.factor,
        plan.attention_factor,
    )


def _set_rotary(struct: LayerStruct, rotary: Rotary) -> None:
    struct.rotary_dim = 2 * rotary.cosines.shape[1]
    struct.cosines, struct.sines = (
        _address(table, tuple(table.shape)) for table in (rotary.cosines, rotary.sines)
    )
    struct.query_factors = (
        None if rotary.factors is None else _address(rotary.factors, (len(rotary.cosines),))
    )


def _address(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
    """Return where a contiguous tensor of this shape and type on the CPU starts; raise ValueError
    for any other."""
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


def rotary_table(frequencies: Tensor, context: int, *, scaling: float = 1.0) -> Rotary:
    """Return cosines and sines of position times frequency [rotary_dim / 2], times scaling, for all
    positions below `context`: the same bytes on every machine."""
    pairs = frequencies.numel()
    table = torch.empty(2, context, pairs)
    start = _address(frequencies.float().contiguous(), (pairs,))
    _functions().dt_rotary_table(
        start, pairs, scaling, context, table[0].data_ptr(), table[1].data_ptr()
    )
    return Rotary(table[0], table[1])
