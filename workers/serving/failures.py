"""Turns failures inside a worker into answers. A worker survives the failure of a command, such as
a session that needs too much memory, or a bug."""

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Close,
    Command,
    Draft,
    Drafts,
    Event,
    Failed,
    Feed,
    Open,
    Read,
    Refeed,
    Verify,
)


def as_request_error(error: Exception) -> RequestError:
    """Return an exception as a code and a line of text; an unexpected one is also printed to stderr
    with its traceback. Keeps no reference to the exception's frames."""
    if isinstance(error, RequestError):
        return RequestError(error.code, str(error))
    if _is_out_of_memory(error):
        return RequestError(
            "memory",
            f"the worker is out of memory: {_line(error)}: "
            "ask for fewer tokens, or wait until others have ended",
        )
    traceback.print_exception(error, file=sys.stderr)
    return RequestError("internal", f"{type(error).__name__}: {_line(error)}")


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. torch's own errors for it only occur if torch has been
    imported, which a draft without a model does not do."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from dovetail.workers.devices.memory import is_out_of_memory

    return is_out_of_memory(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def subject(message: Command | Event) -> dict[str, int | None]:
    """Return the session and the round of a message; None for each that does not apply."""
    items: Sequence[Any] = getattr(message, "items", ()) or (getattr(message, "item", message),)
    about = items[0] if len(items) == 1 else message
    return {"session": getattr(about, "session", None), "round": getattr(about, "round", None)}


def failed_events(command: Command, epoch: int, error: RequestError) -> list[Event]:
    """Return a Failed for every session of a command, or a single one if it has none."""
    subjects: list[tuple[int | None, int | None]] = [(None, None)]
    match command:
        case Verify():
            subjects = [(item.session, item.round) for item in command.items]
            subjects += [(item.session, item.round) for item in command.reads]
        case Drafts():
            subjects = [(order.session, order.round) for order in command.orders]
        case Read():
            subjects = [(command.item.session, command.item.round)]
        case Open() | Feed() | Refeed() | Draft():
            subjects = [(command.session, command.round)]
        case Close():
            subjects = [(command.session, None)]
    return [failed(epoch, error, *about) for about in subjects]


def failed(
    epoch: int, error: RequestError, session: int | None = None, round: int | None = None
) -> Failed:
    """Return the answer to a command, of a session and a round, that failed."""
    return Failed(
        epoch=epoch,
        session=session,
        round=round,
        code=error.code,  # type: ignore[arg-type]
        text=str(error),
    )
