"""What a run comes to: the object that `dovetail profile --json` prints and the report shows, from
what was watched, sampled, sounded and probed.

Computes nothing itself that stands elsewhere: time lines are `timeline.py`, limits `bounds.py`,
changes `advice.py`. Pure but for a look at a model's folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.machine.topology import Topology, format_numbers
from dovetail.launch.profiling import timeline
from dovetail.launch.profiling.advice import Advice, advise
from dovetail.launch.profiling.bounds import Bounds, Model, Offloading, Pass, Roofline, achieved
from dovetail.launch.profiling.forecast import (
    Forecast,
    Tree,
    at_positions,
    curve_of,
    offers_of,
    prices_of,
)
from dovetail.launch.profiling.rounds import (
    Split,
    Waterfall,
    bubbles,
    every_round,
    split_of,
    telling,
)
from dovetail.launch.profiling.samplers import Sample, busy_cores, busy_process, energy_j
from dovetail.launch.profiling.situation import Situation
from dovetail.launch.profiling.timeline import NS, Actor, Slice, Use
from dovetail.launch.profiling.workload import Soundings
from dovetail.protocol.messages import PairState, RoundRecord, SeenRound, SeenWorker, WorkerState
from dovetail.runtime.costs import RowCosts

CURVE_ROWS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
OFF = 0.15
"""By which the forecast of a run may miss it without a word."""
FEW = 30
"""Rounds of which no figure should be trusted."""
MUCH = 0.05
"""Of a round, what messages may take without a word."""
OTHERS = 0.1
"""Of the cores' time, what other programs may take without a word."""
LEAST_S = 0.3
"""Of a run, for which the kernel's count of busy time, in hundredths of a second, says who took the
cores."""
STRETCHES = 60
"""Of the run, for which a device's busy share is drawn."""


@dataclass(frozen=True)
class Evidence:
    """All that is known of a run."""

    slices: Sequence[Slice]
    rounds: Sequence[SeenRound]
    workers: Sequence[SeenWorker]
    states: Sequence[WorkerState]
    """Of the same workers, as status has them."""
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
    """Of the trees; None where it is not known."""
    ahead: bool
    situation: Situation
    title: str
    workload: str
    missed: int = 0
    changes: Mapping[str, str] = field(default_factory=dict)
    """Workers that came or went meanwhile, and what of it they did."""
    coordinator: int | None = None
    """Its process, where that is on this machine."""

    @property
    def records(self) -> list[RoundRecord]:
        return [seen.record for seen in self.rounds]

    @property
    def wall_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS


@dataclass(frozen=True)
class Findings:
    """The result, and what is drawn of it beside that."""

    told: dict[str, Any]
    waterfalls: Sequence[Waterfall]
    busy: Mapping[str, Sequence[float]]
    """Device -> its busy share in each stretch of the run."""
    sampled: Mapping[str, Sequence[tuple[float, float]]]
    """Device -> (seconds since the beginning, share of the time in which its process ran)."""
    advice: Sequence[Advice]


