"""One process with both roles: a target, and as the draft its substitute, which shares embedding,
norms, head, resident layers and KV cache with it, or an assistant that reads its keys and values.

To the coordinator they are separate target and draft workers, each with its own link. Here they
take turns, one command at a time, and the draft stops growing ahead as soon as the target has a
command."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dovetail.protocol.errors import RequestError, SettingsError
from dovetail.protocol.grammar import GrammarVocabulary
from dovetail.protocol.messages import (
    MAX_SESSIONS,
    Command,
    Drafts,
    Event,
    Hello,
    Open,
    Opened,
    Reading,
)
from dovetail.protocol.settings import (
    SUBSTITUTE_WEIGHTS,
    DraftSettings,
    MemorySettings,
    TargetSettings,
)
from dovetail.protocol.spans import Spans
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.opening import open_device
from dovetail.workers.draft import DraftWorker, Identity
from dovetail.workers.drafters.assistant import AssistantDrafter, AssistantSession
from dovetail.workers.drafters.engine import Engine
from dovetail.workers.drafters.model import SUBSTITUTE_SHARPENING
from dovetail.workers.drafters.shared import Lent, SharedDrafter, SharedSession
from dovetail.workers.models.assistant import Assistant
from dovetail.workers.models.backends.device.choice import tell_products
from dovetail.workers.models.checkpoints.hub import is_assistant
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.substitutes.coded import against_codes
from dovetail.workers.models.substitutes.kept import Tell
from dovetail.workers.models.substitutes.quantize import BITS
from dovetail.workers.models.substitutes.substitute import (
    load_device_substitute,
    load_substitute,
    share,
    shared_cache,
)
from dovetail.workers.progress import beat
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.serving.registration import Worker
from dovetail.workers.sessions.prefix_cache import KeptSessions
from dovetail.workers.target import TargetWorker

BEAT_S = 0.2  # interval at which a role that waits for its turn reports that it is alive


class Turns:
    """Mutual exclusion of two workers, one command at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[int] = set()  # threads

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for this thread's turn, and keep it within the block."""
        self._waiting.add(threading.get_ident())
        try:
            while not self._lock.acquire(timeout=BEAT_S):
                beat()
        finally:
            self._waiting.discard(threading.get_ident())
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def free(self) -> Iterator[bool]:
        """Yield whether the device is free; if so, this thread has it within the block."""
        mine = not self._waiting and self._lock.acquire(blocking=False)
        try:
            yield mine
        finally:
            if mine:
                self._lock.release()


class InTurn:
    """A worker that takes its turn for every command, and releases it between two answers, since an
    answer may never be fetched if the coordinator is lost. A `Worker` of the loop."""

    def __init__(self, worker: Worker, turns: Turns) -> None:
        self._worker, self._turns = worker, turns
        self.stale = 0

    @property
    def sessions(self) -> int:
        return self._worker.sessions

    @property
    def spans(self) -> Spans:
        return self._worker.spans

    def hello(self, epoch: int) -> Hello:
        """Return the registration, which disables sharing rows between sessions: the draft computes
        over the target's."""
        hello = self._worker.hello(epoch)
        assert hello.limits is not None
        limits = hello.limits.model_copy(update={"shares": False})
        return hello.model_copy(update={"limits": limits})

    def news(self) -> Iterable[Event]:
        return self._worker.news()

    def handle(self, command: Command) -> Iterator[Event]:
        events: Iterator[Event] | None = None
        while True:
            with self._turns.taken():
                try:
                    events = iter(self._worker.handle(command)) if events is None else events
                    event = next(events, None)
                finally:
                    self.stale = self._worker.stale
            if event is None:
                return
            yield event

    def idle(self) -> bool:
        with self._turns.free() as mine:
            return mine and self._worker.idle()

    def suspend(self) -> KeptSessions[Any]:
        with self._turns.taken():
            return self._worker.suspend()


class _Draft(DraftWorker[Any]):
    """A draft worker whose sessions have their numbers."""

    def _open(self, command: Open) -> Opened | Reading:
        opened = super()._open(command)
        session = self.session(command.session)
        assert isinstance(session, SharedSession | AssistantSession)
        session.number = command.session
        return opened

    def _drafts(self, command: Drafts) -> Iterator[Event]:
        """Carry out all orders before the target's turn: it could close a session whose rows are in
        use, and reuse them for another."""
        return iter([*super()._drafts(command)])


