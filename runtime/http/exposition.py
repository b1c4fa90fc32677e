"""The metrics at /metrics, in Prometheus's text format: under our names, and under vLLM's where
existing dashboards and benchmarks expect them. The coordinator's counters come from its answer to
Status, once a scrape; the latencies of clients are observed in this process. The only import of
`prometheus_client`, with a private registry.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from dovetail.protocol.messages import KeyWaits, Reported, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
BETWEEN_TOKENS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
)
WHOLE_S = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
)


class Counts:
    """Counts of durations between bounds, and the sum of all of them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.sum_s += seconds


class Times(Collector):
    """A histogram for each model, without the library's lock and walk for every chunk."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts: dict[str, Counts] = {}

    def of(self, model: str) -> Counts:
        return self._counts.setdefault(model, Counts(self._bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        for model, found in self._counts.items():
            bounds = (*map(floatToGoString, self._bounds), "+Inf")
            family.add_metric(
                (model,), [*zip(bounds, accumulate(found.counts), strict=True)], found.sum_s
            )
        yield family


@dataclass
class Watch:
    """Times one reply as a client waits for it."""

    began_s: float
    first: Counts
    between: Counts
    whole: Counts
    last_s: float | None = None

    def tokens(self, count: int) -> None:
        """Count tokens of the reply."""
        now_s = time.monotonic()
        if self.last_s is None:
            self.first.observe(now_s - self.began_s)
        else:
            self.between.observe((now_s - self.last_s) / max(1, count))
        self.last_s = now_s

    def ended(self) -> None:
        """Note that the reply is complete."""
        self.whole.observe(time.monotonic() - self.began_s)


class Exposition:
    """The metrics of one HTTP process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._state = _State()
        self._registry.register(self._state)
        self._first = Times(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_S,
        )
        self._between = Times(
            "vllm:inter_token_latency_seconds", "Time between tokens, per token.", BETWEEN_TOKENS_S
        )
        self._whole = Times(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            WHOLE_S,
        )
        for times in (self._first, self._between, self._whole):
            self._registry.register(times)
        self._answering = Gauge(
            "dovetail_http_requests",
            "HTTP requests that are being answered.",
            registry=self._registry,
        )
        self._connections = Gauge(
            "dovetail_http_connections", "HTTP connections that are open.", registry=self._registry
        )

    def watch(self, model: str, began_s: float) -> "Watch":
        """Return a watch for a reply of this model to a request that arrived then."""
        return Watch(began_s, self._first.of(model), self._between.of(model), self._whole.of(model))

    def text(
        self,
        reported: Reported | None,
        model: str,
        *,
        answering: int,
        connections: int,
        let_go: int,
    ) -> bytes:
        """Return the page; without a coordinator, only the figures of this process."""
        self._state.reported, self._state.model = reported, model
        self._answering.set(answering)
        self._connections.set(connections)
        self._state.let_go = let_go
        return generate_latest(self._registry)


class _State(Collector):
    """Collects the metrics of one report of the coordinator."""

    reported: Reported | None = None
    model: str = ""
    let_go: int = 0

    def collect(self) -> Iterator[Metric]:
        reported = self.reported
        yield _counter(
            "dovetail_http_let_go",
            "HTTP clients that read nothing and were disconnected.",
            self.let_go,
        )
        yield _gauge("dovetail_up", "Whether the coordinator answers.", float(reported is not None))
        if reported is not None:
            yield from _own(reported)
            yield from _known(reported, self.model)


def _own(reported: Reported) -> Iterable[Metric]:
    totals = reported.totals
    yield _gauge("dovetail_uptime_seconds", "Time since the coordinator began.", reported.uptime_s)
    yield _gauge(
        "dovetail_degraded",
        "Whether a part that was available is missing.",
        float(reported.degraded),
    )
    faults = GaugeMetricFamily(
        "dovetail_fault_seconds",
        "Seconds for which a part has not been working; a working part has no sample.",
        labels=("part",),
    )
    for fault in reported.faults:
        faults.add_metric((fault.part,), fault.since_s)
    yield faults
    yield _counter(
        "dovetail_draft_failures",
        "Times that a draft failed and its session continued without it.",
        totals.draft_failures,
    )
    yield _gauge("dovetail_sessions", "Requests that are being decoded.", reported.sessions)
    yield _gauge(
        "dovetail_waiting_sessions",
        "Requests whose target was lost and that wait for another.",
        totals.waiting,
    )
    yield _gauge(
        "dovetail_kept_sessions", "Ended conversations whose caches are kept.", totals.kept
    )
    yield from _of_workers(reported)
    yield from _of_requests(reported)
    yield from _of_tokens(totals)
    yield _counter(
        "dovetail_clients_let_go",
        "Clients whose requests were ended because they did not read.",
        totals.let_go,
    )
    yield _counter(
        "dovetail_moves", "Times that a request continued on another target.", totals.moves
    )
    yield _counter("dovetail_rebalanced", "Moves to a faster target.", totals.rebalanced)
    yield _counter(
        "dovetail_stale_messages", "Messages that came too late or twice.", reported.stale
    )
    yield _counter(
        "dovetail_refused_messages", "Peers and messages that broke the protocol.", reported.refused
    )


