"""The load of a coordinator as it is told to a router: what runs, and how fast sessions go by their
number. Pure."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from dovetail.protocol.messages import PairState, Reported, WorkerState

MANY = 8
"""Sessions at whose pass it is looked for what each further one adds."""


def load_of(state: Reported) -> dict[str, Any]:
    """Return the fields `load` of /readyz: what runs and waits, on how many targets, and
    predictions: `seconds_per_token` of a session alone, `further_seconds_per_token`, which each
    further session adds to all, and `reading_seconds_per_token` of a prompt. They are None until a
    target has had a round."""
    targets = [
        worker
        for worker in state.workers
        if "target" in worker.roles and not (worker.standby or worker.leaving or worker.stuck)
    ]
    rates = [rate for target in targets if (rate := _predicted(target, state)) is not None]
    alone_s, further_s, reading_s = map(fmean, zip(*rates, strict=True)) if rates else [None] * 3
    return {
        "epoch": str(state.epoch),
        "sessions": state.sessions,
        "queued": state.totals.queued,
        "seconds_per_token": alone_s,
        "further_seconds_per_token": further_s and further_s / len(targets),
        "reading_seconds_per_token": reading_s,
        "targets": max(1, len(targets)),
    }


def _predicted(target: WorkerState, state: Reported) -> tuple[float, float, float] | None:
    """Return the three of one target: its rounds of late are to take as much longer or shorter with
    other numbers of sessions as the curve of its passes says."""
    curve, round_s = target.t_v, target.round_s
    if curve is None or round_s is None or not curve.seconds[0]:
        return None
    rows = 1.0 + _drafted([pair for pair in state.pairs if pair.target == target.name])
    late_s, alone_s, many_s = (
        curve.at(max(1, round(sessions * rows))) for sessions in (target.sharing, 1, MANY)
    )
    factor = round_s / late_s / (state.tau or 1.0)
    further_s = factor * (many_s - alone_s) / (MANY - 1)
    return factor * alone_s, further_s, target.row_s or curve.seconds[-1] / curve.rows[-1]


def _drafted(pairs: Sequence[PairState]) -> float:
    """Return the nodes that a target verifies in a round of a session."""
    pair = max(pairs, key=lambda pair: pair.rounds, default=None)
    return (pair.gamma or 0.0) if pair is not None and pair.speculating else 0.0
