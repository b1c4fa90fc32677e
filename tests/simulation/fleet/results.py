"""The figures of a load that a fleet was given: throughput, latencies, energy, saturation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulation.fleet.arrivals import Requests
from simulation.fleet.layout import Kind, Plan, Played
from simulation.fleet.play import Fleet

PERCENTS = (50, 90, 99)
COLUMNS = {
    "load": "requests a second over the most that the servers could answer",
    "requests/s": "asked for, by the whole fleet",
    "tokens/s": "written, by the whole fleet, while requests came",
    "TTFT": "seconds to the first token: the median, and what 99 % stay within",
    "ms/token": "milliseconds a token after the first: the same",
    "latency": "seconds to the last token: the same",
    "busy": "share of the servers' time in which they decode or read",
    "J/token": "joules of all servers, idle ones too, a token",
    "coordinator": "share of its time that the busiest one is at work, at its busiest",
    "router": "the same of a router",
    "moved": "sessions that went on on another server",
    "refused": "requests that found the queue full",
}
"""Heading of the table -> its meaning."""
PAIRS = "TTFT, ms/token, latency: the median, and what 99 % stay within"


@dataclass(frozen=True)
class Loaded:
    """A load and what became of it."""

    load: float
    requests: Requests
    seconds: float  # for which requests came
    scale: float  # servers of the fleet for each that was played
    warm_s: float  # requests that came before count for nothing, since the fleet was still filling
    played: Played

    def row(self, kinds: Sequence[Kind]) -> dict[str, Any]:
        """Return the figures."""
        done = [(s, at_s) for s, at_s in self.played.done if s.asked_s >= self.warm_s]
        first = np.array([s.first_s - s.asked_s for s, _ in done])
        whole = np.array([at_s - s.asked_s for s, at_s in done])
        each = np.array([(at_s - s.first_s) / (s.reply - 1) for s, at_s in done if s.reply > 1])
        played = self.played
        tokens = sum(played.tokens)
        joules = sum(
            kind.idle_w * kind.count * played.seconds + (kind.busy_w - kind.idle_w) * busy_s
            for kind, busy_s in zip(kinds, played.busy_s, strict=True)
        )
        servers = sum(kind.count for kind in kinds)
        return {
            "load": self.load,
            "requests_per_s": self.scale * len(self.requests) / self.seconds,
            "tokens_per_s": self.scale * tokens / played.seconds,
            "ttft_s": _percentiles(first),
            "token_s": _percentiles(each),
            "latency_s": _percentiles(whole),
            "busy_share": sum(played.busy_s) / (servers * played.seconds),
            "joules_per_token": joules / tokens if tokens else None,
            "coordinator_busy": played.coordinator_busy,
            "router_busy": played.router_busy,
            "moved": sum(s.moves for s, _ in played.done),
            "refused": played.refused,
            "failures": played.failures,
            "kinds": {
                kind.name: {"tokens_per_s": self.scale * own / played.seconds}
                for kind, own in zip(kinds, played.tokens, strict=True)
            },
        }


def play_load(
    kinds: Sequence[Kind],
    plan: Plan,
    requests: Requests,
    *,
    load: float,
    seconds: float,
    scale: float = 1.0,
    warm: float = 0.0,
) -> Loaded:
    """Return a load and what became of it; `warm`: the share of the time that does not count."""
    warm_s = warm * seconds
    played = Fleet(kinds, plan).play(requests, (warm_s, seconds))
    return Loaded(load, requests, seconds, scale, warm_s, played)


def capacity(kinds: Sequence[Kind], prompt: float, reply: float) -> float:
    """Return the most requests a second of these mean lengths that the servers could answer."""
    return sum(kind.count * kind.profile.requests_per_s(prompt, reply) for kind in kinds)


def line(row: dict[str, Any]) -> tuple[object, ...]:
    """Return a row of the table, as `COLUMNS` has it."""

    def pair(values: dict[str, float | None], times: float = 1.0) -> str:
        middle, most = values["p50"], values["p99"]
        if middle is None or most is None:
            return "-"
        return f"{times * middle:.3g}, {times * most:.3g}"

    return (
        f"{row['load']:.2f}",
        f"{row['requests_per_s']:,.4g}",
        f"{row['tokens_per_s']:,.4g}",
        pair(row["ttft_s"]),
        pair(row["token_s"], 1e3),
        pair(row["latency_s"]),
        f"{row['busy_share']:.0%}",
        f"{row['joules_per_token']:.3g}" if row["joules_per_token"] else "",
        f"{row['coordinator_busy']:.0%}",
        f"{row['router_busy']:.0%}",
        row["moved"],
        row["refused"],
    )


def _percentiles(values: np.ndarray) -> dict[str, float | None]:
    """Return the percentiles; None where no reply has ended that counts."""
    if not len(values):
        return {f"p{percent}": None for percent in PERCENTS}
    found = np.percentile(values, PERCENTS)
    return {f"p{percent}": float(value) for percent, value in zip(PERCENTS, found, strict=True)}
