"""The event log: a ring of recent rounds and spans, from which Look is answered, and the spans of
traced requests.

Events are only stored, which takes a microsecond; messages are made on request. Rounds and spans
share one numbering, so that a caller with the last number gets the new ones and the number of
dropped ones. Workers record fine spans while spans are requested, or a request is traced. Pure:
clock and workers are arguments, and sessions are numbers.

A worker's spans are on its own clock. They are shifted by its known offset; if that is within the
error, the clocks are assumed to be the same, as on one machine."""

import itertools
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from dovetail.protocol.messages import (
    MAX_SEEN_ROUNDS,
    MAX_SEEN_SPANS,
    Event,
    Look,
    RoundRecord,
    Seen,
    SeenRound,
    SeenSpan,
    SeenWorker,
    Verified,
)
from dovetail.protocol.spans import Span
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.session import Session

MAX_HELD = 1 << 15  # stored rounds and spans: minutes of coarse ones; some 6 MiB
MAX_TRACED = 1 << 16  # the most spans of a traced request
LATEST_NS = (1 << 63) - 1  # the largest value in a message
LOOKED_NS = 5_000_000_000  # time for which fine spans are recorded after spans were requested
OURS = "coordinator"  # the name of our own process
BOUND_TO = re.compile(r"^full: .*memory of node ([\d,-]+)")
"""Matches the nodes in a worker's binding."""

Waits = Literal["", "draft", "target", "coordinator", "no work"]
"""Why a worker waits; empty: it works."""
Waiting = Callable[[Worker], Waits]


class _Round(NamedTuple):
    number: int
    session: int
    draft: str
    target: str
    at_ns: int
    record: Callable[[], RoundRecord]


class _Batch(NamedTuple):
    """Spans of one process and session; `number` is that of the last span."""

    number: int
    process: str
    device: str
    session: int | None
    round: int | None
    offset_ns: int
    spans: Sequence[Span]
    shared: Sequence[tuple[int, int]] = ()  # session and round of each, if there are several

    def seen(self) -> Iterator[SeenSpan]:
        """Yield the spans on our clock."""
        for name, start_ns, duration_ns in self.spans:
            yield SeenSpan.model_construct(
                process=self.process,
                device=self.device,
                session=self.session,
                round=self.round,
                shared=tuple(self.shared),
                span=(name, _on_ours(start_ns, self.offset_ns), duration_ns),
            )


