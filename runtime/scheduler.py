"""Whose turn it is on which worker.

A worker does one command at a time; what else is asked of it waits here, in the order in which it came. Verdicts are the exception: everything that waits
for a target worker when it falls idle goes out as one `Verify`, so that one pass over the weights serves several sessions. Knows no sockets and no
clock, and nothing of what a session is but its number.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.protocol.messages import MAX_SESSIONS, Draft, Open, Verify, VerifyItem


@dataclass
class Turns:
    """The commands that wait for one worker, and the answers it owes."""

    epoch: int
    waiting: deque[tuple[int, Open | Draft | VerifyItem]] = field(default_factory=deque)
    owed: dict[int, int] = field(default_factory=dict)
    """Session -> round of the answers that are under way."""

    def ask(self, session: int, command: Open | Draft | VerifyItem) -> None:
        self.waiting.append((session, command))

    def answered(self, session: int, round_: int) -> bool:
        """Whether the worker owed this session the answer of this round; it does no more."""
        if self.owed.get(session) != round_:
            return False
        del self.owed[session]
        return True

    def forget(self, session: int) -> None:
        """The session ended: drop what waits for it. What is under way comes back and is dropped as stale."""
        self.waiting = deque(entry for entry in self.waiting if entry[0] != session)

    def next(self) -> tuple[Open | Draft | Verify, Sequence[int]] | None:
        """The message to send now and the sessions it is about; nothing while the worker owes an answer."""
        if self.owed or not self.waiting:
            return None
        session, command = self.waiting[0]
        if not isinstance(command, VerifyItem):
            self.waiting.popleft()
            self.owed[session] = command.round
            return command, (session,)
        ready = [(s, c) for s, c in self.waiting if isinstance(c, VerifyItem)][:MAX_SESSIONS]
        sessions = tuple(s for s, _ in ready)
        self.waiting = deque(entry for entry in self.waiting if not (isinstance(entry[1], VerifyItem) and entry[0] in sessions))
        self.owed.update((s, c.round) for s, c in ready)
        return Verify(epoch=self.epoch, items=tuple(c for _, c in ready)), sessions
