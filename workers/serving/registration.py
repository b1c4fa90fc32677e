"""The registration of a worker with its coordinator, and reconnecting after a loss."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from dovetail.protocol.codec import COMMAND
from dovetail.protocol.errors import DecodeError, LinkClosed, UserError, printable
from dovetail.protocol.links import Link
from dovetail.protocol.messages import VERSION, Command, Event, Failed, Hello, Open, Welcome
from dovetail.protocol.settings import ANSWER_S
from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.sessions.prefix_cache import KeptSessions

EPOCH_BITS = 62
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0
"""The pause between two attempts to reach a lost coordinator: the first one and the longest.
Sessions wait half a minute or longer (coordinator.recovery_s)."""


LATER = ("capacity",)  # refusals after which a worker may be accepted later


class Worker(Protocol):
    """The loop's interface to a worker with sessions of one or both roles."""

    stale: int  # the number of late, duplicate and stale commands that this worker has dropped

    @property
    def spans(self) -> Spans:
        """The spans of the worker and of its loop."""

    @property
    def sessions(self) -> int:
        """The number of open sessions."""

    def hello(self, epoch: int) -> Hello:
        """Return the registration; `epoch` is this worker's and part of every event."""

    def handle(self, command: Command) -> Iterable[Event]:
        """Carry out a command and yield its answers: several if it has parts, each as soon as it is
        done; none if it was stale."""

    def news(self) -> Iterable[Event]:
        """Return the reports that the coordinator lacks, for sending after any answers."""

    def idle(self) -> bool:
        """Do about a millisecond of background work; return False if nothing is left to do."""

    def suspend(self) -> KeptSessions[Any]:
        """Close every session because their coordinator is lost. Return their rows and the kept
        ones: the next coordinator chooses which of them stay."""


@dataclass(frozen=True)
class Reconnecting:
    """Attempts to reach a lost coordinator."""

    connect: Callable[[], Link]  # return a new link; raise `LinkClosed` if there is no answer
    most_s: float
    say: Callable[[str], None]  # receives reports of the coordinator's loss and return


class Listener(Protocol):
    """Receives reports from a worker's loop."""

    def ready(self) -> None:
        """Called when the worker is registered for the first time."""

    def serves(self) -> None:
        """Called when the worker may get sessions: registered and not on standby."""

    def opens(self, order: Open) -> None:
        """Called before a session is opened, except for a trial."""

    def progress(self) -> None:
        """Called after a message, a step of a computation, or a search for a coordinator."""


@dataclass
class Standing:
    """The facts about a worker that others provide."""

    binding: str
    standby: bool
    load_s: float
    listener: Listener | None = None
    served: int | None = None
    """The epoch of the lost coordinator, whose sessions' rows are in `kept`."""
    kept: KeptSessions[Any] | None = None
    answer_s: float = ANSWER_S  # how long to wait for the coordinator's answer to Hello

    def gets_on(self) -> None:
        """Report that the worker makes progress."""
        if self.listener is not None:
            self.listener.progress()

    def introduce(self, worker: Worker, epoch: int) -> Hello:
        own = {name: getattr(self, name) for name in ("binding", "standby", "load_s")}
        own["kernels"] = kernels.in_words()[:512]  # a Name
        held = self.kept.held if self.kept is not None else ()
        own |= {"held": held, "served": self.served if held else None}
        return worker.hello(epoch).model_copy(update=own)

    def suspend(self, worker: Worker, served: int) -> None:
        """Make the worker keep what it can of the lost coordinator's sessions."""
        self.served, self.kept = served, worker.suspend()

    def welcomed(self, welcomed: Welcome) -> None:
        """Notify the listener that the worker is registered, and free the sessions that the
        coordinator cannot continue."""
        if self.kept is not None:
            self.kept.only(welcomed.keeps)
            self.kept = None
        if self.listener is not None:
            self.listener.ready()
        if not self.standby:
            self.serves()

    def serves(self) -> None:
        """Leave standby, and notify the listener."""
        self.standby = False
        if self.listener is not None:
            self.listener.serves()

    def opens(self, order: Open) -> None:
        """Notify the listener of an Open, unless it is for a trial."""
        if self.listener is not None and not self.standby:
            self.listener.opens(order)


def welcome(link: Link, answer_s: float) -> Welcome:
    """Return the coordinator's answer to Hello; messages before it are for other workers."""
    deadline = time.monotonic() + answer_s
    while (left := deadline - time.monotonic()) > 0:
        frames = link.receive(left)
        if frames is None:
            break
        try:
            answer = COMMAND.decode(frames)
        except DecodeError:
            continue
        if isinstance(answer, Failed):
            text = f"the coordinator refused this worker: {printable(answer.text)}"
            raise (LinkClosed(text) if answer.code in LATER else UserError(text))
        if isinstance(answer, Welcome):
            if answer.version != VERSION:
                raise UserError(
                    f"the coordinator speaks protocol {_dotted(answer.version)}, this worker "
                    f"{_dotted(VERSION)}: run the same release on both"
                )
            return answer
    raise LinkClosed(
        f"the coordinator did not answer within {answer_s:g} s (coordinator.answer_s); check that "
        "the address is a dovetail coordinator's"
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
