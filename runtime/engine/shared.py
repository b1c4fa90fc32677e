"""The state that the parts of a coordinator share: peers, sessions, and counters."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from dovetail.protocol.messages import Feed, Submit
from dovetail.runtime.engine.acts import EngineState
from dovetail.runtime.engine.faults import aside
from dovetail.runtime.engine.stored import ReplyStore, StoredReply
from dovetail.runtime.fleet.block_index import INDEXED_BYTES
from dovetail.runtime.fleet.outbox import TOKEN_BYTES, scores_size, size_of
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.queue import FairQueue
from dovetail.runtime.moves.moving import Moving
from dovetail.runtime.moves.replacement import Changes
from dovetail.runtime.session.request import TOKEN_BYTES as PACKED_BYTES
from dovetail.runtime.session.request import Request


@dataclass(frozen=True, eq=False)
class WaitingRequest:
    """A request that has been read and waits for room."""

    client: ClientPeer
    submit: Submit
    target: Worker  # the target whose tokenizer and limits the request was read with
    request: Request
    since_ns: int  # when the request came, on the coordinator's clock
    entry: StoredReply | None = None  # its earlier entry in the journal
    begun: StoredReply | None = None
    """That entry, if its session begins with the tokens committed for it."""

    def is_of(self, client: ClientPeer, request: int) -> bool:
        """Return whether this is the client's request of this number."""
        return self.client is client and self.submit.request == request


@dataclass(frozen=True)
class Shared(EngineState):
    """The state for the parts that act on messages."""

    moving: Moving
    changes: Changes
    queue: FairQueue[WaitingRequest]  # requests that wait for room
    notes: deque[Callable[[], object]]
    """Deferred bookkeeping, done once workers have their commands."""
    journal: ReplyStore | None = None  # None: requests end with this coordinator

    def size(self, claims: Iterable[Submit]) -> int:
        """Return roughly the bytes of memory that requests and replies take. `claims`: requests
        that wait for a target and are not in the journal."""
        running, clients = [*self.running.values()], self.registry.clients.values()
        workers = self.registry.workers.values()
        apart = [one.session for one in running if not one.delivery.ticket]
        late = chain.from_iterable(chain(*(one.turns.postponed.values() for one in workers)))
        return (
            (self.journal.size if self.journal is not None else 0)
            + sum(TOKEN_BYTES * one.length + scores_size(one.logprobs) for one in apart)
            + sum(one.session.held_bytes for one in running)
            + sum(map(size_of, chain(claims, (one.submit for one in self.queue))))
            + sum(one.outbox.bytes + one.reading_bytes for one in clients)
            + sum(PACKED_BYTES * one.shelf.tokens for one in workers)
            + sum(INDEXED_BYTES * len(one.blocks) for one in workers)
            + sum(len(one.features.data) for one in late if isinstance(one, Feed))
        )

    def keep_books(self) -> None:
        """Do the deferred bookkeeping; errors are logged."""
        while self.notes:
            aside(lambda: [self.notes.popleft()() for _ in range(len(self.notes))])
