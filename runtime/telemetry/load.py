"""The load of a coordinator as it is told to a router: what runs, and how fast sessions go by their
number. Pure."""

from typing import Any

from dovetail.protocol.messages import PairState, Reported

MANY = 8
"""Sessions at whose pass it is looked for what each further one adds."""


def load_of(state: Reported) -> dict[str, Any]:
    """Return the fields `load` of /readyz: what runs and waits, on how many targets, and
    predictions by what passes and rounds have taken: `seconds_per_token` of a session alone,
    `further_seconds_per_token`, which each further session adds to all, and
    `reading_seconds_per_token` of a prompt. They are None until a draft and a target have worked
    together."""
    alone_s, further_s, reading_s = _predicted(state)
    return {
        "epoch": str(state.epoch),
        "sessions": state.sessions,
        "queued": state.totals.queued,
        "seconds_per_token": alone_s,
        "further_seconds_per_token": further_s,
        "reading_seconds_per_token": reading_s,
        "targets": max(1, len({pair.target for pair in state.pairs})),
    }


def _predicted(state: Reported) -> tuple[float | None, float | None, float | None]:
    """Return the three by the pair that has had the most rounds."""
    pairs = [pair for pair in state.pairs if pair.rounds and pair.t_v is not None]
    pair = max(pairs, key=lambda pair: pair.rounds, default=None)
    if pair is None or pair.t_v is None or not state.tau:
        return None, None, None
    alone_s, many_s = (_round_s(pair, sessions) / state.tau for sessions in (1, MANY))
    reading_s = pair.t_v.seconds[-1] / pair.t_v.rows[-1]
    return alone_s, max(0.0, many_s - alone_s) / (MANY - 1), reading_s


def _round_s(pair: PairState, sessions: int) -> float:
    """Return the seconds of a round of so many sessions: a pass over their trees, and the
    messages."""
    assert pair.t_v is not None
    rows = round(sessions * (1.0 + (pair.gamma or 0.0)))
    return pair.t_v.at(max(1, rows)) + (pair.hops_us or 0.0) / 1e6
