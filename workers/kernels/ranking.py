"""The Python interface of the ranking kernel: the likeliest tokens after some rows, or the tokens
chosen there, in one call. Knows rows of logits, not trees."""

import math
from collections.abc import Sequence
from ctypes import Structure, byref, c_int64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, device, float32

from dovetail.protocol.settings import Sampling
from dovetail.workers import kernels
from dovetail.workers.kernels import library

SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)
LARGEST_MARGIN = float(np.finfo(np.float32).max)
ROW = np.dtype(
    [
        ("logits", np.uint64),
        ("word", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        *((name, np.float32) for name in ("least", "temperature", "share", "sharpening")),
        ("noisy", np.int64),
    ]
)
"""`RankedRow` of native/kernels.h."""

Ids = NDArray[np.int32]
Values = NDArray[np.float32]


class RankingStruct(Structure):
    """`Ranking` of native/kernels.h."""

    _fields_ = (
        ("rows", c_void_p),
        *((name, c_int64) for name in ("count", "size", "width", "shares")),
        *((name, c_void_p) for name in ("ids", "values")),
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
    _fill(rows, sampling)
    if sampling.temperature > 0.0:
        heats = sampling.temperature * (1.0 if cut else share)
        rows["temperature"] = np.maximum(heats, SMALLEST_TEMPERATURE)
    rows["logits"] = _start(logits) + 4 * logits.stride(0) * np.arange(len(logits))
    rows["share"], rows["sharpening"] = share if cut else 1.0, sharpening
    if words is not None:
        rows["word"], rows["noisy"] = words, 1
    return _rank(rows, logits.shape[1], width, shares=True)


def choose(asked: Sequence[tuple[Tensor, Sampling, int | None]]) -> list[tuple[int, float]]:
    """Return, for each row of logits [V] with its processors and the word of its noise (None: no
    noise), the chosen id and its distance to the runner-up, NaN if a logit is NaN. An id of -1
    means that rounding decides what top-p keeps of the row, so that torch must choose."""
    rows = np.zeros(len(asked), ROW)
    for row, (logits, sampling, word) in zip(rows, asked, strict=True):
        _fill(row, sampling)
        if sampling.temperature > 0.0:
            row["temperature"] = max(sampling.temperature, SMALLEST_TEMPERATURE)
        row["logits"], row["share"], row["sharpening"] = _start(logits), 1.0, 1.0
        if word is not None:
            row["word"], row["noisy"] = word, 1
    ids, values = _rank(rows, asked[0][0].shape[-1], 2, shares=False)
    with np.errstate(invalid="ignore"):
        margins = (
            np.minimum(values[:, 0] - values[:, 1], np.float32(LARGEST_MARGIN))
            if values.shape[1] > 1
            else np.full(len(rows), LARGEST_MARGIN)
        )
    return [*zip(ids[:, 0].tolist(), margins.tolist(), strict=True)]


def _fill(rows: Any, sampling: Sampling) -> None:
    """Set the processors of rows, but for their temperature."""
    rows["top_k"], rows["top_p"] = sampling.top_k, sampling.top_p
    rows["least"] = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf


def _rank(rows: Any, size: int, width: int, *, shares: bool) -> tuple[Ids, Values]:
    shape = len(rows), min(width, size)
    ids, values = np.empty(shape, np.int32), np.empty(shape, np.float32)
    address = rows.ctypes.data
    library().dt_rank(
        byref(
            RankingStruct(
                address, shape[0], size, shape[1], shares, ids.ctypes.data, values.ctypes.data
            )
        )
    )
    return ids, values


def _start(logits: Tensor) -> int:
    """Return where rows of logits start; raise ValueError unless they are float32 on the CPU."""
    if logits.dtype != float32 or logits.stride(-1) != 1 or logits.device.type != "cpu":
        raise ValueError(
            "expected float32 rows of logits on the CPU, got "
            f"{logits.dtype} {tuple(logits.shape)} on {logits.device}"
        )
    return logits.data_ptr()
