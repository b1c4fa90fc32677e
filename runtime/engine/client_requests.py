"""Handles clients' requests: prompts, queries, and changes of workers. A prompt is tokenized in
another thread, since a long one takes time; its session begins afterwards. Checks the permissions
of clients."""

import logging
from collections.abc import Callable, Iterable
from functools import partial

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.keys import OPERATOR, PeerKey
from dovetail.protocol.messages import (
    Cancel,
    Describe,
    Described,
    Dismiss,
    Failed,
    Forget,
    Forgotten,
    Hello,
    Look,
    Message,
    Observe,
    Recall,
    Reported,
    Status,
    Stop,
    Submit,
    Swap,
)
from dovetail.protocol.messages import Request as ClientRequest
from dovetail.protocol.settings import byte_count
from dovetail.runtime.engine.claims import Claim, Claims
from dovetail.runtime.engine.faults import refusal, reraise_exits
from dovetail.runtime.engine.requests import attempt
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.engine.starting import LATER, TAKEN, Starting, given_up
from dovetail.runtime.engine.stored import StoredReply
from dovetail.runtime.fleet.outbox import size_of
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.registry import Registry
from dovetail.runtime.session.request import Request
from dovetail.runtime.session.state import State
from dovetail.runtime.telemetry.event_log import EventLog, Waits

log = logging.getLogger("dovetail.coordinator")

NO_TARGET = "no target worker is registered: start one with `dovetail worker --role target`"
SLACK = 16  # an additional 1/16 of the limit is freed, so that not every request has to free some


