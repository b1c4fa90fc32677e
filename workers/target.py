"""The target worker: commands about sessions to the verifier, and what comes of them as events.

Knows which command is stale, wrong or next; how tokens are computed is the verifier's business, how
commands arrive the loop's.
"""

import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dovetail.protocol.arrays import MAX_ARRAY_BYTES, Array
from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import (
    MAX_CURVES,
    MAX_SPANS,
    Close,
    Closed,
    Command,
    Event,
    Failed,
    Fingerprint,
    Hello,
    Limits,
    Open,
    Opened,
    Prefilled,
    Refed,
    Refeed,
    Scored,
    States,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.profile import ContextCurve, load_profile
from dovetail.protocol.settings import MAX_GAMMA, MemorySettings, TargetSettings
from dovetail.protocol.spans import Span, Spans
from dovetail.workers.calibration.target import Subject, calibration_key, read_design
from dovetail.workers.devices import open_device
from dovetail.workers.models.checkpoints.inflate import inflation_bytes
from dovetail.workers.models.language_model import LanguageModel, load_language_model
from dovetail.workers.serving.failures import as_request_error
from dovetail.workers.serving.spread import known_readings, spread_of
from dovetail.workers.sessions.admission import MAX_SESSIONS
from dovetail.workers.sessions.prefix_cache import affordable_tokens
from dovetail.workers.sessions.results import First, Part, ScoredPart, Verdict
from dovetail.workers.sessions.wire import to_array, to_tensor
from dovetail.workers.speculation.rejection import Drawn
from dovetail.workers.verifier import Verifier

MOST_WORDS = 200
"""Letters that summaries have for why torch computes a model; the log has all of them."""
UNLIMITED = MemorySettings()


@dataclass(frozen=True)
class Identity:
    """What a target worker says of itself."""

    name: str
    model: str
    device: str
    threads: int
    fingerprint: Fingerprint
    curves: Sequence[ContextCurve] = ()
    """What its passes cost, as the machine's profile file has it."""
    inflation: str = ""
    kept_tokens: int = 0
    """Of sessions that have ended, so many as it keeps the rows of."""
    placement: str = ""
    """In words, where it is spread over devices."""
    reader: str = ""
    """The device that reads prompts beside those that compute the model."""
    reads_from: int = 1
    """Rows of a prompt from which on it does."""


def open_target_worker(
    settings: TargetSettings,
    *,
    name: str,
    threads: int,
    profile: Path | None = None,
    memory: MemorySettings = UNLIMITED,
    beside: int = 0,
) -> "TargetWorker":
    """A target worker with its model loaded on its device, or spread over several; `UserError`
    names what is wrong with the settings.

    `profile`: the file that remembers what was measured on this machine. `beside`: bits of the
    codes of a substitute that shares its GPU, 0 for none.
    """
    device = open_device(settings.device, threads)
    spread = spread_of(
        settings,
        memory,
        device,
        threads,
        () if profile is None else known_readings(settings, profile),
        beside=beside,
    )
    if settings.weights == "int8-per-tensor":
        print(
            f"{name}: int8-per-tensor is not lossless: one scale for all rows of a pass makes "
            "a token depend on what is computed beside it",
            file=sys.stderr,
        )
    model = load_language_model(
        settings.model,
        weights=settings.weights,
        device=device.name,
        backend=settings.backend,
        inflate_bytes=inflation_bytes(settings.inflate),
        profile=profile,
        stage=None if spread is None else spread.stage,
    )
    placed = ""
    if device.is_cpu and (settings.backend, model.backend) == ("auto", "library"):
        print(
            f"{name}: torch's own operations compute this model, since {model.choice}",
            file=sys.stderr,
        )
        placed = f"by torch's own operations, since {model.choice}"[:MOST_WORDS]
    # the kernels compute the same bytes with any instruction set and any number of threads, torch
    # does not
    family = model.kernels if model.backend == "kernels" else f"{device.library}-{model.kernels}"
    others = {} if spread is None else {"split": spread.split, "prefill": spread.prefill}
    fingerprint = Fingerprint(
        checkpoint=model.checkpoint_digest, weights=settings.weights, kernels=family, **others
    )
    whole = spread is None or spread.demand is None
    curves = (
        _curves(settings, model, profile) if profile is not None and device.is_cpu and whole else ()
    )
    # rows that are taken over are the same bytes as rows that are computed anew
    keeps = model.backend == "kernels" and (spread is None or spread.same_bytes)
    kept_tokens = (
        affordable_tokens(device.free_bytes(), model.new_cache(0).row_bytes) if keeps else 0
    )
    identity = Identity(
        name,
        settings.model,
        device.name,
        threads,
        fingerprint,
        curves,
        settings.inflate,
        kept_tokens,
        placement=placed,
    )
    if spread is not None:
        reader = "" if spread.reader is None else spread.reader.name
        identity = replace(
            identity, placement=str(spread), reader=reader, reads_from=spread.reads_from
        )
    return TargetWorker(model, identity)


def _curves(
    settings: TargetSettings, model: LanguageModel, profile: Path
) -> Sequence[ContextCurve]:
    """What `dovetail calibrate` has found of this model, as it is computed here; nothing if it was
    not asked."""
    known = load_profile(profile)
    if not any(entry.calibrations for entry in known.entries):
        return ()
    design = read_design(settings)
    entry = known.find(calibration_key(Subject(model, design, design, random=False)))
    found = [
        calibration.t_v_by_context
        for calibration in entry.calibrations
        if calibration.backend == model.backend
    ]
    return found[0][:MAX_CURVES] if found else ()


class TargetWorker:
    """Open, Refeed, Verify and Close, answered. A `Worker` of the loop."""

    def __init__(self, model: LanguageModel, identity: Identity) -> None:
        self.stale = 0
        self._model, self._identity = model, identity
        self._spans = Spans()
        self._verifier = Verifier(
            model, self._spans, kept_tokens=identity.kept_tokens, reads_from=identity.reads_from
        )
        self._epoch = 0

    @property
    def model(self) -> LanguageModel:
        return self._model

    @property
    def verifier(self) -> Verifier:
        return self._verifier

    @property
    def spans(self) -> Spans:
        return self._spans

    @property
    def sessions(self) -> int:
        return len(self._verifier)

    def hello(self, epoch: int) -> Hello:
        self._epoch = epoch
        identity, checkpoint = self._identity, self._model.checkpoint
        return Hello(
            epoch=epoch,
            roles=("target",),
            name=identity.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=identity.model,
            device=identity.device,
            threads=identity.threads,
            fingerprint=identity.fingerprint,
            limits=Limits(
                context=self._model.context,
                nodes=MAX_GAMMA,
                sessions=MAX_SESSIONS,
                kept=identity.kept_tokens,
            ),
            vocabulary=checkpoint.vocabulary,
            tokenizer=Array(
                dtype="uint8", shape=(len(checkpoint.tokenizer),), data=checkpoint.tokenizer
            ),
            states=States(
                width=self._model.hidden_size,
                layers=self._model.layers,
                checkpoint=checkpoint.digest,
            ),
            cores=tuple(sorted(os.sched_getaffinity(0))) if identity.device == "cpu" else (),
            curves=tuple(identity.curves),
            inflation=identity.inflation,
            placement=identity.placement,
        )

    def handle(self, command: Command) -> Iterable[Event]:
        match command:
            case Open():
                return self._open(command)
            case Refeed():
                return self._refeed(command)
            case Verify():
                return self._verify(command)
            case Close():
                self._verifier.close(command.session, keep=command.keep)
                return [Closed(epoch=self._epoch, session=command.session)]
            case _:
                raise RequestError("role", f"a target worker does not do {command.type!r}")

    def idle(self) -> bool:
        began_ns = time.monotonic_ns()
        worked = self._verifier.prepare_noise()
        if worked:
            self._spans.add_beside("prepare", began_ns, time.monotonic_ns())
        return worked

    def forget(self) -> None:
        self._verifier.clear()

    def _open(self, command: Open) -> Iterator[Event]:
        """A part of the prompt leaves as soon as it has been read: its features are held by nobody
        while the next is computed."""
        if command.session in self._verifier:
            self.stale += 1
            return
        for step in self._verifier.open(command):
            yield self._opening(command, step)

    def _opening(self, command: Open, step: Part | ScoredPart | First) -> Event:
        about: dict[str, Any] = {
            "epoch": self._epoch,
            "session": command.session,
            "round": command.round,
        }
        match step:
            case Part():
                return Prefilled(**about, start=step.start, features=to_array(step.features))
            case ScoredPart():
                return Scored(**about, start=step.start, logprobs=step.logprobs)
            case First():
                spans = self._spans.take(MAX_SPANS)
                about |= {
                    "placement": self._identity.placement or self._identity.device,
                    "read_by": self._identity.reader if step.apart else "",
                }
                return Opened(
                    **about,
                    bonus=step.token,
                    margin=step.margin,
                    logprobs=step.logprobs,
                    spans=spans,
                )

    def _refeed(self, command: Refeed) -> Iterator[Event]:
        for part in self._verifier.refeed(
            command.session, command.features, command.start, command.prefix
        ):
            yield Prefilled(
                epoch=self._epoch,
                session=command.session,
                round=command.round,
                start=part.start,
                features=to_array(part.features),
            )
        yield Refed(
            epoch=self._epoch,
            session=command.session,
            round=command.round,
            spans=self._spans.take(MAX_SPANS),
        )

    def _verify(self, command: Verify) -> Sequence[Event]:
        """An item that cannot be done is answered for itself and hurts none of the others."""
        items: list[VerifyItem] = []
        failed: list[Event] = []
        drawn = _drawn(command)
        for item in command.items:
            try:
                self._verifier.check(item, drawn.get(item.session))
                if any(other.session == item.session for other in items):
                    raise StaleError(f"session {item.session} stands twice in a command")
            except StaleError:
                self.stale += 1
            except RequestError as error:
                failed.append(self._failed(item, error))
            else:
                items.append(item)
        verdicts = self._verdicts(items, drawn) if items else []
        failed += [
            self._failed(item, verdict)
            for item, verdict in zip(items, verdicts, strict=True)
            if isinstance(verdict, RequestError)
        ]
        spans = self._spans.take(MAX_SPANS)
        groups = _alike([verdict for verdict in verdicts if isinstance(verdict, Verdict)])
        return [*(self._verified(group, spans) for group in groups), *failed]

    def _verified(self, verdicts: Sequence[Verdict], spans: Sequence[Span]) -> Verified:
        """One message of verdicts whose features, if they have any, stand below each other;
        `spans`: of the pass."""
        features = [verdict.features for verdict in verdicts if verdict.features is not None]
        return Verified(
            epoch=self._epoch,
            items=tuple(verdict.item for verdict in verdicts),
            spans=tuple(spans),
            beside=self._spans.take_beside(MAX_SPANS),
            features=to_array(torch.cat(features)) if features else None,
        )

    def _verdicts(
        self, items: Sequence[VerifyItem], drawn: Mapping[int, Drawn]
    ) -> Sequence[Verdict | RequestError]:
        """The verdict of each item or why there is none. Of a pass that fails one session may be to
        blame: then each that the pass has not changed gets one of its own."""
        try:
            return self._verifier.verify(items, drawn)
        except Exception as error:
            failure = as_request_error(error)
        return [failure] if len(items) == 1 else [self._verdict(item, drawn) for item in items]

    def _verdict(self, item: VerifyItem, drawn: Mapping[int, Drawn]) -> Verdict | RequestError:
        """The verdict of a pass of one item."""
        try:
            self._verifier.check(item, drawn.get(item.session))
            return self._verifier.verify([item], drawn)[0]
        except Exception as error:
            return as_request_error(error)

    def _failed(self, item: VerifyItem, error: RequestError) -> Failed:
        return Failed(
            epoch=self._epoch,
            session=item.session,
            round=item.round,
            code=error.code,  # type: ignore[arg-type]
            text=str(error),
        )


def _drawn(command: Verify) -> dict[int, Drawn]:
    """Of what the trees of a command were drawn, by session; none of them was where there is
    nothing to be read."""
    if command.candidates is None or command.probabilities is None:
        return {}
    candidates, probabilities = to_tensor(command.candidates), to_tensor(command.probabilities)
    rows = [1 + len(item.tokens) for item in command.items]
    numbers = (candidates.dtype, probabilities.dtype) == (torch.int32, torch.float32)
    if (
        not numbers
        or candidates.dim() != 2
        or candidates.shape != probabilities.shape
        or len(candidates) != sum(rows)
    ):
        return {}  # then no tree that has to be drawn passes its check
    parts = zip(
        command.items, torch.split(candidates, rows), torch.split(probabilities, rows), strict=True
    )
    return {item.session: Drawn(ids, law) for item, ids, law in parts}


def _alike(verdicts: Sequence[Verdict]) -> Iterator[Sequence[Verdict]]:
    """The verdicts of a pass by what their drafts read, no more features in a group than an array
    may have."""
    for reads in dict.fromkeys(verdict.reads for verdict in verdicts):
        group: list[Verdict] = []
        held = 0
        for verdict in verdicts:
            if verdict.reads == reads:
                size = 0 if verdict.features is None else verdict.features.nbytes
                if group and held + size > MAX_ARRAY_BYTES:
                    yield group
                    group, held = [], 0
                group.append(verdict)
                held += size
        yield group