def find(evidence: Evidence) -> Findings:
    """Everything."""
    actors = [Actor(worker.name, worker.roles) for worker in evidence.workers] + [
        Actor(timeline.COORDINATOR, ("coordinator",))
    ]
    uses = timeline.uses(evidence.slices, actors, evidence.start_ns, evidence.end_ns)
    split, every = (
        split_of(evidence.rounds),
        every_round(evidence.rounds, evidence.slices),
    )
    alone = timeline.one_by_one(evidence.rounds)
    costs = costs_of(evidence, alone=alone)
    forecast = forecast_of(evidence, costs, split)
    bounds = bounds_of(evidence, forecast, split)
    advice = advise(forecast, evidence.situation)
    of_rounds = timeline.tokens_of(evidence.records)
    tokens = of_rounds + timeline.firsts_of(evidence.rounds)
    ahead_ms = timeline.ahead_on_the_way_ms(_inside(evidence), len(evidence.rounds))
    energy, others = energy_of(evidence, tokens), others_of(evidence)
    told = {
        "title": evidence.title,
        "workload": evidence.workload,
        "wall_s": evidence.wall_s,
        "sessions": len({seen.session for seen in evidence.rounds}),
        "sessions_a_pass": timeline.sessions_a_pass(_inside(evidence)),
        "rounds": len(evidence.rounds),
        "tokens": tokens,
        "tau": of_rounds / len(evidence.rounds) if evidence.rounds else None,
        "tokens_per_s": bounds.tau / bounds.round_s if bounds is not None else None,
        "accepted_per_position": at_positions(evidence.records),
        "hit_rate": _share_of([record.hit for record in evidence.records if record.verified]),
        "plain_share": _share_of([not record.verified for record in evidence.records]),
        "devices": {actor.name: _device(actor, uses[actor.name], evidence) for actor in actors},
        "other_programs": others,
        "nodes": dict(_nodes(evidence)),
        "gpus": _gpus(evidence),
        "energy": energy,
        "absent": dict(evidence.absent),
        "round_ms": timeline.round_ms(_inside(evidence), len(evidence.rounds)),
        "parts_ms": {name: seconds * 1e3 for name, seconds in split.parts_s.items()}
        if split
        else {},
        "round_wall_ms": split.wall_s * 1e3 if split else None,
        "unaccounted_share": split.unaccounted_share if split else None,
        "ahead_on_the_way_ms": ahead_ms,
        "bubbles": [
            {"after": b.after, "before": b.before, "ms": b.seconds * 1e3}
            for b in bubbles(every, [w.name for w in evidence.workers])
        ],
        "bounds": bounds_told(evidence, bounds, forecast, judged=not disturbed(others)),
        "curves": curves_of(evidence, forecast, costs, bounds),
        "forecast_off": forecast.off,
        "verdict": verdict(
            evidence, bounds, advice, forecast, others, list(_of_transport(split, ahead_ms))
        ),
        "missed": evidence.missed,
    }
    return Findings(
        told,
        telling(every, alone=alone),
        _busy(evidence, actors),
        _sampled(evidence),
        advice,
    )


def _share_of(flags: Sequence[bool]) -> float | None:
    return fmean(flags) if flags else None


def _inside(evidence: Evidence) -> list[Slice]:
    return [
        piece
        for piece in evidence.slices
        if piece.end_ns > evidence.start_ns and piece.start_ns < evidence.end_ns
    ]


# -- devices ---------------------------------------------------------------------------------------


def _device(actor: Actor, use: Use, evidence: Evidence) -> dict[str, Any]:
    """A process and what it runs on: shares of the run."""
    worker = next((worker for worker in evidence.workers if worker.name == actor.name), None)
    state = next((state for state in evidence.states if state.name == actor.name), None)
    whole = use.whole_s or 1.0
    return {
        "roles": list(actor.roles),
        "device": worker.device if worker else "cpu",
        "cores": format_numbers(worker.cores) if worker else "",
        "node": worker.node if worker else "",
        "busy": use.busy_s / whole,
        "ahead": use.ahead_s / whole,
        "idle": 1.0 - use.busy_s / whole,
        "waiting": {
            name: seconds / whole
            for name, seconds in sorted(use.waiting_s.items(), key=lambda item: -item[1])
        },
        "by_span": {
            name: seconds / whole
            for name, seconds in sorted(use.by_name_s.items(), key=lambda item: -item[1])
        },
        "sampled": _cross_check(worker, state, evidence),
        "clock_bound_us": worker.clock_bound_ns / 1e3
        if worker and worker.clock_bound_ns is not None
        else None,
        "rss_mb": state.rss_mb if state else None,
    }


def _cross_check(
    worker: SeenWorker | None, state: WorkerState | None, evidence: Evidence
) -> dict[str, float | None]:
    """What the samplers say of a worker: how busy its cores were, with whatever; and how much of
    the time its process ran. A GPU's: its driver's word."""
    if len(evidence.samples) < 2:
        return {"cores": None, "process": None, "gpu": None}
    first, last = evidence.samples[0], evidence.samples[-1]
    if worker is None or state is None or worker.host != evidence.here:
        ours = worker is None and evidence.coordinator is not None
        return {
            "cores": None,
            "process": busy_process(first, last, evidence.coordinator or 0, 1) if ours else None,
            "gpu": None,
        }
    cards = [
        sample.gpus[name]
        for sample in evidence.samples
        for name in worker.device.split()[:1]
        if name in sample.gpus
    ]
    return {
        "cores": busy_cores(first, last, worker.cores),
        "process": busy_process(first, last, state.pid, state.threads),
        "gpu": fmean(card.busy for card in cards) if cards else None,
    }


