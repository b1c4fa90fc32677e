"""The cost of experts, measured by pairs of passes over equally many rows: one where all rows are
the same token, and one where they differ and use more experts."""

import time

from dovetail.protocol.calibration import ExpertCosts, weighted_median
from dovetail.protocol.experts import Routing
from dovetail.workers.calibration.limits import Subject
from dovetail.workers.calibration.passes import Passes

ROWS = (4, 8, 16)
LEAST_PAIRS, MOST_PAIRS = 8, 64


def measure_experts(subject: Subject, passes: Passes, seconds: float) -> ExpertCosts | None:
    """Return how many experts the passes of the last curve used, and the cost of each further one,
    measured in about `seconds` seconds; None if the model counts no experts."""
    if (routing := subject.model.routing) is None:
        return None
    layers = subject.whole.layers / subject.measured.layers
    return ExpertCosts(
        routing=Routing(row=round(layers * routing.row), most=round(layers * routing.most)),
        expert_s=expert_seconds(passes, seconds),
        passes=tuple((rows, round(layers * found)) for rows, found in passes.experts.items()),
    )


def expert_seconds(passes: Passes, seconds: float) -> float:
    """Return the seconds of each further expert: the weighted median of the slopes of all pairs; 0
    if equal rows use as many experts as different ones."""
    pairs: list[tuple[float, int]] = []
    ends = time.perf_counter() + seconds
    while len(pairs) < MOST_PAIRS and (time.perf_counter() < ends or len(pairs) < LEAST_PAIRS):
        rows = ROWS[len(pairs) % len(ROWS)]
        (differing_s, more), (alike_s, fewer) = passes.counted(rows), passes.counted(rows, 1)
        pairs.append((differing_s - alike_s, more - fewer))
    slopes = [(more_s / apart, float(apart)) for more_s, apart in pairs if apart > 0]
    return max(0.0, weighted_median(slopes)) if slopes else 0.0
