"""Measured costs of a machine: a target's pass over M rows, a draft's over those of a level, how a
context weighs, and the limits of the hardware. `profile.py` keeps them in its file."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import Annotated

from pydantic import Field, model_validator

from dovetail.protocol.experts import DENSE, Experts, Mixture, Routing
from dovetail.protocol.settings import Frozen

MAX_POINTS = 256

Positive = Annotated[int, Field(ge=1, le=1 << 40)]
Seconds = Annotated[float, Field(ge=0.0, le=1e9)]
Rate = Annotated[float, Field(gt=0.0)]
CROSSOVER_STEPS = 64
WEIGHT_BYTES: Mapping[str, float] = {
    "fp32": 4,
    **dict.fromkeys(("half", "fp16", "bf16"), 2),
    **dict.fromkeys(("int8", "int8-per-tensor"), 1),
    **dict.fromkeys(("int4", "int4-int8", "int4-fp32"), 148 / 256),
}
"""Bytes that a pass reads of each weight of a type; of int4, those of the kernels' Q4_K."""


class RowsSeconds(Frozen):
    """A measured curve: a pass over rows[i] rows took seconds[i]; rows ascend."""

    rows: Annotated[tuple[Positive, ...], Field(min_length=1, max_length=MAX_POINTS)]
    seconds: Annotated[tuple[Seconds, ...], Field(min_length=1, max_length=MAX_POINTS)]

    @model_validator(mode="after")
    def _is_curve(self) -> "RowsSeconds":
        if len(self.rows) != len(self.seconds) or not all(
            below < above for below, above in pairwise(self.rows)
        ):
            raise ValueError(
                f"{len(self.rows)} numbers of rows and {len(self.seconds)} of seconds are not a "
                "curve: rows ascend, and each has its seconds"
            )
        return self

    @classmethod
    def rising(cls, rows: Sequence[int], seconds: Iterable[float]) -> "RowsSeconds":
        """Return a curve that never falls: noisy values are raised to the one before."""
        return cls(rows=tuple(rows), seconds=tuple(accumulate(seconds, max)))

    def at(self, rows: int) -> float:
        """Seconds of a pass over this many rows: linear between the measured ones, constant or
        along the last piece beyond them."""
        points = list(zip(self.rows, self.seconds, strict=True))
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        (below, low), (above, high) = next(
            ((a, b) for a, b in pairwise(points) if rows <= b[0]), (points[-2], points[-1])
        )
        return low + (high - low) * (rows - below) / (above - below)


