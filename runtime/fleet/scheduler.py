"""The order of commands on each worker. A worker executes one command at a time; others wait here,
in order. Verifications are the exception: all that wait when a target worker becomes idle are sent
as one `Verify`, so that one pass over the weights serves several sessions. Draft commands of a
draft with shared passes are sent as one `Drafts`. Prompts and other logs are prefilled in chunks,
if the worker can: after each chunk the unread rows queue behind the commands that arrived
meanwhile, and share their passes. Without sockets and clock; sessions are numbers. `cut` decides
how many nodes of a tree go into a pass, `share` how many rows of logs, `first` which log is read
first."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
    ReadItem,
    Refed,
    Refeed,
    Verified,
    Verify,
    VerifyItem,
)


@dataclass(frozen=True)
class Rest:
    """The unread rows of a log that a worker prefills in chunks."""

    command: Open | Refeed  # the command that started the prefill
    done: int
    """Rows of the log that have been prefilled; -1: unknown, because the command was not sent
    yet."""

    @property
    def rows(self) -> int:
        """The total number of rows of the log to prefill."""
        command = self.command
        return len(command.prompt) if isinstance(command, Open) else command.prefix - 1

    @property
    def left(self) -> int:
        """The number of unread rows, if known."""
        return self.rows - max(self.done, 0)

    def item(self, rows: int) -> ReadItem:
        """Return the item for the next `rows` rows."""
        command = self.command
        return ReadItem(
            session=command.session, round=command.round, start=max(self.done, 0), rows=rows
        )


def alike(orders: Mapping[int, Draft]) -> dict[int, Draft]:
    """Return, by session, the commands whose features have the first's type and width, or none."""
    kinds = {s: (f.dtype, f.shape[1:]) for s, o in orders.items() if (f := o.features) is not None}
    kind = next(iter(kinds.values()), None)
    return {s: order for s, order in orders.items() if kinds.get(s, kind) == kind}


def drawn_from(command: Verify) -> int:
    """Return the number of tokens from which each child was drawn; 0: none was drawn."""
    return command.candidates.shape[1] if command.candidates else 0


def beginning(item: VerifyItem, nodes: int) -> VerifyItem:
    """Return the item with its first `nodes` nodes only."""
    if nodes == len(item.tokens):
        return item
    return VerifyItem.unchecked(
        session=item.session,
        round=item.round,
        prefix=item.prefix,
        tokens=item.tokens[:nodes],
        parents=item.parents[:nodes],
        hold=item.hold,
    )


Command = Open | Feed | Refeed | Draft | Verify
"""Here a Verify has one item; they are combined later."""


PROMPTS = Open, Feed  # commands that prefill a prompt
Waiting = Command | Rest
Sent = Command | Drafts | Read


class Owed(NamedTuple):
    """The answer that a worker owes to a command."""

    type: type[Opened | Fed | Refed | Drafted | Verified]
    round: int
    start: int = 0  # position of a Feed, of which there are several in a round


Cut = Callable[[Sequence[VerifyItem]], Sequence[int]]
"""Returns how many nodes of each item of a pass are verified."""


Share = Callable[[Sequence[VerifyItem], Sequence[Rest]], Sequence[int]]
"""Returns how many rows of each log are read in a pass with these items, or alone."""


Hold = Callable[[Sequence[int]], bool]
"""Returns True if a pass of these sessions should wait for proposals that are almost ready; the
caller must then check again. Without sessions: whether a chunk in a separate pass should wait."""


def whole(items: Sequence[VerifyItem]) -> Sequence[int]:
    """Return all nodes of each item."""
    return [len(item.tokens) for item in items]


def all_rows(items: Sequence[VerifyItem], logs: Sequence[Rest]) -> Sequence[int]:
    """Return all unread rows of each log."""
    return [log.left for log in logs]