def _nodes(evidence: Evidence) -> Iterator[tuple[str, dict[str, Any]]]:
    """Memory nodes of this machine: how busy their cores were, each CPU counted once, and what
    memory was in use."""
    if len(evidence.samples) < 2:
        return
    first, last = evidence.samples[0], evidence.samples[-1]
    for node in evidence.topology.nodes:
        cores = [thread for core in node.cores for thread in core]
        used = [
            sample.node_used_bytes[node.number]
            for sample in evidence.samples
            if node.number in sample.node_used_bytes
        ]
        workers = [
            worker.name
            for worker in evidence.workers
            if worker.host == evidence.here and set(worker.cores) & set(cores)
        ]
        yield (
            str(node.number),
            {
                "cores": format_numbers(sorted(cores)),
                "busy": busy_cores(first, last, cores),
                "by_core": {str(core): busy_cores(first, last, [core]) for core in sorted(cores)},
                "workers": workers,
                "most_used_bytes": max(used, default=None),
                "memory_bytes": node.memory_bytes,
            },
        )


def others_of(evidence: Evidence) -> dict[str, Any] | None:
    """What other programs took of the cores of the workers on this machine: shares of their time.
    None where the kernel did not tell, or a worker came or went, of which it tells too little."""
    if evidence.changes:
        return None
    cores = sorted(
        {
            core
            for worker in evidence.workers
            if worker.host == evidence.here
            for core in worker.cores
        }
    )
    if len(evidence.samples) < 2 or not cores:
        return None
    first, last = evidence.samples[0], evidence.samples[-1]
    busy, wall_s = busy_cores(first, last, cores), (last.at_ns - first.at_ns) / NS
    if busy is None or wall_s < LEAST_S:
        return None
    ours = sum(
        last.processes[pid].cpu_s - first.processes[pid].cpu_s
        for pid in last.processes
        if pid in first.processes
    ) / (wall_s * len(cores))
    return {
        "cores": format_numbers(cores),
        "busy": busy,
        "ours": min(ours, busy),
        "share": max(0.0, busy - ours),
    }


def disturbed(others: Mapping[str, Any] | None) -> bool:
    """Whether other programs took so much that figures of this hardware cannot be judged."""
    return others is not None and others["share"] > OTHERS


def _gpus(evidence: Evidence) -> dict[str, Any]:
    names = dict.fromkeys(name for sample in evidence.samples for name in sample.gpus)
    found = {}
    for name in names:
        cards = [sample.gpus[name] for sample in evidence.samples if name in sample.gpus]
        most = max(card.used_bytes for card in cards)
        found[name] = {
            "name": cards[0].name,
            "busy": fmean(card.busy for card in cards),
            "most_used_bytes": most,
            "link_gb_s": cards[0].link_gb_s,
        }
    return found


def energy_of(evidence: Evidence, tokens: int) -> dict[str, Any]:
    """Joules by domain and a token; None, with the reasons in `absent`, where nothing counts
    them."""
    joules = (
        energy_j(evidence.samples[0], evidence.samples[-1]) if len(evidence.samples) > 1 else {}
    )
    return {
        "joules": dict(joules),
        "joules_per_token": sum(joules.values()) / tokens if joules and tokens else None,
    }


def _busy(evidence: Evidence, actors: Sequence[Actor]) -> dict[str, list[float]]:
    return {
        actor.name: timeline.shares_over_time(
            evidence.slices, actor.name, evidence.start_ns, evidence.end_ns, STRETCHES
        )
        for actor in actors
    }


def _sampled(evidence: Evidence) -> dict[str, list[tuple[float, float]]]:
    """Each process of this machine between two samples."""
    found = {}
    for worker in evidence.workers:
        state = next((state for state in evidence.states if state.name == worker.name), None)
        if state is None or worker.host != evidence.here:
            continue
        shares = [
            (two, busy_process(one, two, state.pid, state.threads))
            for one, two in pairwise(evidence.samples)
        ]
        found[worker.name] = [
            ((sample.at_ns - evidence.samples[0].at_ns) / NS, share)
            for sample, share in shares
            if share is not None
        ]
    return found


# -- costs and bounds ------------------------------------------------------------------------------


