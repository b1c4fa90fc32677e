"""Effects: values that say what is to be done about sessions and workers. The parts of the
coordinator that decide yield them, and one loop of the coordinator carries them out.

An effect is carried out before what comes behind it is decided, so that a decision sees the state
of things as it is by then.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Message
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.session.actions import Action
from dovetail.runtime.session.request import Request


class Follow(NamedTuple):
    """Carry out the actions of a session."""

    running: RunningRequest
    actions: Sequence[Action]


@dataclass(frozen=True)
class Forget:
    """Have a worker forget a session, if the worker is still there."""

    running: RunningRequest
    worker: Worker


@dataclass(frozen=True)
class Fail:
    """End a request with an error."""

    running: RunningRequest
    error: RequestError


@dataclass(frozen=True)
class Break:
    """End a request for a fault of the coordinator's."""

    running: RunningRequest
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


class Free(NamedTuple):
    """Send a worker the command that waits for it, since it has answered the last one."""

    worker: Worker


@dataclass(frozen=True)
class Send:
    """Send to a worker what needs no answer."""

    worker: Worker
    message: Message


@dataclass(frozen=True)
class Tell:
    """Send to a client, in order."""

    client: ClientPeer
    message: Message


@dataclass(frozen=True)
class Start:
    """Begin a session."""

    running: RunningRequest


@dataclass(frozen=True)
class Cancel:
    """End a session as far as it has come."""

    running: RunningRequest


@dataclass(frozen=True)
class Abandon:
    """Forget a session that nobody waits for any more."""

    running: RunningRequest


@dataclass(frozen=True)
class LetGo:
    """Have a worker end. Sessions that it still holds go on without it."""

    worker: Worker


@dataclass(frozen=True)
class Join:
    """Have a worker that is registered serve sessions from now on."""

    worker: Worker


@dataclass(frozen=True)
class Admitted:
    """Get ready for a worker that was let in."""

    worker: Worker


@dataclass(frozen=True)
class Gone:
    """Treat a worker as gone, because of what is said in `why` after its name."""

    worker: Worker
    why: str


@dataclass(frozen=True)
class ClientGone:
    """Free the sessions of a client that is not listened to any more."""

    client: ClientPeer


@dataclass(frozen=True)
class Drained:
    """Remember that an operator drained a worker, so that it is not started again."""

    worker: Worker


@dataclass(frozen=True)
class Defer:
    """Read a request elsewhere, since a long prompt takes its time, and go on with the outcome."""

    work: Callable[[], Request | RequestError]
    then: "Callable[[Request | RequestError], Effects[None]]"


@dataclass(frozen=True)
class Unanswered:
    """Tell a client that its request failed for a fault of the coordinator's."""

    client: ClientPeer
    request: int
    error: BaseException


@dataclass(frozen=True)
class End:
    """End the service."""


Effect = (
    Follow
    | Forget
    | Fail
    | Break
    | Say
    | Lose
    | Free
    | Send
    | Tell
    | Start
    | Cancel
    | Abandon
    | LetGo
    | Join
    | Admitted
    | Gone
    | ClientGone
    | Drained
    | Defer
    | Unanswered
    | End
)
T = TypeVar("T")
Effects = Generator[Effect, None, T]
"""Yields effects one after the other, and returns their outcome."""
