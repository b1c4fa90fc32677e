"""Handles workers' failures to carry out a command."""

import logging
from collections.abc import Callable

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import Close, Draft, Failed, Opened, Refed, Verified
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.draft_failures import note_failure
from dovetail.runtime.fleet.peers import Worker

log = logging.getLogger("dovetail.coordinator")


class WorkerFailures:
    """Handles the failures that workers report."""

    def __init__(
        self, shared: Shared, go_on_alone: Callable[[RunningRequest, Worker, object], None]
    ) -> None:
        """`go_on_alone`: called after an invalid message of a draft."""
        self._epoch, self._running, self._registry = shared.epoch, shared.running, shared.registry
        self._moving, self._failing, self._changes = shared.moving, shared.failing, shared.changes
        self._go_on_alone, self._now_ns = go_on_alone, shared.now_ns
        self._acts = shared.acts

    def failed(self, worker: Worker, event: Failed) -> None:
        """Handle a worker's failure: after a draft's, the session continues without it; a target
        that lacks the session must prefill it again; any other failure of a target ends the
        request."""
        if event.session is None:
            self._failed_ahead(worker, event.text)
            return
        running = self._running.get(event.session)
        owed = worker.turns.owed.get(event.session)
        if owed is None or event.round not in (None, owed.round):
            raise StaleError(f"{worker.name} reported a failure, but has no such command")
        if not worker.turns.answered(event.session, owed) or running is None:
            return
        gone = owed.type is Opened and event.code == "prefix"
        log.log(
            logging.INFO if gone else logging.WARNING,  # then the whole prompt is prefilled
            "%s failed in session %d: %s (%s)",
            worker.name,
            event.session,
            event.text,
            event.code,
        )
        if owed.type is Opened and self._open_anew(running, worker, event):
            return
        if self._changes.failed(running, worker, event.text):
            if worker is running.target and worker.peer in self._registry.workers:
                self._moving.lose_target(running, "could not carry out a command")
                self._moving.resettle()
            return
        if worker is running.draft and worker is not running.target:
            if gone:  # it joins later, with recomputed features
                self._moving.drop_draft(running)
            else:
                self._moving.draft_failed(running, event.text)
        elif owed.type is Refed:
            self._moving.draft_failed(
                running,
                f"the target worker {worker.name} cannot recompute the features of its log: "
                f"{event.text}",
            )
        elif worker is running.target and event.code == "protocol" and running.session.doubtful:
            self._verify_without_tree(running, event.text)
        elif (
            worker is running.target
            and event.code in ("session", "prefix")
            and owed.type is Verified
        ):
            self._moving.lose_target(running, "no longer has its session")
            self._moving.resettle()
        elif worker is running.target and owed.type is Opened and self._may_go_elsewhere(running):
            running.shunned.add(worker.peer)
            self._moving.lose_target(running, f"could not read its log: {event.text}")
            self._moving.resettle()
        elif worker is running.target:
            self._acts.fail(running, RequestError(event.code, event.text))

    def _may_go_elsewhere(self, running: RunningRequest) -> bool:
        """Return whether a running session can continue, now or later, on a target other than the
        one that should have prefilled its log."""
        return bool(running.session.tokens) and any(
            other is not running.target
            and other.plays("target")
            and other.available
            and self._moving.suits(running, other)
            for other in self._registry.workers.values()
        )

    def _failed_ahead(self, worker: Worker, why: str) -> None:
        """Handle a worker's failure outside of a command; sessions continue to use it."""
        log.error("%s failed while drafting ahead: %s", worker.name, why)
        now_ns = self._now_ns()
        if worker.plays("draft"):
            self._failing.failed(worker, None, why, now_ns)
        for running in self._running.values():
            if running.draft is worker:
                note_failure(running, worker, why, now_ns)

    def _open_anew(self, running: RunningRequest, worker: Worker, event: Failed) -> bool:
        """Make a worker prefill the whole prompt if it lacks the session's base; return whether it
        did."""
        role = "target" if worker is running.target else "draft"
        if (base := running.session.base(role)) is None:
            return False
        runs = base.session in self._running and worker in self._running[base.session].workers
        lost = not base.shared or (event.code == "prefix" and not runs)
        worker.shelf.refused(running.session.number, base, lost=lost)
        if lost:
            self._acts.send(worker, Close(epoch=self._epoch, session=base.session))
        if event.code != "prefix" or (
            role == "draft"
            and running.session.draft_sync is not None
            and running.session.draft_sync.reads is not None
        ):
            return False
        if role == "target":
            running.interrupted(self._now_ns())
            self._acts.perform(running, running.give(running.session.base_refused, role))
            return True
        orders = worker.turns.withdraw(running.session.number, Draft)
        self._acts.perform(running, running.give(running.session.base_refused, role))
        for order in orders:  # orders that waited for the prefill
            worker.turns.resume(running.session.number)
            worker.turns.ask(running.session.number, order)
        return True

    def _verify_without_tree(self, running: RunningRequest, why: str) -> None:
        """Verify without a tree after the target has rejected the proposal, such as one with
        impossible distributions; the target's state is unchanged."""
        if running.draft is not None:
            self._go_on_alone(running, running.draft, why)
        running.interrupted(self._now_ns())
        self._acts.perform(running, running.give(running.session.tree_refused))
