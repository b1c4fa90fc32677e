"""The structures of `native/layer.h`, field by field."""

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p

from dovetail.workers.kernels import MatrixStruct
from dovetail.workers.kernels.experts import NormStruct, matrix_array, norm_struct
from dovetail.workers.kernels.layer_plan import LatentPlan, Norm


class ActivatorStruct(Structure):
    """`Activator` of native/layer.h."""

    _fields_ = (("kind", c_int32), ("first", c_float), ("second", c_float), ("reserved", c_int32))


class LayerStruct(Structure):
    """`Layer` of native/layer.h."""

    _fields_ = (
        ("before", c_int64),
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
