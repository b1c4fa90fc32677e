"""Running sessions part with their workers and get others: a draft between two rounds, a target
wherever they are.

What is lost, late or to leave is parted with here; on whom a session goes on `placement.py` says,
and how long it waits for a target `recovery.py`. Messages and the session's own logic are the
coordinator's business.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Refeed
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.briefing import Joining
from dovetail.runtime.failing import FailingDrafts
from dovetail.runtime.live import Live
from dovetail.runtime.placement import Placement
from dovetail.runtime.recovery import Recovery
from dovetail.runtime.registry import Registry, Worker
from dovetail.runtime.session import Action, State

log = logging.getLogger("dovetail.coordinator")


class House(Protocol):
    """What the coordinator does for sessions that move."""

    @property
    def lives(self) -> Collection[Live]:
        """All sessions."""

    @property
    def given_up(self) -> str:
        """Why nobody starts another target any more; empty: that is not so."""

    def now_ns(self) -> int:
        """The coordinator's clock."""

    def attempt(self, live: Live, action: Callable[[], object]) -> None:
        """Do something about one session; whatever goes wrong ends it."""

    def perform(self, live: Live, actions: Sequence[Action]) -> None:
        """Carry out what a session decided."""

    def close_on(self, worker: Worker, live: Live) -> None:
        """A worker forgets a session, if it is still there."""

    def fail(self, live: Live, error: RequestError) -> None:
        """End a request with an error."""

    def decide(self, words: str) -> None:
        """Keep for `status` what was decided."""


