"""The sessions that run: how one begins, what follows from its events, and how it ends.

Whatever goes wrong with one session ends it with one error, and nobody else notices.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol, TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Close
from dovetail.runtime.control.rounds import Plan
from dovetail.runtime.engine.client_requests import observe, refusal
from dovetail.runtime.engine.effects import Effects
from dovetail.runtime.engine.faults import as_raised, aside, fault, reraise_exits
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.replies import Replies
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.actions import Action, Ask, NextRound
from dovetail.runtime.session.state import State

log = logging.getLogger("dovetail.coordinator")
T = TypeVar("T")


class CarryOut(Protocol):
    """Carries out effects, and returns their outcome."""

    def __call__(self, effects: Effects[T], /) -> T: ...


class Sessions:
    """Carries out what sessions decide."""

    def __init__(
        self,
        shared: Shared,
        dispatch: CommandSender,
        post: Outgoing,
        replies: Replies,
        *,
        carry_out: CarryOut,
        begun: Callable[[RunningRequest], None],
    ) -> None:
        """`begun` hears of each session before its first event."""
        self._epoch, self._live, self._census = shared.epoch, shared.live, shared.census
        self._registry, self._moving, self._tally = shared.registry, shared.moving, shared.tally
        self._observing, self._now_ns = shared.observing, shared.now_ns
        self._dispatch, self._post, self._replies = dispatch, post, replies
        self._carry_out, self._begun = carry_out, begun
        self._unsettled: deque[RunningRequest] = deque()

    @property
    def all(self) -> Collection[RunningRequest]:
        """Return all sessions, trials too."""
        return self._live.values()

    def get(self, number: int) -> RunningRequest | None:
        """Return the session of this number, if it runs."""
        return self._live.get(number)

    def start(self, live: RunningRequest) -> None:
        """Begin a session."""
        self._live[live.session.number] = live
        self._census.forget()
        for worker in live.workers:
            worker.sessions += 1
        self.attempt(live, lambda: self._start(live))

    def _start(self, live: RunningRequest) -> None:
        self._observing.begin(live.session, trace=live.trace)
        live.observing = self._observing
        self._carry_out(observe(self._observing, self._registry, self._epoch))
        self._begun(live)
        self.perform(live, live.give(live.session.begin))

    def perform(self, live: RunningRequest, actions: Sequence[Action]) -> None:
        """Carry out what a session decided; nothing is raised."""
        try:
            self._perform(live, actions)
        except BaseException as error:
            self.broken(live, error)

    def _perform(self, live: RunningRequest, actions: Sequence[Action]) -> None:
        """Ask workers first, so that they begin: what clients and onlookers are told, and what is
        learned, waits for `settle`. At the end of the session they are told before."""
        if actions and not isinstance(actions[0], Ask):
            live.untold.extend((action, live.mark_ns) for action in actions)
            self._unsettled.append(live)
        over = live.session.state is State.DONE
        if over:
            self._settle(live)
            self._forget(live)
        if actions and isinstance(actions[-1], NextRound):
            actions = self._next_round(live)
        self._dispatch.ask(live, [action for action in actions if isinstance(action, Ask)])
        if not over and not live.sent and not live.queued:
            live.waits(self._now_ns())

    def settle(self) -> None:
        """Tell clients and onlookers what was left untold while workers were asked, and learn from
        the rounds that have ended."""
        while self._unsettled:
            live = self._unsettled.popleft()
            self.attempt(live, partial(self._settle, live))

    def _settle(self, live: RunningRequest) -> None:
        try:
            if live.untold:
                live.tell_round(live.untold[0][1])
            while live.untold:
                action, at_ns = live.untold.popleft()
                if not isinstance(action, Ask | NextRound):
                    self._replies.tell(live, action, at_ns)
            live.learn()
        except BaseException:
            live.untold.clear()
            raise

    def _next_round(self, live: RunningRequest) -> Sequence[Action]:
        """Begin a session's next round, with another draft if there is one that it should get."""
        joining = self._carry_out(self._moving.seek(live)) if self._moving.seeks(live) else None
        plan = self.plan(live) if joining is None and live.session.may_draft else None
        controller = live.controller
        if controller.sampled:
            live.watch_reading()
        return live.give(live.session.next_round, plan, joining, plan is None and controller.idle)

    def plan(self, live: RunningRequest) -> Plan | None:
        """Return how to draft for a session's next round."""
        if (draft := live.draft) is None:
            return None
        session, controller, turns = live.session, live.controller, draft.turns
        load = self._census.load(live)
        drafting = controller.begin_round(load)
        if live.joining:
            live.joining = turns.busy_with(session.number)
        if not drafting:
            return None
        if session.number in turns.postponed:
            if not self._dispatch.can_draft(live):
                return controller.plan(session.length, ready=False)
            self._dispatch.resume(live)
        if session.holding:  # what the draft is yet to read comes with the next verdict
            return controller.plan(session.length, ready=False, patient=False)
        worth_waiting = session.round == 1 and controller.awaits_draft(
            session.length, session.new_tokens
        )
        ready = worth_waiting or not turns.busy_with(session.number)
        free = load.alone or draft is live.target or not turns.reading
        began_ns = self._observing.now_ns() if self._observing.fine else 0
        plan = controller.plan(session.length, ready=ready and free, patient=not live.joining)
        if began_ns:
            self._observing.finely("plan", began_ns, session)
        return plan

    def fail(self, live: RunningRequest, error: RequestError) -> None:
        """End a request with an error; both workers forget it. Nothing happens to one that has
        ended."""
        if self._live.get(live.session.number) is not live:
            return
        aside(self._settle, live)
        self._tally.ended["error"] += not live.trial
        aside(self._post.to_client, live.client, refusal(self._epoch, error, live.request))
        self.drop(live)

    def drop(self, live: RunningRequest) -> None:
        """Forget a session that nobody waits for any more, here and on its workers, whatever state
        it was in."""
        live.untold.clear()
        live.done = None
        aside(self._forget, live)
        aside(live.give, live.session.abandon)
        for role in ("target", "draft"):
            aside(self._dispatch.end, live, role)

    def _forget(self, live: RunningRequest) -> None:
        if self._live.pop(live.session.number, None) is None:
            return
        self._census.forget()
        live.client.sessions.pop(live.request, None)
        for worker in live.workers:
            worker.sessions -= 1
        self._observing.traced(live.session.number)

    def cancel(self, live: RunningRequest) -> None:
        """End a session as far as it has come."""

        def end() -> None:
            live.interrupted(self._now_ns())
            self.perform(live, live.give(live.session.cancel))

        self.attempt(live, end)

    def close_on(self, worker: Worker, live: RunningRequest) -> None:
        """Have a worker forget a session, if the worker is still there."""
        if worker.peer in self._registry.workers:
            self._dispatch.forget(worker, Close(epoch=self._epoch, session=live.session.number))

    # -- faults of our own -------------------------------------------------------------------------

    def broken(self, live: RunningRequest, error: BaseException) -> None:
        """End a session with one error, for a fault of our own; nobody else notices."""
        reraise_exits(error)
        error = as_raised(error)
        log.error(
            "session %d ends for a fault of the coordinator's", live.session.number, exc_info=error
        )
        aside(self.fail, live, fault(error))

    def attempt(self, live: RunningRequest, action: Callable[[], object]) -> None:
        """Do something about one session; whatever goes wrong ends it, and nothing else."""
        try:
            action()
        except BaseException as error:
            self.broken(live, error)