def costs_of(evidence: Evidence, *, alone: bool) -> RowCosts:
    """T_V from every pass that was seen; of those over a single row, where there was none, what the
    coordinator has learned. Where sessions did not run one after the other (`alone`), a pass has
    the rows of all that it was for."""
    costs, context = RowCosts(), fmean(record.prefix for record in evidence.records)
    for rows, seconds, prefix in _passes(evidence) if alone else _shared_passes(evidence):
        costs.observe(rows, seconds, prefix)
    none, no_single = not costs.known, not costs.seen(1)
    for pair in evidence.pairs:
        for rows, seconds in (
            zip(pair.t_v.rows, pair.t_v.seconds, strict=True) if pair.t_v is not None else ()
        ):
            if none or (rows == 1 and no_single):
                costs.observe(rows, seconds, context)
    return costs


def _passes(evidence: Evidence) -> Iterator[tuple[int, float, int]]:
    """Rows, seconds and context of every pass that one session had to itself."""
    sounded = [
        *evidence.soundings.plain,
        *evidence.soundings.others,
        *(record for reply in evidence.soundings.wide for record in reply),
    ]
    for record in (*evidence.records, *sounded):
        if record.verify_ns:
            yield 1 + record.verified, record.verify_ns / NS, record.prefix


def _shared_passes(evidence: Evidence) -> Iterator[tuple[int, float, float]]:
    """The same of passes for several; of those alone whose rounds have all been seen."""
    records = {(seen.session, seen.record.round): seen.record for seen in evidence.rounds}
    for piece in timeline.passes(evidence.slices):
        its = [records[key] for key in piece.about if key in records]
        if len(its) == len(piece.about):
            yield (
                sum(1 + record.verified for record in its),
                (piece.end_ns - piece.start_ns) / NS,
                fmean(record.prefix for record in its),
            )


def forecast_of(evidence: Evidence, costs: RowCosts, split: Split | None) -> Forecast:
    """From the widest trees that were offered; without soundings from those of the run."""
    records = evidence.records
    ordered = sorted(evidence.rounds, key=lambda seen: (seen.session, seen.record.round))
    own = [
        [seen.record for seen in those]
        for _, those in groupby(ordered, key=lambda seen: seen.session)
    ]
    offers = offers_of(evidence.soundings.wide or own)
    drafted = [record for record in records if record.verified]
    plain = [*evidence.soundings.plain, *(record for record in records if not record.verified)]
    prices = prices_of(drafted, plain, costs, timeline.sessions_a_pass(_inside(evidence)))
    exposed_s = fmean(record.draft_ns for record in drafted) / NS if drafted else None
    situation = evidence.situation
    return Forecast(
        offers,
        prices,
        exposed_s=exposed_s,
        rate=timeline.tokens_of(records) / len(records) / split.wall_s
        if split is not None
        else None,
        tree=evidence.tree,
        width=evidence.width,
        ahead=evidence.ahead,
        hit_rate=_share_of([record.hit for record in drafted]) if evidence.ahead else None,
        alone_from=_alone_from(plain, costs),
        reads=situation.reads,
        cuts=situation.cuts,
    )


def _alone_from(plain: Sequence[RoundRecord], costs: RowCosts) -> str:
    """How the rate of the target alone is known."""
    if plain:
        return f"measured in {counted(len(plain), 'round')} without a draft"
    return (
        "predicted, from what the coordinator learned of passes over one row"
        if costs.seen(1)
        else "predicted, from passes over more rows"
    )


def bounds_of(evidence: Evidence, forecast: Forecast, split: Split | None) -> Bounds | None:
    """Of the run; None where no two rounds followed each other."""
    if split is None:
        return None
    records, prices = evidence.records, forecast.prices
    return Bounds(
        tau=timeline.tokens_of(records) / len(records),
        t_t_s=prices.verify_s(1),
        t_v_s=fmean(record.verify_ns for record in records) / NS,
        alone_s=forecast.alone.seconds,
        round_s=split.wall_s,
        drafting_s=max(forecast.in_turn_s, split.parts_s["draft"]),
        exposed_s=split.parts_s["draft"],
    )


def _rows(evidence: Evidence) -> float:
    return 1 + fmean(record.verified for record in evidence.records)


