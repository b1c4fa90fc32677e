"""Shows the figures of a load: a table, notes on what went wrong, a plot. Computes nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.launch.bench.load.served import OTHER
from dovetail.launch.bench.table import number
from dovetail.launch.console.terminal import counted, note, print_table
from dovetail.launch.files.charts import Curve, Panel, draw_panels

COLUMNS = {
    "method": "none: the target alone; draft: with it; server: not dovetail",
    "at once": "requests under way at a time",
    "done": "requests that were answered",
    "failed": "requests that were not; the errors are named below the table",
    "tokens/s": "of all replies, over the whole load (output_throughput)",
    "speed-up": "tokens/s over those of none",
    "requests/s": "answered, over the whole load (request_throughput)",
    "TTFT ms": "time to first token, median: to the first chunk with text",
    "TTFT p99": "its 99th percentile",
    "TPOT ms": "time per output token, median: (latency - TTFT) / (tokens - 1)",
    "TPOT p99": "its 99th percentile",
    "ITL ms": "inter-token latency, median: between two chunks of tokens",
    "ITL p99": "its 99th percentile",
    "tokens/chunk": "output tokens for each chunk with text",
    "differ": "replies whose text is not that of none",
}
"""Heading of the table -> its meaning."""
TIMES = ("ttft", "tpot", "itl")
QUEUE_FULL = "HTTP 429"
PANELS = (
    ("Output tokens/s", "tokens/s", "output_throughput"),
    ("Time to first token, median", "ms", "median_ttft_ms"),
    ("Time per output token, median", "ms", "median_tpot_ms"),
    ("Inter-token latency, 99th percentile", "ms", "p99_itl_ms"),
)


def show(result: Mapping[str, Any]) -> None:
    print_table(tuple(COLUMNS), [_line(row) for row in result["rows"]], keys=2, whole=True)
    show_notes(result)


def show_notes(result: Mapping[str, Any]) -> None:
    """Print what a reader of the table has to know: errors, cached prompts, guessed counts of
    tokens, an early end."""
    for row in result["rows"]:
        for told in row["errors"]:
            refused = ", its queue was full" if told["error"] == QUEUE_FULL else ""
            note(
                f"FAILED: {_where(row)}: {counted(told['count'], 'request')} with "
                f"{told['error']}{refused}: {told['words']}"
            )
        if row["cached_tokens"]:
            share = row["cached_tokens"] / max(1, row["total_input_tokens"])
            note(f"{_where(row)}: {share:.0%} of the prompt tokens were in the server's cache")
        if row["no_usage"]:
            note(f"{_where(row)}: the server reports no usage: every chunk counts as one token")
    if result["lost"]:
        note(f"FAILED: {result['lost']}")
    if result["interrupted"]:
        note("interrupted: the last load has only the requests that had ended by then")


def draw(result: Mapping[str, Any]) -> str:
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    panels = [
        Panel(
            title,
            "requests at once",
            unit,
            [Curve(method, _points(result["rows"], method, field)) for method in methods],
        )
        for title, unit, field in PANELS
    ]
    return draw_panels(f"Load on {result['model']}\n{result['url']}", panels)


def _points(
    rows: Sequence[Mapping[str, Any]], method: str, field: str
) -> list[tuple[float, float]]:
    return [
        (row["max_concurrency"], row[field])
        for row in rows
        if row["method"] == method and row[field] is not None
    ]


def _where(row: Mapping[str, Any]) -> str:
    method = "" if row["method"] == OTHER else f"{row['method']}, "
    return f"{method}{row['max_concurrency']} at once"


def _line(row: Mapping[str, Any]) -> tuple[object, ...]:
    times = (number(row[f"{which}_{name}_ms"], 1) for name in TIMES for which in ("median", "p99"))
    done = row["completed"] > 0
    return (
        row["method"],
        row["max_concurrency"],
        row["completed"],
        row["failed"],
        number(row["output_throughput"] if done else None, 1),
        number(row["speedup"] if done else None, 2),
        number(row["request_throughput"] if done else None, 2),
        *times,
        number(row["tokens_per_chunk"], 2),
        number(row["differ"] if done else None, 0),
    )
