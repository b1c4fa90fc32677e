"""The round rules that the draft and the target worker share: what a command may assume of the
session it is about.

A command about a session carries its round and the committed length that it assumes. Rounds are
consecutive per worker - but for those that it was left out of, whose tokens come along -, so a
command is the next one, or stale (late, or sent twice: dropped and counted), or wrong (answered
with Failed). None but the next changes anything. Knows neither messages nor models.
"""

from collections.abc import Mapping
from typing import TypeVar

from dovetail.protocol.errors import RequestError, StaleError

SessionT = TypeVar("SessionT")


def check_round(
    session: int, *, last: int, round: int, length: int, prefix: int, left_out: int = 0
) -> None:
    """Accepts the next command, of round `last` + 1 for a log of `length` tokens; else raises
    `StaleError`, or `RequestError` of code "prefix". `left_out`: how many tokens were committed in
    rounds without this worker, at least one in each, so that at most this many rounds may be
    missing.
    """
    if round <= last:
        raise StaleError(f"session {session}: round {round} came after round {last} was done")
    if round > last + 1 + left_out:
        raise RequestError(
            "prefix",
            f"session {session}: round {round} was asked for after round {last}; rounds are "
            "consecutive, open the session again",
        )
    if prefix != length:
        raise RequestError(
            "prefix",
            f"session {session}: round {round} assumes {prefix} tokens, the log here has {length}; "
            "open the session again",
        )


def find_session(sessions: Mapping[int, SessionT], session: int) -> SessionT:
    """The open session of that number; `RequestError` of code "session" if there is none."""
    if session not in sessions:
        raise RequestError("session", f"session {session} is not open here; open it first")
    return sessions[session]
