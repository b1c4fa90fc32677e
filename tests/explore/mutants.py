"""Bugs that are planted in the coordinator, each a plausible mistake in one function, to see that
exploration finds them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from dovetail.runtime.engine.peers import Peers
from dovetail.runtime.fleet.outbox import Outbox
from dovetail.runtime.session.session import Session
from dovetail.runtime.session.state import State

MOST = 6000  # each planted bug is found within so many schedules


@dataclass(frozen=True)
class Mutant:
    """A planted bug: in whose function, and what it does in its place, given the right one."""

    words: str
    owner: type
    name: str
    wrong: Callable[[Any], Any] = field(repr=False)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The bug is in the coordinator within the block."""
        right = getattr(self.owner, self.name)
        with patch.object(self.owner, self.name, self.wrong(right)):
            yield


def _twice(right: Any) -> Any:
    def opened(self: Session, event: Any, *rest: Any) -> Any:
        again = self._prompt_read
        actions = right(self, event, *rest)
        if again and self.state is State.READY:
            actions = self._commit([event.bonus], (1.0,), actions[0].logprobs, drafted=0)
        return actions

    return opened


def _nothing(_right: Any) -> Any:
    return lambda *_, **__: None


def _log_too_short(right: Any) -> Any:
    def opened(self: Session, tokens: int, round: int) -> Any:
        return right(self, tokens - 1 if self.tokens and tokens == self.length else tokens, round)

    return opened


def _drops_what_is_refused(right: Any) -> Any:
    def send(self: Outbox, send: Any, now_ns: int) -> None:
        waited = len(self)
        right(self, send, now_ns)
        if 0 < len(self) == waited:
            self._take_first()

    return send


def _only_the_first(_right: Any) -> Any:
    def part(self: Peers) -> None:
        if self._gone:
            worker, why = self._gone.popleft()
            self._census.forget()
            self.handle(self._moving.part_with, worker, why)
            self._gone.clear()
            self.handle(self._moving.resettle)

    return part


MUTANTS = (
    Mutant("another target reads a log without its last token", Session, "_open", _log_too_short),
    Mutant("what a full queue refuses is dropped", Outbox, "send", _drops_what_is_refused),
    Mutant("of two lost workers one is parted with", Peers, "part", _only_the_first),
    Mutant("the token of a lost round is committed twice", Session, "opened", _twice),
    Mutant("sessions of a client that has left go on", Peers, "client_lost", _nothing),
)
"""A wrong token, a token too many, a reply that never ends, a worker and a session left behind."""
