"""Effects: values that say what is to be done about sessions and workers. The parts of the
coordinator that decide yield them, and one loop of the coordinator carries them out.

An effect is carried out before what comes behind it is decided, so that a decision sees the state
of things as it is by then.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Message
from dovetail.runtime.engine.running import Live
from dovetail.runtime.engine.session import Action
from dovetail.runtime.fleet.registry import Worker


@dataclass(frozen=True)
class Follow:
    """Carry out the actions of a session."""

    live: Live
    actions: Sequence[Action]


@dataclass(frozen=True)
class Forget:
    """Have a worker forget a session, if the worker is still there."""

    live: Live
    worker: Worker


@dataclass(frozen=True)
class Fail:
    """End a request with an error."""

    live: Live
    error: RequestError


@dataclass(frozen=True)
class Break:
    """End a request for a fault of the coordinator's."""

    live: Live
    error: BaseException


@dataclass(frozen=True)
class Say:
    """Log a decision, and keep it for `status`."""

    words: str


@dataclass(frozen=True)
class Lose:
    """Treat a worker as lost although it is connected, for the reason `why`."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class Send:
    """Send to a worker what needs no answer."""

    worker: Worker
    message: Message


Effect = Follow | Forget | Fail | Break | Say | Lose | Send
T = TypeVar("T")
Effects = Generator[Effect, None, T]
"""Yields effects one after the other, and returns their outcome."""
