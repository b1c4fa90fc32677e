"""The verdict on a run in sentences: what bounds it, and what in it is doubtful."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.profiling.advice import Advice
from dovetail.launch.profiling.bounds import Bounds, Offloading, Pass, achieved
from dovetail.launch.profiling.evidence import Evidence, disturbed
from dovetail.launch.profiling.forecast import Forecast
from dovetail.launch.profiling.rounds import Split

OFF = 0.15
"""Relative error of the forecast that is not mentioned."""
FEW = 30
"""Rounds of which no figure should be trusted."""
MUCH = 0.05
"""Share of a round that messages may take without a word."""


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
        "active_parameters": roofline.model.active,
    }


def why_no_roofline(evidence: Evidence) -> str:
    if evidence.model is None:
        return "how many weights the target has is not known: its folder is not on this machine"
    return (
        "what these cores can do is not known: dovetail calibrate measures it, on the "
        "machine of the target"
    )


# -- the verdict -----------------------------------------------------------------------------------


def verdict(
    evidence: Evidence,
    bounds: Bounds | None,
    advice: Sequence[Advice],
    forecast: Forecast,
    others: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what binds, whether this is the right method here, and what would help; before that,
    what speaks against these figures. `more`: sentences besides."""
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
        "advice": [asdict(one) for one in advice if one.tells],
        "no_gain": [asdict(one) for one in advice if not one.tells],
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
            f"Workers changed during the run ({said}): shares are of the whole time, and "
            "figures mix what was before and after. Profile again for figures of one set of "
            "workers."
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
        yield f"{few}: too few for these figures to be sure. Use longer replies, or more prompts."


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
        yield "No two rounds followed each other: there is nothing to judge. Use a longer reply."
        return
    if pass_ is not None:
        yield _of_pass(pass_, judged=judged)
    else:
        yield (
            f"Whether memory or arithmetic bounds a pass is not known: {why_no_roofline(evidence)}."
        )
    if forecast.offers:
        printed = round(bounds.speedup, 2)
        word = "pays" if printed > 1.0 else "does not pay" if printed < 1.0 else "brings nothing"
        yield (
            f"Speculation {word} here: {bounds.speedup:.2f} times as fast as the target alone "
            f"({1.0 / bounds.alone_s:.1f} tokens/s, {forecast.alone_from}), "
            f"of {bounds.most_speedup:.2f} that its trees allow (tau T_T / T_V); "
            f"{bounds.exposed_s / bounds.round_s:.0%} of a round is spent waiting for the draft."
        )
    if offloading is not None:
        yield f"Against offloading: {offloading.in_words()}."
    if best is None:
        yield "No change that keeps the target's function is predicted to gain more than 2 %."
    else:
        yield (
            f"What would help most, and changes no token: {best.what} "
            f"({' '.join(best.flags)}), predicted {best.gain:.2f} times as fast."
        )


def of_experts(experts: Mapping[str, float] | None) -> Iterator[str]:
    """Yield a sentence on how many experts a drafted pass goes through, and what they cost."""
    if experts is None:
        return
    yield (
        f"A drafted pass goes through {experts['a_pass']:.0f} of the {experts['most']:.0f} experts "
        f"of all layers ({experts['independent']:.0f} if its rows chose independently); each takes "
        f"{experts['expert_us']:.3g} us, together {experts['share']:.0%} of the pass."
    )


def of_transport(split: Split | None, ahead_ms: float | None) -> Iterator[str]:
    """Return what the time is spent on in which messages are on their way, where that is much."""
    if split is None or split.parts_s["transport"] < MUCH * split.wall_s:
        return
    ahead = (
        f", {ahead_ms:.2f} of them while the draft grows ahead, which ends its pass before it "
        "takes an order"
        if ahead_ms
        else ""
    )
    yield (
        f"messages take {split.parts_s['transport'] * 1e3:.2f} ms of a round{ahead}, with the wait "
        "for a core; between idle processes a round trip takes a fraction of that."
    )


def _doubts(forecast: Forecast) -> Iterator[str]:
    off = forecast.off
    if off is not None and abs(off) > OFF:
        yield (
            f"The forecast of this very run misses what was measured by {off:+.0%}: treat the "
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
