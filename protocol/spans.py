"""Intervals on a monotonic clock, and the offset between two machines' clocks.

A span is (name, start_ns, duration_ns) on the clock of the process that measured it. Only durations
are used for decisions; offsets are for display. Coarse spans are always recorded, fine ones on
request. Spans of a command are sent with its answer; background spans, such as growth ahead, are
sent with a later answer and name their session."""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

Span = tuple[str, int, int]
Beside = tuple[int | None, int | None, Span]
"""Session and round, if it belongs to one, and the span."""

NAMES: Mapping[str, str] = {
    "prefill": "a prompt, or a part of the log, is prefilled",
    "verify": "a pass of the target over the trees of a round, and its verdicts",
    "linears": "in a pass, the matrices of all layers (fine; a sum over the layers, as are the "
    "next two)",
    "attention": "in a pass, attention, rotation and cache (fine)",
    "other": "in a pass, the rest of the layers, the embedding and the final norm (fine)",
    "head": "in a pass, the output matrix that computes the logits (fine)",
    "choose": "sampling, and following the tree (fine)",
    "commit": "rows of accepted nodes become rows of the log",
    "draft": "an order: the root moves, the tree grows and is offered",
    "move": "the root moves: the log grows, and the subtree below it stays (fine)",
    "root": "a pass of the draft over new tokens of the log",
    "level": "a pass of the draft over nodes of the tree",
    "grow": "passes of the draft that no round waits for",
    "prepare": "work ahead of time that no round waits for: noise, learning from verdicts",
    "feed": "the draft reads features of its target",
    "decode": "bytes become a message (fine)",
    "encode": "a message becomes bytes (fine)",
    "send": "bytes are handed to the network (fine)",
    "receive": "the coordinator: bytes become a message (fine)",
    "handle": "the coordinator: from an answer for which a session waited to its next command",
    "plan": "the coordinator: how the next round is drafted (fine)",
    "detokenise": "the coordinator: tokens become text (fine)",
    "queue": "a session waits for a worker that serves others, or reads its prompt",
    "link": "a command or its answer is on its way, decoded and encoded",
    "lost": "a session waited for an answer and then gave up on it",
}
"""All names. Outside of commands: `grow`, `prepare`, `decode`, `encode`, `send`."""

MAX_BESIDE = 1024  # the most waiting spans outside of commands; the oldest are dropped
MERGED_NS = 200_000
"""Coarse spans outside of commands that are closer than this are joined: between two passes ahead a
worker checks for a command."""
JOINED = frozenset({"prepare"})  # always joined: they are short and numerous


class Spans:
    """Records spans until the next event takes them."""

    def __init__(self) -> None:
        self.fine = False  # true if fine spans are recorded
        self._spans: list[Span] = []
        self._beside: list[Beside] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(name, start, time.monotonic_ns())

    def finely(self, name: str) -> AbstractContextManager[None]:
        """Measure a fine span, if fine spans are recorded."""
        return self.measure(name) if self.fine else nullcontext()

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        self._spans.append((name, start_ns, end_ns - start_ns))

    def add_beside(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        session: int | None = None,
        round: int | None = None,
    ) -> None:
        """Add a span outside of commands; a coarse one is joined with the previous one."""
        beside = self._beside
        if beside and (not self.fine or name in JOINED) and beside[-1][:2] == (session, round):
            last, since, duration = beside[-1][2]
            if last == name and start_ns - since - duration <= MERGED_NS:
                beside[-1] = (session, round, (name, since, end_ns - since))
                return
        beside.append((session, round, (name, start_ns, end_ns - start_ns)))
        if len(beside) > MAX_BESIDE:
            del beside[: MAX_BESIDE // 2]

    def take(self, limit: int) -> tuple[Span, ...]:
        """Return the spans since the last call, at most the newest `limit`."""
        spans, self._spans = tuple(self._spans[max(0, len(self._spans) - limit) :]), []
        return spans

    def take_beside(self, limit: int) -> tuple[Beside, ...]:
        """Return the oldest spans outside of commands, at most `limit`."""
        taken, self._beside = tuple(self._beside[:limit]), self._beside[limit:]
        return taken


@dataclass
class ClockOffset:
    """The offset of a peer's monotonic clock from ours, from the fastest of the last probes.

    The true offset lies within `bound_ns` of `offset_ns`: half the round trip of that probe
    (Cristian, 1989)."""

    keep: int = 32
    _samples: list[tuple[int, int]] = field(default_factory=list)
    offset_ns: int = field(default=0, init=False)
    bound_ns: int = field(default=0, init=False)
    ahead_ns: int = field(default=0, init=False)
    """Nanoseconds by which the peer's clock is assumed to be ahead of ours: `offset_ns`, or 0 if
    that is within the bound, since processes of one machine share a clock."""

    def add(self, sent_ns: int, peer_ns: int, received_ns: int) -> None:
        round_trip = received_ns - sent_ns
        self._samples = [*self._samples, (round_trip, peer_ns - (sent_ns + received_ns) // 2)][
            -self.keep :
        ]
        round_trip, self.offset_ns = min(self._samples)
        self.bound_ns = round_trip // 2
        self.ahead_ns = 0 if abs(self.offset_ns) <= self.bound_ns else self.offset_ns

    @property
    def known(self) -> bool:
        return bool(self._samples)
