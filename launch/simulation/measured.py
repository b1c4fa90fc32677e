"""Costs from rounds that were measured: their means, so that rounds of the recorded sizes take in
sum what they took. Knows records, not who made them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil
from statistics import fmean

from dovetail.launch.simulation.costs import NS, Costs, curve
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import RoundRecord
from dovetail.protocol.profile import MAX_POINTS, ContextCurve, RowsSeconds

HOPS_OF_PLAIN, HOPS_OF_DRAFTED = 2, 4
"""Messages of a round."""


def measured_costs(rounds: Sequence[RoundRecord]) -> Costs:
    """Return what those rounds cost; `UserError` if nothing was drafted in any of them. The length
    of the cache makes no difference here: what was measured has it."""
    drafted = [record for record in rounds if record.passes]
    if not drafted:
        raise UserError(
            "nothing was drafted in these rounds: record some with a draft that was used"
        )
    t_v = _by_rows((record.verified + 1, record.verify_ns) for record in rounds)
    t_d = _by_rows(one for record in drafted for one in record.passes)
    hops = sum(HOPS_OF_DRAFTED if record.draft_ns else HOPS_OF_PLAIN for record in rounds)
    return Costs(
        t_v=(ContextCurve(context=0, t_v=t_v),),
        t_d=t_d,
        proposal_s=max(0.0, fmean(_beside(record) for record in drafted)) / NS,
        hop_s=sum(record.transport_ns for record in rounds) / hops / NS,
        coordinator_s=2
        * sum(record.coordinator_ns + record.queue_ns for record in rounds)
        / hops
        / NS,
    )


def _beside(record: RoundRecord) -> float:
    """Nanoseconds of the drafting that was waited for that were spent in no pass; the passes for
    the proposal come first, those ahead of it after them."""
    sums = [0, *accumulate(taken for _, taken in record.passes)]
    return record.draft_ns - max(total for total in sums if total <= record.draft_ns)


def _by_rows(samples: Iterable[tuple[int, int]]) -> RowsSeconds:
    """The mean of every number of rows that was seen; of neighbours together, where a curve has no
    room for all."""
    seen: dict[int, list[int]] = defaultdict(list)
    for rows, taken in samples:
        seen[rows].append(taken)
    known, step = sorted(seen), ceil(len(seen) / MAX_POINTS)
    groups = [known[first : first + step] for first in range(0, len(known), step)]
    return curve(
        [group[len(group) // 2] for group in groups],
        [fmean(taken for rows in group for taken in seen[rows]) / NS for group in groups],
    )