def open_unified(
    target: TargetSettings,
    draft: DraftSettings,
    *,
    name: str,
    threads: int,
    memory: MemorySettings,
    profile: Path | None = None,
    cache: Path | None = None,
    tell: Tell = lambda _done, _all: None,
) -> tuple[Worker, Worker]:
    """Return the target worker and the draft worker of one process. `draft.model` names an
    assistant; if it is empty, the draft is a substitute. Raises `UserError` if the target cannot
    share with it."""
    if isinstance(draft.head_rows, int):
        raise SettingsError(
            f"draft.head_rows = {draft.head_rows}, but the draft in its target's process is not a "
            "draft head: leave draft.head_rows out"
        )
    open_target = partial(
        open_target_worker,
        target,
        name=f"{name}-target",
        threads=threads,
        profile=profile,
        memory=memory,
    )
    if draft.model:
        return _open_with_assistant(target, draft, name, threads, open_target)
    if draft.weights not in SUBSTITUTE_WEIGHTS:
        raise SettingsError(
            f"draft.weights = {draft.weights!r} is not a type of a substitute's weights: use int8, "
            "int4, int3 or int2"
        )
    weights = "int4" if draft.weights == "auto" else draft.weights
    verifying, substitute, shared = _load_both(
        target, weights, name, open_device(target.device, threads), open_target, cache, tell
    )
    spans = Spans()
    engine = SharedDrafter(
        substitute,
        spans,
        ahead=draft.ahead is not False,
        merges=draft.merge_lookup,
        sharpening=SUBSTITUTE_SHARPENING,
    )
    engine.borrow = lambda number: _lent(verifying, number)
    verifying.verifier.rows_beside = engine.rows_beside
    checkpoint = substitute.checkpoint
    about = f"{weights} substitute" + (f", {shared} layers shared" if shared else "")
    identity = Identity(
        f"{name}-draft",
        f"{checkpoint.source} ({about})",
        target.device,
        threads,
        substitute.context,
        checkpoint.vocabulary,
        checkpoint.table,
        weights=weights,
        together=MAX_SESSIONS,
    )
    return _in_turn(verifying, engine, identity, spans)


def _load_both(
    target: TargetSettings,
    weights: str,
    name: str,
    device: Device,
    open_target: Callable[..., TargetWorker],
    cache: Path | None,
    tell: Tell,
) -> tuple[TargetWorker, LanguageModel, int]:
    """Return a target, its substitute, and how many layers they share."""
    if device.is_cpu:  # made before the target is loaded, then shares the target's parts
        substitute, made = load_substitute(
            target.model,
            weights=weights,
            device="cpu",
            context=target.longest,
            folder=cache,
            tell=tell,
        )
        verifying = open_target(bits=BITS[weights])
        shared = share(substitute, verifying.model)
    else:  # made from a target that is already on the device
        if why_not := against_codes(device.torch_device, weights):
            raise SettingsError(
                f"draft.share = true is not possible on {device.name}: {why_not}; set "
                "draft.share to false, and choose another draft.kind"
            )
        verifying = open_target(bits=BITS[weights])
        substitute, made, shared = load_device_substitute(
            verifying.model, device.capture, weights=weights, folder=cache, tell=tell
        )
        tell_products(device.torch_device, name)
    if said := made.report(name):
        print(said, file=sys.stderr)
    return verifying, substitute, shared


def _in_turn(
    verifying: TargetWorker, engine: Engine[Any], identity: Identity, spans: Spans
) -> tuple[Worker, Worker]:
    turns, own = Turns(), verifying.model.checkpoint
    engine.vocabulary = lambda: GrammarVocabulary.of(own.table, own.vocabulary)
    return InTurn(verifying, turns), InTurn(_Draft(engine, identity, spans), turns)


def _open_with_assistant(
    target: TargetSettings,
    draft: DraftSettings,
    name: str,
    threads: int,
    open_target: Callable[..., TargetWorker],
) -> tuple[Worker, Worker]:
    if not is_assistant(draft.model):
        raise SettingsError(
            f"draft.share = true takes a substitute or an assistant of the target, and "
            f"{draft.model} is neither: leave draft.share or draft.model out"
        )
    if draft.weights not in ("auto", "fp32"):
        raise SettingsError(
            f"draft.weights = {draft.weights!r}: an assistant is computed in fp32, so leave it out"
        )
    verifying, spans = open_target(), Spans()
    assistant = Assistant(draft.model, verifying.model)
    engine = AssistantDrafter(assistant, spans, merges=draft.merge_lookup)
    engine.borrow = lambda number: _lent(verifying, number)
    model = verifying.model
    identity = Identity(
        f"{name}-draft",
        f"{draft.model} (assistant)",
        target.device,
        threads,
        model.context,
        weights="fp32",
        together=MAX_SESSIONS,
    )
    return _in_turn(verifying, engine, identity, spans)


def _lent(verifying: TargetWorker, number: int) -> Lent:
    try:
        log, cache, first = verifying.verifier.lend(number)
    except RequestError as error:
        text = f"the target in this process does not have session {number} ({error})"
        raise RequestError("session", f"{text}, which the draft needs") from None
    return Lent(log, shared_cache(cache), first)
