"""Failures of workers: what follows when one could not do what was asked of it."""

import logging
from collections.abc import Callable

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import Close, Draft, Failed, Opened, Refed, Verified
from dovetail.runtime.engine.effects import Effects, Fail, Follow, Send
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.draft_failures import note_failure
from dovetail.runtime.fleet.peers import Worker

log = logging.getLogger("dovetail.coordinator")


class WorkerFailures:
    """Takes what workers say they failed at."""

    def __init__(
        self,
        shared: Shared,
        go_on_alone: Callable[[RunningRequest, Worker, object], Effects[None]],
    ) -> None:
        """`go_on_alone`: done where a draft sent what cannot be."""
        self._epoch, self._live, self._registry = shared.epoch, shared.live, shared.registry
        self._moving, self._failing, self._changes = shared.moving, shared.failing, shared.changes
        self._go_on_alone, self._now_ns = go_on_alone, shared.now_ns

    def failed(self, worker: Worker, event: Failed) -> Effects[None]:
        """Handle that a worker could not do what was asked: a draft is done without, a target that
        does not have the session is to read it anew, and any other word of a target's ends the
        request."""
        if event.session is None:
            self._failed_ahead(worker, event.text)
            return
        live = self._live.get(event.session)
        owed = worker.turns.owed.get(event.session)
        if owed is None or event.round not in (None, owed.round):
            raise StaleError(f"{worker.name} failed in something that was not asked of it")
        if not worker.turns.answered(event.session, owed) or live is None:
            return
        log.warning(
            "%s failed in session %d: %s (%s)", worker.name, event.session, event.text, event.code
        )
        if owed.type is Opened and (yield from self._open_anew(live, worker, event)):
            return
        if (yield from self._changes.failed(live, worker, event.text)):
            if worker is live.target and worker.peer in self._registry.workers:
                yield from self._moving.lose_target(live, "could not do what was asked of it")
                yield from self._moving.resettle()
            return
        if worker is live.draft and worker is not live.target:
            yield from self._moving.draft_failed(live, event.text)
        elif owed.type is Refed:
            yield from self._moving.draft_failed(
                live, f"the target worker {worker.name} cannot show what it reads: {event.text}"
            )
        elif worker is live.target and event.code == "protocol" and live.session.doubtful:
            yield from self._verify_without_tree(live, event.text)
        elif (
            worker is live.target and event.code in ("session", "prefix") and owed.type is Verified
        ):
            yield from self._moving.lose_target(live, "does not have its session any more")
            yield from self._moving.resettle()
        elif worker is live.target:
            yield Fail(live, RequestError(event.code, event.text))

    def _failed_ahead(self, worker: Worker, why: str) -> None:
        """A worker failed in what nobody had asked of it yet; sessions that it drafts for go on
        with what it answers."""
        log.error("%s failed in what it does ahead of its orders: %s", worker.name, why)
        now_ns = self._now_ns()
        if worker.plays("draft"):
            self._failing.failed(worker, None, why, now_ns)
        for live in self._live.values():
            if live.draft is worker:
                note_failure(live, worker, why, now_ns)

    def _open_anew(self, live: RunningRequest, worker: Worker, event: Failed) -> Effects[bool]:
        """Have a worker read the whole prompt if it does not have what its session should have gone
        on from; return whether that was so."""
        role = "target" if worker is live.target else "draft"
        if (base := live.session.base(role)) is None:
            return False
        yield Send(worker, Close(epoch=self._epoch, session=base.session))
        if event.code != "prefix" or (
            role == "draft"
            and live.session.draft_sync is not None
            and live.session.draft_sync.reads is not None
        ):
            return False
        if role == "target":
            live.interrupted(self._now_ns())
            yield Follow(live, live.give(live.session.base_refused, role))
            return True
        orders = worker.turns.withdraw(live.session.number, Draft)
        yield Follow(live, live.give(live.session.base_refused, role))
        for order in orders:  # it may have been waiting for the prompt to be read
            worker.turns.resume(live.session.number)
            worker.turns.ask(live.session.number, order)
        return True

    def _verify_without_tree(self, live: RunningRequest, why: str) -> Effects[None]:
        """The target can make nothing of what the draft proposed, such as laws that its nodes
        cannot have been drawn from; that changed nothing there."""
        if live.draft is not None:
            yield from self._go_on_alone(live, live.draft, why)
        live.interrupted(self._now_ns())
        yield Follow(live, live.give(live.session.tree_refused))