class EventLog:
    """The ring, and the observers."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.now_ns = clock_ns
        self.fine = False  # True if fine spans are recorded
        self._number = self._gone = 0  # the last number given, and the last one that was dropped
        self._ring: deque[_Round | _Batch] = deque()
        self._until_ns = 0
        self._told: set[int] = set()  # epochs of the workers that record fine spans
        self._traces: dict[int, list[SeenSpan]] = {}  # by session

    # -- events ------------------------------------------------------------------------------------

    def add_ours(
        self, spans: Sequence[Span], session: int | None = None, round: int | None = None
    ) -> None:
        """Add spans of the coordinator."""
        self._add(OURS, "", session, round, 0, spans)

    def finely(self, name: str, start_ns: int, about: Any) -> None:
        """Record a fine span that ends now."""
        took_ns = self.now_ns() - start_ns
        items: Sequence[Any] = getattr(about, "items", ())
        about = items[0] if len(items) == 1 else about
        session = getattr(about, "session", None)
        number = getattr(about, "number", None) if session is None else session
        self.add_ours(((name, start_ns, took_ns),), number, getattr(about, "round", None))

    def event(self, worker: Worker, event: Event) -> None:
        """Store the worker's spans in an event."""
        spans, beside = getattr(event, "spans", ()), getattr(event, "beside", ())
        if not spans and not beside:
            return
        hello, offset_ns = worker.hello, worker.clock.ahead_ns
        name, device = hello.name, hello.device
        if spans and isinstance(event, Verified):
            about = [(item.session, item.round) for item in event.items]
            session, round = about[0] if len(about) == 1 else (None, None)
            self._add(
                name, device, session, round, offset_ns, spans, about if len(about) > 1 else ()
            )
        elif spans:
            self._add(name, device, event.session, event.round, offset_ns, spans)  # type: ignore[union-attr]
        for session, round, span in beside:
            self._add(name, device, session, round, offset_ns, (span,))

    def round_ended(
        self,
        session: int,
        draft: Worker | None,
        target: Worker,
        at_ns: int,
        record: Callable[[], RoundRecord],
    ) -> None:
        """Note that a round has ended; its record is made on request."""
        self._number += 1
        self._ring.append(
            _Round(
                self._number,
                session,
                draft.name if draft is not None else "",
                target.name,
                at_ns,
                record,
            )
        )
        self._trim()

    def _add(
        self,
        process: str,
        device: str,
        session: int | None,
        round: int | None,
        offset_ns: int,
        spans: Sequence[Span],
        shared: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._number += len(spans)
        batch = _Batch(self._number, process, device, session, round, offset_ns, spans, shared)
        self._ring.append(batch)
        if self._number - self._gone > MAX_HELD:
            self._trim()
        if self._traces:
            about: Sequence[tuple[int | None, int | None]] = shared or [(session, round)]
            for traced, its_round in about:
                if traced in self._traces and len(kept := self._traces[traced]) < MAX_TRACED:
                    kept.extend(batch._replace(session=traced, round=its_round, shared=()).seen())

    def _trim(self) -> None:
        while self._number - self._gone > MAX_HELD and self._ring:
            self._gone = self._ring.popleft().number

    # -- requests that are traced ------------------------------------------------------------------

    def begin(self, session: Session, *, trace: bool) -> None:
        """Note that a session begins; `trace`: keep its events until they are taken."""
        session.reply.watch(self, session)
        if trace:
            self._traces[session.number] = []

    def traced(self, session: int) -> tuple[SeenSpan, ...]:
        """Return and drop the stored events of a traced session."""
        return tuple(self._traces.pop(session, ())[:MAX_TRACED])

    # -- answers to Look ---------------------------------------------------------------------------

    def orders(self, workers: Iterable[Worker]) -> list[tuple[Worker, bool]]:
        """Return the workers that must start or stop recording fine spans."""
        self.fine = bool(self._traces) or (self._until_ns > 0 and self.now_ns() < self._until_ns)
        if not self.fine and not self._told:
            return []
        said = [worker for worker in workers if (worker.hello.epoch in self._told) != self.fine]
        for worker in said:
            (self._told.add if self.fine else self._told.discard)(worker.hello.epoch)
        if not self.fine:
            self._told.clear()
        return [(worker, self.fine) for worker in said]

    def look(
        self,
        request: Look,
        epoch: int,
        workers: Collection[Worker],
        waiting: Waiting,
        *,
        own: Collection[int] | None = None,
    ) -> Seen:
        """Answer a Look. `own`: sessions whose tokens the client may see; None: all."""
        now_ns = self.now_ns()
        if request.spans:
            self._until_ns = now_ns + LOOKED_NS
        last, rounds, spans = (
            min(max(request.after, self._gone), self._number),
            list[SeenRound](),
            list[SeenSpan](),
        )
        more = False
        for entry in self._behind(last):
            if isinstance(entry, _Round):
                more = len(rounds) == MAX_SEEN_ROUNDS
            elif request.spans:
                more = len(spans) + len(entry.spans) > MAX_SEEN_SPANS
            if more:
                break
            last = entry.number
            if isinstance(entry, _Round):
                rounds.append(_seen_round(entry, readable=own is None or entry.session in own))
            elif request.spans:
                spans += entry.seen()
        return Seen(
            epoch=epoch,
            request=request.request,
            at_ns=now_ns,
            next=last,
            missed=max(0, self._gone - request.after) if request.after else 0,
            more=more,
            workers=tuple(_seen_worker(worker, waiting(worker)) for worker in workers),
            rounds=tuple(rounds),
            spans=tuple(spans),
        )

    def _behind(self, number: int) -> Sequence[_Round | _Batch]:
        """Return the entries after a number; frequent callers get only a few."""
        found = list(itertools.takewhile(lambda entry: entry.number > number, reversed(self._ring)))
        return found[::-1]


def _on_ours(peer_ns: int, offset_ns: int) -> int:
    """Return a worker's time on our clock, clamped to a message's range."""
    return min(max(0, peer_ns - offset_ns), LATEST_NS)


def _seen_round(entry: _Round, *, readable: bool) -> SeenRound:
    record = entry.record()
    if not readable:
        record = record.model_copy(update={"tokens": (0,) * len(record.tokens), "bonus": 0})
    return SeenRound(
        number=entry.number,
        session=entry.session,
        draft=entry.draft,
        target=entry.target,
        at_ns=entry.at_ns,
        readable=readable,
        record=record,
    )


def _seen_worker(worker: Worker, waiting: Waits) -> SeenWorker:
    hello, probed, clock = worker.hello, worker.probed, worker.clock
    bound = BOUND_TO.match(hello.binding)
    return SeenWorker(
        name=hello.name,
        worker_epoch=hello.epoch,
        roles=hello.roles,
        host=hello.host,
        device=hello.device,
        cores=hello.cores,
        node=bound[1] if bound else "",
        busy_ns=probed.busy_ns if probed is not None else 0,
        at_ns=_on_ours(probed.clock_ns, clock.ahead_ns) if probed is not None else 0,
        clock_bound_ns=clock.bound_ns if clock.known else None,
        waiting=waiting,
    )
