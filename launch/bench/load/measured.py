"""`dovetail bench --concurrency`: the same requests at every concurrency, decoded with each method
in turn, over HTTP."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import numpy as np

from dovetail.launch.bench.figures import number
from dovetail.launch.bench.load.served import OTHER, PLAIN, Reply, Served, ask, served
from dovetail.launch.bench.methods import PromptSet
from dovetail.launch.bench.turns import rotated
from dovetail.launch.console.terminal import counted, note, print_table, progress_bar
from dovetail.launch.files.charts import Curve, Panel, draw_panels
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.files import writing

COLUMNS = {
    "method": "none: the target alone; draft: with it; server: not dovetail",
    "at once": "concurrent requests",
    "done": "requests that were answered",
    "failed": "requests that failed; the errors are listed below the table",
    "tokens/s": "of all replies, over the whole load (output_throughput)",
    "speed-up": "tokens/s, relative to no drafting",
    "requests/s": "answered, over the whole load (request_throughput)",
    "TTFT ms": "time to first token, median: to the first chunk with text",
    "TTFT p99": "its 99th percentile",
    "TPOT ms": "time per output token, median: (latency - TTFT) / (tokens - 1)",
    "TPOT p99": "its 99th percentile",
    "ITL ms": "inter-token latency, median: between two chunks of tokens",
    "ITL p99": "its 99th percentile",
    "tokens/chunk": "output tokens for each chunk with text",
    "differ": "replies whose text differs from that of none",
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
    """Print notes for the reader of the table: errors, cached prompts, guessed counts of tokens, an
    early end."""
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
        note("interrupted: the last load includes only requests that had ended")


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


@dataclass(frozen=True)
class LoadRun:
    """The replies of concurrent requests, in the order in which they ended."""

    replies: tuple[Reply, ...]
    seconds: float  # from the start of the first request to the end of the last
    interrupted: bool = False
    """True after Ctrl-C; requests in flight at that time are not among the replies."""


def run(
    ask: Callable[[int], Reply], requests: int, concurrency: int, step: Callable[[], None]
) -> LoadRun:
    """Send requests 0 to `requests` - 1, `concurrency` at a time; `step` is called at the end of
    each."""
    replies: list[Reply] = []
    began_s, interrupted = time.perf_counter(), False
    pool = ThreadPoolExecutor(min(concurrency, requests))
    ended = SimpleQueue[Future[Reply]]()
    try:
        for place in range(requests):
            pool.submit(ask, place).add_done_callback(ended.put)
        while len(replies) < requests:
            replies.append(ended.get().result())
            step()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return LoadRun(tuple(replies), time.perf_counter() - began_s, interrupted)


DEFAULT_LEVELS = "1,2,4,8,16"
DEFAULT_REQUESTS = 32
MOST_AT_ONCE = 4096  # requests at once, each with a thread and a connection


@dataclass(frozen=True)
class Plan:
    """The requests of a run: prompts, loads, sampling."""

    turns: tuple[str, ...]
    """Prompts in the order of the requests, repeated cyclically."""
    prompts: str  # names of their files
    levels: tuple[int, ...]
    requests: int  # requests at each concurrency; at least the concurrency
    repeat: int
    max_tokens: int
    temperature: float
    seed: int

    def requests_at(self, level: int) -> int:
        return max(level, self.requests)

    @property
    def told(self) -> dict[str, Any]:
        names = ("repeat", "max_tokens", "temperature", "seed")
        own = {name: getattr(self, name) for name in names}
        return {"prompts": self.prompts, "num_prompts": self.requests, **own}


@dataclass
class Findings:
    """The completed loads, by method and concurrency, and why others are missing."""

    loads: dict[tuple[str, int], list[LoadRun]] = field(default_factory=dict)
    interrupted: bool = False
    lost: str = ""  # why one of our processes ended meanwhile; empty: none did

    def rows(self) -> list[dict[str, Any]]:
        methods = sorted({method for method, _ in self.loads}, key=lambda name: name != PLAIN)
        levels = dict.fromkeys(level for _, level in self.loads)
        keys = [(m, n) for n in levels for m in methods if (m, n) in self.loads]
        rows = [row(method, level, self.loads[method, level]) for method, level in keys]
        texts = {key: _texts(self.loads[key]) for key in keys}
        return with_speedups(rows, texts, PLAIN)

    def requests(self) -> list[dict[str, Any]]:
        return [
            {"method": method, "max_concurrency": level, "run": number, **_told(reply)}
            for (method, level), loads in self.loads.items()
            for number, load in enumerate(loads)
            for reply in load.replies
        ]


def plan_of(
    sets: Sequence[PromptSet],
    temperatures: Sequence[float],
    concurrency: str,
    *,
    requests: int,
    repeat: int,
    max_tokens: int,
    seed: int,
) -> Plan:
    """Return the plan of a command line; `UserError` for a malformed --concurrency, and for more
    than one temperature."""
    if len(temperatures) > 1:
        raise UserError("--concurrency is measured at one temperature: give --temperature once")
    return Plan(
        turns=tuple(prompt.turns[0] for prompts in sets for prompt in prompts.prompts),
        prompts=", ".join(prompts.name for prompts in sets),
        levels=levels_of(concurrency),
        requests=requests,
        repeat=repeat,
        max_tokens=max_tokens,
        temperature=temperatures[0],
        seed=seed,
    )


def levels_of(text: str) -> tuple[int, ...]:
    """Return the numbers in --concurrency; `UserError` if it is not a list of numbers."""
    parts = [part.strip() for part in text.split(",")]
    levels = tuple(int(part) for part in parts if re.fullmatch("[0-9]{1,4}", part))
    possible = all(0 < level <= MOST_AT_ONCE for level in levels)
    if len(levels) < len(parts) or not possible or len(set(levels)) < len(levels):
        raise UserError(
            f"--concurrency {text!r}: write different numbers from 1 to {MOST_AT_ONCE}, such as "
            f"{DEFAULT_LEVELS}"
        )
    return levels


def measure(server: Served, plan: Plan) -> Findings:
    """Run every load with the methods in turn; each is first equally often. Ctrl-C, or the loss of
    one of our processes, ends it with the measurements so far."""
    found = Findings()
    _warm_up(server, plan)
    total = plan.repeat * len(server.methods) * sum(map(plan.requests_at, plan.levels))
    with progress_bar(total, "requests") as step:
        for place, level in enumerate(plan.levels):
            for turn in range(plan.repeat):
                for method in rotated(server.methods, place + turn):
                    said = f"{method}, {level} at once" if method != OTHER else f"{level} at once"
                    asking, number = partial(_ask, server, plan, method), plan.requests_at(level)
                    load = run(asking, number, level, partial(step, said))
                    found.loads.setdefault((method, level), []).append(load)
                    found.interrupted = load.interrupted
                    found.lost = next((str(loss) for loss in server.lost()), "")
                    if found.interrupted or found.lost:
                        return found
    return found


def _ask(server: Served, plan: Plan, method: str, number: int) -> Reply:
    body = server.body(
        method,
        plan.turns[number % len(plan.turns)],
        seed=plan.seed + number,
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
    )
    return ask(server.site, body, number)


def _warm_up(server: Served, plan: Plan) -> None:
    """Send one request with each method before anything is timed; `DovetailError` if the server
    fails it."""
    for method in server.methods:
        reply = _ask(server, plan, method, 0)
        if reply.error:
            raise DovetailError(
                f"the server at {server.site.url} does not answer the first request: "
                f"{reply.error}: {reply.words}"
            )


def _texts(loads: Sequence[LoadRun]) -> dict[int, str]:
    return {reply.number: reply.text for load in loads for reply in load.replies if not reply.error}


def _told(reply: Reply) -> dict[str, Any]:
    return {
        "number": reply.number,
        "input_tokens": reply.prompt_tokens,
        "output_tokens": reply.output_tokens,
        "ttft": reply.ttft_s,
        "itls": reply.itls_s,
        "latency": reply.latency_s,
        "error": reply.error,
    }


INTERRUPTED = 130


def measure_and_tell(
    configuration: Configuration,
    url: str | None,
    plan: Plan,
    out: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> int:
    """Measure a server under load and show the result; return the exit code. `out` also gets the
    figures of every request."""
    with served(configuration, url) as server:
        found = measure(server, plan)
        result = {
            "url": server.site.url,
            "model": server.model,
            **plan.told,
            "rows": found.rows(),
            "interrupted": found.interrupted,
            "lost": found.lost,
        }
    if out is not None:
        with writing(out, "the result"):
            out.write_text(json.dumps({**result, "requests": found.requests()}), encoding="utf-8")
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(draw(result), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result))
    else:
        show(result)
    if found.interrupted:
        return INTERRUPTED
    return 1 if found.lost or any(row["failed"] for row in result["rows"]) else 0


def row(method: str, concurrency: int, loads: Sequence[LoadRun]) -> dict[str, Any]:
    """Return the figures of a load that was run once or several times. As in vLLM, times and tokens
    exclude failed requests."""
    replies = [reply for load in loads for reply in load.replies]
    good = [reply for reply in replies if not reply.error]
    seconds = sum(load.seconds for load in loads)
    tokens = {
        "total_input_tokens": sum(reply.prompt_tokens for reply in good),
        "total_output_tokens": sum(reply.output_tokens for reply in good),
    }
    return {
        "method": method,
        "max_concurrency": concurrency,
        "completed": len(good),
        "failed": len(replies) - len(good),
        "duration": seconds,
        **tokens,
        "cached_tokens": sum(reply.cached_tokens for reply in good),
        "request_throughput": len(good) / seconds,
        "output_throughput": tokens["total_output_tokens"] / seconds,
        "total_token_throughput": sum(tokens.values()) / seconds,
        **_times("ttft", [reply.ttft_s for reply in good]),
        **_times("tpot", [reply.tpot_s for reply in good]),
        **_times("itl", [gap for reply in good for gap in reply.itls_s]),
        **_times("e2el", [reply.latency_s for reply in good]),
        "tokens_per_chunk": _tokens_a_chunk(good),
        "no_usage": sum(not reply.usage for reply in good),
        "errors": errors(replies),
    }


def with_speedups(
    rows: Sequence[Mapping[str, Any]],
    texts: Mapping[tuple[str, int], Mapping[int, str]],
    plain: str,
) -> list[dict[str, Any]]:
    """Return the rows with `speedup` (output throughput over that of `plain` at the same
    concurrency) and `differ` (replies whose text differs from that of `plain`); None without
    `plain`. `texts`: replies by method, concurrency and number of the request."""
    alone = {row["max_concurrency"]: row for row in rows if row["method"] == plain}
    told = []
    for row in rows:
        level = row["max_concurrency"]
        rate = alone[level]["output_throughput"] if level in alone else 0.0
        own, other = texts[(row["method"], level)], texts.get((plain, level), {})
        differ = sum(other.get(number, text) != text for number, text in own.items())
        speedup = row["output_throughput"] / rate if rate else None
        told.append({**row, "speedup": speedup, "differ": differ if level in alone else None})
    return told


def errors(replies: Sequence[Reply]) -> list[dict[str, Any]]:
    """Return the kinds of errors, most frequent first, each with its count and first message."""
    failed = [reply for reply in replies if reply.error]
    first = {reply.error: reply.words for reply in reversed(failed)}
    counts = Counter(reply.error for reply in failed)
    return [
        {"error": error, "count": count, "words": first[error]}
        for error, count in counts.most_common()
    ]


def _times(name: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    ms = [1e3 * value for value in seconds if value is not None]
    found = (np.mean(ms), np.median(ms), np.percentile(ms, 99)) if ms else (None, None, None)
    names = (f"{which}_{name}_ms" for which in ("mean", "median", "p99"))
    return {key: None if v is None else float(v) for key, v in zip(names, found, strict=True)}


def _tokens_a_chunk(replies: Sequence[Reply]) -> float | None:
    chunks = sum(len(reply.chunks_s) for reply in replies)
    return sum(reply.output_tokens for reply in replies) / chunks if chunks else None
