"""Asking workers: commands wait for their turn, and several sessions' trees go into one
pass.

Whose turn it is `scheduler.py` knows, what a pass costs `costs/`, how many nodes pay
`control/pricing.py`, what of an ended session is kept `prefix_cache.py`.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from dovetail.protocol.messages import (
    MAX_SESSIONS,
    Close,
    Draft,
    Feed,
    Message,
    Open,
    Refeed,
    Verify,
    VerifyItem,
)
from dovetail.runtime.control.loads import Load
from dovetail.runtime.control.pricing import cut, worth_waiting
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.running import JOIN_WORTH, RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.session.actions import Ask
from dovetail.runtime.session.state import MAX_HELD_BYTES, State

HOLD_SLACK, LEAST_HOLD_S = 1.5, 2e-4
"""A pass is held up for so many times as long as a proposal is expected to take, and so much
longer."""
BURST_S = 0.02
"""Requests that come within this time are taken to come together."""
LATE = 0.25
"""A proposal that is overdue is expected to take such a share of what it has taken yet."""

log = logging.getLogger("dovetail.coordinator")


class CommandSender:
    """Asks the workers of sessions."""

    def __init__(
        self,
        shared: Shared,
        post: Outgoing,
        broken: Callable[[RunningRequest, BaseException], None],
    ) -> None:
        """`broken` ends a session for a fault of ours."""
        self._live, self._census, self._registry = shared.live, shared.census, shared.registry
        self._reuse = shared.settings.reuse
        """True if workers keep what they have of ended sessions."""
        self._post, self._broken = post, broken

    def ask(self, live: RunningRequest, asks: Sequence[Ask]) -> None:
        """Ask a session's workers, in their turn. If the session ends at one of the commands, the
        others are not asked; only Close is for sessions that have ended."""
        for ask in asks:
            running = self._live.get(live.session.number) is live
            if running or isinstance(ask.command, Close):
                self._ask(live, ask)

    def end(self, live: RunningRequest, role: str) -> None:
        """A worker forgets a session that nobody waits for, whatever state that is in."""
        worker = live.target if role == "target" else live.draft
        if worker is None or worker.peer not in self._registry.workers:
            return
        if (base := live.session.base(role)) is not None:
            worker.shelf.give_back(base.session)  # if it was not taken
        self.forget(worker, Close(epoch=live.session.epoch, session=live.session.number))

    def _ask(self, live: RunningRequest, ask: Ask) -> None:
        worker = live.target if ask.role == "target" else live.draft
        if worker is None or worker.peer not in self._registry.workers:
            return
        if isinstance(ask.command, Close):
            self._close(live, worker, ask.role, ask.command)
        elif isinstance(ask.command, Open | Feed) and self._can_wait(live, worker, ask.command):
            self._postpone(live, worker, ask.command)
        else:
            number, turns = live.session.number, worker.turns
            if number in turns.postponed and isinstance(ask.command, Draft | Feed):
                turns.resume(number)  # the prompt is read before
            turns.ask(number, ask.command)
            self.next(worker)

    def _can_wait(self, live: RunningRequest, worker: Worker, command: Open | Feed) -> bool:
        """Return whether a draft need not read a prompt yet. The first prompts of a burst wait
        until it is known how many there are, the others as long as nothing is drafted at this load.
        Features of a prompt wait with it while there is room."""
        if worker is live.target:
            return False
        if isinstance(command, Feed):
            held = worker.turns.postponed.get(live.session.number, ())
            size = sum(len(feed.features.data) for feed in held if isinstance(feed, Feed))
            return bool(held) and size + live.session.held_bytes <= MAX_HELD_BYTES
        return live.session.state is State.OPENING or not live.controller.drafts_at(
            self._coming(live)
        )

    def _postpone(self, live: RunningRequest, worker: Worker, command: Open | Feed) -> None:
        worker.turns.postpone(live.session.number, command)
        if isinstance(command, Open):
            live.joining = False  # nobody waits for it, not even a change of drafts
            if live.session.state is State.OPENING:
                self._post.later(BURST_S, lambda: self._read_after_all(live))

    def _drafts_soon(self, live: RunningRequest) -> bool:
        """Return whether a session is drafted for once all sessions that are opening run, and it
        pays to have its draft read the prompt for that."""
        load = self._coming(live)
        return live.controller.drafts_soon(load) and live.controller.worth_reading(
            live.session.to_brief, live.session.room, load
        )

    def _coming(self, live: RunningRequest) -> Load:
        """Return the load of a session's workers once all sessions that are opening run."""
        return self._census.load(live, opening=True)

    def _read_after_all(self, live: RunningRequest) -> None:
        """Have the draft read the prompt of a session that it will be asked about."""
        self._census.forget()
        try:
            if live.session.number in self._live and self._drafts_soon(live):
                self.resume(live)
        except BaseException as error:
            self._broken(live, error)

    def can_draft(self, live: RunningRequest) -> bool:
        """Return whether a session is drafted for where drafting is on. If the draft has not read
        its prompt, it is not where so many others are about to run that drafting will stop, nor
        where the rest of the reply would not pay for that."""
        if live.draft is None or live.session.number not in live.draft.turns.postponed:
            return True
        begins = live.session.round <= 1
        return self._drafts_soon(live) and (begins or live.session.room >= JOIN_WORTH)

    def resume(self, live: RunningRequest) -> None:
        """Have a session's draft read the prompt, if that was put off; a session that has begun
        without it joins in when it has."""
        if live.draft is not None and live.draft.turns.resume(live.session.number):
            if live.session.round > 1:
                live.joining, live.opened_ns = True, None
            self.next(live.draft)

    def _close(self, live: RunningRequest, worker: Worker, role: str, command: Close) -> None:
        """End a session on a worker, which keeps what it has of it if it can; then others may have
        to go."""
        gone = None
        if (
            command.keep
            and self._reuse
            and worker.limits.kept
            and live.draft is not live.target
            and not live.trial
        ):
            gone = self._shelve(live, worker, role)
        for session in gone or ():
            self._post.to_worker(
                worker, command.model_copy(update={"session": session, "keep": False})
            )
        self.forget(worker, command.model_copy(update={"keep": gone is not None}))

    def _shelve(self, live: RunningRequest, worker: Worker, role: str) -> Sequence[int] | None:
        """Have a worker keep an ended session: those that go for it, None if it is not kept. The
        client has its reply: a fault here ends nothing."""
        try:
            return worker.shelf.add(
                live.session.kept(role, idle=not worker.turns.busy_with(live.session.number))
            )
        except BaseException as error:
            reraise_exits(error)
            log.exception("session %d is not kept", live.session.number)
            return None

    def forget(self, worker: Worker, command: Close) -> None:
        """A session is over on a worker; what it was to go on from is there for others, if it did
        not even begin."""
        try:
            for dropped in worker.turns.forget(command.session):
                if isinstance(dropped, Open) and dropped.base is not None:
                    worker.shelf.give_back(dropped.base)
        finally:
            self._post.to_worker(worker, command)

    def next(self, worker: Worker) -> None:
        """Send a worker its next command, if it is there and free and one waits.

        A pass that cannot be built or sent is taken apart, and a session whose own command cannot
        be ends; nothing is raised.
        """
        most = MAX_SESSIONS
        while (
            worker.peer in self._registry.workers and worker.turns.waiting and not worker.turns.owed
        ):
            first = worker.turns.waiting[0][0]
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
                if most > 1 and isinstance(worker.turns.waiting[0][1], Verify):
                    log.exception(
                        "a pass for %s could not be asked for: each session gets one of its own",
                        worker.name,
                    )
                    most = 1
                else:
                    self._unaskable(worker, first, error)
                continue
            if worker.peer in self._registry.workers:
                self._left(worker, *turn, size, left_ns)
            return

    def _unaskable(self, worker: Worker, number: int, error: BaseException) -> None:
        """The command at the head of a worker's queue cannot be sent: its session ends."""
        if (live := self._live.get(number)) is not None:
            self._broken(live, error)
        worker.turns.withdraw(number)

    def _left(
        self, worker: Worker, message: Message, sessions: Sequence[int], size: int, left_ns: int
    ) -> None:
        """A command is on its way: those that it is about know."""
        if isinstance(message, Open) and message.base is not None:
            worker.shelf.taken(message.base)
        if isinstance(message, Draft | Verify):
            worker.traffic.ordered(size)
        worker.prompts += isinstance(message, Open | Feed | Refeed)
        rows, context = 0, 0.0
        if isinstance(message, Verify):
            worker.held_until_ns = None
            rows = sum(1 + len(item.tokens) for item in message.items)
            context = sum(item.prefix for item in message.items) / len(message.items)
            worker.passing = rows, context
        for place, number in enumerate(sessions):
            if (live := self._live.get(number)) is None:
                continue
            try:
                if isinstance(message, Verify):
                    _passing(live, message.items[place], rows, context)
                if isinstance(message, Feed):
                    live.passed_on(size)
                elif live.awaits(worker, message):
                    live.left(left_ns, size // len(sessions))
            except BaseException as error:
                self._broken(live, error)

    def holds(self, worker: Worker, sessions: Sequence[int]) -> bool:
        """Return whether a target waits with a pass of these sessions for proposals that are nearly
        there, since those would have to wait for the next one."""
        now_ns = self._post.now_ns()
        if worker.held_until_ns is not None and now_ns >= worker.held_until_ns:
            return False
        waits = [
            wait
            for draft in self._drafts_of(worker)
            for wait in self._coming_s(draft, worker, now_ns)
        ]
        rows = len(sessions) + len(waits)
        wait_s = worth_waiting(
            waits,
            ready=len(sessions),
            pass_s=worker.verifying.at(rows) if waits and worker.verifying.known else 0.0,
        )
        if wait_s is None:
            return False
        patience_s = HOLD_SLACK * wait_s + LEAST_HOLD_S
        until_ns = worker.held_until_ns = now_ns + round(1e9 * patience_s)
        self._post.later(patience_s, lambda: self._release(worker, until_ns))
        return True

    def _release(self, worker: Worker, until_ns: int) -> None:
        """Have a pass begin that still waits up to this time."""
        if worker.held_until_ns == until_ns:
            worker.held_until_ns = 0
            self.next(worker)

    def _drafts_of(self, target: Worker) -> Sequence[Worker]:
        """Return where trees for a target's sessions grow at present."""
        drafts = {
            live.draft.peer: live.draft
            for live in self._live.values()
            if live.target is target and live.session.state is State.DRAFTING and live.draft
        }
        return [draft for draft in drafts.values() if draft is not target]

    def _coming_s(self, draft: Worker, target: Worker, now_ns: int) -> Iterator[float]:
        """In how many seconds each proposal for sessions of a target is expected, in their order,
        as far as nothing else has to be read before."""
        at_s = 0.0
        for number, order in draft.turns.orders():
            live = self._live.get(number)
            if not order or live is None:
                return
            elapsed_s = (now_ns - live.mark_ns) / 1e9 if live.sent else 0.0
            at_s += max(live.controller.order_s - elapsed_s, LATE * elapsed_s)
            if live.target is target:
                yield at_s

    def cut(self, worker: Worker, items: Sequence[VerifyItem]) -> Sequence[int]:
        """Return how many nodes of each item of a pass are verified: whatever was offered, but
        where a session's policy leaves that to be decided."""
        counts = [len(item.tokens) for item in items]
        lives = [self._live[item.session] for item in items if item.session in self._live]
        if len(lives) < len(items):
            return counts
        choosing = [
            place for place, live in enumerate(lives) if live.controller.cuts and counts[place]
        ]
        if not choosing or not worker.verifying.known:
            return counts
        context = sum(item.prefix for item in items) / len(items)
        running = sum(live.running and live.target is worker for live in self._live.values())
        rate = sum(live.controller.rate(live.session.length) for live in lives) * max(
            1.0, running / len(items)
        )
        if rate <= 0.0:
            return counts
        offers = [lives[place].session.scores for place in choosing]
        seconds = worker.verifying.table(len(items) + sum(counts), context).__getitem__
        fixed, most = (
            sum(1 + count for place, count in enumerate(counts) if place not in choosing),
            worker.verifying.most_rows,
        )
        for place, kept in zip(
            choosing, cut(offers, rate=rate, seconds=seconds, fixed=fixed, most=most), strict=True
        ):
            counts[place] = kept
        return counts


def _passing(live: RunningRequest, item: VerifyItem, rows: int, context: float) -> None:
    """A pass of so many rows, behind contexts of so many tokens on average, begins: a session knows
    what of its own is in it, and what it is expected to take."""
    live.give(live.session.sent, len(item.tokens))
    live.other_rows = rows - len(item.tokens)
    live.controller.sends(context, live.session.scores, rows)
