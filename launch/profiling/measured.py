"""Costs and acceptance of a run, for the planner. A proposal is a list of nodes, best first, whose
prefixes are trees, so the gain and the cost of a smaller tree can be derived from the rounds of a
larger one."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import fmean

from dovetail.launch.planning.planner import Draft, Machine, PartCosts, Planner, Target, Tree
from dovetail.launch.profiling import timeline
from dovetail.launch.profiling.samplers import Sample
from dovetail.launch.profiling.timeline import NS, Slice
from dovetail.protocol.calibration import ExpertCosts
from dovetail.protocol.experts import Mixture, Routing
from dovetail.protocol.messages import PairState, RoundRecord, SeenRound, SeenWorker, WorkerState
from dovetail.protocol.tree import ROOT
from dovetail.runtime.costs.passes import RowCosts
from dovetail.runtime.costs.rounds import DRAFTED_HOPS, UNDRAFTED_HOPS, PairCosts


@dataclass(frozen=True)
class Soundings:
    """Rounds with the widest tree, reply by reply, rounds without any, and those of the trees in
    between."""

    wide: Sequence[Sequence[RoundRecord]] = ()
    plain: Sequence[RoundRecord] = ()
    others: Sequence[RoundRecord] = ()


@dataclass(frozen=True)
class Evidence:
    """All data of a run."""

    slices: Sequence[Slice]
    rounds: Sequence[SeenRound]
    workers: Sequence[SeenWorker]
    states: Sequence[WorkerState]  # the states of the same workers, as in status
    pairs: Sequence[PairState]
    start_ns: int
    end_ns: int
    samples: Sequence[Sample]
    absent: Mapping[str, str]  # reading -> why there is none
    here: str  # the name of this host: the samplers cannot read others
    tree: Tree  # the tree in force, or the largest one seen
    ahead: bool
    title: str
    workload: str
    soundings: Soundings = field(default_factory=Soundings)
    adapts: bool = False  # true if the size of the tree adapts to its costs
    set_here: bool = True
    """True if this command, not the clients of a server, sets the tree."""
    own_device: bool = True  # true if the draft has a separate device, or separate cores
    missed: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)
    """Workers that registered or left meanwhile, and which of the two."""
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


GAMMAS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 19, 23, 27, 31, 39, 47, 55, 63)
LEAST_PLAIN = 4
"""Rounds without a draft for measuring the time outside a pass; the first is often slow."""


def levels_of(parents: Sequence[int]) -> tuple[int, ...]:
    """Return the level of every node of a tree; children of the root are at level 1."""
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent == ROOT else levels[parent] + 1)
    return tuple(levels)


@dataclass(frozen=True)
class Offer:
    """A round: the levels of the verified nodes, best first, the nodes that the target chose, the
    rows of the passes for which it waited, and whether the next root was in the tree."""

    levels: tuple[int, ...]
    accepted: tuple[int, ...]
    rows: tuple[int, ...]
    foreseen: bool

    def brings(self, tree: Tree) -> int:
        """Return how many of the chosen nodes such a tree would contain: a prefix of the path."""
        inside = [node for node, level in enumerate(self.levels) if level <= tree.depth]
        kept = set(inside[: tree.gamma])
        return next(
            (n for n, node in enumerate(self.accepted) if node not in kept), len(self.accepted)
        )


class Replayed:
    """The acceptance of a draft, from decoded rounds."""

    def __init__(self, replies: Sequence[Sequence[RoundRecord]], *, reads: bool) -> None:
        """`replies`: the rounds of each, preferably with large trees; `reads`: the draft is a head,
        which makes its first pass after the verdict, despite any drafting ahead."""
        pairs = [pair for reply in replies for pair in pairwise(reply)]
        self.offers = [
            Offer(
                levels_of(one.parents[: one.verified]),
                one.accepted,
                tuple(rows for rows, _ in timeline.waited_for(one)[0]),
                after.hit,
            )
            for one, after in pairs
            if one.verified and one.draft_ns
        ]
        self.origin = f"replayed: {len(self.offers)} rounds of this run"
        self._reads = reads

    @property
    def trees(self) -> list[tuple[int, int]]:
        """Return gamma and depth of every tree in these rounds."""
        gamma = max(len(offer.levels) for offer in self.offers)
        depth = max(max(offer.levels) for offer in self.offers)
        sizes = sorted({gamma, *(one for one in GAMMAS if one < gamma)})
        return [
            (size, levels) for size in sizes for levels in range(1, depth + 1) if levels <= size
        ]

    def tokens(self, tree: Tree) -> float:
        """Return the tokens of a round, the target's own included."""
        return 1.0 + fmean(offer.brings(tree) for offer in self.offers)

    def passes(self, tree: Tree, ahead: float) -> Iterable[tuple[int, float]]:
        """Return (rows, number per round) of the passes for which a round waits. If the root was in
        the tree, as many passes are already done as there was time for."""
        counts: Counter[int] = Counter()
        for offer in self.offers:
            rows = offer.rows[: tree.depth]
            made = int(ahead / tree.width) if offer.foreseen else 0
            counts.update(rows[max(made, 0) :] or (rows[:1] if self._reads else ()))
        return [(rows, count / len(self.offers)) for rows, count in counts.items()]


