"""Costs from rounds that were measured: their means, so that rounds of the recorded sizes take in
sum what they took. Knows records, not who made them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import ceil
from statistics import fmean

from dovetail.launch.profiling.timeline import waited_for
from dovetail.protocol.calibration import MAX_POINTS, ContextCurve, RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord
from dovetail.runtime.costs.passes import PassCurves
from dovetail.runtime.costs.rounds import DRAFTED_HOPS, UNDRAFTED_HOPS, Messages, Origin
from simulation.prices import PlacedCosts

NS = 1e9


def measured_costs(rounds: Sequence[RoundRecord], told: str = "measured") -> PlacedCosts:
    """Return what those rounds cost; `told`: in words, where they are from. `UserError` if nothing
    was drafted in any of them. The length of the cache makes no difference here: what was measured
    has it."""
    drafted = [record for record in rounds if record.passes]
    if not drafted:
        raise UserError(
            "nothing was drafted in these rounds: record some with a draft that was used"
        )
    t_v = _by_rows((record.verified + 1, record.verify_ns) for record in rounds)
    t_d = _by_rows(one for record in drafted for one in record.passes)
    hops = sum(DRAFTED_HOPS if record.draft_ns else UNDRAFTED_HOPS for record in rounds)
    transport_ns = sum(record.transport_ns for record in rounds)
    coordinator_ns = sum(record.coordinator_ns + record.queue_ns for record in rounds)
    return PlacedCosts(
        t_v=PassCurves([ContextCurve(context=0, t_v=t_v)]),
        t_d=t_d,
        proposal_s=max(0.0, fmean(waited_for(record)[1] for record in drafted)) / NS,
        messages=Messages(transport_ns / hops / NS, 2 * coordinator_ns / hops / NS),
        origin=Origin(told),
    )


def _by_rows(samples: Iterable[tuple[int, int]]) -> RowsSeconds:
    """The mean of every number of rows that was seen; of neighbours together, where a curve has no
    room for all."""
    seen: dict[int, list[int]] = defaultdict(list)
    for rows, taken in samples:
        seen[rows].append(taken)
    known, step = sorted(seen), ceil(len(seen) / MAX_POINTS)
    groups = [known[first : first + step] for first in range(0, len(known), step)]
    return RowsSeconds.rising(
        [group[len(group) // 2] for group in groups],
        [fmean(taken for rows in group for taken in seen[rows]) / NS for group in groups],
    )
