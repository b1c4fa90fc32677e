"""Requests of clients: prompts that become sessions, questions about what is here, changes of
workers.

A prompt is read elsewhere, since a long one takes its time; its session begins when it has been.
Knows who may ask what; what becomes of a session is the coordinator's business.
"""

import logging
from collections.abc import Callable
from functools import partial

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
    Observe,
    Reported,
    Status,
    Stop,
    Submit,
    Swap,
)
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.runtime.engine import effects
from dovetail.runtime.engine.census import waits
from dovetail.runtime.engine.effects import Defer, Effects, End, Send, Start, Tell, Unanswered
from dovetail.runtime.engine.faults import reraise_exits
from dovetail.runtime.engine.requests import attempt
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared, WaitingRequest
from dovetail.runtime.fleet.beginnings import comes_later
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.registry import Registry
from dovetail.runtime.fleet.room import has_room, tokens_of
from dovetail.runtime.session.request import Request
from dovetail.runtime.telemetry.event_log import EventLog

log = logging.getLogger("dovetail.coordinator")

NO_TARGET = "no target worker is registered: start one with `dovetail worker --role target`"
LATER = "try again later"
MAX_READING = 1024
"""Prompts of a client that wait to be read: each is held in memory until it has been."""


class ClientRequests:
    """Takes the requests of clients."""

    def __init__(
        self,
        shared: Shared,
        report: Callable[[], Reported],
    ) -> None:
        """`report`: the answer to Status."""
        self._hub, self._service, self._running = shared.hub, shared.service, shared.running
        self._registry, self._placement = shared.registry, shared.placement
        self._moving, self._changes, self._tally = shared.moving, shared.changes, shared.tally
        self._observing, self._report = shared.observing, report
        self._queue, self._now_ns = shared.queue, shared.now_ns
        self._key_sessions, self._reuse = shared.settings.key_sessions, shared.settings.reuse
        self._short = False
        """True if a request of the queue waited for room when they were last looked through."""

    def _user(self, client: ClientPeer) -> PeerKey | None:
        """Return the key that a client has shown; None over ipc."""
        return self._hub.user(client.peer)

    def take(self, client: ClientPeer, request: ClientRequest, now_ns: int) -> Effects[None]:
        """Handle a request; `StaleError` where it is another incarnation's."""
        if request.epoch != client.hello.epoch:
            raise StaleError("a request from another incarnation of a client")
        match request:
            case Submit():
                yield from self._submit(client, request, now_ns)
            case Cancel():
                if (number := client.sessions.get(request.request)) is not None:
                    yield effects.Cancel(self._running[number])
                elif request.request in client.reading:
                    client.reading[request.request] = False
                else:
                    number = request.request
                    for one in self._queue.remove(lambda one: one.is_of(client, number)):
                        yield self._turn_down(client, one.submit, given_up())
            case Status():
                yield Tell(client, self._report())
            case Describe():
                yield Tell(client, self._describe())
            case Look():
                yield from self._look(client, request)
            case Swap() | Dismiss():
                yield from self._change(client, request, now_ns)
            case Stop() if self._user(client) is None:
                yield End()
            case Stop():
                text = (
                    "only a client on the coordinator's own machine may stop it: connect to "
                    "its ipc address"
                )
                yield Tell(client, refusal(self._service.epoch, RequestError("role", text)))
            case Hello():
                raise StaleError("a client sent Hello twice")

    def _look(self, client: ClientPeer, request: Look) -> Effects[None]:
        """Answer a Look: over ipc, and to an operator, with the tokens of all requests, else with
        those of the client's own."""
        key = self._user(client)
        own = None if key is None or OPERATOR in key.roles else set(client.sessions.values())
        seen = self._observing.look(
            request,
            self._service.epoch,
            self._registry.workers.values(),
            lambda worker: waits(worker, self._running.values()),
            own=own,
        )
        yield from observe(self._observing, self._registry, self._service.epoch)
        yield Tell(client, seen)

    def _change(self, client: ClientPeer, request: Swap | Dismiss, now_ns: int) -> Effects[None]:
        """Have a worker come or go, if that is possible. Over ipc whoever is let in is the owner;
        over tcp the key says who may."""
        key = self._user(client)
        try:
            if key is not None and OPERATOR not in key.roles:
                text = (
                    f"the key {key.name!r} is not an operator's: only operators change workers "
                    "(`dovetail keygen --name NAME --role operator`)"
                )
                raise RequestError("role", text)
            if self._service.ending:
                raise self._ending()
            if isinstance(request, Swap):
                yield from self._changes.swap(client, request, now_ns)
            else:
                yield from self._changes.dismiss(client, request, now_ns)
        except RequestError as error:
            yield Tell(client, refusal(self._service.epoch, error, request.request))

    def _target(self) -> Worker | RequestError:
        """The target that a request would be decoded with."""
        target = self._placement.reader()
        if self._service.ending or target is None:
            return self._ending() if self._service.ending else RequestError("no_target", NO_TARGET)
        return target

    def _ending(self) -> RequestError:
        """Nothing begins any more."""
        why = self._service.given_up
        return RequestError(
            "ending", f"the service is ending: {why}" if why else "the coordinator is ending"
        )

    def _describe(self) -> Described | Failed:
        """The answer to Describe."""
        target = self._target()
        if isinstance(target, RequestError):
            return refusal(self._service.epoch, target)
        assert target.hello.tokenizer is not None
        return Described(
            epoch=self._service.epoch,
            model=target.model,
            fingerprint=str(target.hello.fingerprint),
            limits=target.limits,
            vocabulary=target.facts,
            tokenizer=target.hello.tokenizer,
        )

    def _submit(self, client: ClientPeer, submit: Submit, now_ns: int) -> Effects[None]:
        """Read the prompt, elsewhere: a long one takes its time."""
        target = self._target()
        if isinstance(target, RequestError):
            yield self._turn_down(client, submit, target)
        elif len(client.reading) >= MAX_READING:
            text = (
                f"the prompts of {MAX_READING} requests of this client are already being read, "
                "which is the limit: try again when one is done"
            )
            yield self._turn_down(client, submit, RequestError("capacity", text))
        elif (
            submit.request in client.sessions
            or submit.request in client.reading
            or any(one.is_of(client, submit.request) for one in self._queue)
        ):
            yield self._turn_down(
                client,
                submit,
                RequestError("protocol", f"request {submit.request} is already running"),
            )
        else:
            client.reading[submit.request] = True
            key = self._user(client)
            owner = "" if key is None else key.public
            yield Defer(
                partial(attempt, submit, target, owner),
                lambda outcome: self._begin(client, submit, target, outcome, now_ns),
            )

    def _begin(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request | RequestError,
        now_ns: int,
    ) -> Effects[None]:
        """Start the session of a request that has been read, unless client or target have gone
        meanwhile."""
        if self._registry.clients.get(client.peer) is not client:
            return
        try:
            yield from self._start(client, submit, target, request, now_ns)
        except BaseException as error:
            reraise_exits(error)
            log.exception(
                "request %d of client %s could not begin", submit.request, client.hello.name
            )
            yield Unanswered(client, submit.request, error)

    def _start(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request | RequestError,
        now_ns: int,
    ) -> Effects[None]:
        wanted = client.reading.pop(submit.request)
        if isinstance(request, RequestError):
            yield self._turn_down(client, submit, request)
            return
        waiting = WaitingRequest(client, submit, target, request, now_ns)
        why = self._queue.full(request.owner)
        settled = self._settled(waiting) if self._passes_queue(full=bool(why)) else None
        if settled is not None and (why or not self._comes_later(request, settled)):
            yield from self._run(waiting, settled, wanted=wanted)
        elif not wanted:
            yield self._turn_down(client, submit, given_up())
        elif why:
            yield self._turn_down(
                client, submit, RequestError("capacity", f"the queue is full: {why}; {LATER}")
            )
        else:
            self._queue.add(request.owner, waiting, self._now_ns())

    def _run(
        self, waiting: WaitingRequest, target: Worker, *, wanted: bool = True, waited: bool = False
    ) -> Effects[None]:
        """Start the session of a request on a target that has room for it, which gives up as many
        kept sessions as it takes. `wanted`: the client has not cancelled the request; `waited`: the
        request was in the queue."""
        client, request = waiting.client, waiting.request
        running = self._placement.house(
            client, waiting.submit, target, request, self._tally, waiting.since_ns
        )
        running.queued = waited
        self._queue.given(request.owner, tokens_of(request), self._now_ns())
        yield from self._moving.make_room(request, target, running.session.target_base)
        client.sessions[waiting.submit.request] = running.session.number
        yield Start(running)
        if target.peer not in self._registry.workers:
            yield from self._moving.disconnect(running)
        if not wanted:
            yield effects.Cancel(running)

    def admit(self) -> Effects[None]:
        """Start as many requests of the queue as there is room for. Those of clients that have gone
        are dropped; while the service ends, all are refused."""
        clients = self._registry.clients
        left = self._queue.remove(lambda one: clients.get(one.client.peer) is not one.client)
        self._tally.ended["cancelled"] += len(left)
        if self._service.ending:
            for one in self._queue.remove(lambda _: True):
                yield self._turn_down(one.client, one.submit, self._ending())
        while (next_one := self._next()) is not None:
            try:
                yield from self._run(*next_one, waited=True)
            except BaseException as error:
                reraise_exits(error)
                log.exception("a request from the queue could not begin")
                yield Unanswered(next_one[0].client, next_one[0].submit.request, error)

    def _next(self) -> tuple[WaitingRequest, Worker] | None:
        """Take the next request from the queue, and return it with its target; None: none may
        begin."""
        places: dict[WaitingRequest, Worker] = {}
        self._short = False

        def fits(one: WaitingRequest) -> bool | None:
            if (place := self._settled(one)) is None:
                self._short = True
                return False
            places[one] = place
            return None if self._comes_later(one.request, place) else True

        one = self._queue.take(fits, self._held_by_keys(), self._now_ns())
        return None if one is None else (one, places[one])

    def _passes_queue(self, *, full: bool) -> bool:
        """Return whether a request may begin before those that wait: if there are none, or if they
        fill the queue and wait for their beginnings to be read, not for room."""
        return not len(self._queue) or (full and not self._short)

    def _settled(self, waiting: WaitingRequest) -> Worker | None:
        """Return the target that a request can begin on now; None: it has to wait."""
        request = waiting.request
        if self._key_sessions and self._key_sessions <= sum(
            one.session.request.owner == request.owner for one in self._of_clients()
        ):
            return None
        return self._placement.settle(
            waiting.target,
            request,
            lambda target: (
                not self._moving.awaits(target)
                and has_room(target, request, self._running, reuse=self._reuse)
            ),
        )

    def _comes_later(self, request: Request, target: Worker) -> bool:
        """Return whether a request waits until its target has read what it begins with for
        another."""
        return self._reuse and comes_later(request, target, self._running)

    def _held_by_keys(self) -> dict[str, int]:
        """Return how many tokens the sessions of each key may take in all."""
        held: dict[str, int] = {}
        for one in self._of_clients():
            request = one.session.request
            held[request.owner] = held.get(request.owner, 0) + tokens_of(request)
        return held

    def _of_clients(self) -> list[RunningRequest]:
        return [one for one in self._running.values() if not one.trial]

    def _turn_down(self, client: ClientPeer, submit: Submit, error: RequestError) -> Tell:
        """Count a request that does not begin, and return what its client is told."""
        match error.code:
            case "internal":
                self._tally.ended["error"] += 1
            case "cancelled":
                self._tally.ended["cancelled"] += 1
            case _:
                self._tally.refused += 1
        return Tell(client, refusal(self._service.epoch, error, submit.request))


def given_up() -> RequestError:
    return RequestError("cancelled", "the request was cancelled while it waited for room")


def observe(observing: EventLog, registry: Registry, epoch: int) -> Effects[None]:
    """Have the workers record what somebody looks for."""
    for worker, fine in observing.orders(registry.workers.values()):
        yield Send(worker, Observe(epoch=epoch, fine=fine))


def refusal(epoch: int, error: RequestError, request: int | None = None) -> Failed:
    """Return what a client is told of a request, or a peer of itself, that is turned down."""
    return Failed.model_validate(
        {"epoch": epoch, "session": request, "code": error.code, "text": str(error)[:4096]}
    )
