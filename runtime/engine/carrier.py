"""The loop that carries out effects: what the parts that decide yield is done with sessions, peers
and what is sent."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Failed
from dovetail.runtime.engine.effects import (
    Abandon,
    Admitted,
    Break,
    Cancel,
    ClientGone,
    Defer,
    Drained,
    Effect,
    Effects,
    End,
    Fail,
    Follow,
    Forget,
    Free,
    Gone,
    Join,
    LetGo,
    Lose,
    Say,
    Send,
    Start,
    Tell,
    Unanswered,
)
from dovetail.runtime.engine.outgoing import Outgoing
from dovetail.runtime.engine.peers import Peers
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.engine.sessions import Sessions
from dovetail.runtime.fleet.service import Service
from dovetail.runtime.session.request import Request

T = TypeVar("T")
Elsewhere = Callable[
    [Callable[[], Request | RequestError], Callable[[Request | RequestError], None]], None
]
"""Does a piece of work that takes long, elsewhere, and hands its outcome back."""


class Carrier:
    """Carries out effects, in the order in which they are yielded."""

    def __init__(
        self,
        service: Service,
        sessions: Sessions,
        peers: Peers,
        dispatch: CommandSender,
        post: Outgoing,
        *,
        decide: Callable[[str], None],
        defer: Elsewhere,
        resume: Callable[[Effects[None]], None],
    ) -> None:
        """`decide` tells and keeps a sentence for `status`; `resume` goes on with what follows from
        deferred work."""
        self._service, self._sessions, self._peers = service, sessions, peers
        self._dispatch, self._post = dispatch, post
        self._decide, self._defer, self._resume = decide, defer, resume

    def carry_out(self, effects: Effects[T]) -> T:
        """Carry out effects one after the other and return their outcome. What goes wrong with one
        is raised where it was yielded."""
        raised: BaseException | None = None
        while True:
            try:
                effect = next(effects) if raised is None else effects.throw(raised)
            except StopIteration as end:
                outcome: T = end.value
                return outcome
            try:
                raised = None
                self._carry_out(effect)
            except BaseException as error:
                raised = error

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Follow():
                self._sessions.perform(effect.running, effect.actions)
            case Free():
                self._dispatch.next(effect.worker)
            case Say():
                self._decide(effect.words)
            case Send():
                self._post.to_worker(effect.worker, effect.message)
            case Tell(message=Failed() as told):
                self._post.refuse(effect.client, told)
            case Tell():
                self._post.to_client(effect.client, effect.message)
            case Start():
                self._sessions.start(effect.running)
            case Cancel():
                self._sessions.cancel(effect.running)
            case Fail():
                self._sessions.fail(effect.running, effect.error)
            case Break():
                self._sessions.broken(effect.running, effect.error)
            case Abandon():
                self._sessions.drop(effect.running)
            case Forget():
                self._sessions.forget_on(effect.worker, effect.running)
            case Lose():
                self._peers.lose(effect.worker, effect.why)
            case LetGo():
                self._peers.let_go(effect.worker)
            case Admitted():
                self._peers.admitted(effect.worker)
            case Join():
                self._peers.join(effect.worker)
            case Gone():
                self._peers.worker_lost(effect.worker, effect.why)
            case Drained():
                self._service.drained.update(effect.worker.hello.roles)
            case ClientGone():
                self._peers.client_lost(effect.client)
            case Defer():
                self._defer(effect.work, partial(self._go_on, effect))
            case Unanswered():
                self._peers.unanswered(effect.client, effect.request, effect.error)
            case End():
                self._service.ending = True

    def _go_on(self, deferred: Defer, outcome: Request | RequestError) -> None:
        self._resume(deferred.then(outcome))
