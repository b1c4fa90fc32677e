"""Internal errors: an exception in one session is contained, except those that end the process."""

import logging
from collections.abc import Callable
from typing import ParamSpec

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Failed

log = logging.getLogger("dovetail.coordinator")
P = ParamSpec("P")

EXITS = (KeyboardInterrupt, SystemExit, GeneratorExit)


def reraise_exits(error: BaseException) -> None:
    """Re-raise exceptions that end the process. The caller contains all others, including a
    library's panic, which is not an `Exception`."""
    if isinstance(error, EXITS):
        raise error


def one_line(error: BaseException) -> str:
    """Describe an exception in a few words on one line."""
    try:
        words = " ".join(str(error)[:1000].split())[:300]
    except Exception:
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def fault(error: BaseException) -> RequestError:
    """Return the message to a client for an internal error; the log has the details."""
    return RequestError(
        "internal", f"the coordinator failed on this request ({one_line(error)}); see its log"
    )


def aside(action: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> bool:
    """Run a function that is not about a session; log any error. Return whether it succeeded."""
    try:
        action(*arguments, **named)
    except BaseException as error:
        reraise_exits(error)
        log.exception("%s failed", getattr(action, "__qualname__", "something"))
        return False
    return True


def refusal(epoch: int, error: RequestError, request: int | None = None) -> Failed:
    """Return the message for a refused client or peer."""
    return Failed.model_validate(
        {"epoch": epoch, "session": request, "code": error.code, "text": str(error)[:4096]}
    )
