"""The limits of this machine: memory bandwidth and arithmetic, and the cost of a pass by them
alone."""

from dataclasses import dataclass

import torch

from dovetail.protocol.calibration import MachineLimits, RowsSeconds
from dovetail.workers import kernels
from dovetail.workers.calibration.passes import EVERY_ROW
from dovetail.workers.kernels.probe import (
    Arithmetic,
    bandwidth_gb_s,
    least_seconds,
    peak_gflop_s,
)
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.wanted import FILE_KINDS
from dovetail.workers.serving.design import Design

PROBE_S = 0.6  # duration of the probe of bandwidth; half as long for each kind of arithmetic


@dataclass(frozen=True)
class Subject:
    """A model to be measured, its own design, and that of the whole model that it represents: the
    measured one has fewer layers if memory does not hold all of them."""

    model: LanguageModel
    measured: Design
    whole: Design
    random: bool

    @property
    def scale(self) -> float:
        """Seconds of the whole model for one second of the measured one."""
        return self.whole.weights / self.measured.weights


def measure_limits(budget_s: float) -> MachineLimits:
    """Measure bandwidth and peaks on the threads in use by the kernels' own loops; without kernels
    by torch, whose best is somewhat below the peak."""
    if not kernels.available():
        return MachineLimits(
            bandwidth_gb_s=_torch_bandwidth(),
            peak_gflop_s={
                "fp32": _torch_gflop_s(torch.float32),
                "bf16": _torch_gflop_s(torch.bfloat16),
            },
            probe=kernels.computing(),
        )
    peaks = {
        arithmetic.name.lower(): peak
        for arithmetic in Arithmetic
        if (peak := peak_gflop_s(arithmetic, budget_s=budget_s / 2)) is not None
    }
    return MachineLimits(
        bandwidth_gb_s=bandwidth_gb_s(budget_s=budget_s),
        peak_gflop_s=peaks,
        probe=kernels.computing(),
    )


def best_of(one: MachineLimits, other: MachineLimits) -> MachineLimits:
    """Return the larger of each: smaller figures are due to other programs."""
    peaks = {name: max(peak, other.peak_gflop_s[name]) for name, peak in one.peak_gflop_s.items()}
    return MachineLimits(
        bandwidth_gb_s=max(one.bandwidth_gb_s, other.bandwidth_gb_s),
        peak_gflop_s=peaks,
        probe=one.probe,
    )


def _torch_gflop_s(dtype: torch.dtype) -> float:
    a = torch.ones(TORCH_SIDE, TORCH_SIDE, dtype=dtype)
    return 2 * TORCH_SIDE**3 / least_seconds(lambda: a @ a, TRIES) / 1e9


def _torch_bandwidth() -> float:
    memory = torch.ones(TORCH_BYTES // 4)
    return TORCH_BYTES / least_seconds(memory.sum, TRIES) / 1e9


def limit_curve(subject: Subject, limits: MachineLimits) -> RowsSeconds:
    """Return the least seconds of the subject's passes by these limits."""
    model = subject.model
    least = limits.roofline(
        subject.whole.weights,
        model.weights,
        library=model.backend == "library",
        mixture=subject.whole.mixture,
        states=subject.whole.states,
        size=subject.whole.blocks_bytes if model.weights in FILE_KINDS else 0,
    )
    return RowsSeconds(rows=EVERY_ROW, seconds=tuple(map(least.at, EVERY_ROW)))


TORCH_SIDE, TORCH_BYTES, TRIES = 1024, 128 << 20, 8
