"""The draft worker: commands of the coordinator become calls of the engine, and what it proposes becomes events.

Keeps the rules of rounds, measures spans, introduces itself. Knows one session per number and nothing of links; the engine is `drafter.py`.
"""

import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import RequestError, SettingsError, StaleError
from dovetail.protocol.messages import MAX_SPANS, Close, Closed, Command, Draft, Drafted, Event, Hello, Limits, Open, Opened
from dovetail.protocol.settings import DraftSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.devices import first_device, open_device
from dovetail.workers.drafter import Drafter, DraftSession, Proposal
from dovetail.workers.models.language_model import LanguageModel, load_language_model
from dovetail.workers.rounds import check_round, find_session
from dovetail.workers.speculation.growth import Shape

MAX_OPEN = 64
"""Sessions held at a time, each with a cache of its own."""


@dataclass
class _Held:
    """A session of the engine, the last round done and the tree that was proposed in it."""

    session: DraftSession
    round: int = 0
    proposed: TokenTree = field(default_factory=TokenTree)


class DraftWorker:
    """Open, Draft and Close of any number of sessions, one command at a time."""

    def __init__(self, model: LanguageModel, *, name: str, device: str, threads: int) -> None:
        self._model, self._device, self._name, self._threads = model, device, name, threads
        self._spans = Spans()
        self._drafter = Drafter(model, self._spans)
        self._held: dict[int, _Held] = {}
        self._epoch = 0
        self.stale = 0

    @property
    def sessions(self) -> int:
        return len(self._held)

    def hello(self, epoch: int) -> Hello:
        """The introduction; from now on events carry `epoch`."""
        self._epoch = epoch
        checkpoint = self._model.checkpoint
        return Hello(
            epoch=epoch,
            roles=("draft",),
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=checkpoint.source,
            device=self._device,
            threads=self._threads,
            limits=Limits(context=self._model.context, sessions=MAX_OPEN),
            vocabulary=checkpoint.vocabulary,
            tokenizer=Array(dtype="uint8", shape=(len(checkpoint.tokenizer),), data=checkpoint.tokenizer),
        )

    def handle(self, command: Command) -> Sequence[Event]:
        """The answer to a command; none if it is stale. `RequestError` where the command asks for what cannot be: then nothing has changed."""
        try:
            match command:
                case Open():
                    return [self._open(command)]
                case Draft():
                    return [self._draft(command)]
                case Close():
                    self._held.pop(command.session, None)
                    return [Closed(epoch=self._epoch, session=command.session)]
                case _:
                    raise RequestError("role", f"a draft worker does not do {command.type!r}")
        except StaleError:
            self.stale += 1
            return []

    def idle(self) -> bool:
        """Compute the noise of one coming position of one session."""
        return any(self._drafter.prepare(held.session) for held in self._held.values())

    def _open(self, command: Open) -> Opened:
        number = command.session
        if number in self._held:
            raise StaleError(f"session {number} is open already")
        if len(self._held) >= MAX_OPEN:
            raise RequestError("capacity", f"this draft worker holds {MAX_OPEN} sessions already; wait for one to end or start another worker")
        self._drafter.check_tokens(command.prompt)
        session = self._drafter.open(
            command.prompt,
            capacity=command.capacity,
            vocabulary_size=command.vocabulary_size,
            key=command.key,
            sampling=command.sampling,
            tree=command.tree,
        )
        if not session.readable:
            print(
                f"{self._name}: a prompt of {len(command.prompt)} tokens exceeds the draft's context of {self._model.context}: nothing is drafted for it",
                file=sys.stderr,
            )
        self._held[number] = _Held(session)
        return Opened(epoch=self._epoch, session=number, spans=self._spans.take(MAX_SPANS))

    def _draft(self, command: Draft) -> Drafted:
        start = time.monotonic_ns()
        held = find_session(self._held, command.session)
        self._check(held, command)
        deadline_ns = None if command.deadline_ms is None else start + int(command.deadline_ms * 1e6)
        shape = Shape(command.max_nodes, command.max_depth, command.max_width)
        try:
            with self._spans.measure("draft"):
                proposal = self._drafter.draft(held.session, command.accepted, command.bonus, shape, deadline_ns)
        except BaseException:  # the log may have moved and the cache not: what cannot be trusted is forgotten
            del self._held[command.session]
            raise
        held.round, held.proposed = command.round, proposal.tree
        return self._drafted(command, proposal)

    def _check(self, held: _Held, command: Draft) -> None:
        length = len(held.session.log) + len(command.accepted) + 1
        check_round(command.session, last=held.round, round=command.round, length=length, prefix=command.prefix)
        if not held.proposed.is_path(command.accepted):
            raise RequestError("prefix", f"session {command.session}: nodes {command.accepted} are no path of the proposal of round {held.round}")
        self._drafter.check_tokens([command.bonus])

    def _drafted(self, command: Draft, proposal: Proposal) -> Drafted:
        return Drafted(
            epoch=self._epoch,
            session=command.session,
            round=command.round,
            tokens=proposal.tree.tokens,
            parents=proposal.tree.parents,
            scores=proposal.scores,
            grown=proposal.grown,
            hit=proposal.hit,
            spans=self._spans.take(MAX_SPANS),
        )


def open_draft_worker(settings: DraftSettings, *, name: str, threads: int) -> DraftWorker:
    """The draft worker of `settings`: a smaller causal language model from the folder or hub id `settings.model`."""
    if settings.kind == "none":
        raise SettingsError("draft.kind is 'none': there is no draft worker to start; choose 'auto' or 'small'")
    if not settings.model:
        raise SettingsError("draft.model is empty: name the folder or the hub id of a smaller model of the target's family")
    device = open_device(first_device() if settings.device == "auto" else settings.device, threads)
    weights = device.draft_weights if settings.weights == "auto" else settings.weights
    model = load_language_model(settings.model, weights=weights, device=device.name)
    return DraftWorker(model, name=name, device=device.name, threads=threads)
