"""Measured costs of a machine: target passes over M rows, draft passes over a level, the influence
of the context length, and the hardware limits. `profile.py` stores them."""

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
"""Bytes read per weight of each type; int4 is the kernels' Q4_K."""


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
                f"{len(self.rows)} rows and {len(self.seconds)} seconds are not a curve: rows "
                "must ascend, with seconds for each"
            )
        return self

    @classmethod
    def rising(cls, rows: Sequence[int], seconds: Iterable[float]) -> "RowsSeconds":
        """Return a monotonic curve: a value below its predecessor is noise and is raised to it."""
        return cls(rows=tuple(rows), seconds=tuple(accumulate(seconds, max)))

    def at(self, rows: int) -> float:
        """Return the seconds of a pass over this many rows: interpolated linearly, constant below
        the measured rows, and extrapolated above them."""
        points = list(zip(self.rows, self.seconds, strict=True))
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        (below, low), (above, high) = next(
            ((a, b) for a, b in pairwise(points) if rows <= b[0]), (points[-2], points[-1])
        )
        return low + (high - low) * (rows - below) / (above - below)


class ContextCurve(Frozen):
    """Seconds of a pass over rows at one cache length: T_V of a target, t_D of a draft."""

    context: Annotated[int, Field(ge=0, le=1 << 24)]
    t_v: RowsSeconds


def weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs; the lower one of two."""
    ordered = sorted(values)
    half, reached = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][0]


class ExpertCosts(Frozen):
    """How experts contribute to the time of a pass: T_V = f(M) + c U, where U is the number of
    distinct experts that its M rows use, summed over layers."""

    routing: Routing
    expert_s: Seconds = 0.0
    """c, seconds per additional expert; 0 if it has not been measured."""
    passes: Annotated[tuple[tuple[Positive, Experts], ...], Field(max_length=MAX_POINTS)] = ()
    """(rows, experts) of the passes behind the T_V curve, rows ascending."""

    @model_validator(mode="after")
    def _ascends(self) -> "ExpertCosts":
        if not all(below < above for (below, _), (above, _) in pairwise(self.passes)):
            raise ValueError("the rows of the measured passes do not ascend")
        return self

    def measured(self, rows: int) -> float:
        """Return how many experts the measured passes over `rows` rows used. Between measurements,
        the variety of the nearest measured pass is assumed."""
        near = min(self.passes, key=lambda seen: (abs(seen[0] - rows), seen[0]))
        if near[0] == rows:
            return near[1]
        routing = self.routing
        return routing.unique(rows, routing.variety(*near) if near[0] > 1 else 1.0)


@dataclass(frozen=True)
class StateTraffic:
    """Bytes of fp32 recurrent states that a pass over one session moves in addition to weights."""

    states: float = 0.0
    """The states of all layers, read once per pass regardless of its rows."""
    row: float = 0.0
    """The factors of a row, which are written."""

    @property
    def fixed(self) -> float:
        """Return the bytes that every pass moves: states are read in each pass, and written once
        per `ROWS_WRITTEN` committed rows; a pass commits at least one."""
        return self.states * (1 + 1 / ROWS_WRITTEN)

    @property
    def operations(self) -> float:
        """Return the operations per row: each number decays, is read, and is updated."""
        return OPERATIONS * self.states / 4


STATELESS = StateTraffic()
ROWS_WRITTEN = 8
"""Committed rows per write of the states (`workers/models/recurrent.py`)."""
OPERATIONS = 7
"""Operations per number of a state: two to recall a key, two to update, and one to read it."""


@dataclass(frozen=True)
class LeastTime:
    """The least time of a pass: the larger of reading its bytes and computing (Williams et al.,
    2009)."""

    whole_s: float
    """Seconds to read all weights."""
    row_s: float
    """Seconds to compute one row."""
    mixture: Mixture = DENSE
    states_s: float = 0.0
    """Seconds to move the states."""
    factors_s: float = 0.0
    """Seconds to move the factors of one row."""

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
        """Return the bound for weights of this many bytes with this many operations per row,
        experts included, and for states."""
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
        """Return the number of rows at which reading and computing take equally long."""
        rows = (self.whole_s + self.states_s) / self.row_s
        for _ in range(CROSSOVER_STEPS if self.mixture.share or self.factors_s else 0):
            rows = self.reading_s(rows) / self.row_s  # what is read only falls with fewer rows
        return rows

    def at(self, rows: float) -> float:
        """Return the seconds of a pass over this many rows."""
        return max(self.reading_s(rows), rows * self.row_s)


class MachineLimits(Frozen):
    """The limits of this machine with the cores in use, measured without a model."""

    bandwidth_gb_s: Rate
    """Memory read bandwidth, 10^9 bytes a second."""
    peak_gflop_s: Mapping[str, Rate]
    """Arithmetic -> 10^9 operations a second (multiply and add count as two): fp32 (FMA) and, if
    the CPU has instructions for them, int8 (VNNI) and bf16."""
    probe: str
    """The software that measured them: "kernels avx512-vnni" or "torch"."""

    def peak_of(self, weights: str, *, library: bool) -> float:
        """Return the peak of the arithmetic used for weights of this type: 16-bit weights are
        multiplied in fp32, except by a library in bf16 if the CPU has instructions for it."""
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
        """Return the bound for this many weights of a type, and for states; `size`: bytes of the
        weights, if the type does not determine them."""
        return LeastTime.of(
            size=size or parameters * WEIGHT_BYTES.get(weights, 4),
            operations=2 * parameters,
            bandwidth_gb_s=self.bandwidth_gb_s,
            gflop_s=self.peak_of(weights, library=library),
            mixture=mixture,
            states=states,
        )


class Calibration(Frozen):
    """Seconds of a target's pass, as measured by `dovetail calibrate`."""

    measured: str
    """Time of the measurement, ISO 8601 in UTC."""
    backend: str
    context: Annotated[int, Field(ge=0, le=1 << 24)]
    """Cached rows for which `t_v` holds."""
    t_v: RowsSeconds
    t_v_limit: RowsSeconds
    """The physical limit: max(bytes of packed weights and states / bandwidth, operations / peak),
    with 2 x rows x active parameters operations, and those on states."""
    t_v_by_context: tuple[ContextCurve, ...]
    experts: ExpertCosts | None = None
    """How experts contribute to `t_v`; None: the model has none, or they were not counted."""
    layers: Positive
    layers_measured: Positive
    """Fewer than `layers` if memory could not hold all of them; seconds are then scaled up."""
    limits: MachineLimits
    overhead_s: Annotated[float, Field(ge=0.0)] | None = None
    """Seconds that messages, coordinator and HTTP add to a round without a draft, if measured."""


class ReadingCosts(Frozen):
    """Seconds to prefill a prompt with a model on the CPU: on the CPU itself, and with its weights
    streamed through a device."""

    device: str
    local: RowsSeconds
    streamed: RowsSeconds

    @property
    def better_from(self) -> int | None:
        """Return the smallest measured number of rows from which on the device is faster; None if
        it is slower at the largest."""
        points = sorted({*self.local.rows, *self.streamed.rows}, reverse=True)
        better = list(takewhile(lambda rows: self.streamed.at(rows) < self.local.at(rows), points))
        return better[-1] if better else None


class DeviceCosts(Frozen):
    """Seconds of the parts of a target's pass on a device and on the CPU, from which a planner
    composes placements."""

    device: str
    link_gb_s: Rate
    """Bandwidth of copying a layer's weights to the idle device."""
    layer: RowsSeconds
    """A layer whose weights stay on the device."""
    streamed: RowsSeconds
    """One of several layers whose weights are streamed to the device."""
    head: RowsSeconds
    """The output head and everything else outside the layers, on the device."""
    host_layer: RowsSeconds
    host_head: RowsSeconds
