"""Evidence of a run: everything that was watched, and the figures read off it directly."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dovetail.launch.machine.others import OTHERS
from dovetail.launch.machine.topology import Topology
from dovetail.launch.profiling.bounds import Model, Roofline
from dovetail.launch.profiling.forecast import Tree
from dovetail.launch.profiling.samplers import Sample
from dovetail.launch.profiling.situation import Situation
from dovetail.launch.profiling.timeline import NS, Slice
from dovetail.launch.profiling.workload import Soundings
from dovetail.protocol.messages import PairState, RoundRecord, SeenRound, SeenWorker, WorkerState


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of a run."""

    slices: Sequence[Slice]
    rounds: Sequence[SeenRound]
    workers: Sequence[SeenWorker]
    states: Sequence[WorkerState]
    """The states of the same workers, as status has them."""
    pairs: Sequence[PairState]
    start_ns: int
    end_ns: int
    samples: Sequence[Sample]
    absent: Mapping[str, str]
    topology: Topology
    here: str
    """The name of this host: workers of others are beyond the samplers."""
    soundings: Soundings
    model: Model | None
    roofline: Roofline | None
    wider: Roofline | None
    tree: Tree
    width: int | None
    """The width of the trees; None where it is not known."""
    ahead: bool
    situation: Situation
    title: str
    workload: str
    missed: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)
    """Workers that came or went meanwhile, and what of it they did."""
    coordinator: int | None = None
    """Process number of the coordinator, if it runs on this machine."""

    @property
    def records(self) -> list[RoundRecord]:
        return [seen.record for seen in self.rounds]

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS


def share_of(flags: Sequence[bool]) -> float | None:
    return fmean(flags) if flags else None


def inside(evidence: Evidence) -> list[Slice]:
    return [
        piece
        for piece in evidence.slices
        if piece.end_ns > evidence.start_ns and piece.start_ns < evidence.end_ns
    ]


def disturbed(others: Mapping[str, Any] | None) -> bool:
    """Return whether other programs took so much that figures of this hardware cannot be judged."""
    return others is not None and others["share"] > OTHERS
