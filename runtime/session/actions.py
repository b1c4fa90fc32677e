"""The actions that follow an event of a session."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from dovetail.protocol.messages import (
    Close,
    Draft,
    Feed,
    FinishReason,
    Open,
    Refeed,
    RoundRecord,
    TokenLogprobs,
    Verify,
)


class Ask(NamedTuple):
    """A command for the draft or the target worker of this session."""

    role: str
    command: Open | Feed | Refeed | Draft | Verify | Close


class Emit(NamedTuple):
    """Newly committed tokens, the first `drafted` of which were drafted, and the text that they
    complete, which is decoded lazily."""

    tokens: tuple[int, ...]
    drafted: int
    read: Callable[[], str]
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def text(self) -> str:
        """The text that the tokens complete."""
        return self.read()


@dataclass(frozen=True)
class Score:
    """The target's log-probabilities of prompt tokens, from position `start` on."""

    start: int
    logprobs: tuple[TokenLogprobs, ...]


class NextRound(NamedTuple):
    """A round is over: the session waits for `next_round`. The last of its actions."""

    may_draft: bool = False  # True if the session's draft is ready for a Draft command
    holding: bool = False  # True if the target holds features that the draft must read first


@dataclass(frozen=True)
class Finish:
    """The request is done."""

    reason: FinishReason


@dataclass(frozen=True)
class Note:
    """The record of a round, for a client that requested records."""

    record: RoundRecord


Action = Ask | Emit | Score | Note | NextRound | Finish
