"""The spans of all processes as one trace that Perfetto and chrome://tracing load.

Knows only names and intervals on one clock; aligning the clocks is done before (`protocol/spans.py`).
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dovetail.protocol.spans import Span


def trace_events(spans: Iterable[tuple[str, Span]]) -> list[dict[str, Any]]:
    """Chrome trace events: one process row per name, one slice per span, times in microseconds."""
    spans = list(spans)
    rows = {process: number for number, process in enumerate(dict.fromkeys(process for process, _ in spans), start=1)}
    names = [{"ph": "M", "name": "process_name", "pid": row, "tid": 1, "args": {"name": process}} for process, row in rows.items()]
    slices = [
        {"ph": "X", "name": name, "pid": rows[process], "tid": 1, "ts": start / 1000, "dur": duration / 1000} for process, (name, start, duration) in spans
    ]
    return [*names, *slices]


def write_trace(path: Path, spans: Iterable[tuple[str, Span]]) -> None:
    """Write a trace file; open it in ui.perfetto.dev."""
    path.write_text(json.dumps({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}), encoding="utf-8")
