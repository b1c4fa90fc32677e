"""The spans of all processes as one trace that Perfetto and chrome://tracing load.

A process is a row, which says how well its clock is aligned; the coordinator's has a track for each session, since what several wait for overlaps. Arrows
follow a tree on its trip: from the draft to the target, and from the verdict to the draft's next order. Knows only names and intervals on one clock; aligning
the clocks is done before (`observing.py`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.protocol.messages import SeenSpan
from dovetail.runtime.observing import OURS

TRIP = ("draft", "handle", "verify", "commit")
"""What a tree comes by in a round, in this order; then it is the coordinator's and the draft's again, in the next one."""


def trace_events(spans: Iterable[SeenSpan], bounds: Mapping[str, int | None] | None = None) -> list[dict[str, Any]]:
    """Chrome trace events: a row for each process, a slice for each span, an arrow for each step of a tree; times in microseconds.

    `bounds`: by process, how far its spans may be from where they are shown, in nanoseconds.
    """
    spans = sorted(spans, key=lambda seen: (seen.span[1], -seen.span[2]))
    rows = {process: number for number, process in enumerate(dict.fromkeys(seen.process for seen in spans), start=1)}
    names = [_named("process_name", row, 0, _label(process, (bounds or {}).get(process))) for process, row in rows.items()]
    tracks = dict.fromkeys((rows[seen.process], _track(seen)) for seen in spans if seen.process == OURS)
    names += [_named("thread_name", row, track, f"session {track}" if track else "all sessions") for row, track in tracks]
    return [*names, *(_slice(seen, rows) for seen in spans), *_arrows(spans, rows)]


def write_trace(path: Path, spans: Iterable[SeenSpan], bounds: Mapping[str, int | None] | None = None) -> None:
    """Write a trace file; open it in ui.perfetto.dev."""
    path.write_text(json.dumps({"traceEvents": trace_events(spans, bounds), "displayTimeUnit": "ms"}), encoding="utf-8")


def _label(process: str, bound_ns: int | None) -> str:
    return process if bound_ns is None else f"{process} (aligned within {bound_ns / 1000:.0f} us)"


def _named(kind: str, row: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": row, "tid": track, "args": {"name": name}}


def _track(seen: SeenSpan) -> int:
    return seen.session or 0 if seen.process == OURS else 0


def _slice(seen: SeenSpan, rows: Mapping[str, int]) -> dict[str, Any]:
    name, start_ns, duration_ns = seen.span
    about = {key: value for key, value in (("session", seen.session), ("round", seen.round)) if value is not None}
    return {"ph": "X", "name": name, "pid": rows[seen.process], "tid": _track(seen), "ts": start_ns / 1000, "dur": duration_ns / 1000, "args": about}


def _arrows(spans: Sequence[SeenSpan], rows: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Of every session one chain through its rounds, broken where a round had no draft."""
    stops: dict[tuple[int, int], dict[str, SeenSpan]] = {}
    for seen in spans:
        if seen.session is not None and seen.round is not None and seen.span[0] in TRIP:
            its = stops.setdefault((seen.session, seen.round), {})
            if seen.span[0] != "handle" or "draft" in its:  # the one between proposal and pass
                its.setdefault(seen.span[0], seen)
    for (session, round), its in stops.items():
        if "draft" not in its or "verify" not in its:
            continue
        after = stops.get((session, round + 1), {}).get("draft")
        way = [*(its[name] for name in TRIP if name in its), *([after] if after is not None else [])]
        for place, (one, other) in enumerate(pairwise(way)):
            arrow = {"name": "tree", "cat": "tree", "id": f"{session}.{round}.{place}"}
            yield {**arrow, "ph": "s", **_at(one, rows, end=True)}
            yield {**arrow, "ph": "f", "bp": "e", **_at(other, rows, end=False)}


def _at(seen: SeenSpan, rows: Mapping[str, int], *, end: bool) -> dict[str, Any]:
    """A place within a slice: at its beginning, or just before its end."""
    _, start_ns, duration_ns = seen.span
    return {"pid": rows[seen.process], "tid": _track(seen), "ts": (start_ns + (max(0, duration_ns - 1) if end else 0)) / 1000}