def replayed(evidence: Evidence) -> Replayed:
    """Return the acceptance of the widest trees of the run: those of its soundings, else its own;
    without trees if the run drafted nothing."""
    ordered = sorted(evidence.rounds, key=lambda seen: (seen.session, seen.record.round))
    own = [[one.record for one in its] for _, its in groupby(ordered, lambda seen: seen.session)]
    reads = any(worker.feature_bytes for worker in evidence.states)
    return Replayed((evidence.drafted and evidence.soundings.wide) or own, reads=reads)


def costs_of(evidence: Evidence, mixture: Mixture | None = None) -> PairCosts:
    """Return the times of passes and rounds of the run. If there were no passes over a single row,
    the coordinator's learned time is used; `mixture`: of a target with experts."""
    costs = PairCosts(RowCosts(experts=_known_experts(evidence, mixture)))
    shared = not timeline.one_by_one(evidence.rounds)
    for passed in _shared_passes(evidence) if shared else _passes(evidence):
        costs.target.observe(*passed)
    none, no_single = not costs.target.known, not costs.target.seen(1)
    for pair in evidence.pairs:
        curve = () if pair.t_v is None else zip(pair.t_v.rows, pair.t_v.seconds, strict=True)
        for rows, seconds in curve:
            if none or (rows == 1 and no_single):
                costs.target.observe(rows, seconds, evidence.context)
    for record in (*evidence.drafted, *_sounded(evidence)):
        costs.draft.observe_all(record.passes)
    for record in evidence.drafted or evidence.plain:
        costs.host_s.add(_beside_s(record))
        costs.exposed_s.add(record.draft_ns / NS)
    if len(evidence.plain) >= LEAST_PLAIN or not evidence.drafted:
        for record in evidence.plain:
            costs.undrafted_s.add(_beside_s(record))
    else:
        costs.undrafted_s.add(costs.host_s.value * UNDRAFTED_HOPS / DRAFTED_HOPS)
    return costs


def _beside_s(record: RoundRecord) -> float:
    return (record.transport_ns + record.coordinator_ns) / NS


def _sounded(evidence: Evidence) -> list[RoundRecord]:
    wide = [record for reply in evidence.soundings.wide for record in reply]
    return [*evidence.soundings.plain, *evidence.soundings.others, *wide]


def _known_experts(evidence: Evidence, mixture: Mixture | None) -> ExpertCosts | None:
    """Return how many experts the target has, from its passes over a single row; None if no such
    pass counted any."""
    row = next((found for rows, _, _, found in _passes(evidence) if rows == 1 and found), 0)
    if not row or mixture is None:
        return None
    most = max(row, round(row * mixture.count / mixture.chosen))
    return ExpertCosts(routing=Routing(row=row, most=most))


def _passes(evidence: Evidence) -> Iterator[tuple[int, float, float, int]]:
    """Yield rows, seconds, context and experts of every pass with a single session."""
    for record in (*evidence.records, *_sounded(evidence)):
        if record.verify_ns:
            yield 1 + record.verified, record.verify_ns / NS, record.prefix, record.experts


def _shared_passes(evidence: Evidence) -> Iterator[tuple[int, float, float, int]]:
    """Yield the passes shared by several sessions, if all of their rounds have been seen."""
    records = {(seen.session, seen.record.round): seen.record for seen in evidence.rounds}
    for piece in timeline.passes(evidence.slices):
        its = [records[key] for key in piece.about if key in records]
        if len(its) == len(piece.about):
            yield (
                sum(1 + record.verified for record in its),
                (piece.end_ns - piece.start_ns) / NS,
                fmean(record.prefix for record in its),
                its[0].experts,
            )


def planner_of(evidence: Evidence, costs: PairCosts) -> Planner:
    """Return a planner for a target as placed now, based on the times of its passes."""
    sessions = timeline.sessions_a_pass(evidence.inside)

    def pass_s(rows: int) -> float:
        return costs.target.at(round(rows * sessions), evidence.context)

    target = Target(1, 1, 0, lambda *_: 0, lambda *_: 0)
    return Planner(target, Machine(PartCosts(pass_s, lambda _: 0.0), None, None, messages=costs))


def draft_of(evidence: Evidence, costs: PairCosts, found: Replayed) -> Draft:
    """Return the run's draft for the planner."""
    beside = [timeline.waited_for(record)[1] for record in evidence.drafted]
    return Draft(
        *("the draft", lambda rows, _: costs.draft.at(rows), lambda _: 0, 0),
        *(found.tokens, (), found.passes, max(0.0, fmean(beside) / NS)),
    )
