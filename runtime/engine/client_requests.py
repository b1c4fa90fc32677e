"""What clients ask: requests that become sessions, questions about what is here, changes of
workers.

A prompt is read elsewhere, since a long one takes its time; its session begins when it has been.
Knows who may ask what; what becomes of a session is the coordinator's business.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.keys import OPERATOR, PeerKey
from dovetail.protocol.messages import (
    Cancel,
    Describe,
    Described,
    Dismiss,
    Failed,
    Hello,
    Look,
    Message,
    Reported,
    Seen,
    Status,
    Stop,
    Submit,
    Swap,
)
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.runtime.engine.effects import Effects
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.requests import attempt
from dovetail.runtime.engine.running import Live, waits
from dovetail.runtime.engine.session import Request
from dovetail.runtime.fleet.moving import Moving
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.registry import ClientPeer, Registry, Worker
from dovetail.runtime.fleet.replacement import Changes
from dovetail.runtime.telemetry.event_log import Observing
from dovetail.runtime.telemetry.metrics import Tally

log = logging.getLogger("dovetail.coordinator")

NO_TARGET = "no target worker is registered: start one with `dovetail worker --role target`"
MAX_READING = 1024
"""Prompts of a client that wait to be read: each is held in memory until it has been."""


class House(Protocol):
    """What the coordinator does for those who ask."""

    epoch: int
    ending: bool

    @property
    def given_up(self) -> str:
        """Why it is ending, where that is for good; else empty."""

    @property
    def lives(self) -> Collection[Live]:
        """All sessions."""

    def user(self, client: ClientPeer) -> PeerKey | None:
        """The key that a client has shown; None over ipc."""

    def defer(
        self,
        work: Callable[[], Request | RequestError],
        done: Callable[[Request | RequestError], None],
    ) -> None:
        """Do what takes long elsewhere, and what follows here."""

    def start(self, live: Live) -> None:
        """A session begins."""

    def attempt(self, live: Live, action: Callable[[], object]) -> None:
        """Do something about one session; whatever goes wrong ends it."""

    def carry_out(self, effects: Effects[None]) -> None:
        """Carry out what is to be done about sessions."""

    def unanswered(self, client: ClientPeer, request: int | None, error: BaseException) -> None:
        """What a client asks for could not be done, for our own fault."""

    def cancel(self, live: Live) -> None:
        """A session ends as far as it has come."""

    def part(self) -> None:
        """Have the sessions of workers that have gone do without them."""

    def observe(self) -> None:
        """Have the workers record what is looked for."""

    def report(self) -> Reported:
        """The answer to Status."""

    def tell(self, client: ClientPeer, message: Message) -> None:
        """Send to a client."""


class Intake:
    """Takes the requests of clients."""

    def __init__(
        self,
        house: House,
        live: Mapping[int, Live],
        registry: Registry,
        placement: Placement,
        moving: Moving,
        changes: Changes,
        observing: Observing,
        tally: Tally,
    ) -> None:
        """`live`: the sessions by their numbers."""
        self._house, self._live, self._registry, self._placement = house, live, registry, placement
        self._moving, self._changes, self._observing, self._tally = (
            moving,
            changes,
            observing,
            tally,
        )

    def take(self, client: ClientPeer, request: ClientRequest, now_ns: int) -> None:
        """Handle a request; `StaleError` where it is another incarnation's."""
        if request.epoch != client.hello.epoch:
            raise StaleError("a request of another incarnation of a client")
        match request:
            case Submit():
                self._submit(client, request, now_ns)
            case Cancel():
                if (number := client.sessions.get(request.request)) is not None:
                    self._house.cancel(self._live[number])
                elif request.request in client.reading:
                    client.reading[request.request] = False
            case Status():
                self._house.tell(client, self._house.report())
            case Describe():
                self._house.tell(client, self._describe())
            case Look():
                self._house.tell(client, self._look(client, request))
            case Swap() | Dismiss():
                self._change(client, request, now_ns)
            case Stop() if self._house.user(client) is None:
                self._house.ending = True
            case Stop():
                text = (
                    "only a client on the coordinator's own machine may stop it: connect to "
                    "its ipc address"
                )
                self._house.tell(client, refusal(self._house.epoch, RequestError("role", text)))
            case Hello():
                raise StaleError("a client said Hello again")

    def _look(self, client: ClientPeer, request: Look) -> Seen:
        """The answer to Look: over ipc, and to an operator, the tokens of all requests, else those
        of the client's own."""
        key = self._house.user(client)
        own = None if key is None or OPERATOR in key.roles else set(client.sessions.values())
        seen = self._observing.look(
            request,
            self._house.epoch,
            self._registry.workers.values(),
            lambda worker: waits(worker, self._house.lives),
            own=own,
        )
        self._house.observe()
        return seen

    def _change(self, client: ClientPeer, request: Swap | Dismiss, now_ns: int) -> None:
        """Have a worker come or go, if that is possible. Over ipc whoever is let in is the owner;
        over tcp the key says who may."""
        key = self._house.user(client)
        try:
            if key is not None and OPERATOR not in key.roles:
                text = (
                    f"the key {key.name!r} is none of an operator's: only theirs change "
                    "workers (`dovetail keygen --name NAME --role operator`)"
                )
                raise RequestError("role", text)
            if self._house.ending:
                raise self._ending()
            if isinstance(request, Swap):
                self._changes.swap(client, request, now_ns)
            else:
                self._changes.dismiss(client, request, now_ns)
        except RequestError as error:
            self._house.tell(client, refusal(self._house.epoch, error, request.request))

    def _target(self) -> Worker | RequestError:
        """The target that a request would be decoded with."""
        target = self._placement.reader()
        if self._house.ending or target is None:
            return self._ending() if self._house.ending else RequestError("no_target", NO_TARGET)
        return target

    def _ending(self) -> RequestError:
        """Nothing begins any more."""
        why = self._house.given_up
        return RequestError(
            "ending", f"the service is ending: {why}" if why else "the coordinator is ending"
        )

    def _describe(self) -> Described | Failed:
        """The answer to Describe."""
        target = self._target()
        if isinstance(target, RequestError):
            return refusal(self._house.epoch, target)
        assert target.hello.tokenizer is not None
        return Described(
            epoch=self._house.epoch,
            model=target.model,
            fingerprint=str(target.hello.fingerprint),
            limits=target.limits,
            vocabulary=target.facts,
            tokenizer=target.hello.tokenizer,
        )

    def _submit(self, client: ClientPeer, submit: Submit, now_ns: int) -> None:
        """Read the prompt, elsewhere: a long one takes its time."""
        target = self._target()
        if isinstance(target, RequestError):
            self._turn_down(client, submit, target)
        elif len(client.reading) >= MAX_READING:
            text = (
                f"the prompts of {MAX_READING} requests of this client are being read, as "
                "many as may be: try again when some have been"
            )
            self._turn_down(client, submit, RequestError("capacity", text))
        elif submit.request in client.sessions or submit.request in client.reading:
            self._turn_down(
                client, submit, RequestError("protocol", f"request {submit.request} runs already")
            )
        else:
            client.reading[submit.request] = True
            key = self._house.user(client)
            owner = "" if key is None else key.public
            self._house.defer(
                lambda: attempt(submit, target, owner),
                lambda outcome: self._begin(client, submit, target, outcome, now_ns),
            )

    def _begin(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request | RequestError,
        now_ns: int,
    ) -> None:
        """Start the session of a request that has been read, unless client or target have gone
        meanwhile."""
        if self._registry.clients.get(client.peer) is not client:
            return
        try:
            self._start(client, submit, target, request, now_ns)
        except BaseException as error:
            reraise_exits(error)
            log.exception(
                "request %d of client %s could not begin", submit.request, client.hello.name
            )
            self._house.unanswered(client, submit.request, error)
        self._house.part()

    def _start(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request | RequestError,
        now_ns: int,
    ) -> None:
        wanted = client.reading.pop(submit.request)
        settled = (
            request
            if isinstance(request, RequestError)
            else self._placement.settle(target, request)
        )
        if isinstance(request, RequestError) or isinstance(settled, RequestError):
            assert isinstance(settled, RequestError)
            self._turn_down(client, submit, settled)
            return
        live = self._placement.house(client, submit, settled, request, self._tally, now_ns)
        client.sessions[submit.request] = live.session.number
        self._house.start(live)
        if settled.peer not in self._registry.workers:
            self._house.attempt(
                live, lambda: self._house.carry_out(self._moving.lose_target(live, "disconnected"))
            )
        if not wanted:
            self._house.cancel(live)

    def _turn_down(self, client: ClientPeer, submit: Submit, error: RequestError) -> None:
        if error.code == "internal":
            self._tally.ended["error"] += 1
        else:
            self._tally.refused += 1
        self._house.tell(client, refusal(self._house.epoch, error, submit.request))


def refusal(epoch: int, error: RequestError, request: int | None = None) -> Failed:
    """What a client is told of a request, or a peer of itself, that is turned down."""
    return Failed.model_validate(
        {"epoch": epoch, "session": request, "code": error.code, "text": str(error)[:4096]}
    )
