"""Sends commands to workers: commands wait for their turn, and trees of several sessions share a
pass. `scheduler.py` decides the order, `costs/` the cost of a pass, `control/pricing.py` how many
nodes pay off, and `prefix_cache.py` which ended sessions are kept."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dovetail.protocol.messages import (
    MAX_SESSIONS,
    Close,
    Draft,
    Drafts,
    Feed,
    Message,
    Open,
    Read,
    Refeed,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.runtime.control.pricing import cut, worth_waiting
from dovetail.runtime.control.rounds import Load
from dovetail.runtime.engine.faults import aside, reraise_exits
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.reading import AT_ONCE, chunked_s, in_order, pass_of, rows_read, share
from dovetail.runtime.engine.running import JOIN_WORTH, RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.fleet.scheduler import Owed, Rest
from dovetail.runtime.session.actions import Action, Ask
from dovetail.runtime.session.request import base_of
from dovetail.runtime.session.state import MAX_HELD_BYTES, State

HOLD_SLACK, LEAST_HOLD_S = 1.5, 2e-4
"""A pass waits at most 1.5 times the expected drafting time plus 0.2 ms."""
LATE = 0.25  # an overdue proposal is expected after this further share of its elapsed time
BURST_S = 0.02  # requests within this time are treated as a burst

log = logging.getLogger("dovetail.coordinator")


class CommandSender:
    """Sends the commands of sessions."""

    def __init__(self, shared: Shared, post: Outgoing) -> None:
        self._running, self._census, self._registry = shared.running, shared.census, shared.registry
        self._reuse = shared.settings.reuse  # True if workers keep rows of ended sessions
        self._latency_ms = shared.settings.latency_ms
        self._post, self._acts = post, shared.acts
        self._gathering: dict[bytes, Worker] | None = None
        """Drafts, by peer, whose orders are held back to be sent together; None: orders are sent at
        once."""

    def ask(self, running: RunningRequest, actions: Sequence[Action]) -> None:
        """Send the commands among a session's actions, each in its turn. If one of them ends the
        session, the later ones are not sent, except Close."""
        for action in actions:
            if isinstance(action, Ask) and (
                self._running.get(running.session.number) is running
                or isinstance(action.command, Close)
            ):
                self._ask(running, action)

    def end(self, running: RunningRequest, role: str) -> None:
        """Close an unneeded session on a worker, whatever its state."""
        worker = running.target if role == "target" else running.draft
        if worker is None or worker.peer not in self._registry.workers:
            return
        command = Close(epoch=running.session.epoch, session=running.session.number)
        self._leave(running, worker, role, command)

    def _ask(self, running: RunningRequest, ask: Ask) -> None:
        worker = running.target if ask.role == "target" else running.draft
        if worker is None or worker.peer not in self._registry.workers:
            return
        number, turns, command = running.session.number, worker.turns, ask.command
        match command:
            case Verify() if turns.asked_early(command):
                size, running.times.early = worker.traffic.order_bytes, 1
                self._left(worker, command, (number,), size, running.mark_ns)
            case Open() | Feed() if self._can_wait(running, worker, command):
                self._postpone(running, worker, command)
            case Close():
                self._close(running, worker, ask.role, command)
            case _:
                if number in turns.postponed and isinstance(command, Draft | Feed):
                    turns.resume(number)  # the prompt is read first
                turns.ask(number, command)
                if self._gathering is not None and isinstance(command, Draft):
                    self._gathering[worker.peer] = worker
                else:
                    self.next(worker)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Hold back orders within the block, so that a draft gets those for all verdicts of a pass
        together."""
        self._gathering = {}
        try:
            yield
        finally:
            gathered, self._gathering = self._gathering, None
            for worker in gathered.values():
                self.next(worker)

    def _can_wait(self, running: RunningRequest, worker: Worker, command: Open | Feed) -> bool:
        """Return whether a draft may defer prefilling a prompt. The first prompts of a burst wait
        until their number is known, other prompts as long as nothing is drafted at this load.
        Features of a prompt wait with it while there is room."""
        if worker is running.target:
            return False
        if isinstance(command, Feed):
            held = worker.turns.postponed.get(running.session.number, ())
            size = sum(len(feed.features.data) for feed in held if isinstance(feed, Feed))
            return bool(held) and size + running.session.held_bytes <= MAX_HELD_BYTES
        return running.session.state is State.OPENING or not running.controller.drafts_at(
            self._coming(running)
        )

    def _postpone(self, running: RunningRequest, worker: Worker, command: Open | Feed) -> None:
        worker.turns.postpone(running.session.number, command)
        if isinstance(command, Open):
            running.joining = False  # no longer needed, not even by a change of drafts
            if running.session.state is State.OPENING:
                self._post.later(BURST_S, lambda: self._read_after_all(running))

    def _drafts_soon(self, running: RunningRequest) -> bool:
        """Return whether a session will be drafted for once all opening sessions run, and the
        draft's prefill of its prompt pays off."""
        load = self._coming(running)
        return running.controller.drafts_soon(load) and running.controller.worth_reading(
            running.session.to_brief, running.session.room, load
        )

    def _coming(self, running: RunningRequest) -> Load:
        """Return the load of a session's workers once all opening sessions run."""
        return self._census.load(running, opening=True)

    def _read_after_all(self, running: RunningRequest) -> None:
        """Make the draft prefill the prompt of a session for which it will draft."""
        self._census.forget()
        try:
            if running.session.number in self._running and self._drafts_soon(running):
                self.resume(running)
        except BaseException as error:
            self._acts.broken(running, error)

    def can_draft(self, running: RunningRequest) -> bool:
        """Return whether a session is drafted for while drafting is on. If the draft has not
        prefilled its prompt, it is not if drafting would stop once all opening sessions run, or if
        the rest of the reply is too short to pay for the prefill."""
        if running.draft is None or running.session.number not in running.draft.turns.postponed:
            return True
        begins = running.session.round <= 1
        return self._drafts_soon(running) and (begins or running.session.room >= JOIN_WORTH)

    def resume(self, running: RunningRequest) -> None:
        """Make a session's draft do its deferred prefill, if any; if the session has begun without
        the draft, it joins afterwards."""
        if running.draft is not None and running.draft.turns.resume(running.session.number):
            if running.session.round > 1:
                running.joining, running.opened_ns = True, None
            self.next(running.draft)

    def _close(self, running: RunningRequest, worker: Worker, role: str, command: Close) -> None:
        """Close a session on a worker, which may keep its rows and have to drop those of
        others."""
        gone = None
        if (
            command.keep
            and self._reuse
            and worker.limits.kept
            and running.draft is not running.target
            and (not running.trial or running.reads_for is not None)
        ):
            gone = self._shelve(running, worker, role)
        for session in gone or ():
            self._post.to_worker(
                worker, command.model_copy(update={"session": session, "keep": False})
            )
        self._leave(running, worker, role, command.model_copy(update={"keep": gone is not None}))

    def _leave(self, running: RunningRequest, worker: Worker, role: str, command: Close) -> None:
        if (base := running.session.base(role)) is not None:
            worker.shelf.give_back(base)  # if it was not taken
        self.forget(worker, command)

    def _shelve(self, running: RunningRequest, worker: Worker, role: str) -> Sequence[int] | None:
        """Keep an ended session on a worker. Return the sessions dropped for it, None if it is not
        kept. The client has its reply: an error here ends nothing."""
        try:
            return worker.shelf.add(
                running.session.kept(role, idle=not worker.turns.busy_with(running.session.number))
            )
        except BaseException as error:
            reraise_exits(error)
            log.exception(
                "session %d could not be added to the prefix cache", running.session.number
            )
            return None

    def forget(self, worker: Worker, command: Close) -> None:
        """Close a session on a worker; if it never began there, its base becomes available to
        others."""
        try:
            for dropped in worker.turns.forget(command.session):
                if isinstance(dropped, Open) and (base := base_of(dropped)) is not None:
                    worker.shelf.give_back(base)
        finally:
            if not command.keep:
                worker.shelf.shared.end(command.session)
            if not aside(self._post.to_worker, worker, command):
                self._post.to_worker(worker, command)  # otherwise it holds the session for ever

    def next(self, worker: Worker) -> None:
        """Send a worker its next command, if it is registered and free and one waits. A pass that
        cannot be built or sent is split, and a session whose own command cannot be sent ends;
        nothing is raised."""
        most = MAX_SESSIONS
        while (
            worker.peer in self._registry.workers and worker.turns.waiting and not worker.turns.owed
        ):
            try:
                if (turn := worker.turns.next(most)) is None:
                    return  # a pass waits for proposals
                try:
                    size, left_ns = self._post.to_worker(worker, turn[0])
                except BaseException:
                    worker.turns.take_back()
                    raise
            except BaseException as error:
                reraise_exits(error)
                if most > 1 and isinstance(worker.turns.waiting[0][1], Draft | Verify | Rest):
                    log.exception(
                        "a pass for %s could not be requested: each session gets a separate pass",
                        worker.name,
                    )
                    most = 1
                else:
                    self._unaskable(worker, worker.turns.waiting[0][0], error)
                continue
            if worker.peer in self._registry.workers:
                self._left(worker, *turn, size, left_ns)
            return

    def _unaskable(self, worker: Worker, number: int, error: BaseException) -> None:
        """End the session whose command, at the head of a worker's queue, cannot be sent."""
        if (running := self._running.get(number)) is not None:
            self._acts.broken(running, error)
        worker.turns.withdraw(number)

    def _left(
        self, worker: Worker, message: Message, sessions: Sequence[int], size: int, left_ns: int
    ) -> None:
        """Note for its sessions that a command was sent."""
        each, passing = size // len(sessions), None
        items: Sequence[VerifyItem] = ()
        match message:
            case Verify():
                items = message.items
                worker.held_until_ns, worker.traffic.order_bytes = None, size
                passing = worker.passing = pass_of(message)
                worker.prompts += passing.read > 0
            case Draft() | Drafts():
                worker.traffic.order_bytes = each
            case Feed():
                worker.prompts += 1
            case Open() | Refeed() | Read():
                worker.prompts += 1
                worker.alone_rows = rows_read(message)
                if isinstance(message, Open) and (base := base_of(message)) is not None:
                    worker.shelf.taken(message.session, base)
        for place, number in enumerate(sessions):
            if (running := self._running.get(number)) is None:
                continue
            try:
                if passing is not None and place >= len(items):
                    running.reads_on(left_ns, each)
                    continue
                if passing is not None:
                    _passing(running, items[place], passing.rows, passing.context)
                if isinstance(message, Feed):
                    running.session.accounts.bytes += size
                elif running.awaits(worker, message):
                    running.left(left_ns, each)
                    if items and not items[0].tokens and worker.sessions == 1:
                        self._verify_early(running, worker)
            except BaseException as error:
                self._acts.broken(running, error)

    def _verify_early(self, running: RunningRequest, worker: Worker) -> None:
        """Also send the verification of a lone session's next round, if that round is needed and
        has no draft, so that the target does not wait between passes. The pass is wasted if the
        session ends or moves first, so none is sent to a worker that is leaving, or to a target
        that could not undo its row to reuse the session."""
        undone = worker.limits.shares or not worker.limits.kept
        if not undone or worker.leaving or worker.turns.waiting or running.session.room < 2:
            return
        if self._may_draft(running):
            return
        (ask,) = running.give(running.session.verify_early)
        self._post.to_worker(worker, ask.command)
        worker.turns.early[running.session.number] = Owed(Verified, running.session.round + 1)

    def _may_draft(self, running: RunningRequest) -> bool:
        """Return whether a session's next round may be drafted, or a draft may join it."""
        if not running.lacks_draft:
            controller, searched = running.controller, running.search()
            if controller.idle or searched is None or not controller.cuts:
                return not controller.idle
            return controller.foresees(searched, running.session.length, later=1)
        return running.drafts and any(one.plays("draft") for one in self._registry.workers.values())

    def holds(self, worker: Worker, sessions: Sequence[int]) -> bool:
        """Return whether a target delays a pass of these sessions for almost ready proposals, which
        would otherwise wait for the next pass."""
        if len(sessions) == len(self._running):
            return False
        now_ns = self._post.now_ns()
        if worker.held_until_ns is not None and now_ns >= worker.held_until_ns:
            return False
        waits = due_s(worker, self._running, now_ns)
        pass_s = 0.0
        if waits and worker.verifying.known:
            pass_s = worker.verifying.at(len(sessions) + len(waits))
            pass_s = chunked_s(worker, pass_s, self._latency_ms) if sessions else pass_s
        wait_s = worth_waiting(waits, ready=len(sessions), pass_s=pass_s)
        if wait_s is None:
            return False
        patience_s = HOLD_SLACK * wait_s + LEAST_HOLD_S
        until_ns = worker.held_until_ns = now_ns + round(1e9 * patience_s)
        self._post.later(patience_s, lambda: self._release(worker, until_ns))
        return True

    def _release(self, worker: Worker, until_ns: int) -> None:
        """Begin the pass that waits until this time, if it still does."""
        if worker.held_until_ns == until_ns:
            worker.held_until_ns = 0
            self.next(worker)

    def share(
        self, worker: Worker, items: Sequence[VerifyItem], logs: Sequence[Rest]
    ) -> Sequence[int]:
        """Return how many rows of each log are read in a pass that verifies these items."""
        now_ns = self._post.now_ns()
        return share(worker, items, logs, self._running, now_ns, self._latency_ms)

    def first(self, worker: Worker, logs: Sequence[Rest]) -> int:
        """Return the index of the log that a worker reads first. While sessions decode there, logs
        that are not open yet come first, since they share these sessions' passes."""
        order = in_order(worker, logs, self._running, self._post.now_ns())
        if not any(one.decoding and worker in one.workers for one in self._running.values()):
            return order[0]
        return next((place for place in order if logs[place].done < 0), order[0])

    def cut(self, worker: Worker, items: Sequence[VerifyItem]) -> Sequence[int]:
        """Return how many nodes of each item of a pass are verified: all, except where a session's
        policy leaves the decision to the coordinator."""
        counts = [len(item.tokens) for item in items]
        sharing = [self._running[item.session] for item in items if item.session in self._running]
        if len(sharing) < len(items):
            return counts
        choosing = [
            place for place, one in enumerate(sharing) if one.controller.cuts and counts[place]
        ]
        if not choosing or not worker.verifying.known:
            return counts
        context = sum([item.prefix for item in items]) / len(items)
        decoding = sum(one.decoding and one.target is worker for one in self._running.values())
        rate = sum([one.controller.rate(one.session.length) for one in sharing]) * max(
            1.0, decoding / len(items)
        )
        if rate <= 0.0:
            return counts
        offers = [sharing[place].session.scores for place in choosing]
        rows = len(items) + sum(counts)
        seconds: Callable[[int], float] = worker.verifying.table(rows, context).__getitem__
        if (logs := len(worker.turns.logs)) and (row_s := worker.reading.row_s):
            # A node takes the place of a row of a prompt, which is also awaited.
            rate, seconds = rate * (1.0 + min(logs, AT_ONCE) / len(items)), row_s.__mul__
        fixed = rows - len(choosing) - sum([counts[place] for place in choosing])
        kept = cut(offers, rate=rate, seconds=seconds, fixed=fixed, most=worker.verifying.most_rows)
        for place, nodes in zip(choosing, kept, strict=True):
            counts[place] = nodes
        return counts


