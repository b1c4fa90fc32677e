"""The rules of rounds for draft and target workers: what a command may assume of its session.

A command carries its round and the committed length that it assumes. Rounds are consecutive per
worker, except for those without this worker, whose tokens are sent along. So a command is the next
one, or stale (late or sent twice: dropped and counted), or wrong (answered with Failed). Only the
next one changes anything. Independent of models."""

from collections.abc import Mapping
from typing import TypeVar

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import ReadItem

SessionT = TypeVar("SessionT")


def check_round(
    session: int, *, last: int, round: int, length: int, prefix: int, left_out: int = 0
) -> None:
    """Check that a command is the next one, of round `last` + 1 for a log of `length` tokens; raise
    `StaleError`, or `RequestError` of code "prefix", otherwise. `left_out`: how many tokens were
    committed in rounds without this worker, at least one in each, so at most this many rounds may
    be missing."""
    if round <= last:
        raise StaleError(f"session {session}: round {round} came after round {last} was done")
    if round > last + 1 + left_out:
        text = f"got round {round} after round {last}; rounds are consecutive"
    elif prefix != length:
        text = f"round {round} assumes {prefix} tokens, but the log here has {length}"
    else:
        return
    raise RequestError("prefix", f"session {session}: {text}; open the session again")


def check_chunk(item: ReadItem, done: int) -> None:
    """Raise `StaleError` or `RequestError` unless a chunk of a log begins where the `done` rows
    that have been read end."""
    if item.start < done:
        raise StaleError(f"session {item.session}: rows from {item.start} on were already read")
    if item.start > done:
        text = f"rows from {item.start} on were requested, but {done} have been read"
        raise RequestError("prefix", f"session {item.session}: {text}; open the session again")


def find_session(sessions: Mapping[int, SessionT], session: int) -> SessionT:
    """Return the open session of that number; raise `RequestError` of code "session" if there is
    none."""
    if session not in sessions:
        raise RequestError("session", f"session {session} is not open here; open it first")
    return sessions[session]
