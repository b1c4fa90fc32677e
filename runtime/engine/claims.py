"""Claims: a client resubmits the request of a reply in the journal and gets the missing part. An
ended reply is sent; a running one continues with the new client; any other is decoded after its
last token, on a target with the same fingerprint, as soon as there is one. Tokens that a client has
and the journal lacks are decoded again, but not sent twice: equal seeds give equal tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    NOTHING_TOLD,
    Emitted,
    HeldSession,
    Hello,
    Message,
    Recall,
    Recalled,
    Submit,
    Told,
)
from dovetail.runtime.engine.requests import scope_of
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.engine.shared import Shared
from dovetail.runtime.engine.stored import StoredReply
from dovetail.runtime.fleet.outbox import MAX_JOINED
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.registry import ServiceState
from dovetail.runtime.session.request import TOKEN_BYTES, Kept
from dovetail.runtime.session.session import Session

PATIENCE_S = 30.0
LOADS = 2.0  # seconds to wait for a target, plus this multiple of the last one's loading time


@dataclass(frozen=True)
class Claim:
    """A claimed reply for which there is no target yet."""

    client: ClientPeer
    submit: Submit
    entry: StoredReply | None
    since_ns: int

    def is_of(self, client: ClientPeer, request: int) -> bool:
        """Return whether this is the claim of the client's request of this number."""
        return self.client is client and self.submit.request == request


