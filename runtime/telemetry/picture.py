"""The values that the dashboard and `dovetail top` show. Pure."""

from collections.abc import Callable, Iterator, Sequence
from math import exp
from statistics import fmean
from typing import Any

from dovetail.protocol.messages import PairState, ProcessState, Reported, SeenRound, WorkerState
from dovetail.protocol.tree import ROOT

MAX_NODES = 256  # the most displayed nodes of a tree
MAX_LABEL = 24  # the most displayed characters of a token
SIGNS = str.maketrans({" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"})

Spell = Callable[[int], str]  # returns the text of a token id, as `label` writes it


def label(content: bytes) -> str:
    """Return a token for drawing: one short line with visible spaces and line ends."""
    text = content.decode(errors="replace").translate(SIGNS)
    text = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 1] + "…"


def folder_name(model: str) -> str:
    """Return the last part of a model's path: the view does not reveal the folders of models."""
    return model.rstrip("/").rpartition("/")[2]


def cores_in_words(cores: Sequence[int]) -> str:
    """Return numbers of cores as ranges: "0-3,8"."""
    return ",".join(
        f"{first}" if first == last else f"{first}-{last}" for first, last in _runs(sorted(cores))
    )


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    first: int | None = None
    for place, number in enumerate(numbers):
        first = number if first is None else first
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield first, number
            first = None


def share(part: float, whole: float, digits: int) -> float | None:
    """Return a rounded quotient; None if there is nothing to divide by."""
    return round(part / whole, digits) if whole else None


def counts(state: Reported, missed: int) -> dict[str, int]:
    """Return the counters of a coordinator."""
    totals = state.totals
    return {
        **{
            name: getattr(state, name)
            for name in ("sessions", "finished", "failed", "cancelled", "stale", "refused")
        },
        "rounds_of_finished": state.rounds,
        **{
            name: getattr(totals, name)
            for name in (
                *("refused_requests", "opening", "waiting", "kept", "prompt_tokens"),
                *("reused_tokens", "completion_tokens"),
            )
        },
        "missed": missed,
    }


SPECULATION = {
    "on": "on",
    "partly": "on for some sessions",
    "off": "off",
    "alone": "not in use",
    "none": "not possible",
    "idle": "waiting for a request",
}
"""The words after "Speculation is", by state."""


def speculation(state: Reported) -> dict[str, Any]:
    """Return the state of speculation, its reason and description, and whether that is a fault."""
    word, why = _speculation(state)
    there = any("target" in worker.roles for worker in state.workers)
    fault = bool(state.faults or state.totals.waiting or (state.degraded and there))
    words = SPECULATION[word] + (f": {why}" if why else "")
    return {"state": word, "why": why, "words": words, "fault": fault}


def _speculation(state: Reported) -> tuple[str, str]:
    serving = [worker for worker in state.workers if not (worker.standby or worker.leaving)]
    if not any("target" in worker.roles for worker in serving):
        return "none", "no target worker is registered"
    if not any("draft" in worker.roles for worker in serving):
        why = "no draft worker is registered: the target decodes alone"
        return "off" if state.degraded else "alone", why
    if not state.pairs:
        return "idle", "no request has used a draft yet"
    undrafted = "; ".join(pair.undrafted for pair in state.pairs if pair.undrafted)
    if not any(pair.speculating for pair in state.pairs):
        return "off", undrafted or "the last round had no draft"
    return "partly" if undrafted else "on", undrafted


def pair_figures(pair: PairState) -> dict[str, Any]:
    """Return the figures of a pair of workers."""
    told = pair.model_dump(exclude={"t_v", "t_d"})
    return {
        name: round(value, 3) if isinstance(value, float) else value for name, value in told.items()
    }


def speedup(state: Reported) -> dict[str, float] | None:
    """Return the recent rate of a stream, the rate that the target alone would reach, as predicted,
    and their quotient, of the pair with the most rounds; None before a pair has both."""
    known = [
        (pair.rounds, pair.tokens_per_s, pair.alone_tokens_per_s)
        for pair in state.pairs
        if pair.tokens_per_s and pair.alone_tokens_per_s
    ]
    if not known:
        return None
    _, rate, alone = max(known)
    return {
        "times": round(rate / alone, 3),
        "tokens_per_s": round(rate, 3),
        "alone_tokens_per_s": round(alone, 3),
    }


def process_figures(state: Reported, before: Reported | None) -> list[dict[str, Any]]:
    """Return the processes of a report with their CPU load in cores since the previous report."""
    used = {(one.host, one.pid): one.cpu_s for one in before.processes} if before else {}
    since_s = state.uptime_s - before.uptime_s if before else 0.0

    def busy(one: ProcessState) -> float | None:
        before_s = used.get((one.host, one.pid))
        if one.cpu_s is None or before_s is None or since_s <= 0:
            return None
        return round(max(0.0, one.cpu_s - before_s) / since_s, 3)

    return [{**one.model_dump(exclude={"cpu_s"}), "cpu": busy(one)} for one in state.processes]


def tree_picture(last: SeenRound, root: int | None, spell: Spell | None) -> dict[str, Any]:
    """Return a round's tree, best node first: parents, outcomes, likelihoods; `root`: its token."""
    record = last.record
    if not last.readable:
        spell = None
    shown = min(len(record.parents), MAX_NODES)
    accepted = {node for node in record.accepted if node < shown}
    return {
        "session": last.session,
        "round": record.round,
        "draft": last.draft,
        "target": last.target,
        "parents": list(record.parents[:shown]),
        "fates": "".join(
            "a" if node in accepted else "r" if node < record.verified else "n"
            for node in range(shown)
        ),
        "likely": [round(exp(min(0.0, score)), 4) for score in record.scores[:shown]],
        "bonus_parent": record.accepted[-1]
        if record.accepted and record.accepted[-1] < shown
        else ROOT,
        "offered": len(record.parents),
        "verified": record.verified,
        "accepted": len(record.accepted),
        "hit": record.hit,
        "texts": None if spell is None else [spell(token) for token in record.tokens[:shown]],
        "bonus": None if spell is None else spell(record.bonus),
        "root": None if spell is None or root is None else spell(root),
    }


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
        "targets": len(targets),
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