@dataclass
class Turns:
    """The commands that wait for one worker, and the answers that it owes."""

    epoch: int
    cut: Cut = whole  # only for items without drawn nodes
    hold: Hold = lambda _: False
    share: Share = all_rows
    first: Callable[[Sequence[Rest]], int] = lambda _: 0
    together: int = 1  # the most sessions in a draft's shared passes
    parts: bool = False  # True if the worker reads logs in chunks
    waiting: deque[tuple[int, Waiting]] = field(default_factory=deque)
    owed: dict[int, Owed] = field(default_factory=dict)
    """By session: the answers that are under way."""
    early: dict[int, Owed] = field(default_factory=dict)
    """By session: the answers owed to verifications sent before the last verdict arrived."""
    postponed: dict[int, list[Open | Feed]] = field(default_factory=dict)
    """By session: prompts whose prefill is deferred."""
    void: set[int] = field(default_factory=set)
    """Sessions that ended while it was under way: their answers are dropped."""
    _sent: list[tuple[int, Waiting]] = field(default_factory=list)
    """The commands that `next` returned last, by session."""
    _reading: dict[int, Rest] = field(default_factory=dict)
    """By session: logs of which the worker prefills a chunk."""
    prompted: bool = False  # False if no prompt was queued since the last was prefilled

    def ask(self, session: int, command: Command) -> None:
        self.prompted |= type(command) in PROMPTS
        self.waiting.append((session, command))

    def postpone(self, session: int, command: Open | Feed) -> None:
        """Keep a command until `resume`."""
        self.postponed.setdefault(session, []).append(command)

    def resume(self, session: int) -> bool:
        """Queue a session's postponed commands; return whether there were any."""
        commands = self.postponed.pop(session, ())
        for command in commands:
            self.ask(session, command)
        return bool(commands)

    def asked_early(self, command: Verify) -> bool:
        """Return whether this verification was sent before the last verdict arrived."""
        item = command.items[0]
        return bool(self.owed) and self.owed.get(item.session) == Owed(Verified, item.round)

    def busy_with(self, session: int) -> bool:
        """Return whether the session waits for an answer."""
        return (
            session in self.owed
            or session in self.postponed
            or any(number == session for number, _ in self.waiting)
        )

    def reads(self, session: int) -> bool:
        """Return whether a prompt of the session is still unread."""
        owed = self.owed.get(session)
        if session in self.postponed:
            return True
        return (owed is not None and owed.type in (Opened, Fed)) or any(
            n == session and _is_prompt(command) for n, command in self.waiting
        )

    @property
    def reading(self) -> bool:
        """Whether a prompt of any session is still unread."""
        if not self.prompted:
            return False
        self.prompted = any(owed.type in (Opened, Fed) for owed in self.owed.values()) or any(
            _is_prompt(command) for _, command in self.waiting
        )
        return self.prompted

    @property
    def orders(self) -> Sequence[tuple[int, bool]]:
        """Return the sessions in order, and for each whether it waits for a proposal."""
        return [
            *[(session, owed.type is Drafted) for session, owed in self.owed.items()],
            *[(session, isinstance(command, Draft)) for session, command in self.waiting],
        ]

    def answered(self, session: int, answer: Owed) -> bool:
        """Note an answer; return whether the worker owed it to this session and it is still
        wanted."""
        if self.owed.get(session) != answer:
            return False
        del self.owed[session]
        self._reading.pop(session, None)
        wanted = session not in self.void
        if (early := self.early.pop(session, None)) is not None:
            self.owed[session] = early  # also unwanted if this one is
        else:
            self.void.discard(session)
        return wanted

    def read(self, session: int, round: int, done: int) -> bool:
        """Note that a log was read up to row `done`, and queue the rest before the session's other
        commands. Return False if that was not requested, or is unwanted."""
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
        """The logs with rows that wait to be prefilled."""
        return [entry for _, entry in self.waiting if isinstance(entry, Rest)]

    def done(self) -> dict[int, int]:
        """Return the rows that the worker has of chunked logs, by session; below 0: unknown."""
        waiting = {number: rest for number, rest in self.waiting if isinstance(rest, Rest)}
        return {number: rest.done for number, rest in {**waiting, **self._reading}.items()}

    def forget(self, session: int) -> Sequence[Command]:
        """Drop and return what waits for an ended session; its next answer is stale."""
        if session in self.owed:
            self.void.add(session)
        self._reading.pop(session, None)
        return self.withdraw(session)

    def withdraw(self, session: int, *types: type[Command]) -> Sequence[Command]:
        """Drop and return waiting commands of a session, or of these types."""
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
        """Return the next message and its sessions, at most `most`; None if an answer is owed."""
        if self.owed or not self.waiting:
            return None
        if len(self.waiting) > 1 and isinstance(self.waiting[0][1], Open | Rest):
            self._choose_log()
        session, command = self.waiting[0]
        if isinstance(command, Verify):
            return self._pass(command, most)
        if len(self.waiting) > 1 < min(self.together, most) and isinstance(command, Draft):
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
        """Return the message for `command` and others that can join it, with their sessions."""
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
        """Return the message for a command other than Verify, and its expected answer."""
        if isinstance(command, Verify):
            raise TypeError("verifications are sent in passes")
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
        """Return the pass for `command` and all that can share it, with chunks of logs."""
        ready, mixed = self._ready(command, most)
        if most == MAX_SESSIONS and not mixed and self.hold((*ready,)):
            return None
        # if the message cannot be built, no answer is expected and nothing is dropped
        together = self._together([*ready.values()])
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
        for session, verify in ready.items():
            self.owed[session] = Owed(Verified, verify.items[0].round)
        for session, (rest, _) in logs.items():
            self.owed[session], self._reading[session] = _answer(rest.command), rest
        self._sent = [*sent.items()]
        return together, tuple(sent)

    def _logs(self, verify: Verify) -> dict[int, tuple[Rest, int]]:
        """Return, by session, the logs of which a pass reads a chunk, and the rows."""
        if not (rests := self.logs[:MAX_SESSIONS]):
            return {}
        counts = self.share(verify.items, rests)
        return {
            rest.command.session: (rest, rows)
            for rest, rows in zip(rests, counts, strict=True)
            if rows
        }

    def _ready(self, command: Verify, most: int) -> tuple[dict[int, Verify], bool]:
        """Return, by session, the verifications that may share a pass with `command`, and whether
        other sessions wait for something other than unread rows of a log."""
        if len(self.waiting) == 1:
            return {self.waiting[0][0]: command}, False
        width, ready, rests = drawn_from(command), dict[int, Verify](), 0
        seen: set[int] = set()
        for session, asked in self.waiting:
            if session in seen:
                continue  # a session's earlier commands come first
            seen.add(session)
            if isinstance(asked, Rest):
                rests += 1
            elif isinstance(asked, Verify) and drawn_from(asked) == width and len(ready) < most:
                ready[session] = asked
        return ready, len(seen) > len(ready) + rests

    def take_back(self) -> None:
        """Put the unsent result of `next` back at the head of the queue."""
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
    """Return the command; for unread rows of a log, the one that started the prefill."""
    return command.command if isinstance(command, Rest) else command


def _is_prompt(command: Waiting) -> bool:
    """Return whether the command prefills a prompt."""
    return isinstance(_begun_with(command), PROMPTS)


def _answer(command: Open | Feed | Refeed | Draft) -> Owed:
    match command:
        case Draft():
            return Owed(Drafted, command.round)
        case Open():
            return Owed(Opened, command.round)
        case Feed():
            return Owed(Fed, command.round, command.start)
        case Refeed():
            return Owed(Refed, command.round)
