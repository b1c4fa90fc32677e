"""A session on its workers: its workers, its client, and the accounts of its time. Every nanosecond
since the request's arrival is charged to one account; `mark_ns` is the time up to which this has
been done. Times are arguments."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

from dovetail.protocol.lookup import LONGEST, SearchedLog, in_texts
from dovetail.protocol.messages import (
    NOTHING_TOLD,
    Draft,
    DraftFailure,
    Drafts,
    Message,
    Open,
    Read,
    Told,
    VerifiedItem,
    Verify,
)
from dovetail.protocol.spans import Span
from dovetail.runtime.control.controller import Controller
from dovetail.runtime.control.rounds import Load, Round, load_of
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.session.actions import Action, Emit
from dovetail.runtime.session.lookup_memory import LookupMemory, Recalled
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.session import Session
from dovetail.runtime.session.state import State
from dovetail.runtime.telemetry.event_log import EventLog
from dovetail.runtime.telemetry.metrics import Account, RoundTimes, extent_ns

P = ParamSpec("P")
START = itemgetter(1)  # the start of a span, in nanoseconds
Actions = TypeVar("Actions", bound=Sequence[Action])
Heard = Callable[[str, Sequence[Any], Sequence[Action], BaseException | None], None]
"""Receives an event of a session: name, arguments, and its actions or exception."""

ACCOUNT_OF: dict[State, Account] = {
    State.WAITING: "queue",
    State.OPENING: "prefill",
    State.DRAFTING: "draft_exposed",
    State.VERIFYING: "verify",
    State.READY: "coordinator",
    State.BETWEEN: "coordinator",
}
SPAN_OF: dict[Account, str] = {
    "coordinator": "handle",
    "queue": "queue",
    "prefill": "queue",
    "draft_exposed": "lost",
    "verify": "lost",
}
"""Names in a trace for the time between two answers."""

MOST_LOSSES = 3
"""At most this many targets' processes may end while computing one session, without a token in
between."""
MOST_BREAKS = 12
"""At most this many targets may be lost like this for any reason: usually the connection is at
fault."""
JOIN_WORTH = 16
"""A draft prefills the log of a running session only for at least this many tokens to come."""
RUNNING = State.DRAFTING, State.VERIFYING, State.BETWEEN
AWAITED: dict[State, tuple[type[Message], ...]] = {
    State.OPENING: (Open, Read),
    State.DRAFTING: (Draft, Drafts),
    State.VERIFYING: (Verify,),
}


@dataclass
class Delivery:
    """The delivery of a session's reply to its client and to the journal."""

    ticket: str = ""  # the name of the reply in the journal; empty: not in it
    ahead: Told = NOTHING_TOLD  # tokens to be committed again that the client already has
    noted: int = 0  # the number of undelivered actions that are in the journal
    fingerprint: str = ""  # the fingerprint sent to the client with the last tokens
    finished: bool = False  # True if its end was sent to the client

    def left_of(self, emit: Emit) -> Emit | None:
        """Return the part of newly committed tokens that the client lacks; None: nothing."""
        if self.ahead is NOTHING_TOLD:
            return emit
        tokens = min(self.ahead.tokens, len(emit.tokens))
        characters = min(self.ahead.characters, len(emit.text))
        left = Told(
            tokens=self.ahead.tokens - tokens, characters=self.ahead.characters - characters
        )
        self.ahead = left if left.tokens or left.characters else NOTHING_TOLD
        if tokens == len(emit.tokens) and characters == len(emit.text):
            return None
        return Emit(
            emit.tokens[tokens:],
            max(0, emit.drafted - tokens),
            emit.text[characters:].__str__,
            emit.logprobs[tokens:],
        )


PROGRESS_EVERY_NS = 500_000_000  # the least time between two messages about a prompt's progress


@dataclass(frozen=True)
class Loss:
    """The loss of a target: its time, and a description."""

    since_ns: int
    words: str


