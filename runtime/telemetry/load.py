"""The load of a coordinator for a router: the sessions, and their speed by number."""

from statistics import fmean
from typing import Any

from dovetail.protocol.messages import Reported, WorkerState

MANY = 8  # number of sessions in a pass at which the cost of a further one is computed


def load_of(state: Reported) -> dict[str, Any]:
    """Return `load` of /readyz: sessions, targets and predictions (None before the first round):
    `seconds_per_token` of a single session, `further_seconds_per_token` for each further one, and
    `reading_seconds_per_token` of a prompt."""
    targets = [
        worker
        for worker in state.workers
        if "target" in worker.roles and not (worker.standby or worker.leaving or worker.stuck)
    ]
    rates = [rate for target in targets if (rate := _predicted(target)) is not None]
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


def _predicted(target: WorkerState) -> tuple[float, float, float] | None:
    """Return a target's three figures: recent times, scaled by the curve of its passes."""
    curve, token_s = target.t_v, target.token_s
    if curve is None or token_s is None or not curve.seconds[0]:
        return None
    late_s, alone_s, many_s = (
        curve.at(max(1, round(sessions * target.rows))) for sessions in (target.sharing, 1, MANY)
    )
    factor = token_s / late_s
    further_s = factor * (many_s - alone_s) / (MANY - 1)
    return factor * alone_s, further_s, target.row_s or curve.seconds[-1] / curve.rows[-1]
