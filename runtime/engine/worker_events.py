"""Handles workers' answers: each event goes to the session that waits for it, and the resulting
actions are carried out at once. An unexpected answer is stale and changes nothing. An invalid one
affects its session: if it is the draft's, the target continues alone; if it is the target's, the
request ends."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import OverError, ProtocolError, RequestError, StaleError
from dovetail.protocol.messages import (
    Blocks,
    Close,
    Closed,
    Draft,
    Drafted,
    Event,
    Failed,
    Fed,
    Hello,
    Opened,
    Prefilled,
    Probed,
    PromptRead,
    Reading,
    Refed,
    Scored,
    Verified,
    VerifiedItem,
)
from dovetail.protocol.spans import Span
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.reading import observe_pass, observe_reading
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.draft_failures import note_failure
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.fleet.scheduler import Owed
from dovetail.runtime.session.actions import Action
from dovetail.runtime.session.draft_sync import UnreadableFeatures, features_of_items
from dovetail.runtime.session.state import MAX_HELD_BYTES, State

log = logging.getLogger("dovetail.coordinator")
RECENT_NS = 60_000_000_000  # how long the owners of prefilled logs are remembered
E = TypeVar("E", Prefilled, Refed, Drafted)


class WorkerEvents:
    """Takes the events of workers."""

    def __init__(self, shared: Shared) -> None:
        self._running, self._census, self._moving = shared.running, shared.census, shared.moving
        self._observing, self._dropped = shared.observing, shared.dropped
        self._shared, self._notes, self._acts = shared, shared.notes, shared.acts

    def take(self, worker: Worker, event: Event, now_ns: int, size: int) -> None:
        """Handle an event of `size` bytes; raise `StaleError` if it is unexpected. Any other
        exception ends the session of the event."""
        if event.epoch != worker.hello.epoch:
            raise StaleError(f"an event from another incarnation of {worker.name}")
        worker.traffic.received_bytes += size
        worker.silent, worker.liveness.silent_ns = False, 0
        worker.awaiting_probe &= not isinstance(event, Probed)  # even if its answer cannot be read
        self._notes.append(partial(self._observing.event, worker, event))
        try:
            self._take(worker, event, now_ns, size)
        except StaleError:
            raise
        except BaseException as error:
            reraise_exits(error)
            if not (about := _about(worker, event)):
                raise
            for session, answer in about:
                self._broken(worker, session, answer, error)

    def _broken(
        self, worker: Worker, session: int, answer: Owed | None, error: BaseException
    ) -> None:
        """End the session of an answer that could not be handled, and free the worker for the
        others."""
        if answer is not None:
            worker.turns.answered(session, answer)
        if (running := self._running.get(session)) is None:
            raise error
        self._acts.broken(running, error)

    def _take(self, worker: Worker, event: Event, now_ns: int, size: int) -> None:
        match event:
            case Drafted():
                self._drafted(worker, event, now_ns, size)
            case Verified():
                self._verified(worker, event, now_ns, size)
            case Opened():
                self._opened(worker, event, now_ns, size)
            case Prefilled():
                self._prefilled(worker, event, size)
            case Reading():
                self._part_read(worker, event, now_ns, size)
            case Scored():
                self._scored(worker, event, size)
            case Refed():
                self._refed(worker, event, size)
            case Probed():
                self._probed(worker, event, now_ns)
            case Failed():
                self._failed(worker, event)
            case Fed():
                self._fed(worker, event, now_ns, size)
            case Hello():
                raise StaleError(f"{worker.name} sent Hello twice")
            case Blocks():
                worker.blocks.note(event.names, stored=event.stored)
                worker.blocks.damaged = event.damaged
            case Closed():
                pass

    def _opened(self, worker: Worker, event: Opened, now_ns: int, size: int) -> None:
        running = self._answer(worker, event.session, Owed(Opened, event.round), "target", "draft")
        self._read_alone(worker, event.spans)
        late = {who: at for who, at in worker.read_ns.items() if now_ns - at < RECENT_NS}
        worker.read_ns = late | {running.session.request.owner: now_ns}
        if worker is not running.target:
            running.draft_read(now_ns, event.spans)
            return
        if event.bonus is not None and event.bonus >= worker.facts.size:
            self._acts.fail(
                running,
                RequestError(
                    "internal",
                    f"the target worker {worker.name} chose token {event.bonus}, beyond its "
                    "vocabulary",
                ),
            )
            return
        running.answered(worker, now_ns, size, event.spans)
        running.losses.clear()
        if not running.session.round:
            running.target_read(now_ns)
        if running.draft is not None and not running.session.complete:
            self._go_on_alone(running, worker, "fewer features than requested")
        times = running.round_ended() if running.session.round else None
        self._believe(
            running, lambda: running.give(running.session.opened, event, now_ns, times), asked=True
        )

    def _part_read(self, worker: Worker, event: Reading, now_ns: int, size: int) -> None:
        """Note that a chunk of a log was prefilled; the rest, if needed, waits for its turn."""
        running = self._running.get(event.session)
        worker.stuck &= event.session not in worker.turns.owed
        unwanted = unwanted_by(worker, event.session)
        wanted = worker.turns.read(event.session, event.round, event.done)
        if not wanted or running is None or worker not in (running.target, running.draft):
            raise unwanted(
                f"{event.done} rows of session {event.session} from {worker.name} were not expected"
            )
        self._read_alone(worker, event.spans)
        if worker is running.target:
            running.part_read(worker, now_ns, size, event.spans)
            if running.progresses(now_ns):
                base = running.session.target_base
                self._acts.reply(
                    running.client,
                    PromptRead(
                        epoch=self._shared.epoch,
                        request=running.request,
                        total=len(running.session.request.prompt),
                        cached=base.tokens if base is not None else 0,
                        done=event.done,
                    ),
                )
        else:
            running.draft_read(now_ns, event.spans)

    def _read_alone(self, worker: Worker, spans: Sequence[Span]) -> None:
        """Learn the cost of a chunk that was read in a separate pass."""
        rows, worker.alone_rows = worker.alone_rows, 0
        if rows:
            self._notes.append(partial(observe_reading, worker, rows, spans))

    def _prefilled(self, worker: Worker, event: Prefilled, size: int) -> None:
        """Handle features of a part of a prompt; the answer to Open is still owed."""
        running = self._running.get(event.session)
        if running is None or running.target is not worker:
            unwanted = unwanted_by(worker, event.session)
            raise unwanted(f"session {event.session} expects no features from {worker.name}")
        self._sensible(running, worker, running.session.prefilled, event)
        running.session.accounts.bytes += size

    def _scored(self, worker: Worker, event: Scored, size: int) -> None:
        """Handle the target's scores of a part of a prompt; the answer to Open is still owed."""
        running = self._running.get(event.session)
        if running is None or running.target is not worker:
            unwanted = unwanted_by(worker, event.session)
            raise unwanted(f"session {event.session} expects nothing from {worker.name}")
        running.session.accounts.bytes += size
        self._believe(running, lambda: running.give(running.session.scored, event))

    def _believe(
        self, running: RunningRequest, handle: Callable[[], list[Action]], *, asked: bool = False
    ) -> None:
        """Handle a message of a session's target; an invalid one ends the request. `asked`: it
        answers a command, and no other answer will follow."""
        try:
            actions = handle()
        except ProtocolError as error:
            if isinstance(error, StaleError) and not asked:
                raise
            self._dropped.refused += 1
            self._acts.fail(
                running,
                RequestError(
                    "internal",
                    f"the target worker {running.target.name} sent an invalid message: {error}",
                ),
            )
            return
        self._acts.perform(running, actions)

    def _fed(self, worker: Worker, event: Fed, now_ns: int, size: int) -> None:
        running = self._answer(worker, event.session, Owed(Fed, event.round, event.start), "draft")
        running.session.accounts.bytes += size
        running.draft_read(now_ns, event.spans)

    def _refed(self, worker: Worker, event: Refed, size: int) -> None:
        running = self._answer(worker, event.session, Owed(Refed, event.round), "target")
        running.session.accounts.bytes += size
        self._sensible(running, worker, running.session.refed, event)

    def _drafted(self, worker: Worker, event: Drafted, now_ns: int, size: int) -> None:
        running = self._answer(worker, event.session, Owed(Drafted, event.round), "draft")
        self._notes.append(partial(worker.traffic.answered, worker.traffic.order_bytes + size, 1))
        if not running.session.wants_proposal(event.round):
            running.controller.late(event)
            raise StaleError(
                f"session {event.session} has already continued without the proposal of round "
                f"{event.round}"
            )
        if worker.turns.waiting and worker is not running.target:
            self._acts.free(worker)  # it then drafts for another session while this tree is handled
        running.answered(worker, now_ns, size, event.spans)
        self._sensible(running, worker, running.session.drafted, event)

    def _sensible(
        self, running: RunningRequest, worker: Worker, handle: Callable[[E], list[Action]], event: E
    ) -> None:
        """Handle a message about drafting; after an invalid one the session continues without its
        draft."""
        try:
            actions = running.give(handle, event)
        except StaleError:
            raise
        except ProtocolError as error:
            self._go_on_alone(running, worker, error)
        else:
            self._acts.perform(running, actions)

    def _go_on_alone(self, running: RunningRequest, worker: Worker, why: object) -> None:
        log.warning(
            "%s sent an invalid message (%s): session %d continues without its draft",
            worker.name,
            why,
            running.session.number,
        )
        self._dropped.refused += 1
        self._moving.draft_failed(running, f"{worker.name} sent an invalid message: {why}")

    def _verified(self, worker: Worker, event: Verified, now_ns: int, size: int) -> None:
        """Handle each verdict of a pass separately: a stale one is dropped, an invalid one ends its
        session."""
        self._passed(worker, event, size)
        rows = [None] * len(event.items) if event.features is None else features_of_items(event)
        for item, features in zip(event.items, rows, strict=True):
            answer = Owed(Verified, item.round)
            try:
                running = self._answer(worker, item.session, answer, "target")
            except StaleError as error:
                self._dropped.stale += not isinstance(error, OverError)
                continue
            try:
                running.times.experts = event.experts
                self._verdict(
                    worker, running, item, features, now_ns, size // len(event.items), event.spans
                )
            except ProtocolError as error:
                self._dropped.refused += 1
                self._acts.fail(
                    running,
                    RequestError(
                        "internal", f"the target worker {worker.name} sent no verdict: {error}"
                    ),
                )
            except BaseException as error:
                reraise_exits(error)
                self._broken(worker, item.session, answer, error)

    def _verdict(
        self,
        worker: Worker,
        running: RunningRequest,
        item: VerifiedItem,
        features: Array | None,
        now_ns: int,
        size: int,
        spans: Sequence[Span],
    ) -> None:
        running.answered(worker, now_ns, size, spans)
        times = running.end_round(item, self._census.load(running))
        verified = running.session.verified
        try:
            actions = running.give(verified, item, features, times)
        except UnreadableFeatures as error:
            self._go_on_alone(running, worker, error)
            actions = running.give(verified, item, features, times)
        self._acts.perform(running, actions)
        if running.session.held_bytes > MAX_HELD_BYTES:
            self._relieve(running)

    def _passed(self, worker: Worker, event: Verified, size: int) -> None:
        """Record time and rows of a pass when its first verdicts arrive."""
        owed = worker.turns.owed
        if worker.passing is None or not any(item.session in owed for item in event.items):
            return
        passed, worker.passing = worker.passing, None
        size += worker.traffic.order_bytes
        self._notes.append(partial(observe_pass, worker, passed, event, size))
        if not worker.verifying.profiled:  # the next round may be one that measures the target
            self._shared.keep_books()

    def _relieve(self, running: RunningRequest) -> None:
        """Drop a draft that has been idle for so long that it would have too much to catch up
        on."""
        if running.session.state is not State.DONE:
            self._acts.decide(
                f"session {running.session.number} drops its draft: "
                f"{running.session.held_bytes >> 20} MiB of features are waiting for it"
            )
            self._moving.drop_draft(running, shun=True)

    def _answer(
        self, worker: Worker, session: int, answer: Owed, *roles: Literal["draft", "target"]
    ) -> RunningRequest:
        """Return the session that waits for this answer of this worker in one of these roles; raise
        `StaleError` if none does."""
        running = self._running.get(session)
        meant = running is not None and (
            (worker is running.target and "target" in roles)
            or (worker is running.draft and "draft" in roles)
        )
        if running is not None and not meant and worker in (running.target, running.draft):
            raise StaleError(f"{worker.name} sent an event that its role does not allow")
        if worker.stuck:
            worker.stuck = worker.turns.owed.get(session) != answer
        unwanted = unwanted_by(worker, session)
        wanted = worker.turns.answered(session, answer)
        if not wanted or running is None or not meant:
            raise unwanted(
                f"round {answer.round} of session {session} was not expected from {worker.name}"
            )
        return running

    def _probed(self, worker: Worker, event: Probed, now_ns: int) -> None:
        worker.probed = event
        if event.sent_ns <= now_ns:
            worker.trips.append(now_ns - event.sent_ns)
            worker.round_trip_ns = min(worker.trips)
            worker.clock.add(event.sent_ns, event.clock_ns, now_ns)
        if worker.liveness.has_forgotten(event, worker.turns.owed):
            self._acts.lose(worker, "owes an answer but reports that it is idle")

    # -- failures of workers -----------------------------------------------------------------------

    def _failed(self, worker: Worker, event: Failed) -> None:
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
        if self._shared.changes.failed(running, worker, event.text):
            if worker is running.target and worker.peer in self._shared.registry.workers:
                self._moving.lose_target(running, "could not carry out a command")
                self._moving.resettle()
            return
        if worker is running.draft and worker is not running.target:
            if gone:
                running.controller.report(f"no draft until features are recomputed: {event.text}")
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
            for other in self._shared.registry.workers.values()
        )

    def _failed_ahead(self, worker: Worker, why: str) -> None:
        """Handle a worker's failure outside of a command; sessions continue to use it."""
        log.error("%s failed while drafting ahead: %s", worker.name, why)
        now_ns = self._shared.now_ns()
        if worker.plays("draft"):
            self._shared.failing.failed(worker, None, why, now_ns)
        for running in self._running.values():
            if running.draft is worker:
                note_failure(running, worker, why, now_ns)

    def _open_anew(self, running: RunningRequest, worker: Worker, event: Failed) -> bool:
        """Make a worker prefill the whole prompt if it lacks the session's base; return whether it
        did."""
        role = "target" if worker is running.target else "draft"
        if (base := running.session.base(role)) is None:
            return False
        other = self._running.get(base.session or 0)
        runs = other is not None and worker in other.workers
        lost = not base.shared or (event.code == "prefix" and not runs)
        worker.shelf.refused(running.session.number, base, lost=lost)
        if lost and base.session is not None:
            self._acts.send(worker, Close(epoch=self._shared.epoch, session=base.session))
        if event.code != "prefix" or (
            role == "draft"
            and running.session.draft_sync is not None
            and running.session.draft_sync.reads is not None
        ):
            return False
        if role == "target":
            running.interrupted(self._shared.now_ns())
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
        running.interrupted(self._shared.now_ns())
        self._acts.perform(running, running.give(running.session.tree_refused))


def unwanted_by(worker: Worker, session: int) -> type[StaleError]:
    """Return the type of error for a worker's answer about a closed session."""
    return OverError if session in worker.turns.void else StaleError


def _about(worker: Worker, event: Event) -> list[tuple[int, Owed | None]]:
    """Return the sessions of an event with its answer to each, without those already handled."""
    match event:
        case Opened() | Drafted() | Refed():
            return [(event.session, Owed(type(event), event.round))]
        case Fed():
            return [(event.session, Owed(Fed, event.round, event.start))]
        case Prefilled() | Scored():
            return [(event.session, None)]
        case Reading():
            return [(event.session, worker.turns.owed.get(event.session))]
        case Failed() if event.session is not None:
            return [(event.session, worker.turns.owed.get(event.session))]
        case Verified():
            answers = [(item.session, Owed(Verified, item.round)) for item in event.items]
            return [
                (session, answer)
                for session, answer in answers
                if worker.turns.owed.get(session) == answer
            ]
        case _:
            return []
