"""The running sessions: how a session begins, the actions after its events, and how it ends. An
error in one session ends it with one message, without effect on others."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    NOTHING_TOLD,
    Close,
    Emitted,
    Finished,
    PromptScored,
    Recorded,
)
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine.client_requests import observe
from dovetail.runtime.engine.faults import aside, fault, refusal, reraise_exits
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.engine.stored import ReplyStore
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.actions import Action, Ask, Emit, Finish, NextRound, Note, Score
from dovetail.runtime.session.state import State

log = logging.getLogger("dovetail.coordinator")
T = TypeVar("T")

EARLY = 0.9  # share of its delay after which a timer may fire
BEHIND = RequestError(
    "cancelled",
    "the request was cancelled before all tokens that its client has were decoded again",
)


class Sessions:
    """Carries out the actions of sessions."""

    def __init__(
        self,
        shared: Shared,
        dispatch: CommandSender,
        post: Outgoing,
        *,
        begun: Callable[[RunningRequest], None],
    ) -> None:
        """`begun` is called with each session before its first event."""
        self._shared = shared
        self._epoch, self._running, self._census = shared.epoch, shared.running, shared.census
        self._registry, self._moving, self._tally = shared.registry, shared.moving, shared.tally
        self._observing, self._now_ns = shared.observing, shared.now_ns
        self._dispatch, self._post = dispatch, post
        self._begun = begun
        self._unsettled: deque[RunningRequest] = deque()

    def start(self, running: RunningRequest) -> None:
        """Begin a session."""
        self._running[running.session.number] = running
        self._census.forget()
        for worker in running.workers:
            worker.sessions += 1
        self.attempt(running, lambda: self._start(running))

    def _start(self, running: RunningRequest) -> None:
        self._observing.begin(running.session, trace=running.trace)
        running.observing, running.notes = self._observing, self._shared.notes
        running.memory = None if running.trial else self._shared.memory
        observe(self._observing, self._registry, self._epoch, self._shared.acts.send)
        self._begun(running)
        self.perform(running, running.give(running.session.begin))

    def perform(self, running: RunningRequest, actions: Sequence[Action]) -> None:
        """Carry out a session's actions; nothing is raised."""
        try:
            self._perform(running, actions)
        except BaseException as error:
            self.broken(running, error)

    def _perform(self, running: RunningRequest, actions: Sequence[Action]) -> None:
        """Send commands to workers first, so that they begin; messages to clients and observers,
        and learning, wait for `settle`, except at the end of the session."""
        if actions and not isinstance(actions[0], Ask):
            running.unsent.extend([(action, running.mark_ns) for action in actions])
            self._unsettled.append(running)
        over = running.session.state is State.DONE
        if over:
            self._shared.keep_books()
            self._settle(running)
            self._forget(running)
        if actions and isinstance(last := actions[-1], NextRound):
            actions = self._next_round(running, last)
        self._dispatch.ask(running, actions)
        if not over and not running.sent and not running.queued:
            running.waits(self._now_ns())

    def settle(self) -> None:
        """Send deferred messages to clients and observers, and learn from ended rounds."""
        if self._shared.journal is not None:
            self._note(self._shared.journal, self._unsettled)
        while self._unsettled:
            running = self._unsettled.popleft()
            try:
                self._settle(running)
            except BaseException as error:
                self.broken(running, error)

    def _note(self, journal: ReplyStore, requests: Iterable[RunningRequest]) -> None:
        """Write committed tokens to the journal before they are sent to clients."""
        for running in requests:
            delivery = running.delivery
            if delivery.ticket and delivery.noted < len(running.unsent):
                new = islice(running.unsent, delivery.noted, None)
                emits = [action for action, _ in new if isinstance(action, Emit)]
                aside(journal.committed, delivery.ticket, emits, running.session)
                delivery.noted = len(running.unsent)
        journal.write()

    def _settle(self, running: RunningRequest) -> None:
        if self._shared.journal is not None:
            self._note(self._shared.journal, [running])
        try:
            if running.unsent:
                running.report_round(running.unsent[0][1])
            while running.unsent:
                action, at_ns = running.unsent.popleft()
                running.delivery.noted = max(0, running.delivery.noted - 1)
                self._tell(running, action, at_ns)
            running.learn()
        except BaseException:
            running.unsent.clear()
            raise

    def _tell(self, running: RunningRequest, action: Action, at_ns: int) -> None:
        """Send a session's client the message for an action of `at_ns`, if there is one."""
        if isinstance(action, Emit):
            self._emit(running, action, at_ns)
        elif isinstance(action, Score):
            self._post.to_client(
                running.client,
                PromptScored(
                    epoch=self._epoch,
                    request=running.request,
                    start=action.start,
                    logprobs=action.logprobs,
                ),
            )
        elif isinstance(action, Note):
            self._post.to_client(
                running.client,
                Recorded(epoch=self._epoch, request=running.request, record=action.record),
            )
        elif isinstance(action, Finish):
            self._finish(running, action)

    def _emit(self, running: RunningRequest, emit: Emit, at_ns: int) -> None:
        if running.last_sent_ns is not None and not running.trial:
            self._shared.changes.paused(at_ns - running.last_sent_ns)
        running.last_sent_ns = at_ns
        if (left := running.delivery.left_of(emit)) is None:
            return
        emit, fingerprint = left, running.session.fingerprint
        new = fingerprint != running.delivery.fingerprint
        running.delivery.fingerprint = fingerprint
        self._post.to_client(
            running.client,
            Emitted.unchecked(
                epoch=self._epoch,
                type="emitted",
                request=running.request,
                tokens=emit.tokens,
                drafted=(True,) * emit.drafted + (False,) * (len(emit.tokens) - emit.drafted),
                text=emit.text,
                logprobs=emit.logprobs,
                fingerprint=fingerprint if new else "",
            ),
        )

    def _finish(self, running: RunningRequest, finish: Finish) -> None:
        now_ns = self._now_ns()
        running.over(now_ns)
        result = running.session.result(now_ns, finish.reason)
        # the last one may have been cut short
        controls = min(running.controller.controls, result.plain_rounds)
        result = result.model_copy(
            update={
                "predicted_tokens_per_s": running.controller.predicted_tokens_per_s,
                "control_rounds": controls,
                "draft_failure": running.draft_failure,
            }
        )
        if not running.trial:
            self._shared.failing.drafted(running, result.rounds - result.plain_rounds)
            self._tally.end(finish.reason, result)
        spans = self._observing.traced(running.session.number)
        finished = Finished(
            epoch=self._epoch,
            request=running.request,
            result=result,
            margins=tuple(running.session.margins),
            spans=spans,
        )
        if self._shared.journal is not None and running.delivery.ticket:
            self._shared.journal.ended(running.delivery.ticket, finished)
        self._post.to_client(running.client, finished)
        running.delivery.finished = True

    def _next_round(self, running: RunningRequest, asked: NextRound) -> Sequence[Action]:
        """Begin a session's next round, with another draft if it should get one."""
        joining, early = None, running.session.number in running.target.turns.owed
        if running.drafts and running.lacks_draft and not early:
            joining = self._moving.seek(running)
        plan = self.plan(running, asked) if joining is None and asked.may_draft else None
        if self._running.get(running.session.number) is not running:
            return ()  # an error has ended it while its draft got the order
        controller = running.controller
        if controller.begun.sampled:
            running.watch_reading()
        if plan is not None:
            running.asked_ns = self._now_ns()
            if plan.patience_s is not None and running.draft is not running.target:
                wait = partial(self._wait, running, running.session.round, plan.patience_s)
                self._shared.notes.append(wait)
        return running.give(
            running.session.next_round, plan, joining, early or (plan is None and controller.idle)
        )

    def _wait(self, running: RunningRequest, round: int, patience_s: float) -> None:
        """Continue a round without a draft if no proposal arrives within this time."""

        def look() -> None:
            session, now_ns = running.session, self._now_ns()
            waited_s = (now_ns - running.asked_ns) / 1e9
            runs = self._running.get(session.number) is running
            if runs and session.wants_proposal(round) and waited_s > EARLY * patience_s:
                running.interrupted(now_ns)
                self.perform(running, running.give(session.draft_late))

        self._post.later(patience_s, lambda: self.attempt(running, look))

    def plan(self, running: RunningRequest, asked: NextRound) -> Plan | None:
        """Return the plan of drafting for a session's next round."""
        plan = self._plan(running, asked)
        return plan and replace(plan, recalled=running.recall())

    def _plan(self, running: RunningRequest, asked: NextRound) -> Plan | None:
        if (draft := running.draft) is None:
            return None
        session, controller, turns = running.session, running.controller, draft.turns
        load = self._census.load(running)
        drafting = controller.begin_round(load)
        if running.joining:
            running.joining = turns.busy_with(session.number)
        if not drafting:
            return None
        if session.number in running.target.turns.owed:  # this round was requested early
            return controller.plan(session.length, ready=False, patient=False)
        searched = running.search()
        if searched is not None and not controller.foresees(searched, session.length):
            controller.spare()
            return None
        if session.number in turns.postponed:
            if not self._dispatch.can_draft(running):
                return controller.plan(session.length, ready=False)
            self._dispatch.resume(running)
        if asked.holding:  # the next verdict brings the tokens that the draft has not read yet
            return controller.plan(session.length, ready=False, patient=False)
        worth_waiting = session.round == 1 and controller.awaits_draft(
            session.length, session.new_tokens
        )
        ready = worth_waiting or not turns.busy_with(session.number)
        free = load.alone or draft is running.target or turns.parts or not turns.reading
        began_ns = self._observing.now_ns() if self._observing.fine else 0
        plan = controller.plan(session.length, ready=ready and free, patient=not running.joining)
        if began_ns:
            self._observing.finely("plan", began_ns, session)
        return plan

    def fail(self, running: RunningRequest, error: RequestError) -> None:
        """End a request with an error; both workers close it. No effect if it has ended."""
        if self._running.get(running.session.number) is not running:
            return
        aside(self._settle, running)
        if not running.delivery.finished:
            cancelled = error.code == "cancelled"
            self._tally.ended["cancelled" if cancelled else "error"] += not running.trial
            self._post.refuse(running.client, refusal(self._epoch, error, running.request))
        self.drop(running)

    def drop(self, running: RunningRequest) -> None:
        """Close an unneeded session, here and on its workers, whatever its state."""
        running.unsent.clear()
        running.done = None
        aside(self._forget, running)
        aside(running.give, running.session.abandon)
        self._end_on_workers(running)

    def _end_on_workers(self, running: RunningRequest) -> None:
        for role in ("target", "draft"):
            aside(self._dispatch.end, running, role)

    def _forget(self, running: RunningRequest) -> None:
        if self._running.pop(running.session.number, None) is None:
            return
        self._census.forget()
        if running.memory is not None and running.reads_for is None:
            request, tokens = running.session.request, running.session.tokens
            log = request.log(tokens, running.session.length)
            running.memory.add(request.owner, running.target.facts.digest, log)
        if self._shared.journal is not None and running.delivery.ticket:
            self._shared.journal.left(running.delivery.ticket)
        running.client.sessions.pop(running.request, None)
        for worker in running.workers:
            worker.sessions -= 1
        self._observing.traced(running.session.number)

    def cancel(self, running: RunningRequest) -> None:
        """End a session with the tokens decoded so far, unless it has ended; with an error if its
        client has more of the reply than has been decoded again."""

        def end() -> None:
            if running.session.state is State.DONE:
                return  # its reply was complete from the beginning
            if running.delivery.ahead is not NOTHING_TOLD:
                self.fail(running, BEHIND)
                return
            running.interrupted(self._now_ns())
            self.perform(running, running.give(running.session.cancel))

        self.attempt(running, end)

    def forget_on(self, worker: Worker, running: RunningRequest) -> None:
        """Close a session on a worker. If this fails, the session ends, and Close is sent to the
        worker again, which may no longer serve the session."""
        try:
            self.close_on(worker, running)
        except BaseException as error:
            self.broken(running, error)
            aside(self.close_on, worker, running)

    def close_on(self, worker: Worker, running: RunningRequest) -> None:
        """Close a session on a worker, if the worker is still registered."""
        if worker.peer in self._registry.workers:
            self._dispatch.forget(worker, Close(epoch=self._epoch, session=running.session.number))

    # -- faults of our own -------------------------------------------------------------------------

    def broken(self, running: RunningRequest, error: BaseException) -> None:
        """End a session with an internal error, without effect on others."""
        reraise_exits(error)
        log.error(
            "session %d ends because the coordinator failed", running.session.number, exc_info=error
        )
        if self._running.get(running.session.number) is running:
            aside(self.fail, running, fault(error))
        else:  # it was ending: its workers may not have got their Close
            self._end_on_workers(running)

    def attempt(self, running: RunningRequest, action: Callable[[], object]) -> None:
        """Run a function about one session; any error ends that session alone."""
        try:
            action()
        except BaseException as error:
            self.broken(running, error)
