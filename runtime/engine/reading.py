"""Chunked prefill: how many rows of logs a worker reads while sessions run, and their cost. A chunk
in a pass of the target delays the sessions whose trees the pass verifies; a chunk in a separate
pass delays those whose proposals are due. So chunks are as large as the bound on that delay allows,
or `prompt_rows` of the worker if no session runs. Of many logs, the longest waiting are read first,
fairly by API key: reading all at once would delay each by all others."""

from collections.abc import Mapping, Sequence
from typing import Literal

from dovetail.protocol.messages import Open, Read, Refeed, Verified, Verify, VerifyItem
from dovetail.protocol.spans import Span
from dovetail.runtime.costs.reading import reading_order, shares
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import Pass, Worker
from dovetail.runtime.fleet.scheduler import Rest
from dovetail.runtime.telemetry.metrics import extent_ns

LATENCY = 3.0
"""The longest round with chunks, as a multiple of one without any, unless `latency_ms` is set: a
prompt then has up to two thirds of the target's time while streams run."""
LEAST_ROWS = 8  # minimum rows of logs in a pass, so that prompts make progress under any bound
AHEAD_ROWS = 64
"""Most rows per pass of the log of a session that is about to move: its old target may use the same
cores, and nothing interrupts the computation of a layer."""
AT_ONCE = 4
"""The number of logs that share the rows of a chunk, so that a long prompt does not block short
ones."""


def share(
    worker: Worker,
    items: Sequence[VerifyItem],
    logs: Sequence[Rest],
    running: Mapping[int, RunningRequest],
    now_ns: int,
    latency_ms: float | Literal["auto"],
) -> Sequence[int]:
    """Return how many rows of each log a worker reads next: in the pass that verifies `items`, or,
    without items, in a separate pass. `running`: the sessions by their numbers."""
    own = {log.command.session for log in logs}
    others = [
        one
        for one in running.values()
        if one.decoding and worker in (one.target, one.draft) and one.session.number not in own
    ]
    most = worker.limits.prompt_rows
    if others and not items and logs[0].done < 0:
        return [0]  # opened now, and read in the passes of other sessions
    if others:
        most = min(most, max(LEAST_ROWS, _rows_beside(worker, items, others, latency_ms)))
    if all(running[session].reads_for is not None for session in own):
        most = min(most, AHEAD_ROWS)
    first = in_order(worker, logs, running, now_ns)
    rows = shares([logs[place].left for place in first], most, at_once=AT_ONCE)
    given = dict(zip(first, rows, strict=True))
    return [given[place] for place in range(len(logs))]


def in_order(
    worker: Worker, logs: Sequence[Rest], running: Mapping[int, RunningRequest], now_ns: int
) -> Sequence[int]:
    """Return the indices of logs in the order in which a worker reads them."""
    row_s = worker.reading.row_s
    sessions = [running[log.command.session].session for log in logs]
    return reading_order(
        [session.request.owner for session in sessions],
        waited_s=[(now_ns - session.accounts.began_ns) / 1e9 for session in sessions],
        reading_s=[log.left * row_s for log in logs],
        since_s={owner: (now_ns - at_ns) / 1e9 for owner, at_ns in worker.read_ns.items()},
    )


def _rows_beside(
    worker: Worker,
    items: Sequence[VerifyItem],
    others: Sequence[RunningRequest],
    latency_ms: float | Literal["auto"],
) -> int:
    """Return how many rows of logs may delay the running sessions."""
    target = worker if worker.plays("target") else others[0].target
    rows = sum(1 + len(item.tokens) for item in items)
    context = sum(one.session.length for one in others) / len(others)
    pass_s = target.verifying.at(max(1, rows), context) if target.verifying.known else 0.0
    if not pass_s:
        return LEAST_ROWS
    if worker is not target:  # meanwhile the target verifies the streams' trees
        return worker.reading.rows_within(pass_s)
    bound_s = most_s(target, pass_s, latency_ms)
    if not items:  # meanwhile the draft grows their trees
        bound_s = min(bound_s, max(pass_s, target.round_s.value))
    return worker.reading.rows_within(bound_s - pass_s)


def most_s(target: Worker, pass_s: float, latency_ms: float | Literal["auto"]) -> float:
    """Return the maximum seconds of a pass with chunks; `pass_s`: its seconds without."""
    if latency_ms == "auto":
        round_s = max(pass_s, target.round_s.value)
        return LATENCY * round_s - (round_s - pass_s)
    return max(pass_s, latency_ms / 1e3)


def chunked_s(worker: Worker, pass_s: float, latency_ms: float | Literal["auto"]) -> float:
    """Return the seconds of a target's next pass with its chunks; `pass_s`: its seconds without."""
    if not (logs := worker.turns.logs):
        return pass_s
    rows = min(worker.limits.prompt_rows, sum(log.left for log in logs))
    return min(pass_s + rows * worker.reading.row_s, most_s(worker, pass_s, latency_ms))


def rows_read(message: Open | Refeed | Read) -> int:
    """Return how many rows of a log a command reads, if known."""
    match message:
        case Read():
            return message.item.rows
        case Open():
            left = len(message.prompt) - message.kept
        case Refeed():
            left = message.prefix - 1
    return left if message.read is None else min(left, message.read)


def pass_of(message: Verify) -> Pass:
    rows = tokens = 0
    for item in message.items:
        rows, tokens = rows + 1 + len(item.tokens), tokens + item.prefix
    return Pass(rows, tokens / len(message.items), sum(item.rows for item in message.reads))


def observe_pass(worker: Worker, passed: Pass, event: Verified, size: int) -> None:
    """Learn the cost of a pass, or, if it read rows of logs, the cost of these. `size`: bytes of
    its command and answer."""
    worker.traffic.answered(size, len(event.items))
    seconds, worker.context = extent_ns(event.spans) / 1e9, passed.context
    if not passed.read:
        for _ in event.items:  # a round of each, as in `round_s`
            worker.sharing.add(len(event.items))
        worker.verifying.observe(passed.rows, seconds, passed.context, event.experts)
    elif worker.verifying.known:
        alone_s = worker.verifying.at(passed.rows, passed.context)
        worker.reading.observe(passed.read, seconds - alone_s)


def observe_reading(worker: Worker, rows: int, spans: Sequence[Span]) -> None:
    """Learn the cost of `rows` rows of a log that were read in a separate pass."""
    worker.reading.observe(rows, extent_ns(spans) / 1e9)
