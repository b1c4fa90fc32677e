"""The change of workers in progress, if any: carries out the decisions of `steps.py` on the
coordinator's workers and sessions. A client requests it and receives its progress."""

from collections.abc import Callable, Mapping, Sequence

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Dismiss,
    Dismissed,
    Engage,
    Failed,
    Message,
    Progressed,
    Role,
    Swap,
    Swapped,
)
from dovetail.runtime.engine.acts import Acts
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.registry import Registry, ServiceState
from dovetail.runtime.moves.moving import Moving
from dovetail.runtime.moves.reading_ahead import Reading, ReadingAhead
from dovetail.runtime.moves.steps import (
    Action,
    Change,
    End,
    Keep,
    LetGo,
    Move,
    Party,
    Phase,
    Redirect,
    Say,
    Standing,
    TakeBack,
    Try,
)
from dovetail.runtime.moves.trials import Trials
from dovetail.runtime.session.state import State


class Changes:
    """Takes the requests Swap and Dismiss, one at a time."""

    def __init__(
        self,
        service: ServiceState,
        running: Mapping[int, RunningRequest],
        registry: Registry,
        placement: Placement,
        moving: Moving,
        ahead: ReadingAhead,
        acts: Acts,
        clock_ns: Callable[[], int],
    ) -> None:
        """`running`: the sessions by their numbers."""
        self._service, self._epoch = service, service.epoch
        self._running, self._registry = running, registry
        self._moving, self._ahead, self._acts = moving, ahead, acts
        self._log: Reading | None = None
        """The log of the session that moves next, prefilled ahead by its new target."""
        self._change: Change | None = None
        self._client: ClientPeer | None = None
        self._request = 0
        self._newcomer: Worker | None = None
        self._old: Worker | None = None
        self._trials = Trials(service.epoch, registry, placement, acts, clock_ns)
        self._reading: set[tuple[bytes, int]] = set()
        """Requests that were being read for the old target when it was to get no more."""

    @property
    def under_way(self) -> bool:
        return self._change is not None

    @property
    def words(self) -> str:
        """The change in progress in words; empty: none."""
        return self._change.words if self._change is not None else ""

    # -- what is asked for -------------------------------------------------------------------------

    def swap(self, client: ClientPeer, asked: Swap, now_ns: int) -> None:
        """Begin a change; raise `RequestError` with the reason of a refusal."""
        newcomer = self._registry.of_epoch(asked.newcomer)
        if newcomer is None or not newcomer.standby:
            raise RequestError("swap", "the new worker is no longer on standby: start it again")
        self._check_free()
        role: Role = "target" if newcomer.plays("target") else "draft"
        old = None if asked.old is None else self._leaver(asked.old)
        if old is not None and not old.plays(role):
            raise RequestError(
                "swap",
                f"{old.name} is not a {role} worker: name one that {newcomer.name} can take the "
                "place of",
            )
        self._registry.check_place(newcomer)
        change = Change(
            role,
            _party(newcomer),
            _party(old) if old is not None else None,
            self._trials.plan(newcomer, role, old),
        )
        self._begin(change, client, asked.request, newcomer, old, now_ns)

    def dismiss(self, client: ClientPeer, asked: Dismiss, now_ns: int) -> None:
        """Begin to drain a worker; raise `RequestError` with the reason of a refusal."""
        self._check_free()
        old = self._leaver(asked.worker)
        role: Role = "target" if old.plays("target") else "draft"
        others = [
            other
            for other in self._registry.workers.values()
            if other.plays("target") and other.available and other is not old
        ]
        if role == "target" and old.serves and not others and not asked.last:
            text = (
                f"{old.name} is the only target: put another in its place with `dovetail "
                "swap`, or have requests refused from then on with --last"
            )
            raise RequestError("swap", text)
        suits = self._moving.suits
        mine = [one for one in self._running.values() if one.target is old]
        held = [one for one in mine if not any(suits(one, other) for other in others)]
        if role == "target" and held and not (old.available or asked.last):
            numbers = ", ".join(str(running.session.number) for running in held)
            text = (
                f"{old.whereabouts} does not respond, and no other target can continue its "
                f"sessions ({numbers}): wait until they have ended, or end them with --last"
            )
            raise RequestError("swap", text)
        self._begin(Change(role, None, _party(old)), client, asked.request, None, old, now_ns)

    def _check_free(self) -> None:
        if self._change is not None:
            raise RequestError(
                "swap",
                f"another change of workers is in progress, {self._change.words}: wait "
                "until it is over",
            )

    def _leaver(self, epoch: int) -> Worker:
        worker = self._registry.of_epoch(epoch)
        if worker is None:
            raise RequestError(
                "swap",
                "the worker to remove is no longer registered: `dovetail status` shows who is",
            )
        return worker

    def _begin(
        self,
        change: Change,
        client: ClientPeer,
        request: int,
        newcomer: Worker | None,
        old: Worker | None,
        now_ns: int,
    ) -> None:
        self._change, self._client, self._request, self._newcomer, self._old = (
            change,
            client,
            request,
            newcomer,
            old,
        )
        self._perform(change.begin(now_ns))

    # -- what happens ------------------------------------------------------------------------------

    def step(self, now_ns: int) -> None:
        """Advance the change after an event or a tick."""
        if self._change is not None and self._trials.heard():
            self._change.heard(now_ns)
        for name, end, drafted in self._trials.ended():
            if self._change is not None:
                self._perform(self._change.tried(name, end, drafted=drafted))
        if self._change is not None:
            self._perform(self._change.look(now_ns))
        if (
            self._change is not None
            and self._change.phase is Phase.MOVING
            and not self._still_reading()
        ):
            self._perform(
                self._change.step(
                    {
                        running.session.number: self._standing(running)
                        for running in self._running.values()
                        if not running.trial
                    }
                )
            )

    def break_off(self, why: str) -> None:
        """End a change after an internal error: the old worker stays, the newcomer goes."""
        if self._old is not None:
            self._old.leaving = False
        self._trials.abandon()
        if self._newcomer is not None and self._newcomer.standby:
            self._acts.let_go(self._newcomer)
        self._end(f"the change was abandoned because the coordinator failed ({why}); see its log")

    def lost(self, worker: Worker, why: str) -> None:
        """Handle the loss of a worker."""
        if self._change is not None:
            self._perform(self._change.lost(worker.peer, f"it {why}"))

    def failed(self, running: RunningRequest, worker: Worker, why: str) -> bool:
        """Note a worker's failure; return whether it is a newcomer that is taken back."""
        if self._change is None or running.trial:
            return False
        actions = self._change.failed(
            worker.peer, f"it failed in session {running.session.number}: {why}"
        )
        self._perform(actions)
        return bool(actions)

    def client_lost(self, client: ClientPeer) -> None:
        """Handle the loss of the client that requested the change."""
        if self._change is not None and client is self._client:
            self._client = None
            self._perform(self._change.abandoned())

    def paused(self, pause_ns: int) -> None:
        """Note how long a client has waited for its next token."""
        if self._change is not None:
            self._change.longest_pause_ns = max(self._change.longest_pause_ns, pause_ns)

    def _still_reading(self) -> bool:
        """Return whether a request for the leaving worker is still being read."""
        self._reading = {
            (peer, request)
            for peer, request in self._reading
            if (client := self._registry.clients.get(peer)) is not None
            and request in client.reading
        }
        return bool(self._reading)

    def _standing(self, running: RunningRequest) -> Standing:
        assert self._change is not None
        if self._change.role == "draft":
            return (
                "movable"
                if running.draft is self._old is not None
                else "coming"
                if running.joining
                else "over"
            )
        if running.loss is not None and self._stranded(running):
            return "held"
        if running.target is not self._old or running.loss is not None:
            return "coming" if running.session.state in (State.WAITING, State.OPENING) else "over"
        begun = running.session.state in (State.DRAFTING, State.VERIFYING)
        return "movable" if begun and self._refuge(running) is not None else "held"

    def _stranded(self, running: RunningRequest) -> bool:
        """Return whether a session has lost its target and cannot continue on the newcomer."""
        newcomer = self._newcomer if self._old is None else None
        return newcomer is not None and not self._moving.suits(running, newcomer)

    # -- what follows ------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        """Carry out actions until the change is over."""
        change = self._change
        for action in actions:
            if self._change is not change:
                return
            match action:
                case Try(trial):
                    self._trials.begin(trial)
                case Redirect():
                    self._put_in_place()
                case Move(session):
                    self._move(session)
                case Keep():
                    if self._old is not None:
                        self._old.leaving = False
                case TakeBack():
                    self._take_back()
                case LetGo(party):
                    self._let_go(party)
                case Say(text):
                    self._acts.decide(text)
                    self._answer(Progressed(epoch=self._epoch, request=self._request, text=text))
                case End(why):
                    self._end(why)

    def _put_in_place(self) -> None:
        """Give sessions to the newcomer and none to the old worker, if it still fits."""
        if self._old is not None:
            self._old.leaving = True
            self._reading = {
                (client.peer, request)
                for client in self._registry.clients.values()
                for request in client.reading
            }
        if self._newcomer is None or self._change is None:
            return
        try:
            self._registry.check_place(self._newcomer)
        except RequestError as misfit:
            self._perform(self._change.failed(self._newcomer.peer, str(misfit)))
            return
        self._newcomer.standby = False
        self._registry.engaged.add(self._newcomer.process)
        self._acts.send(self._newcomer, Engage(epoch=self._epoch))
        self._acts.join(self._newcomer)

    def _take_back(self) -> None:
        """Swap old worker and newcomer again."""
        assert self._old is not None
        assert self._newcomer is not None
        kept, self._old, self._newcomer = self._old, self._newcomer, None
        kept.leaving, self._old.leaving = False, True
        self._reading = {
            (client.peer, request)
            for client in self._registry.clients.values()
            for request in client.reading
        }
        self._acts.join(kept)

    def _move(self, number: int) -> None:
        running = next(
            running for running in self._running.values() if running.session.number == number
        )
        if running.draft is self._old:
            self._moving.change_draft(running)
        elif (target := self._refuge(running)) is not None and not (
            self._reads_ahead(running, target)
        ):
            self._moving.move(running, target)

    def _refuge(self, running: RunningRequest) -> Worker | None:
        """Return the target that a session moves to: the one that already prefills its log, if
        any."""
        log = self._log
        if log is not None and log.running is running and log.new.available:
            return log.new
        return self._moving.refuge(running)

    def _reads_ahead(self, running: RunningRequest, target: Worker) -> bool:
        """Have a target read a moving session's log; return whether it still does."""
        log = self._log
        known = log is not None and (log.running, log.new) == (running, target)
        if log is not None and known:
            if log.heard is None:
                return True
            if isinstance(log.heard, Failed) or not self._ahead.lags(log):
                return False
        self._ahead.abandon(log)
        self._log = None
        if self._ahead.able(running, target):
            self._log = self._ahead.begin(running, target)
        return self._log is not None

    def _let_go(self, party: Party) -> None:
        self._trials.abandon()
        if (worker := self._registry.workers.get(party.peer)) is not None:
            self._acts.let_go(worker)

    def _end(self, why: str) -> None:
        """Report the outcome; the next change may begin."""
        assert self._change is not None
        change, about = self._change, {"epoch": self._epoch, "request": self._request}
        self._ahead.abandon(self._log)
        self._log = None
        what = {
            "moved": change.moved,
            "stayed": change.stayed,
            "longest_pause_s": change.longest_pause_ns / 1e9,
        }
        if why:
            self._acts.decide(why)
            self._answer(Failed(epoch=self._epoch, session=self._request, code="swap", text=why))
        elif self._newcomer is not None:
            self._answer(Swapped.model_validate({**about, **what}))
        else:
            if self._old is not None:
                self._service.drained.update(self._old.hello.roles)
            self._acts.decide(
                f"{self._old.name if self._old is not None else 'a worker'} was removed"
            )
            self._answer(Dismissed.model_validate({**about, **what}))
        self._change = self._client = self._newcomer = self._old = None
        self._trials.forget()
        self._reading.clear()

    def _answer(self, message: Message) -> None:
        if self._client is not None:
            self._acts.reply(self._client, message)


def _party(worker: Worker) -> Party:
    return Party(worker.peer, worker.name)
