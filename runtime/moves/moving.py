"""Moves running sessions to other workers: to another draft between two rounds, to another target
at any time. Lost, late and leaving workers are removed from sessions here; `placement.py` chooses
the next."""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Close, Drafted, Refeed
from dovetail.runtime.engine.acts import EngineState
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.running import Loss, RunningRequest
from dovetail.runtime.fleet.beginnings import comes_later, has_room, held_on, needs
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.draft_sync import Joining
from dovetail.runtime.session.request import Base, Request
from dovetail.runtime.session.state import State

log = logging.getLogger("dovetail.coordinator")

MARGIN_S = 30.0
LOADS = 2.0  # seconds to wait for a restarted target, plus this multiple of its loading time
MOST_LOOKED_AT = 8  # waiting sessions that are checked after every event; others less often


class Moving:
    """Moves sessions whose workers leave or are lost."""

    def __init__(self, state: EngineState) -> None:
        self._service, self._running, self._registry = state.service, state.running, state.registry
        self._placement, self._failing, self._now_ns = state.placement, state.failing, state.now_ns
        self._acts, settings = state.acts, state.settings
        self._recovery_s, self._move_to = settings.recovery_s, settings.move
        self._stuck_ns, self._reuse = int(settings.stuck_s * 1e9), settings.reuse

    # -- drafts ------------------------------------------------------------------------------------

    def seek(self, running: RunningRequest) -> Joining | None:
        """Find a draft for a session without an available one, if that is worth it."""
        draft = self._placement.joining(running)
        if draft is None and (running.draft is None or running.draft.serves):
            return None
        self._forget_draft(running)
        if running.session.state is State.DONE:
            return None  # sending to the draft failed, which ended the session
        if draft is None:
            running.controller.leave()
            running.give(running.session.draft_lost)
            return None
        running.draft, running.joining = draft, True
        draft.sessions += draft is not running.target
        running.controller.work_with(*self._placement.pair(draft, running.target))
        self._acts.decide(
            f"session {running.session.number} uses the draft {draft.name} from token "
            f"{len(running.session.tokens)} on"
        )
        return Joining(draft.hello.reads, self._placement.draft_base(running, draft))

    def drop_draft(self, running: RunningRequest, *, shun: bool = False) -> None:
        """Continue with the target alone. `shun`: never use this draft for the session again."""
        if shun and running.draft is not None:
            running.shunned.add(running.draft.peer)
        self._forget_draft(running)
        running.controller.leave()
        if running.session.state is State.DRAFTING and (running.sent or running.queued):
            running.interrupted(self._now_ns())
        self._acts.perform(running, running.give(running.session.draft_lost))

    def draft_failed(self, running: RunningRequest, why: str) -> None:
        """Continue with the target alone after a draft's failure, which is reported."""
        if running.draft is not None and not running.trial:
            self._failing.failed(running.draft, running, why, self._now_ns())
        self.drop_draft(running, shun=True)

    def change_draft(self, running: RunningRequest) -> None:
        """Detach a session from its leaving draft: after its round, or at once before the first."""
        if running.session.state in (State.OPENING, State.WAITING):
            self._each([running], self.drop_draft)

    def _forget_draft(self, running: RunningRequest) -> None:
        """Remove a session from its draft; the target computes no more features for it."""
        draft, running.draft, running.joining = running.draft, None, False
        running.target.turns.withdraw(running.session.number, Refeed)
        if draft is not None and draft is not running.target:
            draft.sessions -= 1
            self._acts.forget_on(draft, running)

    def _draft_stuck(self, running: RunningRequest) -> None:
        """Continue without a draft."""
        draft, number = running.draft, running.session.number
        if draft is not None and (owed := draft.turns.owed.get(number)) and owed.type is Drafted:
            draft.stuck = True
            seconds, name = self._stuck_ns / 1e9, draft.name
            log.warning(
                "draft worker %s has not answered for %.0f s: session %d continues without it",
                name,
                seconds,
                running.session.number,
            )
            self.draft_failed(running, f"it has not answered for {seconds:g} s")
        else:
            self.draft_failed(
                running, f"it has been busy with other sessions for {self._stuck_ns / 1e9:g} s"
            )

    # -- targets -----------------------------------------------------------------------------------

    def lose_target(self, running: RunningRequest, why: str) -> None:
        """Let a session wait for another target; its own drops it."""
        now_ns = self._now_ns()
        if running.sent and running.awaited() is running.target:
            running.losses.append(running.target.process)
        running.loss = Loss(
            now_ns,
            f"the target worker {running.target.whereabouts} {why} after "
            f"{len(running.session.tokens)} tokens",
        )
        running.target.sessions -= 1  # this time belongs to the loss
        running.interrupted(now_ns)
        self._acts.forget_on(running.target, running)
        self._acts.perform(running, running.give(running.session.target_lost))

    def disconnect(self, running: RunningRequest) -> None:
        """Let a session wait for another target after losing its own before it began."""
        self._each([running], partial(self.lose_target, why="disconnected"))

    @property
    def waits(self) -> bool:
        """Whether a session waits for a target."""
        return any(running.loss is not None for running in self._running.values())

    def awaits(self, target: Worker) -> bool:
        """Return whether a waiting session may continue here, before new ones begin."""
        return any(
            running.loss is not None and self.suits(running, target)
            for running in self._running.values()
        )

    def resettle(self, most: int | None = None) -> None:
        """Continue waiting sessions on available targets, the oldest first, and end those that have
        waited too long. `most`: how many are checked; None: all."""
        waiting = (running for running in self._running.values() if running.loss is not None)
        self._each([*islice(waiting, most)], self._resettle)

    def _resettle(self, running: RunningRequest) -> None:
        target = None if running.doomed else self._free_target(running)
        if target is None:
            if (error := self._end_of(running)) is not None:
                log.warning("session %d ends: %s", running.session.number, error)
                self._acts.fail(running, error)
        elif not (self._reuse and comes_later(running.session.request, target, self._running)):
            self._recover(running, target)

    def _free_target(
        self, running: RunningRequest, wanted: Callable[[Worker], bool] = lambda _: True
    ) -> Worker | None:
        """Return the best accepted target with room for a session to continue there."""
        return self._placement.target(
            lambda other: (
                wanted(other) and self.suits(running, other) and self.has_room(running, other)
            ),
            context=running.session.length,
        )

    def has_room(self, running: RunningRequest, target: Worker) -> bool:
        """Return whether a session fits into the memory of another target."""
        return has_room(target, running.session.request, self._running, reuse=self._reuse)

    def make_room(self, request: Request, target: Worker, base: Base | None = None) -> None:
        """Drop kept sessions of a target to make room for a request; `base`: the request's own."""
        if target.limits.room is None:
            return
        left = target.limits.room - held_on(target, self._running)
        left -= needs(request, target, self._running, reuse=self._reuse)
        for session in target.shelf.give_up(left, base):
            self._acts.send(target, Close(epoch=self._service.epoch, session=session))

    def _end_of(self, running: RunningRequest) -> RequestError | None:
        """Return why a session must stop waiting for a target, if it must."""
        assert running.loss is not None
        if self._service.given_up:
            return RequestError(
                "ending",
                f"{running.loss.words}, and the service is ending: {self._service.given_up}",
            )
        if running.trial:
            return RequestError("worker_lost", running.loss.words)
        if running.doomed:
            text = (
                f"{running.loss.words}, and {len(running.losses)} in a row were lost without a "
                "token in between: find out why targets end while reading this request"
            )
            return RequestError("worker_lost", text)
        if self._now_ns() - running.loss.since_ns < self._patience_s(running) * 1e9:
            return None
        waited = f"{self._patience_s(running):.3g} s"
        if self._move_to == "same" and any(
            other.plays("target") and other.reads_as(running.target)
            for other in self._registry.workers.values()
        ):
            text = (
                f"and within {waited} none of its fingerprint was free: start one, or let requests "
                "continue on others with coordinator.move = 'any'"
            )
        else:
            text = f"and within {waited} no other was free: start one and send the request again"
        return RequestError("worker_lost", f"{running.loss.words}, {text}")

    def _patience_s(self, running: RunningRequest) -> float:
        """Return how long a session that lost its target waits for another one."""
        if self._recovery_s == "auto":
            return MARGIN_S + LOADS * running.target.hello.load_s
        return self._recovery_s

    def suits(self, running: RunningRequest, target: Worker) -> bool:
        """Return whether a session may continue on this target: it has the same vocabulary, has not
        refused the session, and, once that has sent tokens, has the same fingerprint, unless the
        setting coordinator.move allows any."""
        return (
            target.peer not in running.shunned
            and target.reads_as(running.target)
            and target.obeys(running.session.request.constraint)
            and running.session.request.capacity <= target.limits.context
            and (
                self._move_to == "any"
                or running.session.unheard
                or target.hello.fingerprint == running.target.hello.fingerprint
            )
        )

    def refuge(self, running: RunningRequest) -> Worker | None:
        """Return another target that has room for a session to continue there."""
        return self._free_target(running, lambda other: other is not running.target)

    def move(self, running: RunningRequest, target: Worker) -> None:
        """Move a session to another target, although its own is available."""
        self._each([running], partial(self._move, target=target))

    def _move(self, running: RunningRequest, target: Worker) -> None:
        losses = [*running.losses]
        self.lose_target(running, f"passes its session to {target.name}")
        running.losses = losses
        if self._runs(running):
            self._recover(running, target)

    def _recover(self, running: RunningRequest, target: Worker) -> None:
        """Continue a session on another target, which prefills its log."""
        base = self._placement.target_base(running, target)
        try:
            self._go_on(running, target, base)
        except BaseException:
            if base is not None:
                target.shelf.give_back(base)
            raise

    def _go_on(self, running: RunningRequest, target: Worker, base: Base | None) -> None:
        self.make_room(running.session.request, target, base)
        running.target, running.loss = target, None
        target.sessions += target is not running.draft
        running.controller.work_with(*self._placement.pair(running.draft, target))
        self._acts.decide(
            f"session {running.session.number} continues on {target.name} from token "
            f"{len(running.session.tokens)} on"
        )
        self._acts.perform(
            running, running.give(running.session.recovered, str(target.hello.fingerprint), base)
        )

    # -- both --------------------------------------------------------------------------------------

    def part_with(self, worker: Worker, why: str) -> None:
        """Continue the sessions of a worker that has gone without it."""
        for running in [*self._running.values()]:
            if running.draft is worker:
                self._each([running], self.drop_draft)
            if (
                running.target is worker
                and running.loss is None
                and running.session.number in self._running
            ):
                self._each([running], partial(self.lose_target, why=why))

    def tick(self) -> None:
        """Handle late drafts and sessions that have waited too long."""
        now_ns = self._now_ns()
        late = [
            running
            for running in self._running.values()
            if now_ns - running.asked_ns > self._stuck_ns
            and running.draft is not None
            and (running.session.number, True) in running.draft.turns.orders
        ]
        self._each(late, self._draft_stuck)
        self.resettle()

    def _each(
        self, requests: Iterable[RunningRequest], handle: Callable[[RunningRequest], None]
    ) -> None:
        """Do this for each live session; an internal error ends only that session."""
        for running in requests:
            if not self._runs(running):
                continue
            try:
                handle(running)
            except BaseException as error:
                reraise_exits(error)
                self._acts.broken(running, error)

    def _runs(self, running: RunningRequest) -> bool:
        """Return whether a session has not ended, as it does after an internal error."""
        return self._running.get(running.session.number) is running

    def words(self) -> Sequence[str]:
        """Return for `status` which sessions wait for a target, and why."""
        now_ns = self._now_ns()
        return [
            f"session {number} waits for a target, for {left_s:.0f} s at most: {loss.words}"
            for number, running in self._running.items()
            if (loss := running.loss) is not None
            for left_s in [max(0.0, self._patience_s(running) - (now_ns - loss.since_ns) / 1e9)]
        ]
