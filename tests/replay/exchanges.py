"""The exchanges between a coordinator and one worker, read off a recording."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dovetail.protocol.codec import COMMAND, EVENT
from dovetail.protocol.errors import DecodeError, UserError
from dovetail.protocol.messages import (
    Draft,
    Drafted,
    Event,
    Failed,
    Fed,
    Feed,
    Open,
    Opened,
    Refed,
    Refeed,
    Verified,
    Verify,
)
from dovetail.runtime.record.recording import Peer, Recording, Said
from dovetail.runtime.record.replay import Asked, own_part, own_verdicts

Role = Literal["target", "draft"]
ASKED: dict[Role, tuple[type[Asked], ...]] = {
    "target": (Open, Refeed, Verify),
    "draft": (Open, Feed, Draft),
}
LAST = (Opened, Fed, Refed, Drafted, Verified, Failed)
"""Each of these is the last answer to a command."""


@dataclass(frozen=True)
class Exchange:
    """A command to a worker and all its answers; none, if they did not come or are not in the
    recording."""

    entry: int
    at_s: float
    command: Asked
    answers: tuple[Event, ...] = ()

    @property
    def where(self) -> str:
        return f"{self.command.type} of round {round_of(self.command)}"


@dataclass(frozen=True)
class Part:
    """The part that one worker had in a session."""

    peer: Peer
    exchanges: tuple[Exchange, ...]


def parts_of(recording: Recording, role: Role) -> Sequence[Part]:
    """Return what the workers of this role did, in the order in which they began; `UserError` if
    none of them was asked anything."""
    session = recording.begin.session
    parts: dict[int, list[Exchange]] = {}
    for number, entry in enumerate(recording.entries, start=1):
        if not isinstance(entry, Said) or role not in recording.peers[entry.peer].roles:
            continue
        exchanges = parts.setdefault(entry.peer, [])
        if entry.type == "out" and isinstance(command := _read(recording, entry), ASKED[role]):
            own = own_part(command, session) if isinstance(command, Verify) else command
            exchanges.append(Exchange(number, entry.at / 1e9, own))
        elif entry.type == "in":
            event = _read(recording, entry)
            for place in range(len(exchanges))[-2:]:  # the last may have been requested early
                asked = exchanges[place]
                if not ended(asked) and answers(asked.command, event, session):
                    exchanges[place] = replace(asked, answers=(*asked.answers, event))
                    break
    found = [
        Part(recording.peers[peer], tuple(exchanges))
        for peer, exchanges in parts.items()
        if exchanges
    ]
    if not found:
        raise UserError(
            f"no {role} worker was asked anything in {recording.path}: there is nothing to replay "
            "to one"
        )
    return found


def _read(recording: Recording, said: Said) -> Any:
    try:
        return (COMMAND if said.type == "out" else EVENT).decode(said.frames)
    except DecodeError as error:
        raise UserError(
            f"a message in {recording.path} cannot be read: {error}; use the release that wrote it"
        ) from None


def ended(exchange: Exchange) -> bool:
    return bool(exchange.answers) and isinstance(exchange.answers[-1], LAST)


def missed_its_base(exchange: Exchange) -> bool:
    """True if the worker did not have the base of this session, which was then opened from
    scratch."""
    return (
        isinstance(exchange.command, Open)
        and exchange.command.base is not None
        and any(isinstance(answer, Failed) for answer in exchange.answers)
    )


def answers(command: Asked, event: Event, session: int) -> bool:
    """Return whether this is an answer to the command."""
    if isinstance(event, Verified):
        return isinstance(command, Verify) and any(
            item.round == round_of(command) for item, _ in own_verdicts(event, session)
        )
    if getattr(event, "session", None) != session or getattr(event, "round", None) not in (
        None,
        round_of(command),
    ):
        return False
    return not isinstance(event, Fed) or (
        isinstance(command, Feed) and event.start == command.start
    )


def round_of(command: Asked) -> int:
    return command.items[0].round if isinstance(command, Verify) else command.round
