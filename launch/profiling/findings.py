"""Computes the findings of a run, which `dovetail profile --json` prints and the figure shows, from
observations, samples and soundings; and predicts what would make it faster, from its rounds and
this machine's other costs. Gains are ratios of two predictions, so that common errors cancel."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.machine.others import OTHERS
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.planning.candidates import Reader
from dovetail.launch.planning.planner import Option, Planner, Tree
from dovetail.launch.planning.subject import Subject, folder_of, subject_here
from dovetail.launch.planning.words import against_offloading, placement, settings
from dovetail.launch.profiling import timeline
from dovetail.launch.profiling.measured import (
    Evidence,
    Replayed,
    costs_of,
    draft_of,
    planner_of,
    replayed,
)
from dovetail.launch.profiling.samplers import busy_cores, busy_process
from dovetail.launch.profiling.timeline import NS, Actor, Split, Use
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.models import with_draft, with_target
from dovetail.protocol.calibration import LeastTime
from dovetail.protocol.messages import RoundRecord, SeenWorker, WorkerState
from dovetail.protocol.settings import DRAFT_KINDS
from dovetail.runtime.costs.passes import RowCosts
from dovetail.runtime.costs.rounds import PairCosts
from dovetail.workers.models.checkpoints.footprint import half_of, read_tensors

WORTH = 1.02  # smaller gains are ignored: they are within the variation of two runs
REPLAYED = "replayed from the offered trees, with the measured passes"


@dataclass(frozen=True)
class Advice:
    """A change, and its expected gain."""

    name: str  # the kind of change: tree, policy, ahead, alone, weights, placement
    what: str
    flags: tuple[str, ...]  # the settings to change, as flags
    gain: float  # tokens per second over those with the settings in force
    basis: str  # how the gain was found
    same: bool = True  # true if the target stays the same function

    @property
    def worth(self) -> bool:
        return self.gain >= WORTH


class Rates:
    """Tokens a second of a run with other settings."""

    def __init__(self, evidence: Evidence, costs: PairCosts, found: Replayed) -> None:
        self.evidence, self.found, self.tree = evidence, found, evidence.tree
        if evidence.adapts and evidence.drafted:
            verified = fmean(record.verified for record in evidence.drafted)
            self.tree = replace(evidence.tree, gamma=round(verified))
        self.planner = planner_of(evidence, costs)
        self.draft = draft_of(evidence, costs, found) if found.offers else None
        self._factor = 1.0
        if self.draft is not None and (expected_s := self.option(self.tree).draft_s):
            self._factor = costs.exposed_s.value / expected_s
        self.now = self.rate(self.option(self.tree))

    def option(
        self, tree: Tree, *, ahead: bool | None = None, planner: Planner | None = None
    ) -> Option:
        """Return rounds with a tree; `ahead`: None is as in the run."""
        planner, ahead = planner or self.planner, self.evidence.ahead if ahead is None else ahead
        if self.draft is None:
            return planner.option(0, 0, None, None, 1.0)
        return planner.option(0, 0, self.draft, tree, self.found.tokens(tree), ahead=ahead)

    def rate(self, option: Option) -> float:
        """Return the tokens per second of an option; its wait for the draft is scaled from the
        measured one."""
        return option.tau / (self._factor * option.draft_s + option.verify_s + option.beside_s)

    @property
    def alone(self) -> float:
        return self.rate(self.planner.option(0, 0, None, None, 1.0))

    @property
    def in_turn_s(self) -> float:
        """Return the drafting time of a round without drafting ahead."""
        return self._factor * self.option(self.tree, ahead=False).draft_s

    def best(self) -> Tree:
        trees = (replace(self.evidence.tree, gamma=g, depth=d) for g, d in self.found.trees)
        return max(trees, key=lambda tree: self.rate(self.option(tree)))


def advise(
    rates: Rates, measured: float | None, subject: Subject | None, say: Callable[[str], None]
) -> list[Advice]:
    """Return every change, those that keep the target first, then by gain. `measured`: tokens/s of
    the run, if known; `subject`: the target on this machine, None if unknown."""
    found = [*_drafting(rates, measured)] if rates.draft is not None else []
    if subject is not None and rates.evidence.on_cpu:
        found += [*_weights(rates, subject, say), *_placements(rates, subject)]
    return sorted(found, key=lambda one: (not one.worth, not one.same, -one.gain))


def _drafting(rates: Rates, measured: float | None) -> Iterator[Advice]:
    evidence, now = rates.evidence, rates.tree
    best = rates.best()
    gain = rates.rate(rates.option(best)) / rates.now
    if not evidence.adapts and (best.gamma, best.depth) != (now.gamma, now.depth):
        sizes = {"gamma": (now.gamma, best.gamma), "depth": (now.depth, best.depth)}
        changed = tuple(f"--tree.{name}={new}" for name, (old, new) in sizes.items() if old != new)
        old, new = (f"gamma {one.gamma} and depth {one.depth}" for one in (now, best))
        what = f"another tree: {new} instead of {old}"
        yield Advice("tree", what, changed, gain, REPLAYED)
    if not evidence.adapts and evidence.set_here:
        gammas, depths = zip(*rates.found.trees, (now.gamma, now.depth), strict=True)
        flags = (
            *("--tree.policy=goodput", "--tree.insist=false"),
            *(f"--tree.gamma={max(gammas)}", f"--tree.depth={max(depths)}"),
        )
        what = "let the tree's size adapt to its costs: policy goodput"
        basis = f"at least the best tree of one size, {REPLAYED}"
        yield Advice("policy", what, flags, max(1.0, gain), basis)
    if evidence.own_device:
        other = not evidence.ahead
        gain = rates.rate(rates.option(now, ahead=other)) / rates.now
        what = "keep drafting while the target verifies"
        what = what if other else "draft only after the verdict"
        yield Advice("ahead", what, (f"--draft.ahead={str(other).lower()}",), gain, REPLAYED)
    gain, what = rates.alone / (measured or rates.now), "decode with the target alone"
    yield Advice("alone", what, ("--draft=none",), gain, "measured passes")


def _weights(rates: Rates, subject: Subject, say: Callable[[str], None]) -> Iterator[Advice]:
    base = subject.configuration
    tensors = read_tensors(folder_of(with_target(base.settings.target).model))
    halves = ["half"] if half_of(tensors) and subject.weights == "fp32" else []
    for weights in [*halves, "int8"] if subject.weights in ("fp32", "half") else []:
        other = subject_here(base.over("profile", {"target.weights": weights}), say, subject)
        planner = _at_other_speed(rates.planner, subject, other)
        gain = rates.rate(rates.option(rates.tree, planner=planner)) / rates.now
        same = weights == "half"
        what = "weights in 8 bits: another function, with other tokens"
        what = "weights in the 16 bits of the checkpoint: the same function" if same else what
        flags = (f"--target.weights={weights}", *(("--target.cache=fp32",) if same else ()))
        basis = "measured passes, scaled by the plan's estimates for both types"
        yield Advice("weights", what, flags, gain, basis, same=same)


def _at_other_speed(planner: Planner, subject: Subject, other: Subject) -> Planner:
    """Return a planner whose pass times are scaled to another subject."""
    host = planner.machine.host
    assert host is not None
    own_s = host.layer_s

    def layer_s(rows: int) -> float:
        return own_s(rows) * _whole_s(other, rows) / _whole_s(subject, rows)

    return replace(planner, machine=replace(planner.machine, host=replace(host, layer_s=layer_s)))


def _whole_s(subject: Subject, rows: int) -> float:
    host = subject.machine.host
    assert host is not None
    return subject.target.layers * host.layer_s(rows) + host.head_s(rows)


def _placements(rates: Rates, subject: Subject) -> Iterator[Advice]:
    base, found = subject.configuration, rates.found
    draft, candidates = base.settings.draft, []
    if found.offers and DRAFT_KINDS[draft.kind].own_model:
        width, own = rates.evidence.tree.width, subject.embedded
        reader = Reader(base, subject.design, [], folder_of, embedded=own, width=width)
        trees = [replace(rates.evidence.tree, gamma=g, depth=d) for g, d in found.trees]
        (candidate,) = reader.read([with_draft(draft).model])
        candidates = [replace(candidate, acceptance=found, trees=trees)]
    every = subject.search(candidates, lambda _: None)
    stays = [one for one in every if not one.computed and one.nodes == 1]
    now = [one for one in stays if (one.draft is not None) is bool(candidates)]
    for one in every if now else ():
        if not one.computed and one.nodes == 1:
            continue
        device = subject.device or "cpu"
        flags = tuple(
            f"--{name}={SETTINGS[name].flag_text(value)}"
            for name, value in settings(one, device, device, base).items()
            if value != base.value(name)
        )
        gain = one.tokens_per_s / now[0].tokens_per_s
        basis = "the plan's estimates for both placements, each with its best tree"
        yield Advice("placement", placement(one, device), flags, gain, basis)


LEAST_S = 0.3
"""The shortest run for which the kernel's counters (in 10 ms) show who used the cores."""
BALANCED = 0.1
"""If reading and arithmetic are closer than this, neither is reported as the bound of a pass."""
FEW = 30  # number of rounds below which no figure is reliable


