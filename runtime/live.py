"""A session on its workers: who serves it, for whom, and where its time goes.

Every nanosecond from the request's arrival on is put down to one account; `mark_ns` is the time up to which that has been done. Times are handed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.protocol.messages import Draft, Message, Open, Verify
from dovetail.protocol.spans import Span
from dovetail.runtime.metrics import Account, RoundTimes
from dovetail.runtime.pilot import Pilot
from dovetail.runtime.registry import ClientPeer, Worker
from dovetail.runtime.session import Session, State

MAX_TRACE_SPANS = 1 << 16
ACCOUNT_OF: dict[State, Account] = {
    State.WAITING: "queue",
    State.OPENING: "prefill",
    State.DRAFTING: "draft_exposed",
    State.VERIFYING: "verify",
}


MOST_LOSSES = 3
"""Targets that may be lost under one session, while they work on it, without a token in between."""
AWAITED: dict[State, type[Message]] = {State.OPENING: Open, State.DRAFTING: Draft, State.VERIFYING: Verify}


@dataclass(frozen=True)
class Loss:
    """A target was lost: when, and in words."""

    since_ns: int
    words: str


@dataclass
class Live:
    """A session with its client, its workers, and the time up to which its life has been accounted for."""

    session: Session
    client: ClientPeer
    request: int
    target: Worker
    """While it waits for another, the one that was lost."""
    draft: Worker | None
    mark_ns: int
    trace: bool
    pilot: Pilot
    queued: bool = False
    sent: bool = False
    spans: list[tuple[str, Span]] = field(default_factory=list)
    times: RoundTimes = field(default_factory=RoundTimes)
    """Of the round that runs."""
    opened_ns: int | None = None
    """When the target had read the prompt, as long as the draft has not."""
    other_rows: int = 1
    """Rows of the pass that the session waits for, without its own nodes: what it would have without a draft."""
    drafts: bool = False
    """Whether the request is to be drafted for."""
    joining: bool = False
    """Whether its draft has not been ready since it was taken in the midst of the session."""
    shunned: set[bytes] = field(default_factory=set)
    """Drafts that the session has parted with for what they did or could not do."""
    loss: Loss | None = None
    """Of its target, while it waits for another."""
    losses: int = 0
    """Of targets, since the last token."""
    told_ns: int | None = None
    """When its client was last told a token."""

    @property
    def workers(self) -> Sequence[Worker]:
        """Those that hold the session."""
        held = [self.target] if self.loss is None else []
        return held if self.draft is None or self.draft in held else [*held, self.draft]

    @property
    def trial(self) -> bool:
        """Whether it is run for the sake of its workers: nobody else hears of it, and it goes on on no others."""
        return self.client.hear is not None

    @property
    def doomed(self) -> bool:
        """Whether one target after the other was lost while it worked on the session, so that the next one is not given to it; nor is it to a trial."""
        return self.trial or self.losses >= MOST_LOSSES

    def awaited(self) -> Worker | None:
        """The worker whose answer the session waits for."""
        if self.session.state is State.WAITING:
            return None
        return self.draft if self.session.state is State.DRAFTING else self.target

    def awaits(self, worker: Worker, command: Message) -> bool:
        """Whether this is the command that the session waits for, and not something beside it such as the draft worker's Open."""
        return self.awaited() is worker and isinstance(command, AWAITED.get(self.session.state, ()))

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
        elif self.session.state is State.VERIFYING or self.session.round:
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

    def target_read(self, now_ns: int) -> None:
        """The target has read the prompt."""
        self.opened_ns = now_ns
        self.draft_read(now_ns)

    def draft_read(self, now_ns: int) -> None:
        """The draft has read a part of the prompt. What a session waits until it has read all of it belongs to the prefill."""
        if self.session.state is State.DRAFTING and self.queued:
            self._spend("prefill", now_ns)
        if self.draft is None or self.opened_ns is None or self.draft.turns.reads(self.session.number):
            return
        self.pilot.draft_read(self.session.new_tokens, (now_ns - self.opened_ns) / 1e9)
        self.opened_ns = None

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
