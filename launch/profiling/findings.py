"""Draws the findings of a run: the object that `dovetail profile --json` prints and the report
shows, from what was watched, sampled, sounded and probed.

Computes nothing itself that stands elsewhere: time lines are `timeline.py`, limits `bounds.py`,
changes `advice.py`. Pure but for a look at a model's folder.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.profiling import timeline
from dovetail.launch.profiling.advice import Advice, advise
from dovetail.launch.profiling.bounds import Bounds
from dovetail.launch.profiling.devices import (
    busy_in,
    device_told,
    energy_of,
    gpus_told,
    nodes_told,
    others_of,
    sampled_of,
)
from dovetail.launch.profiling.evidence import Evidence, disturbed, inside, share_of
from dovetail.launch.profiling.forecast import (
    Forecast,
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
from dovetail.launch.profiling.timeline import NS, Actor
from dovetail.launch.profiling.verdict import bounds_told, of_experts, of_transport, verdict
from dovetail.protocol.calibration import ExpertCosts
from dovetail.protocol.experts import Routing
from dovetail.protocol.messages import RoundRecord
from dovetail.runtime.costs.passes import RowCosts

CURVE_ROWS = (1, 2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)


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
    """Compute all findings of a run."""
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
    ahead_ms = timeline.ahead_on_the_way_ms(inside(evidence), len(evidence.rounds))
    energy, others = energy_of(evidence, tokens), others_of(evidence)
    told = {
        "title": evidence.title,
        "workload": evidence.workload,
        "wall_s": evidence.wall_s,
        "sessions": len({seen.session for seen in evidence.rounds}),
        "sessions_a_pass": timeline.sessions_a_pass(inside(evidence)),
        "rounds": len(evidence.rounds),
        "tokens": tokens,
        "tau": of_rounds / len(evidence.rounds) if evidence.rounds else None,
        "tokens_per_s": bounds.tau / bounds.round_s if bounds is not None else None,
        "accepted_per_position": at_positions(evidence.records),
        "hit_rate": share_of([record.hit for record in evidence.records if record.verified]),
        "plain_share": share_of([not record.verified for record in evidence.records]),
        "devices": {actor.name: device_told(actor, uses[actor.name], evidence) for actor in actors},
        "other_programs": others,
        "nodes": dict(nodes_told(evidence)),
        "gpus": gpus_told(evidence),
        "energy": energy,
        "absent": dict(evidence.absent),
        "round_ms": timeline.round_ms(inside(evidence), len(evidence.rounds)),
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
        "experts": (experts := experts_of(evidence, costs)),
        "forecast_off": forecast.off,
        "verdict": verdict(
            *(evidence, bounds, advice, forecast, others),
            [*of_experts(experts), *of_transport(split, ahead_ms)],
        ),
        "missed": evidence.missed,
    }
    return Findings(
        told,
        telling(every, alone=alone),
        busy_in(evidence, actors),
        sampled_of(evidence),
        advice,
    )


# -- costs and bounds ------------------------------------------------------------------------------


def costs_of(evidence: Evidence, *, alone: bool) -> RowCosts:
    """T_V from every pass that was seen; of those over a single row, where there was none, what the
    coordinator has learned. Where sessions did not run one after the other (`alone`), a pass has
    the rows of all that it was for."""
    costs, context = RowCosts(experts=_known_experts(evidence)), mean_context(evidence)
    for passed in _passes(evidence) if alone else _shared_passes(evidence):
        costs.observe(*passed)
    none, no_single = not costs.known, not costs.seen(1)
    for pair in evidence.pairs:
        for rows, seconds in (
            zip(pair.t_v.rows, pair.t_v.seconds, strict=True) if pair.t_v is not None else ()
        ):
            if none or (rows == 1 and no_single):
                costs.observe(rows, seconds, context)
    return costs


def mean_context(evidence: Evidence) -> float:
    """Return the mean number of tokens committed before a round."""
    return fmean(record.prefix for record in evidence.records)


def _known_experts(evidence: Evidence) -> ExpertCosts | None:
    """Return how many experts the target has, from its passes over a single row; None if no such
    pass counted any."""
    row = next((found for rows, _, _, found in _passes(evidence) if rows == 1 and found), 0)
    if not row or evidence.model is None:
        return None
    mixture = evidence.model.mixture
    most = max(row, round(row * mixture.count / mixture.chosen))
    return ExpertCosts(routing=Routing(row=row, most=most))


def experts_of(evidence: Evidence, costs: RowCosts) -> dict[str, float] | None:
    """Return how many experts a drafted pass goes through, how many it would if rows chose
    independently, the cost of one in us, and the share of all in the seconds of the pass; None if
    none are counted."""
    records = [record for record in evidence.records if record.verified and record.experts]
    if costs.experts is None or not records:
        return None
    routing, mean = costs.experts.routing, fmean(record.experts for record in records)
    independent = fmean(routing.unique(1 + record.verified) for record in records)
    pass_s = fmean(record.verify_ns for record in records) / NS
    return {
        "a_pass": mean,
        "independent": independent,
        "row": routing.row,
        "most": routing.most,
        "expert_us": costs.experts.expert_s * 1e6,
        "share": costs.experts.expert_s * mean / pass_s,
    }


def _passes(evidence: Evidence) -> Iterator[tuple[int, float, float, int]]:
    """Yield rows, seconds, context and experts of every pass that one session had to itself."""
    sounded = [
        *evidence.soundings.plain,
        *evidence.soundings.others,
        *(record for reply in evidence.soundings.wide for record in reply),
    ]
    for record in (*evidence.records, *sounded):
        if record.verify_ns:
            yield 1 + record.verified, record.verify_ns / NS, record.prefix, record.experts


def _shared_passes(evidence: Evidence) -> Iterator[tuple[int, float, float, int]]:
    """Yield the passes that several sessions shared, if all of their rounds have been seen."""
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


def forecast_of(evidence: Evidence, costs: RowCosts, split: Split | None) -> Forecast:
    """Make the forecast from the widest trees that were offered; without soundings from those of
    the run."""
    records = evidence.records
    ordered = sorted(evidence.rounds, key=lambda seen: (seen.session, seen.record.round))
    own = [
        [seen.record for seen in those]
        for _, those in groupby(ordered, key=lambda seen: seen.session)
    ]
    offers = offers_of(evidence.soundings.wide or own)
    drafted = [record for record in records if record.verified]
    plain = [*evidence.soundings.plain, *(record for record in records if not record.verified)]
    prices = prices_of(drafted, plain, costs, timeline.sessions_a_pass(inside(evidence)))
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
        hit_rate=share_of([record.hit for record in drafted]) if evidence.ahead else None,
        alone_from=_alone_from(plain, costs),
        reads=situation.reads,
        cuts=situation.cuts,
    )


def _alone_from(plain: Sequence[RoundRecord], costs: RowCosts) -> str:
    """Return how the rate of the target alone is known."""
    if plain:
        return f"measured in {counted(len(plain), 'round')} without a draft"
    return (
        "predicted, from what the coordinator learned of passes over one row"
        if costs.seen(1)
        else "predicted, from passes over more rows"
    )


def bounds_of(evidence: Evidence, forecast: Forecast, split: Split | None) -> Bounds | None:
    """Return the bounds of the run; None where no two rounds followed each other."""
    if split is None:
        return None
    records = evidence.records
    return Bounds(
        tau=timeline.tokens_of(records) / len(records),
        t_v_s=fmean(record.verify_ns for record in records) / NS,
        alone_s=forecast.alone.seconds,
        round_s=split.wall_s,
        drafting_s=max(forecast.in_turn_s, split.parts_s["draft"]),
        exposed_s=split.parts_s["draft"],
    )


def curves_of(
    evidence: Evidence, forecast: Forecast, costs: RowCosts, bounds: Bounds | None
) -> dict[str, Any]:
    """T_V and its limits over the rows, and the speed-up over gamma; what is drawn. What is
    replayed is of other trees and shorter replies than the run's: it is taken in proportion to what
    is replayed for the settings of the run, which stands where it was measured."""
    rows = [count for count in CURVE_ROWS if count <= 64]
    context = mean_context(evidence)
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
