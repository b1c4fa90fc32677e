"""The spans of all processes as one trace that Perfetto and chrome://tracing load.

A process is a row, labelled with the accuracy of its clock; the coordinator's row has a track for
each session. Slices on a track follow or contain each other; one that partly overlaps another, such
as a message in transit, is on a further track. Arrows follow a tree from the draft to the target,
and from the verdict to the draft's next order. All intervals are on one clock (`event_log.py`
aligns the clocks)."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dovetail.protocol.files import writing
from dovetail.protocol.messages import SeenSpan
from dovetail.runtime.telemetry.event_log import OURS

TRIP = ("draft", "handle", "verify", "commit")
"""Spans of a tree in a round, in order, up to the coordinator's and the draft's next ones."""


Place = tuple[int, int]  # (row, track) numbers


def trace_events(
    spans: Iterable[SeenSpan], bounds: Mapping[str, int | None] | None = None
) -> list[dict[str, Any]]:
    """Chrome trace events in microseconds: a row a process, a slice a span, an arrow a step of a
    tree. `bounds`: by process, the error of its spans in ns."""
    spans = sorted(spans, key=lambda seen: (seen.span[1], -seen.span[2]))
    rows = {
        process: number
        for number, process in enumerate(dict.fromkeys(seen.process for seen in spans), start=1)
    }
    tracks: dict[tuple[str, int, int], int] = {}
    places = [
        (rows[seen.process], tracks.setdefault((seen.process, session, lane), len(tracks)))
        for seen, session, lane in _lanes(spans)
    ]
    names = [
        _named("process_name", row, 0, _label(process, (bounds or {}).get(process)))
        for process, row in rows.items()
    ]
    names += [
        _named("thread_name", rows[process], track, _track_label(process, session, lane))
        for (process, session, lane), track in tracks.items()
    ]
    where = {id(seen): place for seen, place in zip(spans, places, strict=True)}
    return [
        *names,
        *(_slice(seen, place) for seen, place in zip(spans, places, strict=True)),
        *_arrows(spans, where),
    ]


def _lanes(spans: Sequence[SeenSpan]) -> Iterator[tuple[SeenSpan, int, int]]:
    """Yield spans by start time, each with its session (0: none) and its first free lane."""
    open_ends: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    for seen in spans:
        session = seen.session or 0 if seen.process == OURS else 0
        _, start_ns, duration_ns = seen.span
        lanes = open_ends[seen.process, session]
        for ends in lanes:
            while ends and ends[-1] <= start_ns:
                ends.pop()
        lane = next(
            (
                number
                for number, ends in enumerate(lanes)
                if not ends or start_ns + duration_ns <= ends[-1]
            ),
            len(lanes),
        )
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(start_ns + duration_ns)
        yield seen, session, lane


def write_trace(
    path: Path, spans: Iterable[SeenSpan], bounds: Mapping[str, int | None] | None = None
) -> None:
    """Write a trace file; open it in ui.perfetto.dev."""
    text = json.dumps({"traceEvents": trace_events(spans, bounds), "displayTimeUnit": "ms"})
    with writing(path, "the trace"):
        path.write_text(text, encoding="utf-8")


def _label(process: str, bound_ns: int | None) -> str:
    return process if bound_ns is None else f"{process} (aligned within {bound_ns / 1000:.0f} us)"


def _named(kind: str, row: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": row, "tid": track, "args": {"name": name}}


def _track_label(process: str, session: int, lane: int) -> str:
    name = f"session {session}" if session else "all sessions" if process == OURS else process
    return (
        name
        if not lane
        else f"{name}, overlapping"
        if lane == 1
        else f"{name}, overlapping ({lane})"
    )


def _slice(seen: SeenSpan, place: Place) -> dict[str, Any]:
    name, start_ns, duration_ns = seen.span
    about: dict[str, Any] = {
        key: value
        for key, value in (("session", seen.session), ("round", seen.round))
        if value is not None
    }
    if seen.shared:
        about = {
            "sessions": [session for session, _ in seen.shared],
            "rounds": [round for _, round in seen.shared],
        }
    row, track = place
    return {
        "ph": "X",
        "name": name,
        "pid": row,
        "tid": track,
        "ts": start_ns / 1000,
        "dur": duration_ns / 1000,
        "args": about,
    }


def _arrows(spans: Sequence[SeenSpan], where: Mapping[int, Place]) -> Iterator[dict[str, Any]]:
    """Yield for each session one chain through its rounds, broken at rounds without a draft."""
    stops: dict[tuple[int, int], dict[str, SeenSpan]] = {}
    for seen in spans:
        own = (
            [(seen.session, seen.round)]
            if seen.session is not None and seen.round is not None
            else []
        )
        for key in seen.shared or own if seen.span[0] in TRIP else ():
            its = stops.setdefault(key, {})
            if seen.span[0] != "handle" or "draft" in its:  # the one between proposal and pass
                its.setdefault(seen.span[0], seen)
    numbers = itertools.count(1)  # Perfetto takes numbers alone
    for (session, round), its in stops.items():
        if "draft" not in its or "verify" not in its:
            continue
        after = stops.get((session, round + 1), {}).get("draft")
        way = [
            *(its[name] for name in TRIP if name in its),
            *([after] if after is not None else []),
        ]
        for one, other in pairwise(way):
            if one.span[1] <= other.span[1]:  # otherwise the clocks are not aligned well enough
                arrow = {"name": "tree", "cat": "tree", "id": next(numbers)}
                yield {**arrow, "ph": "s", **_at(one, where, before_ns=other.span[1])}
                yield {**arrow, "ph": "f", "bp": "e", **_at(other, where)}


def _at(seen: SeenSpan, where: Mapping[int, Place], before_ns: int | None = None) -> dict[str, Any]:
    """Return a time within a slice: its beginning, or just before its end and `before_ns`."""
    _, start_ns, duration_ns = seen.span
    at_ns = start_ns if before_ns is None else min(start_ns + max(0, duration_ns - 1), before_ns)
    row, track = where[id(seen)]
    return {"pid": row, "tid": track, "ts": at_ns / 1000}
