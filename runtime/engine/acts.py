"""The actions on sessions, workers and clients for the deciding parts of a coordinator. Each is a
method of another part. The parts need each other, so they are bound here once all exist."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.protocol.errors import RequestError
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import Message
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.running import Census, RunningRequest
from dovetail.runtime.fleet.draft_failures import FailingDrafts
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.registry import Registry, ServiceState
from dovetail.runtime.session.actions import Action
from dovetail.runtime.session.lookup_memory import LookupMemory
from dovetail.runtime.session.request import Request
from dovetail.runtime.telemetry.event_log import EventLog
from dovetail.runtime.telemetry.metrics import Dropped, Tally

Outcome = Request | RequestError  # a request in tokens, or the reason why it cannot be served


class Acts:
    """Bound by the coordinator."""

    # of a session
    start: Callable[[RunningRequest], None]
    perform: Callable[[RunningRequest, Sequence[Action]], None]
    cancel: Callable[[RunningRequest], None]  # end it with the tokens so far
    drop: Callable[[RunningRequest], None]  # end it without a reply
    fail: Callable[[RunningRequest, RequestError], None]
    broken: Callable[[RunningRequest, BaseException], None]
    """End it because of a fault of the coordinator."""
    forget_on: Callable[[Worker, RunningRequest], None]
    """Close it on a worker, if the worker is still registered."""

    # of a worker
    send: Callable[[Worker, Message], object]  # send a message that needs no answer
    free: Callable[[Worker], None]  # send its next command, after its answer to the last one
    join: Callable[[Worker], None]  # let it serve sessions from now on
    let_go: Callable[[Worker], None]  # dismiss it; sessions that it still holds continue without it
    lose: Callable[[Worker, str], None]  # treat it as lost although it is connected
    unreachable: Callable[[Worker], None]  # give it up, because nothing can be sent to it

    # of a client
    reply: Callable[[ClientPeer, Message], None]
    unanswered: Callable[[ClientPeer, int | None, BaseException], None]
    """Report that its request failed because of a fault of the coordinator."""
    encode_failed: Callable[[ClientPeer, int | None, BaseException], None]
    """Fail its request after a message that could not be encoded; None: not about a request."""
    client_lost: Callable[[ClientPeer], None]
    client_not_reading: Callable[[ClientPeer], None]  # disconnect it, since it does not read
    defer: Callable[[Callable[[], Outcome], Callable[[Outcome], None]], None]
    """Read a request in another thread, and continue with the outcome."""

    decide: Callable[[str], None]  # log a decision, and keep it for `status`


@dataclass(frozen=True)
class EngineState:
    """Values that the parts of a coordinator read; only the owner of a value changes it."""

    hub: Hub
    acts: Acts
    settings: CoordinatorSettings
    service: ServiceState
    running: dict[int, RunningRequest]  # the sessions by their numbers, including trials
    census: Census
    registry: Registry
    placement: Placement
    failing: FailingDrafts
    observing: EventLog
    tally: Tally
    dropped: Dropped
    now_ns: Callable[[], int]
    memory: LookupMemory | None  # earlier texts; None: they are not kept

    @property
    def epoch(self) -> int:
        """The incarnation of the coordinator."""
        return self.service.epoch
