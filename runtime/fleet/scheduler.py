"""Whose turn it is on which worker.

A worker does one command at a time; what else is asked of it waits here, in the order in which it
came. Verdicts are the exception: everything that waits for a target worker when it falls idle goes
out as one `Verify`, so that one pass over the weights serves several sessions. Orders for a draft
whose passes several sessions share go out as one `Drafts`. Prompts and other logs are read in
chunks, if the worker can do that: after each chunk the unread rows wait behind what others have
asked for meanwhile, and share their passes. Knows no sockets and no clock, and nothing of a session
but its number; `cut` says how many nodes of a tree go into a pass, `share` how many rows of logs,
`first` which log is read first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dovetail.protocol.arrays import stack
from dovetail.protocol.messages import (
    MAX_SESSIONS,
    Draft,
    Drafted,
    Drafts,
    Fed,
    Feed,
    Open,
    Opened,
    Read,
    Refed,
    Refeed,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.runtime.fleet.rest import Rest
from dovetail.runtime.fleet.sharing import alike, beginning, drawn_from

Command = Open | Feed | Refeed | Draft | Verify
"""A Verify of one item each: they are put together here."""


Waiting = Command | Rest
Sent = Command | Drafts | Read


class Owed(NamedTuple):
    """The answer that a worker owes to a command."""

    type: type[Opened | Fed | Refed | Drafted | Verified]
    round: int
    start: int = 0
    """Position of a Feed, of which there are several in a round."""


Cut = Callable[[Sequence[VerifyItem]], Sequence[int]]
"""Returns how many nodes of each item of a pass are verified."""


Share = Callable[[Sequence[VerifyItem], Sequence[Rest]], Sequence[int]]
"""Returns how many rows of each log are read in a pass that verifies these items, or in one of
their own if there are none."""


Hold = Callable[[Sequence[int]], bool]
"""True if a pass of these sessions waits for those whose proposals are nearly there; who says so
has them looked at again. Without sessions: True if a chunk in a pass of its own waits."""


def whole(items: Sequence[VerifyItem]) -> Sequence[int]:
    """All of them."""
    return [len(item.tokens) for item in items]


def all_rows(items: Sequence[VerifyItem], logs: Sequence[Rest]) -> Sequence[int]:
    """Return all unread rows of each log."""
    return [log.left for log in logs]


@dataclass
class Turns:
    """The commands that wait for one worker, and the answers it owes."""

    epoch: int
    cut: Cut = whole
    """Asked of items whose nodes were not drawn from a law."""
    hold: Hold = lambda _: False
    share: Share = all_rows
    first: Callable[[Sequence[Rest]], int] = lambda _: 0
    together: int = 1
    """The most sessions that a draft serves in shared passes."""
    parts: bool = False
    """True if the worker reads logs in chunks."""
    waiting: deque[tuple[int, Waiting]] = field(default_factory=deque)
    owed: dict[int, Owed] = field(default_factory=dict)
    """By session: the answers that are under way."""
    postponed: dict[int, list[Open | Feed]] = field(default_factory=dict)
    """Prompts by session, with what the target says of them, that are read once somebody wants what
    follows from them."""
    void: set[int] = field(default_factory=set)
    """Sessions that had ended here when it was under way: nobody waits for it, though another of
    the same number may have begun."""
    _sent: list[tuple[int, Waiting]] = field(default_factory=list)
    """The commands that `next` returned last, by session."""
    _reading: dict[int, Rest] = field(default_factory=dict)
    """By session: logs of which the worker reads a chunk."""
    prompted: bool = False
    """False if no prompt has been asked for since none was to be read."""

    def ask(self, session: int, command: Command) -> None:
        self.prompted |= isinstance(command, Open | Feed)
        self.waiting.append((session, command))

    def postpone(self, session: int, command: Open | Feed) -> None:
        """Keep a command until `resume`."""
        self.postponed.setdefault(session, []).append(command)

    def resume(self, session: int) -> bool:
        """Have the postponed commands of a session wait for their turn; return whether there were
        any."""
        commands = self.postponed.pop(session, ())
        for command in commands:
            self.ask(session, command)
        return bool(commands)

    def busy_with(self, session: int) -> bool:
        """Return whether the session has asked for something that has not been answered."""
        return (
            session in self.owed
            or session in self.postponed
            or any(number == session for number, _ in self.waiting)
        )

    def reads(self, session: int) -> bool:
        """Return whether a prompt of the session, or what the target says of it, is still to be
        read."""
        owed = self.owed.get(session)
        if session in self.postponed:
            return True
        return (owed is not None and owed.type in (Opened, Fed)) or any(
            n == session and _is_prompt(command) for n, command in self.waiting
        )

    @property
    def reading(self) -> bool:
        """Return whether a prompt of any session is still to be read."""
        if not self.prompted:
            return False
        self.prompted = any(owed.type in (Opened, Fed) for owed in self.owed.values()) or any(
            _is_prompt(command) for _, command in self.waiting
        )
        return self.prompted

    @property
    def orders(self) -> Sequence[tuple[int, bool]]:
        """Return the sessions that are served next, in their order, and whether it is a proposal
        that each wants."""
        return [
            *[(session, owed.type is Drafted) for session, owed in self.owed.items()],
            *[(session, isinstance(command, Draft)) for session, command in self.waiting],
        ]

    def answered(self, session: int, answer: Owed) -> bool:
        """Return whether the worker owed this session this answer, and it is wanted; it does no
        more."""
        if self.owed.get(session) != answer:
            return False
        del self.owed[session]
        self._reading.pop(session, None)
        wanted = session not in self.void
        self.void.discard(session)
        return wanted

    def read(self, session: int, round: int, done: int) -> bool:
        """Note that the worker has read a log up to row `done`, and have the unread rows wait for
        their turn, ahead of what else the session waits for. Return False if that chunk was not
        asked for, or the rest is no longer wanted."""
        owed, rest = self.owed.get(session), self._reading.get(session)
        if owed is None or owed.type not in (Opened, Refed) or owed.round != round:
            return False
        if rest is not None and not rest.done < done < rest.rows:
            return False
        if not self.answered(session, owed) or rest is None:
            return False
        own = [entry for entry in self.waiting if entry[0] == session]
        if own:
            self.waiting = deque(entry for entry in self.waiting if entry[0] != session)
        self.waiting += [(session, Rest(rest.command, done)), *own]
        return True

    @property
    def logs(self) -> Sequence[Rest]:
        """Return the logs of which rows wait to be read."""
        return [entry for _, entry in self.waiting if isinstance(entry, Rest)]

    def done(self) -> dict[int, int]:
        """Return how many rows the worker has of each log that it reads in chunks, by session;
        below 0: not known."""
        waiting = {number: rest for number, rest in self.waiting if isinstance(rest, Rest)}
        return {number: rest.done for number, rest in {**waiting, **self._reading}.items()}

    def settle(self, session: int, answer: Owed) -> None:
        """The answer has come, and could not be handled: whoever waits for the worker need not wait
        for it."""
        if self.owed.get(session) == answer:
            self.answered(session, answer)

    def forget(self, session: int) -> Sequence[Command]:
        """The session ended: drop what waits for it, which is returned. What is under way comes
        back and is dropped as stale."""
        if session in self.owed:
            self.void.add(session)
        self._reading.pop(session, None)
        return self.withdraw(session)

    def withdraw(self, session: int, *types: type[Command]) -> Sequence[Command]:
        """Drop the waiting commands of a session, or those of some types, and return them, except
        logs that were read in part."""
        dropped = [
            entry
            for entry in self.waiting
            if entry[0] == session and isinstance(_begun_with(entry[1]), types or Command)
        ]
        if dropped:
            self.waiting = deque(
                entry for entry in self.waiting if not any(entry is other for other in dropped)
            )
        rest = self._reading.get(session)
        if rest is not None and isinstance(rest.command, types or Command):
            del self._reading[session]
        commands = [command for _, command in dropped if not isinstance(command, Rest)]
        if session in self.postponed and Open in (types or (Open,)):
            commands += self.postponed.pop(session)
        return commands

    def next(self, most: int = MAX_SESSIONS) -> tuple[Sent, Sequence[int]] | None:
        """The message to send now and the sessions it is about, `most` of them; nothing while the
        worker owes an answer."""
        if self.owed or not self.waiting:
            return None
        if len(self.waiting) > 1 and isinstance(self.waiting[0][1], Open | Rest):
            self._choose_log()
        session, command = self.waiting[0]
        if isinstance(command, Verify):
            return self._pass(command, most)
        if isinstance(command, Draft) and len(self.waiting) > 1 < min(self.together, most):
            return self._orders(command, min(self.together, most))
        if isinstance(command, Rest) and most == MAX_SESSIONS:
            if (verify := self._first_verify()) is not None:
                return self._pass(verify, most)
            if self.hold(()):
                return None
        message, owed = self._alone(command)
        self.owed[session] = owed
        self.waiting.popleft()
        self._sent = [(session, command)]
        return message, (session,)

    def _choose_log(self) -> None:
        """Move the log to read next to the head of the queue."""
        logs, seen = dict[int, Rest](), set[int]()
        for place, (session, asked) in enumerate(self.waiting):
            if session not in seen and isinstance(asked, Open | Rest):
                logs[place] = asked if isinstance(asked, Rest) else Rest(asked, -1)
            seen.add(session)
        place = [*logs][self.first([*logs.values()])]
        entry = self.waiting[place]
        del self.waiting[place]
        self.waiting.appendleft(entry)

    def _orders(self, command: Draft, most: int) -> tuple[Sent, Sequence[int]]:
        """Return the message for `command` and the orders that can go with it, and their sessions:
        those for which nothing else has to be done first."""
        first: dict[int, Waiting] = {}
        for session, asked in self.waiting:
            first.setdefault(session, asked)
        orders = {session: asked for session, asked in first.items() if isinstance(asked, Draft)}
        orders = dict([*alike(orders).items()][:most])
        together = Drafts.of([*orders.values()]) if len(orders) > 1 else command
        self.waiting = deque(e for e in self.waiting if orders.get(e[0]) is not e[1])
        self.owed.update((session, _answer(order)) for session, order in orders.items())
        self._sent = [*orders.items()]
        return together, tuple(orders)

    def _alone(self, command: Waiting) -> tuple[Sent, Owed]:
        """Return the message for a command other than Verify, and the answer that it is owed."""
        if isinstance(command, Verify):
            raise TypeError("verdicts are asked for in passes")
        if isinstance(command, Rest):
            (rows,) = self.share((), (command,))
            message = Read(epoch=self.epoch, item=command.item(max(1, rows)))
            self._reading[command.command.session] = command
            return message, _answer(command.command)
        if not self.parts or not isinstance(command, Open | Refeed):
            return command, _answer(command)
        rest = Rest(command, -1)
        (rows,) = self.share((), (rest,))
        self._reading[command.session] = rest
        part = command.model_copy(update={"read": rows}) if rows < rest.left else command
        return part, _answer(command)

    def _first_verify(self) -> Verify | None:
        """Return the first Verify that may be sent now; None if there is none."""
        before: set[int] = set()
        for session, command in self.waiting:
            if isinstance(command, Verify) and session not in before:
                return command
            before.add(session)
        return None

    def _pass(self, command: Verify, most: int) -> tuple[Sent, Sequence[int]] | None:
        """Return the pass that verifies `command`, all that can share it, and chunks of logs."""
        ready, mixed = self._ready(command, most)
        if most == MAX_SESSIONS and not mixed and self.hold((*ready,)):
            return None
        together = self._together(
            [*ready.values()]
        )  # nothing is owed and nothing is dropped for a message that cannot be built
        logs = self._logs(together) if most == MAX_SESSIONS else {}
        if logs:
            reads = tuple(rest.item(rows) for rest, rows in logs.values())
            together = together.model_copy(update={"reads": reads})
        sent: dict[int, Waiting] = {**ready, **{s: rest for s, (rest, _) in logs.items()}}
        if len(sent) == len(self.waiting):
            self.waiting.clear()
        else:
            self.waiting = deque(
                entry for entry in self.waiting if sent.get(entry[0]) is not entry[1]
            )
        self.owed.update((s, Owed(Verified, c.items[0].round)) for s, c in ready.items())
        for session, (rest, _) in logs.items():
            self.owed[session], self._reading[session] = _answer(rest.command), rest
        self._sent = [*sent.items()]
        return together, tuple(sent)

    def _logs(self, verify: Verify) -> dict[int, tuple[Rest, int]]:
        """Return the logs that a pass reads a chunk of, and its rows, by session."""
        if not (rests := self.logs[:MAX_SESSIONS]):
            return {}
        counts = self.share(verify.items, rests)
        return {
            rest.command.session: (rest, rows)
            for rest, rows in zip(rests, counts, strict=True)
            if rows
        }

    def _ready(self, command: Verify, most: int) -> tuple[dict[int, Verify], bool]:
        """Return the verdicts that may be asked for in one pass with that of `command`, by session,
        and whether other sessions wait for something else than unread rows of a log."""
        if len(self.waiting) == 1:
            return {self.waiting[0][0]: command}, False
        width, ready, rests = drawn_from(command), dict[int, Verify](), 0
        seen: set[int] = set()
        for session, asked in self.waiting:
            if session in seen:
                continue  # what a session asked for before is done before
            seen.add(session)
            if isinstance(asked, Rest):
                rests += 1
            elif isinstance(asked, Verify) and drawn_from(asked) == width and len(ready) < most:
                ready[session] = asked
        return ready, len(seen) > len(ready) + rests

    def take_back(self) -> None:
        """Have what `next` returned wait again, before everything else, since it was not sent."""
        for session, _ in self._sent:
            del self.owed[session]
            self._reading.pop(session, None)
        self.waiting.extendleft(reversed(self._sent))

    def _together(self, commands: Sequence[Verify]) -> Verify:
        items = [item for command in commands for item in command.items]
        if commands[0].candidates is None:
            counts = self.cut(items)
            if len(commands) == 1 and counts[0] == len(items[0].tokens):
                return commands[0]
            kept = [beginning(item, nodes) for item, nodes in zip(items, counts, strict=True)]
            return Verify.unchecked(
                epoch=self.epoch,
                type="verify",
                items=tuple(kept),
                candidates=None,
                probabilities=None,
                reads=(),
            )
        if len(commands) == 1:
            return commands[0]
        return Verify(
            epoch=self.epoch,
            items=tuple(items),
            candidates=stack([c.candidates for c in commands if c.candidates]),
            probabilities=stack([c.probabilities for c in commands if c.probabilities]),
        )


def _begun_with(command: Waiting) -> Command:
    """Return the command; for unread rows of a log, the one that the log began with."""
    return command.command if isinstance(command, Rest) else command


def _is_prompt(command: Waiting) -> bool:
    """Return whether the command has a prompt read."""
    return isinstance(_begun_with(command), Open | Feed)


def _answer(command: Open | Feed | Refeed | Draft) -> Owed:
    match command:
        case Open():
            return Owed(Opened, command.round)
        case Feed():
            return Owed(Fed, command.round, command.start)
        case Refeed():
            return Owed(Refed, command.round)
        case Draft():
            return Owed(Drafted, command.round)
