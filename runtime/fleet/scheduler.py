"""Whose turn it is on which worker.

A worker does one command at a time; what else is asked of it waits here, in the order in which it
came. Verdicts are the exception: everything that waits for a target worker when it falls idle goes
out as one `Verify`, so that one pass over the weights serves several sessions. Knows no sockets and
no clock, and nothing of what a session is but its number; how many of the nodes that are offered go
into a pass, it asks.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dovetail.protocol.arrays import stack
from dovetail.protocol.messages import (
    MAX_SESSIONS,
    Draft,
    Drafted,
    Fed,
    Feed,
    Open,
    Opened,
    Refed,
    Refeed,
    Verified,
    Verify,
    VerifyItem,
)

Command = Open | Feed | Refeed | Draft | Verify
"""A Verify of one item each: they are put together here."""


@dataclass(frozen=True)
class Owed:
    """The answer that a worker owes to a command."""

    type: type[Opened | Fed | Refed | Drafted | Verified]
    round: int
    start: int = 0
    """Position of a Feed, of which there are several in a round."""


Cut = Callable[[Sequence[VerifyItem]], Sequence[int]]
"""Returns how many nodes of each item of a pass are verified."""


Hold = Callable[[Sequence[int]], bool]
"""True if a pass of these sessions waits for those whose proposals are nearly there; who says so
has them looked at again."""


def whole(items: Sequence[VerifyItem]) -> Sequence[int]:
    """All of them."""
    return [len(item.tokens) for item in items]


@dataclass
class Turns:
    """The commands that wait for one worker, and the answers it owes."""

    epoch: int
    cut: Cut = whole
    """Asked of items whose nodes were not drawn from a law."""
    hold: Hold = lambda _: False
    waiting: deque[tuple[int, Command]] = field(default_factory=deque)
    owed: dict[int, Owed] = field(default_factory=dict)
    """By session: the answers that are under way."""
    postponed: dict[int, list[Open | Feed]] = field(default_factory=dict)
    """Prompts by session, with what the target says of them, that are read once somebody wants what
    follows from them."""
    void: set[int] = field(default_factory=set)
    """Sessions that had ended here when it was under way: nobody waits for it, though another of
    the same number may have begun."""
    _sent: list[tuple[int, Command]] = field(default_factory=list)
    """The commands that `next` returned last, by session."""
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
            n == session and isinstance(command, Open | Feed) for n, command in self.waiting
        )

    @property
    def reading(self) -> bool:
        """Return whether a prompt of any session is still to be read."""
        if not self.prompted:
            return False
        self.prompted = any(owed.type in (Opened, Fed) for owed in self.owed.values()) or any(
            isinstance(c, Open | Feed) for _, c in self.waiting
        )
        return self.prompted

    def orders(self) -> Iterator[tuple[int, bool]]:
        """The sessions that are served next, in their order, and whether it is a proposal that each
        wants."""
        yield from ((session, owed.type is Drafted) for session, owed in self.owed.items())
        yield from ((session, isinstance(command, Draft)) for session, command in self.waiting)

    def answered(self, session: int, answer: Owed) -> bool:
        """Return whether the worker owed this session this answer, and it is wanted; it does no
        more."""
        if self.owed.get(session) != answer:
            return False
        del self.owed[session]
        wanted = session not in self.void
        self.void.discard(session)
        return wanted

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
        return self.withdraw(session)

    def withdraw(self, session: int, *types: type[Command]) -> Sequence[Command]:
        """Drop what waits for a session, or that of some types; it is returned."""
        dropped = [
            command
            for number, command in self.waiting
            if number == session and isinstance(command, types or Command)
        ]
        if dropped:
            self.waiting = deque(
                entry
                for entry in self.waiting
                if not any(entry[1] is command for command in dropped)
            )
        if session in self.postponed and Open in (types or (Open,)):
            dropped += self.postponed.pop(session)
        return dropped

    def next(self, most: int = MAX_SESSIONS) -> tuple[Command, Sequence[int]] | None:
        """The message to send now and the sessions it is about, `most` of them; nothing while the
        worker owes an answer."""
        if self.owed or not self.waiting:
            return None
        session, command = self.waiting[0]
        if not isinstance(command, Verify):
            self.owed[session] = _answer(command)
            self.waiting.popleft()
            self._sent = [(session, command)]
            return command, (session,)
        ready, mixed = self._ready(command, most)
        if most == MAX_SESSIONS and not mixed and self.hold((*ready,)):
            return None
        together = self._together(
            [*ready.values()]
        )  # nothing is owed and nothing is dropped for a message that cannot be built
        if len(ready) == len(self.waiting):
            self.waiting.clear()
        else:
            self.waiting = deque(
                entry
                for entry in self.waiting
                if not (isinstance(entry[1], Verify) and entry[0] in ready)
            )
        self.owed.update((s, Owed(Verified, c.items[0].round)) for s, c in ready.items())
        self._sent = [*ready.items()]
        return together, tuple(ready)

    def _ready(self, command: Verify, most: int) -> tuple[dict[int, Verify], bool]:
        """Return the verdicts that may be asked for in one pass with that of `command`, by session,
        and whether other sessions wait for something else."""
        if len(self.waiting) == 1:
            return {self.waiting[0][0]: command}, False
        first: dict[int, Command] = {}
        for session, asked in self.waiting:
            first.setdefault(session, asked)  # what a session asked for before is done before
        width = _candidates(command)
        ready = [
            (session, asked)
            for session, asked in first.items()
            if isinstance(asked, Verify) and _candidates(asked) == width
        ][:most]
        return dict(ready), len(first) > len(ready)

    def take_back(self) -> None:
        """Have what `next` returned wait again, before everything else, since it was not sent."""
        for session, _ in self._sent:
            del self.owed[session]
        self.waiting.extendleft(reversed(self._sent))

    def _together(self, commands: Sequence[Verify]) -> Verify:
        items = [item for command in commands for item in command.items]
        if commands[0].candidates is None:
            counts = self.cut(items)
            if len(commands) == 1 and counts[0] == len(items[0].tokens):
                return commands[0]
            return Verify(
                epoch=self.epoch,
                items=tuple(
                    _beginning(item, nodes) for item, nodes in zip(items, counts, strict=True)
                ),
            )
        if len(commands) == 1:
            return commands[0]
        return Verify(
            epoch=self.epoch,
            items=tuple(items),
            candidates=stack([c.candidates for c in commands if c.candidates]),
            probabilities=stack([c.probabilities for c in commands if c.probabilities]),
        )


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


def _beginning(item: VerifyItem, nodes: int) -> VerifyItem:
    """The item with the first so many of its nodes."""
    if nodes == len(item.tokens):
        return item
    return VerifyItem(
        session=item.session,
        round=item.round,
        prefix=item.prefix,
        tokens=item.tokens[:nodes],
        parents=item.parents[:nodes],
        hold=item.hold,
    )


def _candidates(command: Verify) -> int:
    """Return how many tokens each child was drawn from, 0 where none was drawn: the arrays of a
    message have one width."""
    return command.candidates.shape[1] if command.candidates else 0
