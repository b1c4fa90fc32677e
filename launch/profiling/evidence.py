"""Everything that was watched, sampled and sounded of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from dovetail.launch.planning.planner import Tree
from dovetail.launch.profiling.samplers import Sample
from dovetail.launch.profiling.timeline import NS, Slice
from dovetail.launch.profiling.workload import Soundings
from dovetail.protocol.messages import PairState, RoundRecord, SeenRound, SeenWorker, WorkerState


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of a run."""

    slices: Sequence[Slice]
    rounds: Sequence[SeenRound]
    workers: Sequence[SeenWorker]
    states: Sequence[WorkerState]  # the states of the same workers, as status has them
    pairs: Sequence[PairState]
    start_ns: int
    end_ns: int
    samples: Sequence[Sample]
    absent: Mapping[str, str]  # reading -> why there is none
    here: str  # the name of this host: workers of others are beyond the samplers
    tree: Tree  # the tree in force, or the largest that was seen
    ahead: bool
    title: str
    workload: str
    soundings: Soundings = field(default_factory=Soundings)
    adapts: bool = False  # true if the size of the tree follows what pays
    set_here: bool = True
    """True if this command sets the tree, rather than the clients of a server."""
    own_device: bool = True  # true if the draft has a separate device, or separate cores
    missed: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)
    """Workers that came or went meanwhile, and which of the two."""
    coordinator: int | None = None  # process number of the coordinator, if it runs on this machine

    @property
    def records(self) -> list[RoundRecord]:
        return [seen.record for seen in self.rounds]

    @property
    def drafted(self) -> list[RoundRecord]:
        return [record for record in self.records if record.verified]

    @property
    def plain(self) -> list[RoundRecord]:
        """Return the rounds without a draft, of the run and of its soundings."""
        return [*self.soundings.plain, *(one for one in self.records if not one.verified)]

    @property
    def on_cpu(self) -> bool:
        """Return whether all of the target is computed on the CPU."""
        targets = [state for state in self.states if "target" in state.roles]
        return all(state.device == "cpu" and not state.placement for state in targets)

    @property
    def inside(self) -> list[Slice]:
        return [
            piece
            for piece in self.slices
            if piece.end_ns > self.start_ns and piece.start_ns < self.end_ns
        ]

    @property
    def context(self) -> float:
        """Return the mean number of tokens committed before a round."""
        return fmean(record.prefix for record in self.records)

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS
