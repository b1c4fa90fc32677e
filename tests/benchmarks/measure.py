"""The judging of a figure: pairs in which both sides take turns, the median of their ratios with a
bootstrap interval, the limit of the hardware.

Pure but for the measuring function that is passed in; knows neither models nor engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
INTERVAL = (0.025, 0.975)
LEEWAY = 0.02
"""A bound holds when the interval reaches it and the median misses it by no more than this."""


NOTHING = 1e-9


@dataclass(frozen=True)
class Estimate:
    """A median and the 95 % interval of a bootstrap over the samples."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"

    def holds(self, most: float) -> bool:
        """Return whether this is at most `most`."""
        return self.low <= most and self.median <= most + LEEWAY

    def reaches(self, least: float) -> bool:
        """Return whether this is at least `least`."""
        return self.high >= least and self.median >= least - LEEWAY

    def as_json(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}


def estimate(samples: Sequence[float], *, seed: int = 0) -> Estimate:
    """The median of `samples` (at least one)."""
    values = np.asarray(samples, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(values[drawn], axis=1), INTERVAL)
    return Estimate(float(np.median(values)), float(low), float(high))


def ratio(left: Sequence[float], right: Sequence[float]) -> Estimate:
    """Return the ratio of the left side to the right one, pair by pair."""
    return estimate([a / b for a, b in zip(left, right, strict=True)])


def ratio_of_sums(
    left: Sequence[tuple[float, float]], right: Sequence[tuple[float, float]], *, seed: int = 0
) -> Estimate:
    """Return the ratio of the left side's rate to the right one's, over pairs of prompts; a rate is
    the sum of first numbers over the sum of second ones."""
    sides = np.asarray([left, right], dtype=float)
    drawn = np.random.default_rng(seed).integers(0, sides.shape[1], (RESAMPLES, sides.shape[1]))
    low, high = np.quantile(_ratios(sides[:, drawn].sum(axis=2)), INTERVAL)
    return Estimate(float(_ratios(sides.sum(axis=1, keepdims=True))[0]), float(low), float(high))


def _ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """sums [side, sample, number] -> [sample]; where the right side's rate is nothing, the ratio is
    very large instead of infinite."""
    left, right = sums[..., 0] / np.maximum(sums[..., 1], NOTHING)
    ratios: NDArray[np.float64] = left / np.maximum(right, NOTHING)
    return ratios


def take_turns(sides: Sequence[Callable[[], float]], number: int) -> tuple[float, ...]:
    """Return what each side measures in round `number`. Who is first changes from round to round,
    so that drift meets all of them alike."""
    order = range(len(sides)) if number % 2 == 0 else reversed(range(len(sides)))
    measured = {side: sides[side]() for side in order}
    return tuple(measured[side] for side in range(len(sides)))