class ContextCurve(Frozen):
    """Seconds of a pass over rows, at one length of the cache: T_V of a target, t_D of a draft."""

    context: Annotated[int, Field(ge=0, le=1 << 24)]
    t_v: RowsSeconds


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs, the lower one of two."""
    ordered = sorted(values)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][0]


class ExpertCosts(Frozen):
    """The share of experts in the seconds of a pass: T_V = f(M) + c U, where U is the number of
    experts that its M rows go through, summed over layers."""

    routing: Routing
    expert_s: Seconds = 0.0
    """c, seconds for each further expert; 0 if it has not been measured."""
    passes: Annotated[tuple[tuple[Positive, Experts], ...], Field(max_length=MAX_POINTS)] = ()
    """(rows, experts) of the passes that the curve of T_V was measured with, rows ascending."""

    @model_validator(mode="after")
    def _ascends(self) -> "ExpertCosts":
        if not all(below < above for (below, _), (above, _) in pairwise(self.passes)):
            raise ValueError("the rows of the measured passes do not ascend")
        return self

    def measured(self, rows: int) -> float:
        """Return how many experts the measured passes over `rows` rows went through. For rows that
        were not measured, the variety of the nearest measured pass is taken."""
        near = min(self.passes, key=lambda seen: (abs(seen[0] - rows), seen[0]))
        if near[0] == rows:
            return near[1]
        routing = self.routing
        return routing.unique(rows, routing.variety(*near) if near[0] > 1 else 1.0)


@dataclass(frozen=True)
class StateTraffic:
    """Bytes of fp32 states that a pass over rows of one session moves in addition to weights."""

    states: float = 0.0
    """The states of all layers: a pass reads them once, whatever its rows."""
    row: float = 0.0
    """The factors of a row, which are written."""

    @property
    def fixed(self) -> float:
        """Return what every pass moves: states are written once for some rows that are committed,
        of which a pass brings one at least."""
        return self.states * (1 + 1 / ROWS_WRITTEN)

    @property
    def operations(self) -> float:
        """Return the operations of a row: it decays each number, reads it, and adds to it."""
        return OPERATIONS * self.states / 4


STATELESS = StateTraffic()
ROWS_WRITTEN = 8
"""Committed rows for which states are written once (`workers/models/recurrent/states.py`)."""
OPERATIONS = 7
"""Operations on a number of a state: for what it remembers of a key, a decay and an addition; for
what it becomes, the same decay and an addition; and one for what is read."""


@dataclass(frozen=True)
class LeastTime:
    """The least time of a pass: reading its bytes or computing (Williams et al., 2009)."""

    whole_s: float
    """Seconds of reading all weights."""
    row_s: float
    """Seconds of the arithmetic of one row."""
    mixture: Mixture = DENSE
    states_s: float = 0.0
    """Seconds of moving states."""
    factors_s: float = 0.0
    """Seconds of moving the factors of one row."""

    @classmethod
    def of(
        cls,
        *,
        size: float,
        operations: float,
        bandwidth_gb_s: float,
        gflop_s: float,
        mixture: Mixture = DENSE,
        states: StateTraffic = STATELESS,
    ) -> "LeastTime":
        """Passes through weights of this many bytes, with this many operations a row if it uses all
        of them, and through states."""
        row_s = (mixture.active * operations + states.operations) / (gflop_s * 1e9)
        whole_s, states_s, factors_s = (
            moved / (bandwidth_gb_s * 1e9) for moved in (size, states.fixed, states.row)
        )
        return cls(whole_s, row_s, mixture, states_s, factors_s)

    def reading_s(self, rows: float) -> float:
        """Return the seconds of memory traffic of a pass over this many rows."""
        return self.whole_s * self.mixture.read(rows) + self.states_s + rows * self.factors_s

    @property
    def crossover(self) -> float:
        """Return the rows at which reading and computing take the same time."""
        rows = (self.whole_s + self.states_s) / self.row_s
        for _ in range(CROSSOVER_STEPS if self.mixture.share or self.factors_s else 0):
            rows = self.reading_s(rows) / self.row_s  # what is read only falls with fewer rows
        return rows

    def at(self, rows: float) -> float:
        """Return the seconds of a pass over this many rows."""
        return max(self.reading_s(rows), rows * self.row_s)


class MachineLimits(Frozen):
    """The limits of this machine on the cores in use, measured without a model."""

    bandwidth_gb_s: Rate
    """Reading memory, 10^9 bytes a second."""
    peak_gflop_s: Mapping[str, Rate]
    """Arithmetic -> 10^9 operations a second (a multiply and an add are two): fp32 (FMA) and, where
    there are instructions, int8 (VNNI) and bf16."""
    probe: str
    """The software that measured them, in words: "kernels avx512-vnni" or "torch"."""

    def peak_of(self, weights: str, *, library: bool) -> float:
        """Return the peak of the arithmetic that multiplies such weights: 16-bit weights are
        multiplied in fp32, but by a library's bf16, where there are instructions for it."""
        rounding = ("int8", "int8-per-tensor", "int4", "int4-int8", "file", "file-int8")
        own = {**dict.fromkeys(rounding, "int8"), "bf16": "bf16" if library else "fp32"}
        fp32 = self.peak_gflop_s["fp32"]
        return self.peak_gflop_s.get(own.get(weights, "fp32"), fp32)

    def roofline(
        self,
        parameters: int,
        weights: str,
        *,
        library: bool,
        mixture: Mixture = DENSE,
        states: StateTraffic = STATELESS,
        size: int = 0,
    ) -> LeastTime:
        """Return the least time of passes through this many weights of a type, and states; `size`:
        their bytes, if the type does not determine them."""
        return LeastTime.of(
            size=size or parameters * WEIGHT_BYTES.get(weights, 4),
            operations=2 * parameters,
            bandwidth_gb_s=self.bandwidth_gb_s,
            gflop_s=self.peak_of(weights, library=library),
            mixture=mixture,
            states=states,
        )


class Calibration(Frozen):
    """Seconds of one pass of a target, as `dovetail calibrate` found them."""

    measured: str
    """When, ISO 8601 in UTC."""
    backend: str
    context: Annotated[int, Field(ge=0, le=1 << 24)]
    """Rows in the cache that `t_v` holds for."""
    t_v: RowsSeconds
    t_v_limit: RowsSeconds
    """At the physical limit: max(packed bytes that are read, and states / bandwidth, 2 rows active
    parameters, and operations on states / peak)."""
    t_v_by_context: tuple[ContextCurve, ...]
    experts: ExpertCosts | None = None
    """The share of experts in `t_v`; None: the model has none, or they were not counted."""
    layers: Positive
    layers_measured: Positive
    """Fewer than `layers` where memory did not hold all of them: seconds are scaled up then."""
    limits: MachineLimits
    overhead_s: Annotated[float, Field(ge=0.0)] | None = None
    """Seconds that messages, coordinator and HTTP add to a round without a draft, if measured."""


class Reading(Frozen):
    """Seconds of reading a prompt, with a model on the CPU: on the CPU itself, and with its weights
    streaming through a device."""

    device: str
    local: RowsSeconds
    streamed: RowsSeconds

    @property
    def better_from(self) -> int | None:
        """The fewest measured rows from which on the device is always the faster one; None: at the
        most rows that were measured it is not."""
        points = sorted({*self.local.rows, *self.streamed.rows}, reverse=True)
        better = list(takewhile(lambda rows: self.streamed.at(rows) < self.local.at(rows), points))
        return better[-1] if better else None


class DeviceCosts(Frozen):
    """Seconds of the parts of a target in a pass over rows, on a device and on the CPU: a planner
    composes placements from them."""

    device: str
    link_gb_s: Rate
    """Copying a layer's weights to the device, with nothing computed meanwhile."""
    layer: RowsSeconds
    """One whose weights stay there."""
    streamed: RowsSeconds
    """One of several whose weights stream through it."""
    head: RowsSeconds
    """On the device, and whatever else a pass has but layers."""
    host_layer: RowsSeconds
    host_head: RowsSeconds