class Moving:
    """What happens to sessions whose workers go."""

    def __init__(
        self,
        house: House,
        registry: Registry,
        placement: Placement,
        failing: FailingDrafts,
        settings: CoordinatorSettings,
    ) -> None:
        self._house, self._registry, self._placement, self._failing = (
            house,
            registry,
            placement,
            failing,
        )
        self._recovery = Recovery(settings.recovery_s, settings.move)
        self._stuck_ns = int(settings.stuck_s * 1e9)

    # -- drafts ------------------------------------------------------------------------------------

    def seek(self, live: Live) -> Joining | None:
        """A draft for a session whose own was lost or is not available any more, or which never had
        one, where that is worth it."""
        if not live.drafts or (live.draft is not None and live.draft.available):
            return None
        draft = self._placement.joining(live)
        if draft is None and (live.draft is None or live.draft.serves):
            return None
        self._forget_draft(live)
        if draft is None:
            live.pilot.leave()
            live.give(live.session.draft_lost)
            return None
        live.draft, live.joining = draft, True
        draft.sessions += draft is not live.target
        live.pilot.work_with(*self._placement.pair(draft, live.target))
        self._house.decide(
            f"session {live.session.number} is drafted for by {draft.name} from token "
            f"{len(live.session.tokens)} on"
        )
        return Joining(draft.hello.reads, self._placement.draft_base(live, draft))

    def drop_draft(self, live: Live, *, shun: bool = False) -> None:
        """Go on with the target alone. `shun`: for good, as far as this draft is concerned."""
        if shun and live.draft is not None:
            live.shunned.add(live.draft.peer)
        self._forget_draft(live)
        live.pilot.leave()
        if live.session.state is State.DRAFTING and (live.sent or live.queued):
            live.interrupted(self._house.now_ns())
        self._house.perform(live, live.give(live.session.draft_lost))

    def draft_failed(self, live: Live, why: str) -> None:
        """Go on with the target alone, since a session's draft cannot do what is asked of it: that
        is said, and it is not asked again."""
        if live.draft is not None and not live.trial:
            self._failing.failed(live.draft, live, why, self._house.now_ns())
        self.drop_draft(live, shun=True)

    def change_draft(self, live: Live) -> None:
        """Have a session part with its draft, which gets no more sessions: at the end of its round,
        and at once before its first."""
        if live.session.state in (State.OPENING, State.WAITING):
            self._house.attempt(live, partial(self.drop_draft, live))

    def _forget_draft(self, live: Live) -> None:
        """A session's draft forgets it, if it has one, and the target need not compute anything for
        it."""
        draft, live.draft, live.joining = live.draft, None, False
        live.target.turns.withdraw(live.session.number, Refeed)
        if draft is not None and draft is not live.target:
            draft.sessions -= 1
            self._house.close_on(draft, live)

    def _draft_stuck(self, live: Live) -> None:
        """Nobody has to wait for a draft: go on without it."""
        if live.draft is not None and live.sent:
            live.draft.stuck = True
            seconds, name = self._stuck_ns / 1e9, live.draft.name
            log.warning(
                "draft worker %s has not answered for %.0f s: session %d goes on without it",
                name,
                seconds,
                live.session.number,
            )
            self.draft_failed(live, f"it has not answered for {seconds:g} s")
        else:
            self.draft_failed(
                live, f"it has been busy with other sessions for {self._stuck_ns / 1e9:g} s"
            )

    # -- targets -----------------------------------------------------------------------------------

    def lose_target(self, live: Live, why: str) -> None:
        """Have a session wait for another target than its own, which forgets it if it is still
        there."""
        now_ns = self._house.now_ns()
        self._recovery.lost(live, why, now_ns)
        live.interrupted(now_ns)
        live.target.sessions -= 1
        self._house.close_on(live.target, live)
        self._house.perform(live, live.give(live.session.target_lost))

    def resettle(self) -> None:
        """Have every session that waits for a target go on where it can, and end those that have
        waited long enough."""
        for live in [live for live in self._house.lives if live.loss is not None]:
            self._house.attempt(live, partial(self._resettle, live))

    def _resettle(self, live: Live) -> None:
        target = self._placement.target(
            partial(self._recovery.suits, live), context=live.session.length
        )
        if target is not None and not live.doomed:
            self._recover(live, target)
        elif (error := self._end_of(live)) is not None:
            log.warning("session %d ends: %s", live.session.number, error)
            self._house.fail(live, error)

    def _end_of(self, live: Live) -> RequestError | None:
        """Why a session that waits for a target is not to wait any longer, if that is so."""
        assert live.loss is not None
        if self._house.given_up:
            return RequestError(
                "ending", f"{live.loss.words}, and the service is ending: {self._house.given_up}"
            )
        return self._recovery.end_of(live, self._registry.workers.values(), self._house.now_ns())

    def refuge(self, live: Live) -> Worker | None:
        """Another target on which a session may go on."""
        return self._placement.target(
            lambda other: other is not live.target and self._recovery.suits(live, other),
            context=live.session.length,
        )

    def move(self, live: Live, target: Worker) -> None:
        """Have a session go on on another target, though its own is there."""

        def move() -> None:
            losses = [*live.losses]
            self.lose_target(live, f"hands its session over to {target.name}")
            live.losses = losses
            self._recover(live, target)

        self._house.attempt(live, move)

    def _recover(self, live: Live, target: Worker) -> None:
        """A session goes on on another target, which reads its log."""
        live.target, live.loss = target, None
        target.sessions += target is not live.draft
        live.pilot.work_with(*self._placement.pair(live.draft, target))
        self._house.decide(
            f"session {live.session.number} goes on on {target.name} from token "
            f"{len(live.session.tokens)} on"
        )
        self._house.perform(
            live,
            live.give(
                live.session.recovered,
                str(target.hello.fingerprint),
                self._placement.target_base(live, target),
            ),
        )

    # -- both --------------------------------------------------------------------------------------

    def part_with(self, worker: Worker, why: str) -> None:
        """A worker is not here any more: its sessions do without it."""
        for live in list(self._house.lives):
            if live.draft is worker:
                self._house.attempt(live, partial(self.drop_draft, live))
            if live.target is worker and live.loss is None and live in self._house.lives:
                self._house.attempt(live, partial(self.lose_target, live, why))

    def tick(self) -> None:
        """What is due: drafts that are too late, sessions that have waited."""
        now_ns = self._house.now_ns()
        for live in list(self._house.lives):
            if live.session.state is State.DRAFTING and now_ns - live.mark_ns > self._stuck_ns:
                self._house.attempt(live, partial(self._draft_stuck, live))
        self.resettle()

    def words(self) -> Sequence[str]:
        """Who waits for a target, and why, for `status`."""
        now_ns = self._house.now_ns()
        return [
            self._recovery.words(live, now_ns)
            for live in self._house.lives
            if live.loss is not None
        ]
