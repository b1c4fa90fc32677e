"""The Python interface of the ranking kernel: the likeliest tokens after some rows, or the tokens
chosen there, in one call. Knows rows of logits, not trees."""

import ctypes
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device, float32

from dovetail.protocol.settings import Sampling
from dovetail.workers import kernels
from dovetail.workers.kernels import library

SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
LARGEST_MARGIN = float(np.finfo(np.float32).max)
Ids = NDArray[np.int32]
Values = NDArray[np.float32]


class RowStruct(ctypes.Structure):
    """`RankedRow` of native/kernels.h."""

    _fields_ = (
        ("logits", ctypes.c_uint64),
        ("word", ctypes.c_uint64),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("least", "temperature", "share", "sharpening")),
        ("noisy", ctypes.c_int64),
    )


ROW = np.dtype(RowStruct)


class RankingStruct(ctypes.Structure):
    """`Ranking` of native/kernels.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "size", "width", "shares")),
        *((name, ctypes.c_void_p) for name in ("ids", "values")),
    )


def ranks(device: device) -> bool:
    """Return whether the kernels rank logits on a device."""
    return device.type == "cpu" and kernels.available()


def likeliest(
    logits: Tensor,
    width: int,
    *,
    sampling: Sampling,
    words: Sequence[int] | None = None,
    share: float | NDArray[np.float64] = 1.0,
    sharpening: float | NDArray[np.float64] = 1.0,
) -> tuple[Ids, Values]:
    """Return the `width` highest ids [N, K] of z = (t / share + noise) / sharpening, where t are
    the logits [N, V] after temperature, top-k, top-p and min-p, and log_softmax(z) at them, best
    first. `share`, `sharpening`: of all rows, or [N].

    `words`: of the noise, one for each row; None: no noise. Of equals the lower id comes first; a
    temperature of 0 leaves the logits unchanged. A first id of -1 means that rounding decides what
    top-p keeps of the row, so that torch must rank it."""
    if words is not None and len(words) != len(logits):
        raise ValueError(f"expected the noise of {len(logits)} rows, got {len(words)}")
    cut = sampling.truncates
    rows = np.zeros(len(logits), ROW)
    rows["top_k"], rows["top_p"], rows["least"] = sampling.top_k, sampling.top_p, _least(sampling)
    if sampling.temperature > 0.0:
        heats = sampling.temperature * (1.0 if cut else share)
        rows["temperature"] = np.maximum(heats, SMALLEST_TEMPERATURE)
    rows["logits"] = _start(logits) + 4 * logits.stride(0) * np.arange(len(logits))
    rows["share"], rows["sharpening"] = share if cut else 1.0, sharpening
    if words is not None:
        rows["word"], rows["noisy"] = words, 1
    shape = len(rows), min(width, logits.shape[1])
    ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
    address, found = rows.ctypes.data, (ids.ctypes.data, values.ctypes.data)
    library().dt_rank(
        ctypes.byref(RankingStruct(address, shape[0], logits.shape[1], shape[1], True, *found))
    )
    return ids, values


def choose(asked: Sequence[tuple[Tensor, Sampling, int | None]]) -> list[tuple[int, float]]:
    """Return, for each row of logits [V] with its processors and the word of its noise (None: no
    noise), the chosen id and its distance to the runner-up, NaN if a logit is NaN. An id of -1
    means that rounding decides what top-p keeps of the row, so that torch must choose."""
    rows, size = (RowStruct * len(asked))(), asked[0][0].shape[-1]
    width = min(2, size)
    for row, (logits, sampling, word) in zip(rows, asked, strict=True):
        row.top_k, row.top_p, row.least = sampling.top_k, sampling.top_p, _least(sampling)
        if sampling.temperature > 0.0:
            row.temperature = max(sampling.temperature, SMALLEST_TEMPERATURE)
        row.logits, row.share, row.sharpening = _start(logits), 1.0, 1.0
        if word is not None:
            row.word, row.noisy = word, 1
    ids, values = (ctypes.c_int32 * (width * len(rows)))(), (ctypes.c_float * (width * len(rows)))()
    found = ctypes.addressof(ids), ctypes.addressof(values)
    library().dt_rank(
        ctypes.byref(RankingStruct(ctypes.addressof(rows), len(rows), size, width, False, *found))
    )
    margins = [LARGEST_MARGIN] * len(rows)
    if width > 1:
        # rounded like a difference of two numbers of 32 bits; a NaN remains
        gaps = [
            ctypes.c_float(best - second).value
            for best, second in zip(values[::2], values[1::2], strict=True)
        ]
        margins = [LARGEST_MARGIN if gap > LARGEST_MARGIN else gap for gap in gaps]
    return [*zip(ids[::width], margins, strict=True)]


def _least(sampling: Sampling) -> float:
    """Return the logarithm of min-p."""
    return math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def _start(logits: Tensor) -> int:
    """Return where rows of logits start; raise ValueError unless they are float32 on the CPU."""
    if logits.dtype != float32 or logits.stride(-1) != 1 or logits.device.type != "cpu":
        raise ValueError(
            "expected float32 rows of logits on the CPU, got "
            f"{logits.dtype} {tuple(logits.shape)} on {logits.device}"
        )
    return logits.data_ptr()