def _of_workers(reported: Reported) -> Iterable[Metric]:
    workers = GaugeMetricFamily("dovetail_workers", "Registered workers.", labels=("role",))
    for role in ("target", "draft"):
        workers.add_metric((role,), sum(role in worker.roles for worker in reported.workers))
    yield workers
    busy = GaugeMetricFamily(
        "dovetail_worker_busy_share",
        "Share of its time that a worker has computed.",
        labels=("worker",),
    )
    memory = GaugeMetricFamily(
        "dovetail_worker_resident_bytes", "Memory of a worker.", labels=("worker",)
    )
    for worker in {worker.name: worker for worker in reported.workers}.values():
        busy.add_metric((worker.name,), worker.busy_share)
        memory.add_metric((worker.name,), worker.rss_mb * 1e6)
    yield busy
    yield memory


def _of_requests(reported: Reported) -> Iterable[Metric]:
    totals = reported.totals
    if reported.tau is not None:
        yield _gauge("dovetail_tau", "Tokens per round, over all rounds.", reported.tau)
    yield _counter("dovetail_rounds", "Rounds that ended.", reported.rounds)
    for name, text, count in (
        ("finished", "were decoded to their end", reported.finished),
        ("failed", "began and could not be decoded to their end", reported.failed),
        ("refused", "the coordinator turned down before decoding", totals.refused_requests),
        ("cancelled", "were cancelled", reported.cancelled),
    ):
        yield _counter(f"dovetail_requests_{name}", f"Requests that {text}.", count)
    yield _of_keys("length", "Requests in the queue", totals.queue, "length")
    yield _of_keys("longest_wait_seconds", "Longest wait in the queue", totals.queue, "longest_s")


def _of_tokens(totals: Totals) -> Iterable[Metric]:
    for name, text, count in (
        ("prompt", "Tokens of prompts.", totals.prompt_tokens),
        ("reused", "Prompt tokens taken from the prefix cache.", totals.reused_tokens),
        ("completion", "Tokens of replies.", totals.completion_tokens),
        ("drafted", "Nodes that were verified.", totals.drafted_tokens),
        ("accepted", "Nodes that were accepted.", totals.accepted_tokens),
    ):
        yield _counter(f"dovetail_{name}_tokens", text, count)


def _known(reported: Reported, model: str) -> Iterable[Metric]:
    """Yield the metrics under vLLM's names."""
    totals, label = reported.totals, {"model_name": model}
    yield _gauge(
        "vllm:num_requests_running",
        "Requests that are being decoded.",
        max(0, reported.sessions - totals.opening),
        label,
    )
    yield _gauge(
        "vllm:num_requests_waiting",
        "Requests in the queue, or whose prompt has not been read yet.",
        totals.opening + totals.queued,
        label,
    )
    yield _gauge(
        "vllm:kv_cache_usage_perc",
        "Share of the targets' sessions that are open; 1 is all.",
        totals.occupied,
        label,
    )
    yield _counter("vllm:prompt_tokens", "Tokens of prompts.", totals.prompt_tokens, label)
    yield _counter("vllm:generation_tokens", "Tokens of replies.", totals.completion_tokens, label)
    success = CounterMetricFamily(
        "vllm:request_success",
        "Requests by how they ended.",
        labels=("model_name", "finished_reason"),
    )
    for reason, count in totals.reasons:
        success.add_metric((model, {"cancelled": "abort"}.get(reason, reason)), count)
    yield success
    yield _counter(
        "vllm:spec_decode_num_drafts",
        "Rounds that were verified with a tree.",
        totals.drafts,
        label,
    )
    yield _counter(
        "vllm:spec_decode_num_draft_tokens",
        "Nodes that were verified.",
        totals.drafted_tokens,
        label,
    )
    yield _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Nodes that were accepted.",
        totals.accepted_tokens,
        label,
    )
    depths = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Rounds that accepted a node at a depth below the root.",
        labels=("model_name", "position"),
    )
    for depth, count in enumerate(totals.accepted_per_depth):
        depths.add_metric((model, str(depth)), count)
    yield depths


def _gauge(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family


def _of_keys(name: str, text: str, queue: Sequence[KeyWaits], field: str) -> Metric:
    text = f"{text}, by the first digits of the digest of the API key."
    family = GaugeMetricFamily(f"dovetail_queue_{name}", text, labels=("key",))
    for own in queue:
        family.add_metric((own.key,), getattr(own, field))
    return family


def _counter(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Metric:
    family = CounterMetricFamily(name, text, labels=tuple(labels or ()))
    family.add_metric(tuple((labels or {}).values()), value)
    return family
