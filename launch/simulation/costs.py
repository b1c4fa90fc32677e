"""The costs of the simulated machine for a pass, a message, a proposal. Numbers only; where they
come from, `machines.py` and `measured.py` say."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from dovetail.protocol.profile import ContextCurve, RowsSeconds

NS = 1e9


@dataclass(frozen=True)
class Costs:
    """Seconds of everything that takes time in a round."""

    t_v: tuple[ContextCurve, ...]
    """The target's pass over rows, at lengths of the cache, ascending."""
    t_d: RowsSeconds
    """A pass of the draft over rows."""
    proposal_s: float = 0.0
    """Seconds of the draft worker in a round beside its passes."""
    hop_s: float = 0.0
    """A message on its way."""
    coordinator_s: float = 0.0
    """Seconds of the coordinator for a message."""

    def verify_s(self, rows: int, context: int) -> float:
        """T_V: linear between the lengths that are known, level or along the last piece beyond
        them."""
        if len(self.t_v) == 1 or context <= self.t_v[0].context:
            return self.t_v[0].t_v.at(rows)
        below, above = next(
            ((a, b) for a, b in pairwise(self.t_v) if context <= b.context), self.t_v[-2:]
        )
        low, high = below.t_v.at(rows), above.t_v.at(rows)
        return low + (high - low) * (context - below.context) / (above.context - below.context)

    def draft_s(self, rows: int) -> float:
        """t_D of one pass."""
        return self.t_d.at(rows)

    def with_slower_draft(self, factor: float) -> "Costs":
        """Return these costs with a draft whose passes and proposals take `factor` times as
        long."""
        slower = RowsSeconds(
            rows=self.t_d.rows, seconds=tuple(factor * seconds for seconds in self.t_d.seconds)
        )
        return Costs(self.t_v, slower, self.proposal_s * factor, self.hop_s, self.coordinator_s)


def curve(rows: Sequence[int], seconds: Sequence[float]) -> RowsSeconds:
    """A curve whose time never falls with the rows: what was measured noisily is raised to what
    came before it."""
    risen: list[float] = []
    for value in seconds:
        risen.append(max(value, risen[-1] if risen else 0.0))
    return RowsSeconds(rows=tuple(rows), seconds=tuple(risen))


def in_ns(seconds: float) -> int:
    return round(seconds * NS)