class ClientRequests:
    """Takes the requests of clients."""

    def __init__(
        self, shared: Shared, claims: Claims, starting: Starting, report: Callable[[], Reported]
    ) -> None:
        """`report`: the answer to Status."""
        self._shared, self._most_bytes = shared, byte_count(shared.settings.memory)
        self._sharing = shared.settings.share_prefixes if shared.settings.reuse else "off"
        self._hub, self._service, self._running = shared.hub, shared.service, shared.running
        self._registry, self._placement = shared.registry, shared.placement
        self._changes, self._observing = shared.changes, shared.observing
        self._report, self._claims, self._starting = report, claims, starting
        self._acts, self._memory = shared.acts, shared.memory

    def _user(self, client: ClientPeer) -> PeerKey | None:
        """Return a client's key; None over ipc."""
        return self._hub.user(client.peer)

    def take(self, client: ClientPeer, request: ClientRequest, now_ns: int) -> None:
        """Handle a request; raise `StaleError` if it is from another incarnation."""
        if request.epoch != client.hello.epoch:
            raise StaleError("a request from another incarnation of a client")
        match request:
            case Submit():
                self._asked(client, request, now_ns)
            case Recall():
                self._recall(client, request)
            case Forget():
                owner = f"{self._starting.key(client)}/{request.owner}"
                found = self._memory is not None and self._memory.forget(owner)
                epoch = self._service.epoch
                self._acts.reply(
                    client, Forgotten(epoch=epoch, request=request.request, found=found)
                )
            case Cancel():
                if (number := client.sessions.get(request.request)) is not None:
                    self._acts.cancel(self._running[number])
                elif request.request in client.reading:
                    client.reading[request.request] = False
                else:
                    self._give_up(client, request.request)
            case Status():
                self._acts.reply(client, self._report())
            case Describe():
                self._acts.reply(client, self._describe())
            case Look():
                self._look(client, request)
            case Swap() | Dismiss():
                self._change(client, request, now_ns)
            case Stop() if self._user(client) is None:
                self._service.ending = True
            case Stop():
                text = (
                    "only a client on the coordinator's own machine may stop it: connect to "
                    "its ipc address"
                )
                self._acts.reply(client, refusal(self._service.epoch, RequestError("role", text)))
            case Hello():
                raise StaleError("a client sent Hello twice")

    def _look(self, client: ClientPeer, request: Look) -> None:
        """Answer a Look: over ipc and for operators with all tokens, else with the client's."""
        key = self._user(client)
        own = None if key is None or OPERATOR in key.roles else set(client.sessions.values())
        seen = self._observing.look(
            request,
            self._service.epoch,
            self._registry.workers.values(),
            lambda worker: waits(worker, self._running.values()),
            own=own,
        )
        observe(self._observing, self._registry, self._service.epoch, self._acts.send)
        self._acts.reply(client, seen)

    def _change(self, client: ClientPeer, request: Swap | Dismiss, now_ns: int) -> None:
        """Replace or drain a worker, if possible. Over ipc every client is the owner; over tcp the
        key must allow it."""
        key = self._user(client)
        try:
            if key is not None and OPERATOR not in key.roles:
                text = (
                    f"swapping and draining need an operator key, but {key.name!r} is not one: "
                    "create one with `dovetail keygen --name NAME --role operator`"
                )
                raise RequestError("role", text)
            if self._service.ending:
                raise self._service.refusal()
            if isinstance(request, Swap):
                self._changes.swap(client, request, now_ns)
            else:
                self._changes.dismiss(client, request, now_ns)
        except RequestError as error:
            self._acts.reply(client, refusal(self._service.epoch, error, request.request))

    def _target(self) -> Worker | RequestError:
        """Return the target that would serve a request."""
        target = self._placement.reader()
        if self._service.ending or target is None:
            return (
                self._service.refusal()
                if self._service.ending
                else RequestError("no_target", NO_TARGET)
            )
        return target

    def _describe(self) -> Described | Failed:
        """Return the answer to Describe."""
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
            table=target.hello.table,
            grammars=target.hello.grammars,
        )

    def _give_up(self, client: ClientPeer, number: int) -> None:
        """Refuse a waiting request that its client has cancelled."""
        for submit in self._claims.give_up(client, number):
            self._starting.turn_down(client, submit, given_up())

    def _recall(self, client: ClientPeer, request: Recall) -> None:
        try:
            self._acts.reply(client, self._claims.recall(request, self._starting.key(client)))
        except RequestError as error:
            self._acts.reply(client, refusal(self._service.epoch, error))

    def _asked(self, client: ClientPeer, submit: Submit, now_ns: int) -> None:
        """Accept a request. A reply with a known ticket continues."""
        try:
            entry = self._claims.known(submit, self._starting.key(client))
        except RequestError as error:  # of a running reply, perhaps another client's
            self._acts.reply(client, refusal(self._service.epoch, error, submit.request))
            return
        if entry is not None:
            self._claimed(client, submit, entry)
        elif (over := self.relieve(size_of(submit))) > 0:
            text = (
                f"this request exceeds coordinator.memory ({self._most_bytes} bytes for requests "
                f"and replies) by {over} bytes; {LATER}"
            )
            self._starting.turn_down(client, submit, RequestError("capacity", text))
        elif self._service.ending or not self._needs_target(submit):
            self._submit(client, submit, self._target(), now_ns)
        else:
            self._wait(client, submit, None)

    def _needs_target(self, submit: Submit) -> bool:
        """Return whether a request that is not in the journal waits for a target: for one that
        computes the client's tokens identically, or, if it was resubmitted, for any."""
        return bool(submit.told.tokens) or (submit.again and self._placement.reader() is None)

    def _wait(self, client: ClientPeer, submit: Submit, entry: StoredReply | None) -> None:
        """Queue a reply for a target, ending earlier claims to it."""
        for claim in self._claims.wait(client, submit, entry):
            self._acts.reply(
                claim.client, refusal(self._service.epoch, TAKEN, claim.submit.request)
            )

    def _claimed(self, client: ClientPeer, submit: Submit, entry: StoredReply) -> None:
        """Send a client the missing part of a reply, and the rest as it is decoded."""
        if entry.finished is not None and self._claims.begun(submit.told, entry):
            for message in self._claims.ended(submit, entry):
                self._acts.reply(client, message)
            return
        if self._starting.take_over(client, submit, entry):
            return
        own = ("epoch", "request", "told", "trace", "again")
        again = {name: getattr(submit, name) for name in own}
        self._wait(client, entry.submit.model_copy(update=again), entry)

    def claim(self) -> None:
        """Start the waiting requests for which there is a target now."""
        clients = self._registry.clients
        self._claims.withdraw(lambda claim: clients.get(claim.client.peer) is not claim.client)
        if not self._service.ending:
            for claim, target in self._claims.met():
                self._read(claim, target)
        for claim, error in self._claims.late(self._service):
            self._read(claim, error)

    def _read(self, claim: Claim, target: Worker | RequestError) -> None:
        """Read a request that has waited for a target; it no longer waits, so an internal error
        ends it."""
        client, submit = claim.client, claim.submit
        try:
            self._submit(client, submit, target, claim.since_ns, claim.entry)
        except BaseException as error:
            reraise_exits(error)
            log.exception(
                "request %d of client %s could not be read", submit.request, client.hello.name
            )
            self._acts.unanswered(client, submit.request, error)

    def _submit(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker | RequestError,
        now_ns: int,
        entry: StoredReply | None = None,
    ) -> None:
        """Read the prompt in another thread: a long one takes time."""
        if isinstance(target, RequestError):
            self._starting.turn_down(client, submit, target)
        elif self._claims.is_open(client, submit.request):
            self._starting.turn_down(
                client,
                submit,
                RequestError("protocol", f"request {submit.request} is already running"),
            )
        else:
            client.reading[submit.request], size = True, size_of(submit)
            client.reading_bytes += size

            def begin(outcome: Request | RequestError) -> None:
                client.reading_bytes -= size
                self._starting.begin(client, submit, target, outcome, now_ns, entry)

            key, sharing = self._starting.key(client), self._sharing
            self._acts.defer(partial(attempt, submit, target, key, sharing), begin)

    def relieve(self, more: int = 0) -> int:
        """Drop finished replies from the journal until the rest and `more` bytes fit into the
        limit; return the bytes still over it."""
        shared = self._shared
        claims = (claim.submit for claim in self._claims if claim.entry is None)
        over = shared.size(claims) + more - self._most_bytes
        if over > 0 and shared.journal is not None:
            before = shared.journal.size
            shared.journal.give_up(over + self._most_bytes // SLACK)
            over -= before - shared.journal.size
        return over


def observe(
    observing: EventLog, registry: Registry, epoch: int, send: Callable[[Worker, Message], object]
) -> None:
    """Make the workers record the requested spans."""
    for worker, fine in observing.orders(registry.workers.values()):
        send(worker, Observe(epoch=epoch, fine=fine))


def waits(worker: Worker, requests: Iterable[RunningRequest]) -> Waits:
    """Return what a worker waits for: nothing while it owes an answer; else what its sessions wait
    for."""
    if worker.turns.owed:
        return ""
    states = {one.session.state for one in requests if worker in one.workers}
    if states & {State.VERIFYING, State.OPENING, State.WAITING}:
        return "target"
    if State.DRAFTING in states:
        return "draft"
    return "coordinator" if states else "no work"