@dataclass(eq=False)
class RunningRequest:
    """A session with its client, its workers, and the time up to which its time is accounted
    for."""

    session: Session
    client: ClientPeer
    request: int
    target: Worker  # the lost target, while the session waits for another
    draft: Worker | None
    mark_ns: int
    trace: bool
    controller: Controller
    queued: bool = False
    sent: bool = False
    observing: EventLog | None = None  # receives the accounts of its time
    notes: deque[Callable[[], object]] = field(default_factory=deque)
    """The coordinator's bookkeeping, deferred until workers have their commands."""
    own_spans: list[Span] = field(default_factory=list)
    """The coordinator's spans since the last awaited answer, recorded with the next one."""
    recorded: Heard | None = None  # called with every event of the session
    times: RoundTimes = field(default_factory=RoundTimes)  # times of the current round
    opened_ns: int | None = None
    """When the target finished the prompt; None once the draft has, too."""
    progress_ns: int = 0  # when the client was last sent the progress of its prompt
    reading_ns: int = 0  # time that the draft has taken so far to prefill what it needs
    other_rows: int = 1
    """Rows of the awaited pass without the session's own nodes: the pass without a draft."""
    drafts: bool = False  # True if there may be drafts for the request
    searched: SearchedLog | None = None
    """Its log in the form that a look-up draft searches, from its first round with one."""
    memory: LookupMemory | None = None  # earlier texts, in which a look-up also searches
    _recalled: tuple[int, Recalled] = (0, ())
    """What was found in them, and the length of the log then."""
    asked_ns: int = 0  # when a proposal was last requested
    joining: bool = False  # True if its draft joined while it was running and is not ready yet
    draft_failure: DraftFailure | None = None  # its draft's first failure
    shunned: set[bytes] = field(default_factory=set)
    """Workers that the session has left because of failures."""
    reads_for: "RunningRequest | None" = None
    """The session whose log this one only prefills, on the future target, before it ends. None: a
    request or a trial."""
    loss: Loss | None = None  # the loss of its target, while it waits for another
    losses: list[tuple[str, int] | None] = field(default_factory=list)
    """Targets lost since the last token: host and pid; None if the target returned."""
    last_sent_ns: int | None = None  # when its client was last sent a token
    delivery: Delivery = field(default_factory=Delivery)
    unsent: deque[tuple[Action, int]] = field(default_factory=deque)
    """Actions and times for client and observers, delivered after the commands."""
    done: Round | None = None  # the round that has ended, until the controller learns from it
    _prompts: int = 0  # the number of prompts sent to its workers when the round began
    _reading: bool = False  # True if one of them was prefilling then

    def recall(self) -> Recalled:
        """Return occurrences of the log's last tokens in earlier texts of its owner."""
        session = self.session
        if self.memory is None or session.request.rejects:
            return ()
        if self._recalled[0] != session.length:
            log = [*session.request.prompt[-LONGEST:], *session.tokens[-LONGEST:]]
            owner, vocabulary = session.request.owner, self.target.facts.digest
            found = self.memory.find(owner, vocabulary, log, session.request.most_nodes)
            self._recalled = session.length, found
        return self._recalled[1]

    def search(self) -> SearchedLog | None:
        """Return its log up to now if it has a look-up draft, else None. A trial asks its draft in
        any case."""
        if self.draft is None or not self.draft.hello.looks_up or self.trial:
            return None
        session = self.session
        if self.searched is None:
            self.searched = SearchedLog([*session.request.prompt])
        log = self.searched.log
        log += session.tokens[len(log) - len(session.request.prompt) :]
        self.searched.recalled = in_texts(self.recall())
        return self.searched

    def give(self, event: Callable[P, Actions], *what: P.args, **named: P.kwargs) -> Actions:
        """Pass an event, one of its methods, to the session and return the resulting actions. All
        events of a session go through this."""
        if self.recorded is None:
            return event(*what, **named)
        actions: Sequence[Action] = ()
        error = None
        try:
            actions = event(*what, **named)
        except BaseException as raised:  # a library's panic too
            error = raised
            raise
        finally:
            self.recorded(event.__name__, what, actions, error)
        return actions

    @property
    def decoding(self) -> bool:
        """Whether it takes part in its target's passes."""
        return self.session.state in RUNNING

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that hold the session."""
        held = [self.target] if self.loss is None else []
        return held if self.draft is None or self.draft in held else [*held, self.draft]

    @property
    def trial(self) -> bool:
        """True for a trial of its workers: it is not reported and does not move."""
        return self.client.hear is not None

    @property
    def claim(self) -> Request:
        """The request that takes room on its target."""
        return (self.reads_for or self).session.request

    @property
    def doomed(self) -> bool:
        """Whether too many targets were lost while computing the session, so that it gets no other.
        A trial never gets a second target."""
        ended = sum(loss is not None for loss in self.losses)
        return self.trial or ended >= MOST_LOSSES or len(self.losses) >= MOST_BREAKS

    @property
    def lacks_draft(self) -> bool:
        """Whether it has no draft, or one that gets no more commands."""
        draft = self.draft
        return draft is None or draft.standby or draft.leaving or draft.stuck or draft.silent

    def heard_of(self, worker: Worker) -> None:
        """Note that a worker has registered: if it was lost, only its connection had failed."""
        self.losses = [None if loss == worker.process else loss for loss in self.losses]

    def awaited(self) -> Worker | None:
        """Return the worker whose answer the session waits for."""
        if self.session.state is State.WAITING:
            return None
        return self.draft if self.session.state is State.DRAFTING else self.target

    def check_asked(self) -> None:
        """Raise `RuntimeError` if the session waits for a worker that has no command."""
        awaited = self.awaited()
        if awaited is not None and not awaited.turns.busy_with(self.session.number):
            raise RuntimeError(f"it waits for {awaited.name}, which has no command")

    def awaits(self, worker: Worker, command: Message) -> bool:
        """Return whether the session waits for the answer to this command, unlike for the draft
        worker's Open."""
        return self.awaited() is worker and isinstance(command, AWAITED.get(self.session.state, ()))

    def left(self, now_ns: int, size: int) -> None:
        """Note that the command that the session waits for was sent."""
        self._spend("queue" if self.queued else "coordinator", now_ns)
        self.session.accounts.bytes += size
        self.queued, self.sent = False, True

    def reads_on(self, now_ns: int, size: int) -> None:
        """Note that a pass with a chunk of the log was sent."""
        if self.session.state is State.OPENING:
            self.left(now_ns, size)
        else:
            self.session.accounts.bytes += size

    def waits(self, now_ns: int) -> None:
        """Note that the session's command has to wait for its worker."""
        self._spend("coordinator", now_ns)
        self.queued = True

    def progresses(self, now_ns: int) -> bool:
        """Return whether the client is sent the progress of its prompt now."""
        wanted = self.session.request.progress and not self.session.round
        if not wanted or now_ns - self.progress_ns < PROGRESS_EVERY_NS:
            return False
        self.progress_ns = now_ns
        return True

    def part_read(self, worker: Worker, now_ns: int, size: int, spans: Sequence[Span]) -> None:
        """Note that the target has prefilled a chunk of the log; the rest waits for its turn."""
        if self.session.state is not State.OPENING:
            self.session.accounts.bytes += size
            return
        self.answered(worker, now_ns, size, spans)
        self.waits(now_ns)

    def answered(self, worker: Worker, now_ns: int, size: int, spans: Sequence[Span]) -> None:
        """Note that the awaited answer has come."""
        waited = now_ns - self.mark_ns
        session, times = self.session, self.times
        worked = session.accounts.reply(ACCOUNT_OF[session.state], waited, spans, size)
        if session.state is State.DRAFTING:
            times.draft_ns += worked
            times.draft_hop_ns += waited - worked
        elif session.state is State.VERIFYING or session.round:
            times.verify_ns += worked
            times.target_hop_ns += waited - worked
        if self.observing is not None:
            hops = self.mark_ns, now_ns, waited - worked
            own, self.own_spans = self.own_spans, []
            self.notes.append(partial(self._note_hops, session.round, own, worker, spans, *hops))
        self.mark_ns, self.sent = now_ns, False

    def _note_hops(
        self,
        round: int,
        own: list[Span],
        worker: Worker,
        spans: Sequence[Span],
        left_ns: int,
        back_ns: int,
        hops_ns: int,
    ) -> None:
        """Record our own spans of a round, and the travel times of its command and of its answer,
        separated by the worker's start time as far as its clock is known."""
        assert self.observing is not None
        began_ns = min(map(START, spans), default=0) - worker.clock.ahead_ns
        there_ns = min(max(0, began_ns - left_ns), hops_ns)
        return_ns = hops_ns - there_ns
        hops = ("link", left_ns, there_ns), ("link", back_ns - return_ns, return_ns)
        self.observing.add_ours([*own, *hops], self.session.number, round)

    def interrupted(self, now_ns: int) -> None:
        """Note that the session no longer waits for its answer."""
        self._spend("queue" if self.queued else ACCOUNT_OF[self.session.state], now_ns)
        self.queued = self.sent = False

    def target_read(self, now_ns: int) -> None:
        """Note that the target has prefilled the prompt."""
        self.opened_ns = now_ns
        if self.draft is not None and not self.draft.turns.reads(self.session.number):
            self._draft_ready(now_ns)

    def draft_read(self, now_ns: int, spans: Sequence[Span]) -> None:
        """Note that the draft has prefilled a part of the prompt. Waiting for the rest counts as
        prefill."""
        if self.session.state is State.DRAFTING and self.queued:
            self._spend("prefill", now_ns)
        self.reading_ns += extent_ns(spans)
        if self.draft is None or self.draft.turns.reads(self.session.number):
            return
        if self.session.briefed:
            self.controller.prompt_read(self.session.to_brief, self.reading_ns / 1e9)
            self.reading_ns = 0
        self._draft_ready(now_ns)

    def _draft_ready(self, now_ns: int) -> None:
        """Note that the draft has prefilled everything, and how much later than the target."""
        if self.opened_ns is None:
            return
        self.controller.draft_read(self.session.new_tokens, (now_ns - self.opened_ns) / 1e9)
        self.opened_ns = None

    def round_ended(self) -> RoundTimes:
        """Return the times of the round, and start measuring the next."""
        ended, self.times = self.times, RoundTimes()
        return ended

    def end_round(self, item: VerifiedItem, load: Load) -> RoundTimes:
        """End the round of this verdict at this load. Return its times. The controller learns from
        it once the next round has begun, unless that may turn drafting on or off."""
        times, session = self.round_ended(), self.session
        begun = self.controller.end_round()
        if begun.sampled:
            self.done = Round(
                times,
                session.length,
                1 + len(item.accepted),
                len(session.tree.tokens),
                session.proposal,
                self.other_rows,
                load,
                self._reading or self._prompts != self.prompts,
                self.unread,
                begun,
            )
        if begun.deciding:
            self.learn()
        return times

    def learn(self) -> None:
        """Learn from the round that has ended, if that has not been done yet."""
        done, self.done = self.done, None
        if done is not None:
            self.controller.learn(done)
            if not done.disturbed:
                self.target.had_round(done.seconds, done.tokens, 1 + done.verified)

    def watch_reading(self) -> None:
        """Note whether its workers are prefilling when a round begins: that would disturb it."""
        target, draft = self.target.turns, self.draft.turns if self.draft else self.target.turns
        self._prompts = self.prompts
        self._reading = (target.prompted and target.reading) or (draft.prompted and draft.reading)

    @property
    def prompts(self) -> int:
        """The number of prompts sent to its workers for prefill."""
        draft = self.draft
        others = draft.prompts if draft is not None and draft is not self.target else 0
        return self.target.prompts + others

    @property
    def unread(self) -> int:
        """The number of tokens of a deferred prefill, which the draft must do first."""
        if self.draft is None or self.session.number not in self.draft.turns.postponed:
            return 0
        return self.session.to_brief

    def report_round(self, at_ns: int) -> None:
        """Report the round that ended at this time, if any, to observers."""
        ended, self.session.ended = self.session.ended, None
        if ended is not None and self.observing is not None and not self.trial:
            self.observing.round_ended(
                self.session.number, self.draft, self.target, at_ns, ended.light().record
            )

    def over(self, now_ns: int) -> None:
        """Note that the session has ended; time since its last round belongs to no round."""
        self.session.accounts.add("coordinator", now_ns - self.mark_ns)
        if self.observing is not None:
            last = "handle", self.mark_ns, now_ns - self.mark_ns
            self.observing.add_ours([*self.own_spans, last], self.session.number)

    def _spend(self, account: Account, now_ns: int) -> None:
        """Charge the time since the mark to an account, and record it for observers."""
        self.session.accounts.add(account, now_ns - self.mark_ns)
        self._time(account, now_ns - self.mark_ns)
        if self.observing is not None:
            self.own_spans.append((SPAN_OF[account], self.mark_ns, now_ns - self.mark_ns))
        self.mark_ns = now_ns

    def _time(self, account: Account, duration_ns: int) -> None:
        """Charge time to an account of the current round."""
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


class Census:
    """Counts sessions that share workers with a session. Counts are cached until `forget` is
    called, since handling one message needs many."""

    def __init__(self, running: Mapping[int, RunningRequest]) -> None:
        """`running`: the sessions by their numbers."""
        self._running = running
        self._counted: dict[tuple[int, int, bool], Load] = {}

    def forget(self) -> None:
        """Clear the cache, because sessions may have begun, ended or moved."""
        self._counted.clear()

    def load(self, running: RunningRequest, *, opening: bool = False) -> Load:
        """Return the load of a session's workers, including the session itself. `opening`: also
        count sessions whose prompts are being prefilled."""
        key = id(running.target), id(running.draft), opening
        if (known := self._counted.get(key)) is None:
            known = self._counted[key] = self._count(running, opening)
        return known

    def _count(self, running: RunningRequest, opening: bool) -> Load:
        states = (*RUNNING, State.READY, State.OPENING)[: None if opening else -1]
        on_target = on_draft = 0
        for other in self._running.values():
            if other.session.state in states:
                on_target += other.target is running.target
                on_draft += other.draft is running.draft
        return load_of(max(1, on_target), max(1, on_draft if running.draft is not None else 0))
