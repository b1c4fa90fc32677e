"""Running sessions part with their workers and get others: a draft between two rounds, a target
wherever they are.

What is lost, late or to leave is parted with here; on whom a session goes on `placement.py` says,
and how long it waits for a target `recovery.py`. What follows is returned as effects, which the
coordinator carries out.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Refeed
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.effects import Break, Effects, Fail, Follow, Forget, Say
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.draft_failures import FailingDrafts
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.recovery import Recovery
from dovetail.runtime.fleet.registry import Registry
from dovetail.runtime.fleet.service import Service
from dovetail.runtime.session.draft_sync import Joining
from dovetail.runtime.session.state import State

log = logging.getLogger("dovetail.coordinator")


class Moving:
    """Moves sessions whose workers go."""

    def __init__(
        self,
        service: Service,
        live: Mapping[int, RunningRequest],
        registry: Registry,
        placement: Placement,
        failing: FailingDrafts,
        settings: CoordinatorSettings,
        clock_ns: Callable[[], int],
    ) -> None:
        """`live`: the sessions by their numbers."""
        self._service, self._live, self._registry = service, live, registry
        self._placement, self._failing, self._now_ns = placement, failing, clock_ns
        self._recovery = Recovery(settings.recovery_s, settings.move)
        self._stuck_ns = int(settings.stuck_s * 1e9)

    # -- drafts ------------------------------------------------------------------------------------

    def seeks(self, live: RunningRequest) -> bool:
        """Return whether a session is in want of a draft: its own was lost or is not available any
        more, or it never had one."""
        return live.drafts and (live.draft is None or not live.draft.available)

    def seek(self, live: RunningRequest) -> Effects[Joining | None]:
        """Find a draft for a session that `seeks` one, where that is worth it."""
        draft = self._placement.joining(live)
        if draft is None and (live.draft is None or live.draft.serves):
            return None
        yield from self._forget_draft(live)
        if draft is None:
            live.controller.leave()
            live.give(live.session.draft_lost)
            return None
        live.draft, live.joining = draft, True
        draft.sessions += draft is not live.target
        live.controller.work_with(*self._placement.pair(draft, live.target))
        yield Say(
            f"session {live.session.number} is drafted for by {draft.name} from token "
            f"{len(live.session.tokens)} on"
        )
        return Joining(draft.hello.reads, self._placement.draft_base(live, draft))

    def drop_draft(self, live: RunningRequest, *, shun: bool = False) -> Effects[None]:
        """Go on with the target alone. `shun`: for good, as far as this draft is concerned."""
        if shun and live.draft is not None:
            live.shunned.add(live.draft.peer)
        yield from self._forget_draft(live)
        live.controller.leave()
        if live.session.state is State.DRAFTING and (live.sent or live.queued):
            live.interrupted(self._now_ns())
        yield Follow(live, live.give(live.session.draft_lost))

    def draft_failed(self, live: RunningRequest, why: str) -> Effects[None]:
        """Go on with the target alone, since a session's draft cannot do what is asked of it: that
        is said, and it is not asked again."""
        if live.draft is not None and not live.trial:
            self._failing.failed(live.draft, live, why, self._now_ns())
        yield from self.drop_draft(live, shun=True)

    def change_draft(self, live: RunningRequest) -> Effects[None]:
        """Have a session part with its draft, which gets no more sessions: at the end of its round,
        and at once before its first."""
        if live.session.state in (State.OPENING, State.WAITING):
            yield from self._each([live], self.drop_draft)

    def _forget_draft(self, live: RunningRequest) -> Effects[None]:
        """A session's draft forgets it, if it has one, and the target need not compute anything for
        it."""
        draft, live.draft, live.joining = live.draft, None, False
        live.target.turns.withdraw(live.session.number, Refeed)
        if draft is not None and draft is not live.target:
            draft.sessions -= 1
            yield Forget(live, draft)

    def _draft_stuck(self, live: RunningRequest) -> Effects[None]:
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
            yield from self.draft_failed(live, f"it has not answered for {seconds:g} s")
        else:
            yield from self.draft_failed(
                live, f"it has been busy with other sessions for {self._stuck_ns / 1e9:g} s"
            )

    # -- targets -----------------------------------------------------------------------------------

    def lose_target(self, live: RunningRequest, why: str) -> Effects[None]:
        """Have a session wait for another target than its own, which forgets it if it is still
        there."""
        now_ns = self._now_ns()
        self._recovery.lost(live, why, now_ns)
        live.interrupted(now_ns)
        live.target.sessions -= 1
        yield Forget(live, live.target)
        yield Follow(live, live.give(live.session.target_lost))

    def disconnect(self, live: RunningRequest) -> Effects[None]:
        """Have a session wait for another target, since its own has gone before it began."""
        yield from self._each([live], partial(self.lose_target, why="disconnected"))

    def resettle(self) -> Effects[None]:
        """Have every session that waits for a target go on where it can, and end those that have
        waited long enough."""
        waiting = [live for live in self._live.values() if live.loss is not None]
        yield from self._each(waiting, self._resettle)

    def _resettle(self, live: RunningRequest) -> Effects[None]:
        target = self._placement.target(
            partial(self._recovery.suits, live), context=live.session.length
        )
        if target is not None and not live.doomed:
            yield from self._recover(live, target)
        elif (error := self._end_of(live)) is not None:
            log.warning("session %d ends: %s", live.session.number, error)
            yield Fail(live, error)

    def _end_of(self, live: RunningRequest) -> RequestError | None:
        """Why a session that waits for a target is not to wait any longer, if that is so."""
        assert live.loss is not None
        if self._service.given_up:
            return RequestError(
                "ending", f"{live.loss.words}, and the service is ending: {self._service.given_up}"
            )
        return self._recovery.end_of(live, self._registry.workers.values(), self._now_ns())

    def refuge(self, live: RunningRequest) -> Worker | None:
        """Another target on which a session may go on."""
        return self._placement.target(
            lambda other: other is not live.target and self._recovery.suits(live, other),
            context=live.session.length,
        )

    def move(self, live: RunningRequest, target: Worker) -> Effects[None]:
        """Have a session go on on another target, though its own is there."""
        yield from self._each([live], partial(self._move, target=target))

    def _move(self, live: RunningRequest, target: Worker) -> Effects[None]:
        losses = [*live.losses]
        yield from self.lose_target(live, f"hands its session over to {target.name}")
        live.losses = losses
        yield from self._recover(live, target)

    def _recover(self, live: RunningRequest, target: Worker) -> Effects[None]:
        """A session goes on on another target, which reads its log."""
        live.target, live.loss = target, None
        target.sessions += target is not live.draft
        live.controller.work_with(*self._placement.pair(live.draft, target))
        yield Say(
            f"session {live.session.number} goes on on {target.name} from token "
            f"{len(live.session.tokens)} on"
        )
        yield Follow(
            live,
            live.give(
                live.session.recovered,
                str(target.hello.fingerprint),
                self._placement.target_base(live, target),
            ),
        )

    # -- both --------------------------------------------------------------------------------------

    def part_with(self, worker: Worker, why: str) -> Effects[None]:
        """A worker is not here any more: its sessions do without it."""
        for live in [*self._live.values()]:
            if live.draft is worker:
                yield from self._each([live], self.drop_draft)
            if live.target is worker and live.loss is None and live.session.number in self._live:
                yield from self._each([live], partial(self.lose_target, why=why))

    def tick(self) -> Effects[None]:
        """Do what is due about drafts that are too late and sessions that have waited."""
        now_ns = self._now_ns()
        late = [
            live
            for live in self._live.values()
            if live.session.state is State.DRAFTING and now_ns - live.mark_ns > self._stuck_ns
        ]
        yield from self._each(late, self._draft_stuck)
        yield from self.resettle()

    def _each(
        self, lives: Iterable[RunningRequest], handle: Callable[[RunningRequest], Effects[None]]
    ) -> Effects[None]:
        """Do this for each of these sessions; a fault of ours at one ends it, and no other."""
        for live in lives:
            try:
                yield from handle(live)
            except BaseException as error:
                reraise_exits(error)
                yield Break(live, error)

    def words(self) -> Sequence[str]:
        """Who waits for a target, and why, for `status`."""
        now_ns = self._now_ns()
        return [
            self._recovery.words(live, now_ns)
            for live in self._live.values()
            if live.loss is not None
        ]
