"""The limits of this machine: the bandwidth of its memory and its arithmetic, and the cost of a
pass by them alone."""

import torch

from dovetail.protocol.profile import (
    Limits,
    RowsSeconds,
)
from dovetail.workers import kernels
from dovetail.workers.calibration.passes import (
    EVERY_ROW,
    least_seconds,
)
from dovetail.workers.calibration.subject import Subject
from dovetail.workers.kernels.probe import Arithmetic, bandwidth_gb_s, peak_gflop_s
from dovetail.workers.models.language_model import LanguageModel

PROBE_S = 0.6
"""For the bandwidth, and half as long for each kind of arithmetic."""
BYTES_A_WEIGHT = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "int8-per-tensor": 1}


def measure_limits(budget_s: float) -> Limits:
    """Bandwidth and peaks on the threads in use: by the kernels' own loops; without kernels by
    torch, whose best is somewhat below the peak."""
    if not kernels.available():
        return Limits(
            bandwidth_gb_s=_torch_bandwidth(),
            peak_gflop_s={
                "fp32": _torch_gflop_s(torch.float32),
                "bf16": _torch_gflop_s(torch.bfloat16),
            },
            probe="torch",
        )
    peaks = {
        arithmetic.name.lower(): peak
        for arithmetic in Arithmetic
        if (peak := peak_gflop_s(arithmetic, budget_s=budget_s / 2)) is not None
    }
    return Limits(
        bandwidth_gb_s=bandwidth_gb_s(budget_s=budget_s),
        peak_gflop_s=peaks,
        probe=f"kernels {kernels.isa().name.lower()}",
    )


def best_of(one: Limits, other: Limits) -> Limits:
    """The larger of each: whatever else ran on the machine made the smaller one small."""
    peaks = {name: max(peak, other.peak_gflop_s[name]) for name, peak in one.peak_gflop_s.items()}
    return Limits(
        bandwidth_gb_s=max(one.bandwidth_gb_s, other.bandwidth_gb_s),
        peak_gflop_s=peaks,
        probe=one.probe,
    )


def _torch_gflop_s(dtype: torch.dtype) -> float:
    a = torch.ones(TORCH_SIDE, TORCH_SIDE, dtype=dtype)
    return 2 * TORCH_SIDE**3 / least_seconds(lambda: a @ a) / 1e9


def _torch_bandwidth() -> float:
    memory = torch.ones(TORCH_BYTES // 4)
    return TORCH_BYTES / least_seconds(memory.sum) / 1e9


def arithmetic_of(model: LanguageModel, limits: Limits) -> str:
    """Which peak bounds a model's products: 16-bit weights are multiplied in fp32, but by the
    library's bf16, where there are instructions for it."""
    wanted = {
        "int8": "int8",
        "int8-per-tensor": "int8",
        "bf16": "bf16" if model.backend == "library" else "fp32",
    }.get(model.weights, "fp32")
    return wanted if wanted in limits.peak_gflop_s else "fp32"


def limit_curve(subject: Subject, limits: Limits) -> RowsSeconds:
    """max(packed bytes / bandwidth, 2 rows weights / peak), in seconds."""
    weights = subject.whole.weights
    reading = weights * BYTES_A_WEIGHT[subject.model.weights] / (limits.bandwidth_gb_s * 1e9)
    row = 2 * weights / (limits.peak_gflop_s[arithmetic_of(subject.model, limits)] * 1e9)
    return RowsSeconds(rows=EVERY_ROW, seconds=tuple(max(reading, m * row) for m in EVERY_ROW))


TORCH_SIDE, TORCH_BYTES = 1024, 128 << 20
