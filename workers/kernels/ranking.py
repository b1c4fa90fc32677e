"""The Python face of the ranking kernel: the likeliest tokens after some rows, in one call. Knows
rows of logits, not trees."""

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, float32

from dovetail.workers.kernels import library

SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class RankingStruct(Structure):
    """`Ranking` of native/kernels.h."""

    _fields_ = (
        ("logits", c_void_p),
        *((name, c_int64) for name in ("stride", "rows", "size")),
        ("noise", POINTER(c_void_p)),
        *((name, c_float) for name in ("temperature", "sharpening")),
        ("width", c_int64),
        *((name, c_void_p) for name in ("ids", "gains")),
    )


def likeliest(
    logits: Tensor,
    width: int,
    *,
    temperature: float = 0.0,
    noise: Sequence[Tensor] | None = None,
    sharpening: float = 1.0,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return, of z = (logits [N, V] / temperature + noise, a row [V] for each) / sharpening the
    `width` highest ids [N, K], and log_softmax(z) at them, best first.

    All of it is float32 on the CPU. Of equals the lower id comes first; a temperature of 0 leaves
    the logits as they are.
    """
    (rows, size), (stride, step) = logits.shape, logits.stride()
    noisy = None if noise is None else (c_void_p * rows)(*[_start(row, size) for row in noise])
    if (
        logits.dtype != float32
        or step != 1
        or logits.device.type != "cpu"
        or (noise is not None and len(noise) != rows)
    ):
        raise ValueError(
            "expected float32 rows of logits on the CPU and noise for each, got "
            f"{logits.dtype} {tuple(logits.shape)} on {logits.device}"
        )
    temperature, width = (
        max(temperature, SMALLEST_TEMPERATURE) if temperature > 0.0 else 0.0,
        min(width, size),
    )
    ids, gains = np.empty((rows, width), np.int32), np.empty((rows, width), np.float32)
    library().dt_likeliest(
        byref(
            RankingStruct(
                logits.data_ptr(),
                stride,
                rows,
                size,
                noisy,
                temperature,
                sharpening,
                width,
                ids.ctypes.data,
                gains.ctypes.data,
            )
        )
    )
    return ids, gains


def _start(row: Tensor, size: int) -> int:
    """Return where a row of noise starts; ValueError for one of another size or type."""
    if (
        row.shape != (size,)
        or row.dtype != float32
        or not row.is_contiguous()
        or row.device.type != "cpu"
    ):
        raise ValueError(
            f"expected a row of {size} float32 on the CPU, got {row.dtype} {tuple(row.shape)}"
        )
    return row.data_ptr()
