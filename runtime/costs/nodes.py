"""Costs of a target that is spread over the memory nodes of a machine, from those of the same
target on one node. Every node computes a share of the outputs from weights in its own memory, so
reading and computing are divided among the threads. In addition, the threads of all nodes
synchronise several times per layer, and read results of other nodes. Pure."""

from dataclasses import dataclass

from dovetail.protocol.calibration import RowsSeconds
from dovetail.runtime.costs.rounds import Origin

MEETING_S = 50e-6
"""Additional seconds of a spread layer: four synchronisations of 1 us, and half of the activations
of 16 rows (0.75 MB) at 16 GB/s. An estimate, measured on no machine."""
ASSUMED = f"{MEETING_S * 1e6:.0f} us a layer for traffic between nodes (assumed, not measured)"


@dataclass(frozen=True)
class Nodes:
    """Memory nodes over which a target can be spread."""

    count: int
    times: float  # ratio of the threads on all nodes to those on one
    meeting_s: float = MEETING_S  # additional seconds of a layer
    meeting: str = ASSUMED  # its origin, in words

    def spread_s(self, alone_s: float, layers: float) -> float:
        """Return the seconds on all nodes of this many layers that take `alone_s` on one."""
        return alone_s / self.times + layers * self.meeting_s

    def origin_of(self, alone: Origin) -> Origin:
        """Return the origin of passes over all nodes, from that of passes on one."""
        words = f"1/{self.times:.3g} of a pass on one node ({alone}), and {self.meeting}"
        return Origin(words, estimated=True)


def measured_meeting_s(
    alone: RowsSeconds, spread: RowsSeconds, *, rows: int, times: float, layers: int
) -> float:
    """Return the additional seconds of a layer on all nodes, from measured times."""
    return max(0.0, spread.at(rows) - alone.at(rows) / times) / layers