def bounds_told(
    evidence: Evidence, bounds: Bounds | None, forecast: Forecast, *, judged: bool
) -> dict[str, Any]:
    """The bounds, and the pass beside those of the hardware; a reason where they are not known.
    `judged`: whether the hardware was this run's own."""
    if bounds is None:
        return {}
    told: dict[str, Any] = {
        **bounds.as_json(),
        "alone_from": forecast.alone_from,
        "drafted": bool(forecast.offers),
        "judged": judged,
    }
    roofline = evidence.roofline
    if roofline is None:
        return {**told, "pass": None, "why_no_pass": why_no_roofline(evidence)}
    rows = _rows(evidence)
    rates = achieved(roofline.model, rows, bounds.t_v_s)
    limits = {
        "bandwidth_gb_s": roofline.limits.bandwidth_gb_s,
        "peak_gflop_s": roofline.peak_gflop_s,
        "probe": roofline.limits.probe,
    }
    return {
        **told,
        "pass": Pass.of(roofline, rows, bounds.t_v_s).as_json(),
        "achieved": dict(rates),
        "limits": limits,
        "parameters": roofline.model.parameters,
    }


def why_no_roofline(evidence: Evidence) -> str:
    if evidence.model is None:
        return "how many weights the target has is not known: its folder is not on this machine"
    return (
        "what these cores can do is not known: dovetail calibrate measures it, on the "
        "machine of the target"
    )


def curves_of(
    evidence: Evidence, forecast: Forecast, costs: RowCosts, bounds: Bounds | None
) -> dict[str, Any]:
    """T_V and its limits over the rows, and the speed-up over gamma; what is drawn. What is
    replayed is of other trees and shorter replies than the run's: it is taken in proportion to what
    is replayed for the settings of the run, which stands where it was measured."""
    rows = [count for count in CURVE_ROWS if count <= 64]
    context = fmean(record.prefix for record in evidence.records)
    roofline, gammas = evidence.roofline, curve_of(forecast)
    per_rate = (forecast.rate / forecast.now.rate if forecast.rate else 1.0) / forecast.alone.rate
    per_token = (
        (bounds.tau - 1.0) / (forecast.now.tokens - 1.0)
        if bounds is not None and forecast.now.tokens > 1.0
        else 1.0
    )
    verified = [record.verified for record in evidence.records if record.verified]
    return {
        "t_v": {str(count): costs.at(count, context) for count in rows} if costs.known else {},
        "t_v_limit": {str(count): roofline.least_s(count) for count in rows} if roofline else {},
        "speedup_by_gamma": {
            str(gamma): outcome.rate * per_rate if gamma else 1.0
            for gamma, outcome in gammas.items()
        },
        "tau_by_gamma": {
            str(gamma): 1.0 + (outcome.tokens - 1.0) * per_token
            for gamma, outcome in gammas.items()
        },
        "run": {"gamma": fmean(verified), "speedup": bounds.speedup, "tau": bounds.tau}
        if verified and bounds is not None
        else None,
    }


# -- the verdict -----------------------------------------------------------------------------------


