"""The metrics at /metrics, in Prometheus's text format: under our names, and under vLLM's where
existing dashboards and benchmarks expect them. The coordinator's counters come from its answer to
Status, once per scrape; the latencies of clients are measured in this process. The only import of
`prometheus_client`, with a private registry.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.protocol.messages import KeyWaits, Reported

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEY_DIGITS = 8  # hexadecimal digits of a key's digest that name it, as in the coordinator's metrics
BY_KEY = "by the first digits of the digest of the API key"


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


FIRST_TOKEN_S = _bounds(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160"
)
BETWEEN_TOKENS_S = _bounds(
    "0.001 0.0025 0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 10"
)
WHOLE_S = _bounds("0.1 0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960")


@dataclass
class KeyUse:
    """What the requests of one API key used since the server was started."""

    replies: int = 0
    """Replies with a token."""
    prompt: int = 0
    """Tokens of their prompts; a prompt counts once for each reply."""
    completion: int = 0


@dataclass
class ReplyWatch:
    """Measures one reply as its client sees it: its times and its tokens."""

    began_s: float
    prompt: int
    use: KeyUse
    first: Histogram
    between: Histogram
    whole: Histogram
    last_s: float | None = None

    def tokens(self, count: int) -> None:
        """Count tokens of the reply."""
        now_s = time.monotonic()
        self.use.completion += count
        if self.last_s is None:
            self.use.replies += 1
            self.use.prompt += self.prompt
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
        self.used: dict[str, KeyUse] = {}
        """By API key, as `KEY_DIGITS` of its digest; empty: requests without a key."""
        self._state = _State(self.used)
        self._registry.register(self._state)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # vLLM has none
        self._first = self._times(
            "vllm:time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            FIRST_TOKEN_S,
        )
        self._between = self._times(
            "vllm:inter_token_latency_seconds", "Time between tokens, per token.", BETWEEN_TOKENS_S
        )
        self._whole = self._times(
            "vllm:e2e_request_latency_seconds",
            "From a request's arrival to its last token.",
            WHOLE_S,
        )
        self._answering = Gauge(
            "dovetail_http_requests",
            "HTTP requests that are being answered.",
            registry=self._registry,
        )
        self._connections = Gauge(
            "dovetail_http_connections", "HTTP connections that are open.", registry=self._registry
        )

    def _times(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=bounds, registry=self._registry)

    def watch(self, model: str, began_s: float, owner: str = "", prompt: int = 0) -> ReplyWatch:
        """Return a watch for a reply of this model, to a request that arrived then. `owner`: the
        digest of its API key; `prompt`: the tokens of the prompt."""
        return ReplyWatch(
            began_s,
            prompt,
            self.used.setdefault(owner[:KEY_DIGITS], KeyUse()),
            self._first.labels(model),
            self._between.labels(model),
            self._whole.labels(model),
        )

    def text(
        self,
        reported: Reported | None,
        model: str,
        *,
        answering: int,
        connections: int,
        let_go: int,
    ) -> bytes:
        """Return the page; without a coordinator, only with the figures of this process."""
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

    def __init__(self, used: Mapping[str, KeyUse]) -> None:
        self._used = used

    def collect(self) -> Iterator[Metric]:
        reported = self.reported
        yield _counter(
            "dovetail_http_let_go",
            "HTTP clients that read nothing and were disconnected.",
            self.let_go,
        )
        yield _family(
            CounterMetricFamily,
            "dovetail_tokens",
            f"Tokens of prompts and replies over HTTP, {BY_KEY}.",
            ("key", "kind"),
            [
                ((key, kind), getattr(use, kind))
                for key, use in self._used.items()
                for kind in ("prompt", "completion")
            ],
        )
        yield _gauge("dovetail_up", "Whether the coordinator answers.", float(reported is not None))
        if reported is not None:
            yield from _own(reported)
            yield from _known(reported, self.model)


def _own(reported: Reported) -> Iterable[Metric]:
    totals = reported.totals
    for name, text, value in (
        ("uptime_seconds", "Time since the coordinator started.", reported.uptime_s),
        ("degraded", "Whether a part that was available is missing.", float(reported.degraded)),
        ("sessions", "Requests that are being decoded.", reported.sessions),
        (
            "waiting_sessions",
            "Requests whose target was lost and that wait for another.",
            totals.waiting,
        ),
        ("kept_sessions", "Ended conversations whose caches are kept.", totals.kept),
    ):
        yield _gauge(f"dovetail_{name}", text, value)
    text = "Seconds for which a part has not been working; a working part has no sample."
    faults = [((fault.part,), fault.since_s) for fault in reported.faults]
    yield _family(GaugeMetricFamily, "dovetail_fault_seconds", text, ("part",), faults)
    yield from _of_workers(reported)
    yield from _of_requests(reported)
    for name, text, value in (
        (
            "draft_failures",
            "Times that a draft failed and its session continued without it.",
            totals.draft_failures,
        ),
        (
            "clients_let_go",
            "Clients whose requests were ended because they did not read.",
            totals.let_go,
        ),
        ("moves", "Times that a request continued on another target.", totals.moves),
        ("rebalanced", "Moves to a faster target.", totals.rebalanced),
        ("stale_messages", "Messages that arrived too late or twice.", reported.stale),
        ("refused_messages", "Peers and messages that broke the protocol.", reported.refused),
        ("prompt_tokens", "Tokens of prompts.", totals.prompt_tokens),
        ("reused_tokens", "Prompt tokens taken from the prefix cache.", totals.reused_tokens),
        ("completion_tokens", "Tokens of replies.", totals.completion_tokens),
        ("drafted_tokens", "Nodes that were verified.", totals.drafted_tokens),
        ("accepted_tokens", "Nodes that were accepted.", totals.accepted_tokens),
    ):
        yield _counter(f"dovetail_{name}", text, value)


def _of_workers(reported: Reported) -> Iterable[Metric]:
    roles = [
        ((role,), sum(role in worker.roles for worker in reported.workers))
        for role in ("target", "draft")
    ]
    yield _family(GaugeMetricFamily, "dovetail_workers", "Registered workers.", ("role",), roles)
    named = {worker.name: worker for worker in reported.workers}.items()
    for name, text, values in (
        (
            "busy_share",
            "Share of its time that a worker has computed.",
            [((name,), worker.busy_share) for name, worker in named],
        ),
        (
            "resident_bytes",
            "Resident memory of a worker; pages that processes share count in each of them.",
            [((name,), worker.rss_mb * 1e6) for name, worker in named],
        ),
        (
            "stored_blocks",
            "Stored blocks of prompts, 64 tokens each.",
            [((name,), worker.blocks) for name, worker in named],
        ),
        (
            "damaged_blocks",
            "Stored blocks whose files were damaged and deleted.",
            [((name,), worker.damaged_blocks) for name, worker in named],
        ),
    ):
        yield _family(GaugeMetricFamily, f"dovetail_worker_{name}", text, ("worker",), values)


def _of_requests(reported: Reported) -> Iterable[Metric]:
    totals = reported.totals
    if reported.tau is not None:
        yield _gauge("dovetail_tau", "Tokens per round, over all rounds.", reported.tau)
    yield _counter("dovetail_rounds", "Rounds that ended.", reported.rounds)
    for name, text, count in (
        ("finished", "were completed", reported.finished),
        ("failed", "began but could not be completed", reported.failed),
        ("refused", "were refused before decoding", totals.refused_requests),
        ("cancelled", "were cancelled", reported.cancelled),
    ):
        yield _counter(f"dovetail_requests_{name}", f"Requests that {text}.", count)
    yield _of_keys("length", "Requests in the queue", totals.queue, "length")
    yield _of_keys("longest_wait_seconds", "Longest wait in the queue", totals.queue, "longest_s")


def _known(reported: Reported, model: str) -> Iterable[Metric]:
    """Yield the metrics under vLLM's names."""
    totals = reported.totals
    running = max(0, reported.sessions - totals.opening)
    waiting = totals.opening + totals.queued
    for name, text, value in (
        ("num_requests_running", "Requests that are being decoded.", running),
        (
            "num_requests_waiting",
            "Requests that are queued, or whose prompt is being prefilled.",
            waiting,
        ),
        (
            "kv_cache_usage_perc",
            "Open sessions as a share of the targets' capacity.",
            totals.occupied,
        ),
    ):
        yield _gauge(f"vllm:{name}", text, value, model)
    for name, text, value in (
        ("prompt_tokens", "Tokens of prompts.", totals.prompt_tokens),
        ("generation_tokens", "Tokens of replies.", totals.completion_tokens),
        ("spec_decode_num_drafts", "Rounds that were verified with a tree.", totals.drafts),
        ("spec_decode_num_draft_tokens", "Nodes that were verified.", totals.drafted_tokens),
        ("spec_decode_num_accepted_tokens", "Nodes that were accepted.", totals.accepted_tokens),
    ):
        yield _counter(f"vllm:{name}", text, value, model)
    ends = [
        ((model, {"cancelled": "abort"}.get(reason, reason)), count)
        for reason, count in totals.reasons
    ]
    depths = [((model, str(depth)), n) for depth, n in enumerate(totals.accepted_per_depth)]
    for name, text, label, counts in (
        ("request_success", "Requests by finish reason.", "finished_reason", ends),
        (
            "spec_decode_num_accepted_tokens_per_pos",
            "Rounds that accepted a node at a depth below the root.",
            "position",
            depths,
        ),
    ):
        labels = ("model_name", label)
        yield _family(CounterMetricFamily, f"vllm:{name}", text, labels, counts)


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Sequence[str],
    values: Iterable[tuple[Sequence[str], float]],
) -> Metric:
    """Return a metric with a value for each label value."""
    family = kind(name, text, labels=labels)
    for of_labels, value in values:
        family.add_metric(of_labels, value)
    return family


def _gauge(name: str, text: str, value: float, model: str | None = None) -> Metric:
    named = ((), ()) if model is None else (("model_name",), (model,))
    return _family(GaugeMetricFamily, name, text, named[0], [(named[1], value)])


def _counter(name: str, text: str, value: float, model: str | None = None) -> Metric:
    named = ((), ()) if model is None else (("model_name",), (model,))
    return _family(CounterMetricFamily, name, text, named[0], [(named[1], value)])


def _of_keys(name: str, text: str, queue: Sequence[KeyWaits], field: str) -> Metric:
    text = f"{text}, {BY_KEY}."
    values = [((own.key,), getattr(own, field)) for own in queue]
    return _family(GaugeMetricFamily, f"dovetail_queue_{name}", text, ("key",), values)
