"""Bugs that are planted in the coordinator, each a plausible mistake in one function, to see that
exploration finds them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from dovetail.protocol.messages import Cancel, Draft
from dovetail.runtime.engine.client_requests import ClientRequests
from dovetail.runtime.engine.peers import Peers
from dovetail.runtime.fleet.outbox import Outbox
from dovetail.runtime.fleet.scheduler import Owed, Turns
from dovetail.runtime.moves.moving import Moving
from dovetail.runtime.session.draft_sync import DraftSync
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


def _any_round(right: Any) -> Any:
    def answered(self: Turns, session: int, answer: Owed) -> bool:
        owed = self.owed.get(session)
        alike = owed is not None and owed.type is answer.type
        return bool(right(self, session, owed if alike else answer))

    return answered


def _twice(right: Any) -> Any:
    def opened(self: Session, event: Any, *rest: Any) -> Any:
        again = self._prompt_read
        actions = right(self, event, *rest)
        if again and self.state is State.READY:
            actions = self._commit([event.bonus], (1.0,), actions[0].logprobs, drafted=0)
        return actions

    return opened


def _order_stays(right: Any) -> Any:
    def forget(self: Turns, session: int) -> Any:
        orders = [e for e in self.waiting if e[0] == session and isinstance(e[1], Draft)]
        dropped = right(self, session)
        self.waiting.extend(orders)
        return dropped

    return forget


def _nothing(_right: Any) -> Any:
    return lambda *_, **__: None


def _cancel_forgotten(right: Any) -> Any:
    def take(self: ClientRequests, client: Any, request: Any, now_ns: int) -> Any:
        if isinstance(request, Cancel) and request.request in client.reading:
            return
        yield from right(self, client, request, now_ns)

    return take


def _log_too_short(right: Any) -> Any:
    def opened(self: Session, tokens: int, round: int) -> Any:
        return right(self, tokens - 1 if self.tokens and tokens == self.length else tokens, round)

    return opened


def _untold(right: Any) -> Any:
    def committed(self: DraftSync, *what: Any, ordered: bool) -> None:
        more = [*self.more]
        right(self, *what, ordered=ordered)
        self.more = more

    return committed


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


def _one_more_session(right: Any) -> Any:
    def forget_draft(self: Moving, running: Any) -> Any:
        draft = running.draft
        yield from right(self, running)
        if draft is not None and draft is not running.target:
            draft.sessions += 1

    return forget_draft


MUTANTS = (
    Mutant("an answer of another round counts as the one owed", Turns, "answered", _any_round),
    Mutant("orders to a draft stay when their session is over", Turns, "forget", _order_stays),
    Mutant(
        "a cancel is forgotten while a prompt is read", ClientRequests, "take", _cancel_forgotten
    ),
    Mutant("another target reads a log without its last token", Session, "_open", _log_too_short),
    Mutant("a draft is not told of rounds without it", DraftSync, "committed", _untold),
    Mutant("what a full queue refuses is dropped", Outbox, "send", _drops_what_is_refused),
    Mutant("of two lost workers one is parted with", Peers, "part", _only_the_first),
    Mutant(
        "a draft that is parted with still counts the session",
        Moving,
        "_forget_draft",
        _one_more_session,
    ),
    Mutant("the token of a lost round is committed twice", Session, "opened", _twice),
    Mutant("sessions of a client that has left go on", Peers, "client_lost", _nothing),
)