def verdict(
    evidence: Evidence,
    bounds: Bounds | None,
    advice: Sequence[Advice],
    forecast: Forecast,
    others: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """What binds, whether this is the right method here, and what would help; before that, what
    speaks against these figures. `more`: sentences besides."""
    roofline = evidence.roofline
    pass_ = Pass.of(roofline, _rows(evidence), bounds.t_v_s) if roofline and bounds else None
    offloading = (
        Offloading.of(evidence.model, bounds, _bus(evidence)) if evidence.model and bounds else None
    )
    best = next((one for one in advice if one.worth and one.certain and one.same), None)
    return {
        "bound": pass_.bound if pass_ else None,
        "in_words": [
            *_caveats(evidence, others),
            *_sentences(
                bounds, pass_, offloading, best, evidence, forecast, judged=not disturbed(others)
            ),
            *more,
            *_doubts(forecast),
        ],
        "offloading": offloading.as_json() if offloading else None,
        "advice": [one.as_json() for one in advice],
    }


def _bus(evidence: Evidence) -> float | None:
    links = [
        card.link_gb_s
        for sample in evidence.samples
        for card in sample.gpus.values()
        if card.link_gb_s is not None
    ]
    return max(links, default=None)


def _caveats(evidence: Evidence, others: Mapping[str, Any] | None) -> Iterator[str]:
    if evidence.changes:
        said = ", ".join(f"{name} {what}" for name, what in evidence.changes.items())
        yield (
            f"Workers changed meanwhile ({said}): shares are of the whole time, and figures "
            "mix what was before and after. Watch again for those of one."
        )
    if others is not None and disturbed(others):
        cores = f"{'cores' if set(others['cores']) & set('-,') else 'core'} {others['cores']}"
        yield (
            f"Other programs took {others['share']:.0%} of the time of {cores}, and the "
            f"processes of this run {others['ours']:.0%}: "
            "all figures hold for a machine that is as busy, and what the hardware allows is "
            "not judged."
        )
    if len(evidence.rounds) < FEW:
        few = f"Only {counted(len(evidence.rounds), 'round')} in {evidence.wall_s:.2f} s"
        yield f"{few}: too few for these figures to be sure. Take longer replies, or more prompts."


def _sentences(
    bounds: Bounds | None,
    pass_: Pass | None,
    offloading: Offloading | None,
    best: Advice | None,
    evidence: Evidence,
    forecast: Forecast,
    *,
    judged: bool,
) -> Iterator[str]:
    if bounds is None:
        yield "No two rounds followed each other: there is nothing to judge. Take a longer reply."
        return
    if pass_ is not None:
        yield _of_pass(pass_, judged=judged)
    else:
        yield (
            "Whether a pass is bound by memory or by arithmetic is not available: "
            f"{why_no_roofline(evidence)}."
        )
    if forecast.offers:
        word = "pays" if bounds.speedup >= 1.0 else "does not pay"
        yield (
            f"Speculation {word} here: {bounds.speedup:.2f} times as fast as the target alone "
            f"({1.0 / bounds.alone_s:.1f} tokens/s, {forecast.alone_from}), "
            f"of {bounds.most_speedup:.2f} that its trees allow (tau T_T / T_V); "
            f"{bounds.exposed_s / bounds.round_s:.0%} of a round is spent waiting for the draft."
        )
    if offloading is not None:
        yield f"Against offloading: {offloading.in_words()}."
    if best is None:
        yield "None of the changes that keep the target as it is promises more than 2 %."
    else:
        yield (
            f"What would help most, and changes no token: {best.what} "
            f"({' '.join(best.flags)}), predicted {best.gain:.2f} times as fast."
        )


def _of_transport(split: Split | None, ahead_ms: float | None) -> Iterator[str]:
    """What the time is spent on in which messages are on their way, where that is much."""
    if split is None or split.parts_s["transport"] < MUCH * split.wall_s:
        return
    ahead = (
        f", {ahead_ms:.2f} of them while the draft grows ahead, which ends its pass before it "
        "takes an order"
        if ahead_ms
        else ""
    )
    whole = (
        f"{split.parts_s['transport'] * 1e3:.2f} ms of a round its messages are on their way{ahead}"
    )
    yield (
        f"{whole}; whoever shares a core waits for it: a round trip between idle processes "
        "takes a fraction of that."
    )


def _doubts(forecast: Forecast) -> Iterator[str]:
    off = forecast.off
    if off is not None and abs(off) > OFF:
        yield (
            f"The forecast of this very run misses what was measured by {off:+.0%}: take the "
            "predicted gains with care."
        )


def _of_pass(pass_: Pass, *, judged: bool) -> str:
    times = (
        f"reading the weights takes at least {pass_.t_p_s * 1e3:.2f} ms, the arithmetic of "
        f"{pass_.rows:.1f} rows {pass_.t_c_s * 1e3:.2f} ms"
    )
    measured = (
        f"a pass takes {pass_.t_v_s * 1e3:.2f} ms, "
        f"{f'{pass_.efficiency:.0%} of what the hardware allows' if judged else 'beside other programs'}"  # noqa: E501
    )
    if pass_.bound == "memory":
        return (
            f"The target is bound by memory: {times}; {measured}. More rows cost little up "
            f"to about {pass_.crossover_rows:.0f}."
        )
    kind = (
        "The target is bound by arithmetic"
        if pass_.bound == "compute"
        else "Memory and arithmetic bind the target alike"
    )
    return (
        f"{kind}: {times}; {measured}. Beyond about {pass_.crossover_rows:.0f} rows every "
        "further one costs its full price."
    )
