"""Starts the sessions of requests that have been read, or queues them for room on a target. The
queue is fair by API key. A request known from an earlier coordinator begins with the tokens
committed there."""

import logging

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Submit
from dovetail.protocol.messages.status import Lack
from dovetail.runtime.engine.claims import Claims
from dovetail.runtime.engine.faults import refusal, reraise_exits
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared, WaitingRequest
from dovetail.runtime.engine.stored import StoredReply
from dovetail.runtime.fleet.beginnings import comes_later, has_room, tokens_of
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.session.request import Request

log = logging.getLogger("dovetail.coordinator")

LATER = "try again later"
TAKEN = RequestError("ticket", "another client has taken over this reply")


class Starting:
    """Starts sessions as capacity allows."""

    def __init__(self, shared: Shared, claims: Claims) -> None:
        self._hub, self._service, self._running = shared.hub, shared.service, shared.running
        self._registry, self._placement = shared.registry, shared.placement
        self._moving, self._tally = shared.moving, shared.tally
        self._queue, self._now_ns = shared.queue, shared.now_ns
        self._key_sessions, self._reuse = shared.settings.key_sessions, shared.settings.reuse
        self._journal, self._claims, self._acts = shared.journal, claims, shared.acts
        self._short = False
        """True if a request of the queue waited for room at the last check."""

    def key(self, client: ClientPeer) -> str:
        """Return the public key of a client; empty over ipc."""
        user = self._hub.user(client.peer)
        return "" if user is None else user.public

    def begin(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request | RequestError,
        now_ns: int,
        entry: StoredReply | None,
    ) -> None:
        """Start the session of a request that was read, unless its client left or cancelled it."""
        if (
            self._registry.clients.get(client.peer) is not client
            or submit.request not in client.reading
        ):
            return
        try:
            self._start(client, submit, target, request, now_ns, entry)
        except BaseException as error:
            reraise_exits(error)
            log.exception(
                "request %d of client %s could not begin", submit.request, client.hello.name
            )
            self._acts.unanswered(client, submit.request, error)

    def _start(
        self,
        client: ClientPeer,
        submit: Submit,
        target: Worker,
        request: Request | RequestError,
        now_ns: int,
        entry: StoredReply | None,
    ) -> None:
        number = submit.request
        wanted = client.reading.pop(number)
        if isinstance(request, RequestError):
            self.turn_down(client, submit, request)
            return
        if self._claims.taken(submit.ticket):
            try:
                if not wanted:
                    raise given_up()
                entry = self._claims.known(submit, self.key(client))
            except RequestError as error:
                self._acts.reply(client, refusal(self._service.epoch, error, number))
                return
            if entry is not None and self.take_over(client, submit, entry):
                return
        begun = self._claims.begun(submit.told, entry)
        waiting = WaitingRequest(client, submit, target, request, now_ns, entry, begun)
        why = "" if entry is not None else self._queue.full(request.owner)
        settled = self._settled(waiting) if self._passes_queue(full=bool(why)) else None
        if settled is not None and (why or not self._comes_later(request, settled)):
            self._run(waiting, settled, wanted=wanted)
        elif not wanted:
            self.turn_down(client, submit, given_up())
        elif why:
            self.turn_down(
                client, submit, RequestError("capacity", f"the queue is full: {why}; {LATER}")
            )
        else:
            self._accept(waiting)
            self._queue.add(request.owner, waiting, self._now_ns())

    def _accept(self, waiting: WaitingRequest) -> None:
        """Write an accepted request to the journal."""
        if self._journal is not None and waiting.submit.ticket:
            digest, key = waiting.target.facts.digest, self.key(waiting.client)
            self._journal.accept(waiting.submit, waiting.request, key, digest, begun=waiting.begun)

    def _run(
        self, waiting: WaitingRequest, target: Worker, *, wanted: bool = True, waited: bool = False
    ) -> None:
        """Start the session of a request on a target with room for it, which drops as many kept
        sessions as necessary. `wanted`: the client has not cancelled the request; `waited`: the
        request was in the queue."""
        client, request = waiting.client, waiting.request
        running = self._placement.house(
            client, waiting.submit, target, request, self._tally, waiting.since_ns, waiting.begun
        )
        running.queued = waited
        try:
            self._deliver(running, waiting)
            self._queue.given(request.owner, tokens_of(request), self._now_ns())
            self._moving.make_room(request, target, running.session.target_base)
            client.sessions[waiting.submit.request] = running.session.number
            self._acts.start(running)
        except BaseException:
            give_back(running)
            raise
        if target.peer not in self._registry.workers:
            self._moving.disconnect(running)
        if not wanted:
            self._acts.cancel(running)

    def _deliver(self, running: RunningRequest, waiting: WaitingRequest) -> None:
        """Record a session in the journal, and send its client the tokens of an earlier one."""
        submit, session = waiting.submit, running.session
        session.told_scores(submit.told.scores)
        running.delivery.ahead = self._claims.ahead(submit, session)
        if self._journal is None or not submit.ticket:
            return
        self._accept(waiting)
        running.delivery.ticket = submit.ticket
        hello, tokens = running.target.hello, len(session.tokens)
        fingerprint = str(hello.fingerprint)
        self._journal.serves(
            submit.ticket, session.number, fingerprint, hello.load_s, tokens=tokens
        )
        if waiting.begun is not None:
            for missed in self._claims.missed(submit, waiting.begun, session):
                self._acts.reply(waiting.client, missed)

    def take_over(self, client: ClientPeer, submit: Submit, entry: StoredReply) -> bool:
        """Take a reply over from another client; return whether it is running and continues with
        this one."""
        for one in self._queue.remove(lambda one: one.submit.ticket == submit.ticket):
            self._acts.reply(one.client, refusal(self._service.epoch, TAKEN, one.submit.request))
        if (running := self._claims.running(submit.ticket)) is None:
            return False
        self._acts.reply(running.client, refusal(self._service.epoch, TAKEN, running.request))
        if self._claims.unscored(submit.told, entry):
            self._tally.ended["cancelled"] += 1
            self._acts.drop(running)
            return False
        self._claims.hand_over(running, client, submit)
        for missed in self._claims.missed(submit, entry, running.session):
            self._acts.reply(client, missed)
        return True

    def admit(self) -> None:
        """Start as many queued requests as fit. Requests of clients that have gone are dropped;
        while the service ends, all are refused."""
        clients = self._registry.clients
        left = self._queue.remove(lambda one: clients.get(one.client.peer) is not one.client)
        self._tally.ended["cancelled"] += len(left)
        for one in left:
            self._claims.let_lie(one.submit)
        if self._service.ending:
            for one in self._queue.remove(lambda _: True):
                self.turn_down(one.client, one.submit, self._service.refusal())
        for one in self._queue.remove(self._lacks_target):
            self._claims.wait(one.client, one.submit, one.entry)
        while (next_one := self._next()) is not None:
            try:
                self._run(*next_one, waited=True)
            except BaseException as error:
                reraise_exits(error)
                log.exception("a request from the queue could not begin")
                self._acts.unanswered(next_one[0].client, next_one[0].submit.request, error)

    def _next(self) -> tuple[WaitingRequest, Worker] | None:
        """Take from the queue the next request that may begin, and choose its target."""
        places: dict[WaitingRequest, Worker] = {}
        self._short = False

        def fits(one: WaitingRequest) -> bool | None:
            if self._key_is_busy(one.request):
                return None
            if (place := self._settled(one)) is None:
                self._short = True
                return False
            places[one] = place
            return None if self._comes_later(one.request, place) else True

        one = self._queue.take(fits, self._held_by_keys(), self._now_ns())
        return None if one is None else (one, places[one])

    def _passes_queue(self, *, full: bool) -> bool:
        """Return whether a request may begin before the waiting ones: if there are none, or if the
        queue is full of requests that wait for something other than room, such as a prefix being
        prefilled or other requests of their keys."""
        return not len(self._queue) or (full and not self._short)

    def _settled(self, waiting: WaitingRequest) -> Worker | None:
        """Return the target that a request can begin on now; None: it has to wait."""
        request = waiting.request
        if self._key_is_busy(request):
            return None
        return self._placement.settle(
            waiting.target,
            request,
            lambda target: (
                not self._moving.awaits(target)
                and self._claims.suits(waiting.entry, waiting.submit.told, target)
                and has_room(target, request, self._running, reuse=self._reuse)
            ),
        )

    def _lacks_target(self, waiting: WaitingRequest) -> bool:
        """Return whether a request continues a reply that no present target may continue."""
        told, entry = waiting.submit.told, waiting.entry
        if not told.tokens and (entry is None or not entry.tokens):
            return False
        return not any(
            one.plays("target") and one.available and self._claims.suits(entry, told, one)
            for one in self._registry.workers.values()
        )

    def lacks(self, waiting: WaitingRequest) -> Lack:
        """Return what a request of the queue waits for."""
        if self._key_is_busy(waiting.request):
            return "key"
        return "room" if self._settled(waiting) is None else "beginning"

    def _key_is_busy(self, request: Request) -> bool:
        """Return whether the request's key has reached its limit of running requests."""
        own = sum(one.session.request.owner == request.owner for one in self._of_clients())
        return 0 < self._key_sessions <= own

    def _comes_later(self, request: Request, target: Worker) -> bool:
        """Return whether a request waits because its prefix is being prefilled for another."""
        return self._reuse and comes_later(request, target, self._running)

    def _held_by_keys(self) -> dict[str, int]:
        """Return the total tokens that the sessions of each key may use."""
        held: dict[str, int] = {}
        for one in self._of_clients():
            request = one.session.request
            held[request.owner] = held.get(request.owner, 0) + tokens_of(request)
        return held

    def _of_clients(self) -> list[RunningRequest]:
        return [one for one in self._running.values() if not one.trial]

    def turn_down(self, client: ClientPeer, submit: Submit, error: RequestError) -> None:
        """Count a request that does not begin, and send its client the reason."""
        self._claims.let_lie(submit)
        match error.code:
            case "internal":
                self._tally.ended["error"] += 1
            case "cancelled":
                self._tally.ended["cancelled"] += 1
            case _:
                self._tally.refused += 1
        self._acts.reply(client, refusal(self._service.epoch, error, submit.request))


def give_back(running: RunningRequest) -> None:
    """Return the bases of a session that does not begin to its workers' prefix caches."""
    for role, worker in (("target", running.target), ("draft", running.draft)):
        if worker is not None and (base := running.session.base(role)) is not None:
            worker.shelf.give_back(base)


def given_up() -> RequestError:
    return RequestError("cancelled", "the request was cancelled while it waited for room")