def find(
    evidence: Evidence, subject: Subject | None, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Compute all findings of a run. `subject`: its target on this machine, None if its potential
    is unknown."""
    actors = [Actor(worker.name, worker.roles) for worker in evidence.workers]
    actors.append(Actor(timeline.COORDINATOR, ("coordinator",)))
    uses = timeline.uses(evidence.slices, actors, evidence.start_ns, evidence.end_ns)
    split = timeline.split_of(evidence.rounds)
    costs = costs_of(evidence, subject.design.mixture if subject is not None else None)
    rates = Rates(evidence, costs, replayed(evidence))
    brought = timeline.tokens_of(evidence.records)
    tau = brought / len(evidence.rounds)
    rate = tau / split.wall_s if split is not None else None
    others = _others(evidence)
    bounds = _bounds(evidence, rates, costs.target, split, subject, judged=not _disturbed(others))
    advice = advise(rates, rate, subject, say)
    experts = _experts(evidence, costs.target)
    accepted = Counter(place for one in evidence.drafted for place in range(len(one.accepted)))
    return {
        "title": evidence.title,
        "workload": evidence.workload,
        "wall_s": evidence.wall_s,
        "sessions": len({seen.session for seen in evidence.rounds}),
        "sessions_a_pass": timeline.sessions_a_pass(evidence.inside),
        "rounds": len(evidence.rounds),
        "tokens": brought + timeline.firsts_of(evidence.rounds),
        "tau": tau,
        "tokens_per_s": rate,
        "accepted_per_position": [n / len(evidence.drafted) for n in accepted.values()],
        "hit_rate": _mean([record.hit for record in evidence.drafted]),
        "plain_share": _mean([not record.verified for record in evidence.records]),
        "devices": {actor.name: _device(actor, uses[actor.name], evidence) for actor in actors},
        "other_programs": others,
        "gpus": _gpus(evidence),
        "absent": dict(evidence.absent),
        "round_ms": timeline.round_ms(evidence.inside, len(evidence.rounds)),
        "parts_ms": {name: 1e3 * s for name, s in split.parts_s.items()} if split else {},
        "round_wall_ms": split.wall_s * 1e3 if split else None,
        "unaccounted_share": split.unaccounted_share if split else None,
        "bounds": bounds,
        "experts": experts,
        "advice": [asdict(one) for one in advice if round(one.gain, 2) > 1.0],
        "no_gain": [asdict(one) for one in advice if round(one.gain, 2) <= 1.0],
        "in_words": [*_caveats(evidence, others), *_verdict(bounds, advice), *_of_experts(experts)],
        "missed": evidence.missed,
    }


def _worker(actor: Actor, evidence: Evidence) -> tuple[SeenWorker | None, WorkerState | None]:
    seen = next((worker for worker in evidence.workers if worker.name == actor.name), None)
    return seen, next((state for state in evidence.states if state.name == actor.name), None)


def _device(actor: Actor, use: Use, evidence: Evidence) -> dict[str, Any]:
    worker, state = _worker(actor, evidence)
    whole = use.whole_s or 1.0
    bound_ns = worker.clock_bound_ns if worker else None
    return {
        "roles": list(actor.roles),
        "device": worker.device if worker else "cpu",
        "cores": format_numbers(worker.cores) if worker else "",
        "node": worker.node if worker else "",
        "busy": use.busy_s / whole,
        "ahead": use.ahead_s / whole,
        "waiting": {name: seconds / whole for name, seconds in use.waiting_s.items()},
        "by_span": {name: seconds / whole for name, seconds in use.by_name_s.items()},
        "sampled": _sampled(actor, evidence),
        "clock_bound_us": None if bound_ns is None else bound_ns / 1e3,
        "rss_mb": state.rss_mb if state else None,
    }


def _sampled(actor: Actor, evidence: Evidence) -> dict[str, float | None]:
    """Return the samplers' figures for a process: how busy its cores were with any process, the
    share of time that it ran, and for a GPU the driver's figures."""
    worker, state = _worker(actor, evidence)
    found: dict[str, float | None] = {"cores": None, "process": None, "gpu": None}
    if len(evidence.samples) < 2:
        return found
    ends = evidence.samples[0], evidence.samples[-1]
    if worker is None:
        if evidence.coordinator is not None:
            found["process"] = busy_process(*ends, evidence.coordinator, 1)
    elif state is not None and worker.host == evidence.here:
        found["cores"] = busy_cores(*ends, worker.cores)
        found["process"] = busy_process(*ends, state.pid, state.threads)
        card = worker.device.split()[0] if worker.device else ""
        busy = [sample.gpus[card].busy for sample in evidence.samples if card in sample.gpus]
        found["gpu"] = _mean(busy)
    return found


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def _gpus(evidence: Evidence) -> dict[str, Any]:
    found = {}
    for name in dict.fromkeys(name for sample in evidence.samples for name in sample.gpus):
        cards = [sample.gpus[name] for sample in evidence.samples if name in sample.gpus]
        used = [card.used_bytes for card in cards if card.used_bytes is not None]
        found[name] = {
            "name": cards[0].name,
            "busy": _mean([card.busy for card in cards]),
            "most_used_bytes": max(used, default=None),
            "link_gb_s": cards[0].link_gb_s,
        }
    return found


def _others(evidence: Evidence) -> dict[str, Any] | None:
    """Return the share of time that other programs took of the cores of the workers on this
    machine. None if unknown: a worker came or went, or the run was short."""
    own = [worker.cores for worker in evidence.workers if worker.host == evidence.here]
    cores = sorted({core for its in own for core in its})
    if evidence.changes or len(evidence.samples) < 2 or not cores:
        return None
    first, last = evidence.samples[0], evidence.samples[-1]
    busy, wall_s = busy_cores(first, last, cores), (last.at_ns - first.at_ns) / NS
    if busy is None or wall_s < LEAST_S:
        return None
    both = first.processes.keys() & last.processes.keys()
    cpu_s = sum(last.processes[pid].cpu_s - first.processes[pid].cpu_s for pid in both)
    ours = min(cpu_s / (wall_s * len(cores)), busy)
    return {"cores": format_numbers(cores), "busy": busy, "ours": ours, "share": busy - ours}


def _disturbed(others: Mapping[str, Any] | None) -> bool:
    return others is not None and others["share"] > OTHERS


def _bounds(
    evidence: Evidence,
    rates: Rates,
    target: RowCosts,
    split: Split | None,
    subject: Subject | None,
    *,
    judged: bool,
) -> dict[str, Any]:
    """The figures of the run and their bounds; empty if no two rounds followed each other. T_T is a
    round of the target alone, including its messages."""
    if split is None:
        return {}
    records = evidence.records
    tau = timeline.tokens_of(records) / len(records)
    t_v_s = fmean(record.verify_ns for record in records) / NS
    waiting = split.parts_s["queue"] / max(1e-9, split.wall_s - split.parts_s["queue"])
    alone_s = (1.0 + waiting) / rates.alone
    exposed_s = split.parts_s["draft"]
    found: dict[str, Any] = {
        "drafted": rates.draft is not None,
        "speedup": tau * alone_s / split.wall_s,
        "most_speedup": tau * alone_s / t_v_s,
        "alone_s": alone_s,
        "alone_from": _alone_from(evidence.plain, target),
        "t_v_s": t_v_s,
        "exposed_s": exposed_s,
        "in_turn_s": max(exposed_s, rates.in_turn_s) if rates.draft is not None else exposed_s,
        "round_s": split.wall_s,
        "judged": judged,
        "pass": None,
        "offloading": None,
    }
    if subject is not None:
        found["pass"] = _pass(evidence, subject, t_v_s)
        links = [card.link_gb_s for one in evidence.samples for card in one.gpus.values()]
        bus = max((link for link in links if link is not None), default=None)
        needed = subject.read_bytes * tau / split.wall_s / 1e9
        words = against_offloading(needed, bus)
        found["offloading"] = {"needed_gb_s": needed, "bus_gb_s": bus, "in_words": words}
    return found


def _alone_from(plain: Sequence[RoundRecord], target: RowCosts) -> str:
    if plain:
        return f"measured in {counted(len(plain), 'round')} without a draft"
    rows = "what the coordinator learned of passes over one row" if target.seen(1) else ""
    return f"predicted, from {rows or 'passes over more rows'}"


def _pass(evidence: Evidence, subject: Subject, t_v_s: float) -> dict[str, Any] | None:
    """A pass compared with the limits of bandwidth and arithmetic of these cores (equations 4 and 5
    of the Dovetail paper); None if a part of the target is computed elsewhere."""
    here, design = subject.here, subject.design
    if here is None or not evidence.on_cpu:
        return None
    limits, origin = here.limits
    size, rows = subject.read_bytes, 1 + fmean(one.verified for one in evidence.records)
    least = LeastTime.of(
        size=size,
        operations=2 * design.parameters,
        bandwidth_gb_s=limits.bandwidth_gb_s,
        gflop_s=(peak := limits.peak_of(subject.weights, library=False)),
        mixture=design.mixture,
    )
    reading_s, computing_s = least.reading_s(rows), rows * least.row_s
    longer_s = max(reading_s, computing_s)
    even = abs(reading_s - computing_s) <= BALANCED * longer_s
    return {
        "rows": rows,
        "t_p_s": reading_s,
        "t_c_s": computing_s,
        "bound": "both" if even else "compute" if computing_s > reading_s else "memory",
        "efficiency": longer_s / t_v_s,
        "crossover_rows": least.crossover,
        "gb_s": size * design.mixture.read(rows) / t_v_s / 1e9,
        "gflop_s": 2 * rows * design.active / t_v_s / 1e9,
        "bandwidth_gb_s": limits.bandwidth_gb_s,
        "peak_gflop_s": peak,
        "limits_from": f"{limits.probe}, {origin}",
    }


def _experts(evidence: Evidence, target: RowCosts) -> dict[str, float] | None:
    """Return how many experts a drafted pass reads, how many if rows chose independently, the cost
    of one in us, and their share of the pass; None without experts."""
    records = [record for record in evidence.drafted if record.experts]
    if target.experts is None or not records:
        return None
    routing, mean = target.experts.routing, fmean(record.experts for record in records)
    pass_s = fmean(record.verify_ns for record in records) / NS
    return {
        "a_pass": mean,
        "independent": fmean(routing.unique(1 + record.verified) for record in records),
        "row": routing.row,
        "most": routing.most,
        "expert_us": target.experts.expert_s * 1e6,
        "share": target.experts.expert_s * mean / pass_s,
    }


def _caveats(evidence: Evidence, others: Mapping[str, Any] | None) -> Iterator[str]:
    if evidence.changes:
        changes = ", ".join(f"{name} {what}" for name, what in evidence.changes.items())
        yield (
            f"Workers changed during the run ({changes}): the figures mix the time before and "
            "after. Profile again for figures of one set of workers."
        )
    if others is not None and _disturbed(others):
        cores = f"{'cores' if set(others['cores']) & set('-,') else 'core'} {others['cores']}"
        yield (
            f"Other programs took {others['share']:.0%} of the time of {cores}, and the "
            f"processes of this run {others['ours']:.0%}: all figures hold for a machine that is "
            "as busy, and what the hardware allows is not judged."
        )
    if len(evidence.rounds) < FEW:
        few = f"Only {counted(len(evidence.rounds), 'round')} in {evidence.wall_s:.2f} s"
        yield f"{few}: too few for reliable figures. Use longer replies, or more prompts."


def _verdict(bounds: Mapping[str, Any], advice: Sequence[Advice]) -> Iterator[str]:
    if not bounds:
        yield "No two rounds followed each other: there is nothing to judge. Use a longer reply."
        return
    if (found := bounds["pass"]) is not None:
        yield _of_pass(found, bounds["t_v_s"], judged=bounds["judged"])
    if bounds["drafted"]:
        printed = round(bounds["speedup"], 2)
        word = "pays" if printed > 1.0 else "does not pay" if printed < 1.0 else "brings nothing"
        yield (
            f"Speculation {word} here: {bounds['speedup']:.2f} times as fast as the target alone "
            f"({1.0 / bounds['alone_s']:.1f} tokens/s, {bounds['alone_from']}), "
            f"of {bounds['most_speedup']:.2f} that its trees allow (tau T_T / T_V); "
            f"{bounds['exposed_s'] / bounds['round_s']:.0%} of a round is spent waiting for the "
            "draft."
        )
    if bounds["offloading"] is not None:
        yield f"Against offloading: {bounds['offloading']['in_words']}."
    best = next((one for one in advice if one.worth and one.same), None)
    if best is None:
        yield "No change that keeps the target's function is predicted to gain more than 2 %."
    else:
        yield (
            f"What would help most, and changes no token: {best.what} "
            f"({' '.join(best.flags)}), predicted {best.gain:.2f} times as fast."
        )


def _of_pass(found: Mapping[str, Any], t_v_s: float, *, judged: bool) -> str:
    reached = f"{found['efficiency']:.0%} of what the hardware allows"
    kind = {
        "memory": "The target is bound by memory",
        "compute": "The target is bound by arithmetic",
        "both": "Memory and arithmetic bind the target alike",
    }[found["bound"]]
    return (
        f"{kind}: reading the weights takes at least {found['t_p_s'] * 1e3:.2f} ms, the "
        f"arithmetic of {found['rows']:.1f} rows {found['t_c_s'] * 1e3:.2f} ms; a pass takes "
        f"{t_v_s * 1e3:.2f} ms, {reached if judged else 'while other programs ran'}. Up to about "
        f"{found['crossover_rows']:.0f} rows, further ones cost little."
    )


def _of_experts(experts: Mapping[str, float] | None) -> Iterator[str]:
    if experts is not None:
        yield (
            f"A drafted pass uses {experts['a_pass']:.0f} of the {experts['most']:.0f} "
            f"experts of all layers ({experts['independent']:.0f} if its rows chose "
            f"independently); each takes {experts['expert_us']:.3g} us, together "
            f"{experts['share']:.0%} of the pass."
        )
