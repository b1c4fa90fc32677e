"""Trials of a worker that will replace another: internal requests on exactly these workers."""

import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Failed, Finished, Hello, Message, Role, Submit
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.engine.acts import Acts
from dovetail.runtime.engine.requests import attempt
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.fleet.peers import ClientPeer, Worker
from dovetail.runtime.fleet.placement import Placement
from dovetail.runtime.fleet.registry import Registry

COMMON = 1024
"""A trial's tokens are among the first this many of a vocabulary, which are the most frequent."""
PLACES = (0.5, 0.625, 0.75)
TRIAL_TOKENS, TRIAL_SEED = 12, 20260101
TRIAL_TREE = TreeSettings(policy="dynamic", insist=True, gamma=4, depth=3, width=2)
"""A policy that every kind of draft supports, and that drafts even at a loss."""


TrialName = Literal["alone", "drafted", "before"]


@dataclass(frozen=True)
class Trial:
    """A short session for the newcomer: a fixed request, on these workers alone."""

    name: TrialName
    target: bytes
    draft: bytes | None = None


class Trials:
    """Runs trials and receives their results."""

    def __init__(
        self,
        epoch: int,
        registry: Registry,
        placement: Placement,
        acts: Acts,
        clock_ns: Callable[[], int],
    ) -> None:
        """`epoch`: the coordinator's."""
        self._epoch, self._registry = epoch, registry
        self._placement, self._acts, self._now_ns = placement, acts, clock_ns
        self._running: dict[TrialName, RunningRequest] = {}
        self._ended: deque[tuple[TrialName, Finished | Failed, bool]] = deque()
        self._heard = False

    def heard(self) -> bool:
        """Return whether a trial has made progress since the last call."""
        heard, self._heard = self._heard, False
        return heard

    def ended(self) -> Iterator[tuple[TrialName, Finished | Failed, bool]]:
        """Yield ended trials, and whether the draft of each worked."""
        while self._ended:
            ended = self._ended.popleft()
            self._running.pop(ended[0], None)
            yield ended

    def abandon(self) -> None:
        """End the running trials."""
        ended = [*self._running.values()]
        self._running.clear()
        for running in ended:
            self._acts.drop(running)

    def forget(self) -> None:
        """Forget the trials that have ended."""
        self._ended.clear()

    def plan(self, newcomer: Worker, role: Role, old: Worker | None) -> list[Trial]:
        """Return a newcomer's trials: as a draft for the present target; as a target alone, with
        the draft, and compared with a target of equal fingerprint."""
        if role == "draft":
            target = self._placement.target(
                lambda target: self._placement.goes_with(newcomer, target)
            )
            if target is None:
                raise RequestError(
                    "no_target",
                    f"there is no target worker to test {newcomer.name} with: start one first",
                )
            return [Trial("drafted", target.peer, newcomer.peer)]
        draft = self._placement.draft(newcomer)
        same = [
            other
            for other in self._registry.workers.values()
            if other.plays("target") and other.available and _decides_as(other, newcomer)
        ]
        reference = old if old in same else next(iter(same), None)
        return [
            Trial("alone", newcomer.peer),
            *([Trial("drafted", newcomer.peer, draft.peer)] if draft is not None else []),
            *([Trial("before", reference.peer)] if reference is not None else []),
        ]

    def begin(self, trial: Trial) -> None:
        """Run a trial, and receive its messages as the client."""
        target, draft = (
            self._registry.workers.get(trial.target),
            self._registry.workers.get(trial.draft or b""),
        )
        if target is None or (trial.draft is not None and draft is None):
            self._ended.append(
                (
                    trial.name,
                    Failed(epoch=self._epoch, code="worker_lost", text="its partner disconnected"),
                    False,
                )
            )
            return
        submit = Submit(
            epoch=self._epoch,
            request=0,
            tokens=trial_tokens(target),
            sampling=Sampling(temperature=1.0),
            max_tokens=TRIAL_TOKENS,
            seed=TRIAL_SEED,
            end=(),
            tree=TRIAL_TREE,
        )
        try:
            running = self.session(submit, target, draft, partial(self._hear, trial.name, draft))
        except RequestError as error:
            said = {"epoch": self._epoch, "code": error.code, "text": str(error)}
            self._ended.append((trial.name, Failed.model_validate(said), False))
            return
        self._running[trial.name] = running
        self._acts.start(running)

    def session(
        self, submit: Submit, target: Worker, draft: Worker | None, hear: Callable[[Message], None]
    ) -> RunningRequest:
        """Return a session for an internal request on these workers; `hear` receives its messages.
        Raises `RequestError` if it cannot be tokenized."""
        request = attempt(submit, target)
        if isinstance(request, RequestError):
            raise request
        hello = Hello(epoch=self._epoch, roles=("client",), name="trial", host="", pid=os.getpid())
        ours = ClientPeer(b"", hello, hear=hear)
        return self._placement.try_out(ours, submit, target, draft, request, self._now_ns())

    def _hear(self, name: TrialName, draft: Worker | None, message: Message) -> None:
        """Receive a trial's message; a draft that was lost meanwhile has not failed."""
        self._heard = True
        if isinstance(message, Finished | Failed):
            draft_sync, gone = (
                self._running[name].session.draft_sync,
                draft is not None and draft.peer not in self._registry.workers,
            )
            self._ended.append(
                (name, message, gone or (draft_sync is not None and draft_sync.rows > 0))
            )


def _decides_as(one: Worker, other: Worker) -> bool:
    """Return whether two targets compute the same for the same tokens."""
    return one.hello.fingerprint == other.hello.fingerprint and one.reads_as(other)


def trial_tokens(target: Worker) -> tuple[int, ...]:
    """Return a prompt of repeating ordinary tokens, without reading the tokenizer."""
    assert target.language is not None
    table, begin = target.language.table, target.facts.begin
    special = {*table.special.values(), *target.facts.end}
    ordinary = (token for token in table if token < target.facts.size and token not in special)
    common = [*islice(ordinary, COMMON)]
    found = [common[int(place * len(common))] for place in PLACES]
    return (*(() if begin is None else (begin,)), *found, *found, *found, found[0])