class Claims:
    """Replies that are resubmitted by their clients."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._journal, self._settings = shared.journal, shared.settings
        self._waiting: list[Claim] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._waiting)

    def known(self, submit: Submit, key: str) -> StoredReply | None:
        """Return the journal's entry for the reply of a Submit from a client with this key. Raises
        `RequestError` if the ticket belongs to another client, or the client's tokens cannot be
        decoded again."""
        if self._journal is None or not submit.ticket:
            return None
        entry = self._journal.find(submit.ticket, f"{key}/{submit.owner}")
        if entry is None and self._journal.holds(submit.ticket):
            raise RequestError(
                "ticket", "this ticket belongs to another client: choose a random one"
            )
        drawn = (submit if entry is None else entry.submit).sampling
        begun = 0 if entry is None or self.unscored(submit.told, entry) else len(entry.tokens)
        if drawn.rejects and begun < max(submit.told.tokens, len(entry.tokens) if entry else 0):
            raise RequestError(
                "coordinator_lost",
                "a part of this reply is not in the journal, and tokens by rejection sampling "
                "cannot be decoded again: send a new request",
            )
        return entry

    def recall(self, request: Recall, key: str) -> Message:
        """Return the answer to a Recall; raise `RequestError` if there is none."""
        found = self._journal and self._journal.find(request.ticket, f"{key}/{request.owner}")
        if not found:
            name = request.ticket.rpartition("/")[0] or request.ticket
            why = "this coordinator keeps no journal"
            if self._journal is not None:
                why = f"one is kept for {self._settings.journal_s:g} s after its end"
            text = f"no response {name[:80]!r} of this API key is known here: {why}"
            raise RequestError("ticket", text)
        epoch = self._shared.service.epoch
        return Recalled(epoch=epoch, request=request.request, memo=found.submit.memo)

    # -- replies that run, or have ended -----------------------------------------------------------

    def running(self, ticket: str) -> RunningRequest | None:
        """Return the session that decodes the reply of this ticket."""
        sessions = self._shared.running.values()
        return next((one for one in sessions if ticket and one.delivery.ticket == ticket), None)

    def taken(self, ticket: str) -> bool:
        """Return whether the reply of this ticket is running or waits for room."""
        queued = (one.submit.ticket for one in self._shared.queue)
        return bool(ticket) and (self.running(ticket) is not None or ticket in queued)

    def hand_over(self, running: RunningRequest, client: ClientPeer, submit: Submit) -> None:
        """Continue a session for another client."""
        running.client.sessions.pop(running.request, None)
        running.client, running.request = client, submit.request
        client.sessions[submit.request] = running.session.number
        running.delivery.ahead = self.ahead(submit, running.session)
        running.delivery.fingerprint = ""
        running.last_sent_ns = None

    def missed(
        self, submit: Submit, entry: StoredReply, session: Session | None
    ) -> Iterator[Emitted]:
        """Yield the committed part of a reply that its client lacks; `session`: the session that
        decodes it, None: it has ended."""
        told = submit.told
        assert session is not None or entry.finished is not None
        text = session.text if session is not None else entry.finished.result.text  # type: ignore[union-attr]
        begin, end, text = told.tokens, len(entry.tokens), text[told.characters :]
        while begin < end or text:
            piece = slice(begin, begin + MAX_JOINED)
            yield Emitted(
                epoch=self._shared.service.epoch,
                request=submit.request,
                tokens=tuple(entry.tokens[piece]),
                drafted=tuple(entry.drafted[piece]),
                text=text,
                logprobs=tuple(entry.logprobs[piece]),
                fingerprint=entry.fingerprint if told.tokens else "",
            )
            begin, text = begin + MAX_JOINED, ""

    def ended(self, submit: Submit, entry: StoredReply) -> Iterator[Message]:
        """Yield the messages for an ended reply."""
        assert entry.finished is not None
        yield from self.missed(submit, entry, None)
        fields = {"epoch": self._shared.service.epoch, "request": submit.request, "spans": ()}
        yield entry.finished.model_copy(update=fields)

    # -- replies that do not run -------------------------------------------------------------------

    def wait(self, client: ClientPeer, submit: Submit, entry: StoredReply | None) -> list[Claim]:
        """Queue a reply for a target, replacing earlier claims to it, which are returned."""
        before = self.withdraw(lambda claim: claim.submit.ticket == submit.ticket != "")
        self._waiting.append(Claim(client, submit, entry, self._shared.now_ns()))
        return before

    def withdraw(self, unwanted: Callable[[Claim], bool]) -> list[Claim]:
        """Withdraw claims, and return them."""
        gone = [claim for claim in self._waiting if unwanted(claim)]
        self._waiting = [claim for claim in self._waiting if not unwanted(claim)]
        return gone

    def met(self) -> Iterator[tuple[Claim, Worker]]:
        """Yield the claims that can begin, each with the target whose limits apply."""
        for claim in [*self._waiting]:
            targets = self._shared.registry.workers.values()
            fit = (one for one in targets if one.plays("target") and one.available)
            told = claim.submit.told
            target = next((one for one in fit if self.suits(claim.entry, told, one)), None)
            if target is not None:
                self._waiting.remove(claim)
                yield claim, target

    def late(self, service: ServiceState) -> Iterator[tuple[Claim, RequestError]]:
        """Yield the claims that have waited too long, with the reason; if the service is ending,
        all."""
        for claim in [*self._waiting]:
            if service.ending:
                self._waiting.remove(claim)
                yield claim, service.refusal()
                continue
            entry, waited_s = claim.entry, (self._shared.now_ns() - claim.since_ns) / 1e9
            load_s = 0.0 if entry is None else entry.load_s
            most_s = self._settings.recovery_s
            most_s = PATIENCE_S + LOADS * load_s if most_s == "auto" else most_s
            if waited_s < most_s:
                continue
            self._waiting.remove(claim)
            known = claim.submit.told.fingerprint or (entry.fingerprint if entry else "")
            begun = claim.submit.told.tokens or (entry is not None and entry.tokens)
            wanted = f" with {known or 'the (unknown) fingerprint of its tokens'}" if begun else ""
            text = f"no target{wanted} registered within {most_s:.3g} s of the coordinator's start"
            yield (
                claim,
                RequestError("worker_lost", f"{text}: start one and send the request again"),
            )

    def suits(self, entry: StoredReply | None, told: Told, target: Worker) -> bool:
        """Return whether a reply may continue on this target. If the reply has begun, the target
        must compute the same bytes, or `coordinator.move` must be any; if the client has more of it
        than the journal, the target must decode the same tokens again."""
        fingerprint = str(target.hello.fingerprint)
        journaled, served = (len(entry.tokens), entry.fingerprint) if entry else (0, "")
        if told.tokens > journaled and fingerprint != (told.fingerprint or served):
            return False
        if entry is None:
            return True
        if entry.submit.vocabulary != target.facts.digest:
            return False
        if not target.obeys(entry.submit.constraint):
            return False
        return (
            not entry.tokens
            or fingerprint == entry.fingerprint
            or (self._settings.move == "any" and not entry.depends_on_draft)
        )

    def begun(self, told: Told, entry: StoredReply | None) -> StoredReply | None:
        """Return the entry whose tokens a session begins with, if any."""
        if entry is None or not entry.tokens or self.unscored(told, entry):
            return None
        return entry

    def unscored(self, told: Told, entry: StoredReply) -> bool:
        """Return whether a client lacks scores of the prompt: computing them requires prefilling
        it."""
        return entry.submit.scored and told.scores + 1 < len(entry.submit.tokens or ())

    def ahead(self, submit: Submit, session: Session) -> Told:
        """Return the tokens that a session will commit and the client already has."""
        told = submit.told
        tokens = max(0, told.tokens - len(session.tokens))
        characters = max(0, told.characters - len(session.text))
        return Told(tokens=tokens, characters=characters) if tokens or characters else NOTHING_TOLD

    # -- requests by their numbers -----------------------------------------------------------------

    def is_open(self, client: ClientPeer, number: int) -> bool:
        """Return whether a client's request of this number is running, being read or waiting."""
        return (
            number in client.sessions
            or number in client.reading
            or any(one.is_of(client, number) for one in self._shared.queue)
            or any(one.is_of(client, number) for one in self._waiting)
        )

    def give_up(self, client: ClientPeer, number: int) -> list[Submit]:
        """Withdraw a client's request of this number that waits for room or for a target; return it
        if there was one."""
        queued = self._shared.queue.remove(lambda one: one.is_of(client, number))
        claims = self.withdraw(lambda claim: claim.is_of(client, number))
        return [*(one.submit for one in queued), *(one.submit for one in claims)]

    def let_lie(self, submit: Submit) -> None:
        """Record in the journal that a request is no longer running."""
        if self._journal is not None and submit.ticket:
            self._journal.left(submit.ticket)

    # -- sessions held by workers ------------------------------------------------------------------

    def keep(self, worker: Worker) -> tuple[int, ...]:
        """Record which sessions held by a new worker are in the journal; return their numbers."""
        return tuple(one.session for one in worker.hello.held if self._keep(worker, one))

    def _runs(self, served: int | None, held: HeldSession) -> bool:
        """Return whether a returning worker still has a session that is running here. It will be
        opened again, which requires its number to be free."""
        shared = self._shared
        return served == shared.service.epoch and held.session in shared.running

    def _keep(self, worker: Worker, held: HeldSession) -> bool:
        hello: Hello = worker.hello
        if self._journal is None or not self._settings.reuse or self._runs(hello.served, held):
            return False
        entry = self._journal.of_session(hello.served, held.session)
        if entry is None:
            return False
        log = entry.log
        rows = min(held.rows, len(log) // TOKEN_BYTES)
        scope = scope_of(entry.submit, entry.owner, self._settings.share_prefixes)
        worker.shelf.hold(Kept(held.session, log, rows, max(rows, held.rows), scope))
        return True
