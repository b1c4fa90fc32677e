"""The figures of a load, under the names that `vllm bench serve --save-result` writes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dovetail.launch.bench.load.crew import Load
from dovetail.launch.bench.load.request import Reply


def row(method: str, concurrency: int, loads: Sequence[Load]) -> dict[str, Any]:
    """Return the figures of a load that was run once or several times. As in vLLM, requests that
    failed do not count in times and tokens."""
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
    """Return the rows with `speedup`, their output throughput over that of `plain` at the same
    concurrency, and `differ`, the number of replies whose text differs from that of `plain`; both
    are None without `plain`. `texts`: the replies of every method and concurrency, by the number of
    the request."""
    alone = {row["max_concurrency"]: row for row in rows if row["method"] == plain}
    told = []
    for row in rows:
        level = row["max_concurrency"]
        rate = alone[level]["output_throughput"] if level in alone else 0.0
        own, other = texts[(row["method"], level)], texts.get((plain, level), {})
        differ = sum(other.get(number, text) != text for number, text in own.items())
        told.append(
            {
                **row,
                "speedup": row["output_throughput"] / rate if rate else None,
                "differ": differ if level in alone else None,
            }
        )
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
    if not ms:
        return dict.fromkeys((f"mean_{name}_ms", f"median_{name}_ms", f"p99_{name}_ms"))
    return {
        f"mean_{name}_ms": float(np.mean(ms)),
        f"median_{name}_ms": float(np.median(ms)),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }


def _tokens_a_chunk(replies: Sequence[Reply]) -> float | None:
    chunks = sum(len(reply.chunks_s) for reply in replies)
    return sum(reply.output_tokens for reply in replies) / chunks if chunks else None