def _passing(running: RunningRequest, item: VerifyItem, rows: int, context: float) -> None:
    """Record for a session its rows in a pass that begins, and the predicted time of that pass of
    this many rows with this mean context."""
    running.give(running.session.sent, len(item.tokens))
    running.other_rows = rows - len(item.tokens)
    running.controller.sends(context, running.session.scores, rows)


def due_s(target: Worker, requests: Mapping[int, RunningRequest], now_ns: int) -> Sequence[float]:
    """Return the seconds until each proposal for a target is expected, by draft."""
    drafts, drafting = dict[bytes, Worker](), State.DRAFTING
    for running in requests.values():
        if (
            running.session.state is drafting
            and running.target is target
            and (draft := running.draft) is not None
            and draft is not target
        ):
            drafts[draft.peer] = draft
    due = list[float]()
    for draft in drafts.values():
        due += _due_of(draft, target, requests, now_ns)
    return due


def _due_of(
    draft: Worker, target: Worker, requests: Mapping[int, RunningRequest], now_ns: int
) -> Sequence[float]:
    """Return the seconds until each proposal of a draft is expected, in order, up to the first one
    delayed by a prefill."""
    begins_s = ends_s = 0.0
    together, due = draft.turns.together, list[float]()
    room = together
    for number, order in draft.turns.orders:
        running = requests.get(number)
        if not order or running is None:
            break
        sent, wait_s = running.sent, running.controller.order_s
        if not room or (together > 1 and not sent and begins_s == 0.0):
            begins_s, room = ends_s, together
        room -= 1
        if sent:
            elapsed_s = (now_ns - running.mark_ns) / 1e9
            wait_s = max(wait_s - elapsed_s, LATE * elapsed_s)
        wait_s += begins_s
        ends_s = max(ends_s, wait_s)
        if running.target is target:
            due.append(wait_s)
    return due
