"""A session on its workers: who serves it, for whom, and where its time goes.

Every nanosecond from the request's arrival on is put down to one account; `mark_ns` is the time up to which that has been done. Times are handed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.protocol.spans import Span
from dovetail.runtime.metrics import Account, RoundTimes
from dovetail.runtime.pilot import Pilot
from dovetail.runtime.registry import ClientPeer, Worker
from dovetail.runtime.session import Session, State

MAX_TRACE_SPANS = 1 << 16
ACCOUNT_OF: dict[State, Account] = {State.OPENING: "prefill", State.DRAFTING: "draft_exposed", State.VERIFYING: "verify"}


@dataclass
class Live:
    """A session with its client, its workers, and the time up to which its life has been accounted for."""

    session: Session
    client: ClientPeer
    request: int
    target: Worker
    draft: Worker | None
    mark_ns: int
    trace: bool
    pilot: Pilot
    queued: bool = False
    sent: bool = False
    spans: list[tuple[str, Span]] = field(default_factory=list)
    times: RoundTimes = field(default_factory=RoundTimes)
    """Of the round that runs."""
    other_rows: int = 1
    """Rows of the pass that the session waits for, without its own nodes: what it would have without a draft."""

    def awaited(self) -> Worker | None:
        """The worker whose answer the session waits for."""
        return self.draft if self.session.state is State.DRAFTING else self.target

    def left(self, now_ns: int, size: int) -> None:
        """The command that the session waits for has been sent."""
        self._spend("queue" if self.queued else "coordinator", now_ns)
        self.session.accounts.bytes += size
        self.queued, self.sent = False, True

    def waits(self, now_ns: int) -> None:
        """The command that the session waits for has to wait for its worker."""
        self._spend("coordinator", now_ns)
        self.queued = True

    def answered(self, worker: Worker, now_ns: int, size: int, spans: Sequence[Span]) -> None:
        """The answer that the session waits for has come."""
        waited = now_ns - self.mark_ns
        worked = self.session.accounts.reply(ACCOUNT_OF[self.session.state], waited, spans)
        if self.session.state is State.DRAFTING:
            self.times.draft_ns += worked
            self.times.draft_hop_ns += waited - worked
        elif self.session.state is State.VERIFYING:
            self.times.verify_ns += worked
            self.times.target_hop_ns += waited - worked
        self.session.accounts.bytes += size
        self.mark_ns, self.sent = now_ns, False
        self.keep(worker, spans)

    def interrupted(self, now_ns: int) -> None:
        """The session waits no longer for what it waited for."""
        self._spend("queue" if self.queued else ACCOUNT_OF[self.session.state], now_ns)
        self.queued = self.sent = False

    def passed_on(self, size: int) -> None:
        """Features have come from the target, or gone to the draft."""
        self.session.accounts.bytes += size

    def draft_read(self, now_ns: int) -> None:
        """What a session waits until its draft has read the prompt belongs to the prefill."""
        if self.session.state is State.DRAFTING and self.queued:
            self._spend("prefill", now_ns)

    def round_ended(self) -> RoundTimes:
        """Where the time of the round went; that of the next begins."""
        ended, self.times = self.times, RoundTimes()
        return ended

    def keep(self, worker: Worker, spans: Sequence[Span]) -> None:
        """Remember the spans of a worker, on our clock, if the client wants a trace."""
        if self.trace and len(self.spans) < MAX_TRACE_SPANS:
            self.spans.extend((worker.name, (name, max(0, worker.clock.to_ours(start)), duration)) for name, start, duration in spans)

    def _spend(self, account: Account, now_ns: int) -> None:
        """Put down the time since the mark to an account, and to the coordinator's row of a trace."""
        self.session.accounts.add(account, now_ns - self.mark_ns)
        self._time(account, now_ns - self.mark_ns)
        if self.trace and len(self.spans) < MAX_TRACE_SPANS:
            self.spans.append(("coordinator", (account, self.mark_ns, now_ns - self.mark_ns)))
        self.mark_ns = now_ns

    def _time(self, account: Account, duration_ns: int) -> None:
        """The same for the round that runs."""
        times, drafting = self.times, self.session.state is State.DRAFTING
        if account == "coordinator":
            times.coordinator_ns += duration_ns
        elif account == "draft_exposed":
            times.draft_ns += duration_ns
        elif account == "verify":
            times.verify_ns += duration_ns
        elif drafting:
            times.draft_queue_ns += duration_ns
        else:
            times.target_queue_ns += duration_ns
