"""What a coordinator asks of its extras: of a journal, which stores replies for the next
coordinator, and of a recorder of messages. Both are arguments, and it runs without either."""

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Protocol

from dovetail.protocol.messages import Finished, JournalState, Message, Submit, TokenLogprobs
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.session.actions import Emit
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.session import Session


class StoredReply(Protocol):
    """What is stored of a reply."""

    submit: Submit
    """The request in tokens, with its seed."""
    fingerprint: str
    """The fingerprint of the target that has served it last."""
    load_s: float
    """The seconds that this target took to load."""
    tokens: list[int]
    drafted: list[bool]
    """For each token, True if the draft had proposed it."""
    logprobs: list[TokenLogprobs]
    finished: Finished | None
    """The last message to its client; None if it has not ended, or its client has left."""

    @property
    def owner(self) -> str: ...
    @property
    def log(self) -> bytes: ...
    @property
    def depends_on_draft(self) -> bool: ...
    def done(self) -> dict[str, Any]: ...


class ReplyStore(Protocol):
    """A journal: replies by their tickets. `journal.py` describes the methods; none raises when the
    disk fails."""

    sessions: int
    """The highest session number of any coordinator."""
    failed: str
    """Why nothing is written any more; empty while it is."""
    aside: Callable[[Callable[[], None]], object]
    """Runs a function in a thread."""

    @property
    def size(self) -> int: ...
    @property
    def stopped_s(self) -> float: ...
    def begin(self, epoch: int) -> None: ...
    def of_session(self, epoch: int | None, number: int) -> StoredReply | None: ...
    def find(self, ticket: str, owner: str) -> StoredReply | None: ...
    def holds(self, ticket: str) -> bool: ...
    def state(self) -> JournalState: ...
    def accept(
        self, submit: Submit, request: Request, key: str, vocabulary: str, begun: Any = None
    ) -> None: ...
    def serves(
        self, ticket: str, session: int, fingerprint: str, load_s: float, tokens: int
    ) -> None: ...
    def committed(self, ticket: str, emits: Iterable[Emit], session: Session) -> None: ...
    def ended(self, ticket: str, finished: Finished) -> None: ...
    def left(self, ticket: str) -> None: ...
    def write(self) -> None: ...
    def tick(self) -> None: ...
    def give_up(self, size: int) -> None: ...
    def close(self, *, remove: bool = False) -> None: ...


class MessageRecorder(Protocol):
    """Records the messages and events of sessions, as `recorder.py` describes."""

    def begin(self, running: RunningRequest) -> None: ...
    def received(
        self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]
    ) -> None: ...
    def sent(
        self, peer: Worker | ClientPeer, message: Message, frames: Sequence[bytes]
    ) -> None: ...
    def settle(self) -> None: ...
    def tick(self, running: Container[int]) -> None: ...
    def close(self) -> None: ...
