"""The target worker: passes the coordinator's commands to the verifier and turns the results into
events. Decides whether a command is stale, wrong or next; the verifier computes, and the loop
handles messages."""

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dovetail.protocol.arrays import MAX_ARRAY_BYTES, Array
from dovetail.protocol.calibration import ContextCurve, ExpertCosts
from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.messages import (
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
    Read,
    Reading,
    ReadItem,
    Reads,
    Refed,
    Refeed,
    Scored,
    States,
    Verified,
    Verify,
    VerifyItem,
    grammar_engine,
)
from dovetail.protocol.settings import MAX_GAMMA
from dovetail.protocol.spans import Span, Spans
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.serving.failures import as_request_error, failed
from dovetail.workers.sessions.blocks import BlockStore
from dovetail.workers.sessions.opener import FEW_SESSIONS, MAX_SESSIONS, ReadingStep
from dovetail.workers.sessions.prefix_cache import KeptSessions
from dovetail.workers.sessions.results import First, Part, ScoredPart, Unread, Verdict
from dovetail.workers.sessions.wire import to_array, to_tensor
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.verifier import Verifier

ItemT = TypeVar("ItemT", VerifyItem, ReadItem)


@dataclass(frozen=True)
class Identity:
    """The facts with which a target worker registers."""

    name: str
    model: str
    device: str
    threads: int
    fingerprint: Fingerprint
    curves: Sequence[ContextCurve] = ()
    """The cost of its passes, from this machine's profile file; `experts`: likewise, of a model
    that counts the experts that a pass uses."""
    experts: ExpertCosts | None = None
    kept_tokens: int = 0  # the number of tokens of ended sessions whose rows it can keep
    room_tokens: int | None = None
    """Tokens of all sessions that fit into its memory; None: unknown."""
    same_bytes: bool = False  # True if a row has the same bytes in chunks of any size
    placement: str = ""  # description of how the model is spread over devices
    reader: str = ""  # the prefill device, in addition to those that compute the model
    reads_from: int = 1  # the fewest rows of a prompt for which it is used
    blocks: BlockStore | None = None  # blocks of cached prompts; None: none are stored


class TargetWorker:
    """Carries out Open, Refeed, Verify and Close. A `Worker` of the loop."""

    def __init__(self, model: LanguageModel, identity: Identity) -> None:
        self.stale = 0
        self.model, self.spans, self._identity = model, Spans(), identity
        self.verifier = Verifier(
            model,
            self.spans,
            kept_tokens=identity.kept_tokens,
            reads_from=identity.reads_from,
            blocks=identity.blocks,
        )
        self._epoch = 0

    @property
    def sessions(self) -> int:
        return len(self.verifier)

    def hello(self, epoch: int) -> Hello:
        self._epoch = epoch
        identity, checkpoint = self._identity, self.model.checkpoint
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
                context=self.model.context,
                nodes=MAX_GAMMA,
                sessions=FEW_SESSIONS if identity.room_tokens is None else MAX_SESSIONS,
                kept=identity.kept_tokens,
                room=identity.room_tokens,
                prompt_rows=self.verifier.prompt_rows if identity.same_bytes else 0,
                shares=bool(identity.kept_tokens) and self.model.new_cache(0).branches,
            ),
            vocabulary=checkpoint.vocabulary,
            tokenizer=Array.of(checkpoint.tokenizer),
            table=Array.of(checkpoint.table.packed),
            states=States(
                width=self.model.hidden_size,
                layers=self.model.layers,
                checkpoint=checkpoint.digest,
            ),
            cores=tuple(sorted(os.sched_getaffinity(0))) if identity.device == "cpu" else (),
            curves=tuple(identity.curves),
            experts=identity.experts,
            grammars=grammar_engine(),
            placement=identity.placement,
            blocks=b"" if identity.blocks is None else identity.blocks.begin(epoch),
            snapshots=identity.blocks is not None and identity.blocks.snapshots,
        )

    def news(self) -> Iterable[Event]:
        blocks = self._identity.blocks
        return () if blocks is None else blocks.news()

    def handle(self, command: Command) -> Iterable[Event]:
        match command:
            case Open():
                return self._open(command)
            case Refeed():
                return self._refeed(command)
            case Read():
                return self._read(command.item)
            case Verify():
                return self._verify(command)
            case Close():
                self.verifier.close(command.session, keep=command.keep)
                return [Closed(epoch=self._epoch, session=command.session)]
            case _:
                raise RequestError("role", f"a target worker does not take {command.type!r}")

    def idle(self) -> bool:
        began_ns = time.monotonic_ns()
        worked = self.verifier.prepare_noise()
        if worked:
            self.spans.add_beside("prepare", began_ns, time.monotonic_ns())
        blocks = self._identity.blocks
        return worked or (not self.sessions and blocks is not None and blocks.idle())

    def suspend(self) -> KeptSessions[Any]:
        return self.verifier.suspend()

    def _open(self, command: Open) -> Iterator[Event]:
        """Open a session. Features of each chunk of the prompt are sent before the next is
        computed, so that they take no memory."""
        if command.session in self.verifier:
            self.stale += 1
            return
        yield from self._steps(command, self.verifier.open(command))

    def _refeed(self, command: Refeed) -> Iterator[Event]:
        if self.verifier.recomputes(command.session, command.round):
            self.stale += 1
            return
        yield from self._steps(
            command,
            self.verifier.refeed(
                command.session,
                command.features,
                command.start,
                command.prefix,
                round=command.round,
                rows=command.read,
            ),
        )

    def _read(self, item: ReadItem) -> Iterator[Event]:
        try:
            self.verifier.check_read(item)
        except StaleError:
            self.stale += 1
            return
        except RequestError as error:
            yield self._failed(item, error)
            return
        yield from self._steps(item, self.verifier.read(item))

    def _steps(
        self, about: Open | Refeed | ReadItem, steps: Iterable[ReadingStep]
    ) -> Iterator[Event]:
        """Yield the events of the steps by which a log is prefilled for a command."""
        step: ReadingStep | None = None
        for step in steps:
            yield self._told(about, step)
        if not isinstance(step, Unread | First):
            yield self._refed(about)

    def _told(self, about: Open | Refeed | ReadItem, step: ReadingStep) -> Event:
        """Return the event of a step by which a log is prefilled for a command."""
        told: dict[str, Any] = {"session": about.session, "round": about.round}
        told["epoch"] = self._epoch
        match step:
            case Part():
                return Prefilled(**told, start=step.start, features=to_array(step.features))
            case ScoredPart():
                return Scored(**told, start=step.start, logprobs=step.logprobs)
            case Unread():
                return Reading(**told, done=step.done, spans=self.spans.take(MAX_SPANS))
            case First():
                return Opened(
                    **told,
                    placement=self._identity.placement or self._identity.device,
                    read_by=self._identity.reader if step.apart else "",
                    restored=step.restored,
                    bonus=step.token,
                    margin=step.margin,
                    logprobs=step.logprobs,
                    spans=self.spans.take(MAX_SPANS),
                )

    def _refed(self, about: Open | Refeed | ReadItem) -> Refed:
        return Refed(
            epoch=self._epoch,
            session=about.session,
            round=about.round,
            spans=self.spans.take(MAX_SPANS),
        )

    def _verify(self, command: Verify) -> Iterator[Event]:
        """Verify items and prefill chunks of logs in one pass. An invalid one is answered with
        Failed, and does not affect the others."""
        wrong: list[Event] = []
        drawn = _drawn(command)
        items = self._sound(
            command.items,
            lambda item: self.verifier.check(item, drawn.get(item.session)),
            wrong,
        )
        reads = self._sound(command.reads, self.verifier.check_read, wrong)
        verdicts, steps = self._verdicts(items, drawn, reads)
        wrong += [
            self._failed(item, verdict)
            for item, verdict in zip(items, verdicts, strict=True)
            if isinstance(verdict, RequestError)
        ]
        spans, experts = self.spans.take(MAX_SPANS), self.verifier.take_experts()
        groups = _alike([verdict for verdict in verdicts if isinstance(verdict, Verdict)])
        yield from (self._verified(group, spans, experts) for group in groups)
        yield from wrong
        for read, step in zip(reads, steps, strict=True):
            if isinstance(step, RequestError):
                yield self._failed(read, step)
            else:
                yield from self._steps(read, step)

    def _sound(
        self, asked: Sequence[ItemT], check: Callable[[ItemT], None], wrong: list[Event]
    ) -> list[ItemT]:
        """Return the items that pass `check`, and add the failures of others to `wrong`."""
        sound: list[ItemT] = []
        for item in asked:
            try:
                check(item)
                if any(other.session == item.session for other in sound):
                    raise StaleError(f"session {item.session} occurs twice in a command")
            except StaleError:
                self.stale += 1
            except RequestError as error:
                wrong.append(self._failed(item, error))
            else:
                sound.append(item)
        return sound

    def _verified(
        self, verdicts: Sequence[Verdict], spans: Sequence[Span], experts: int
    ) -> Verified:
        """Return one message of verdicts whose features, if any, are stacked; `spans` and
        `experts`: of the pass."""
        features = [verdict.features for verdict in verdicts if verdict.features is not None]
        return Verified(
            epoch=self._epoch,
            items=tuple(verdict.item for verdict in verdicts),
            experts=experts,
            spans=tuple(spans),
            beside=self.spans.take_beside(MAX_SPANS),
            features=to_array(torch.cat(features)) if features else None,
        )

    def _verdicts(
        self,
        items: Sequence[VerifyItem],
        drawn: Mapping[int, ProposalProbabilities],
        reads: Sequence[ReadItem],
    ) -> tuple[Sequence[Verdict | RequestError], Sequence[Sequence[ReadingStep] | RequestError]]:
        """Return the verdict of each item and the steps of each chunk of a log, or why they failed.
        If a pass fails because of one session, the sessions that it has not changed get separate
        passes."""
        try:
            if items:
                return self.verifier.verify_and_read(items, drawn, reads)
        except Exception as error:
            failure = as_request_error(error)
            if len(items) == 1 and not reads:
                return [failure], []
        return [self._verdict(item, drawn) for item in items], [self._part(item) for item in reads]

    def _part(self, item: ReadItem) -> Sequence[ReadingStep] | RequestError:
        """Prefill a chunk of a log in a separate pass."""
        try:
            return [*self.verifier.read(item)]
        except Exception as error:
            return as_request_error(error)

    def _verdict(
        self, item: VerifyItem, drawn: Mapping[int, ProposalProbabilities]
    ) -> Verdict | RequestError:
        """Verify one item in a separate pass."""
        try:
            self.verifier.check(item, drawn.get(item.session))
            return self.verifier.verify([item], drawn)[0]
        except Exception as error:
            return as_request_error(error)

    def _failed(self, item: VerifyItem | ReadItem, error: RequestError) -> Failed:
        return failed(self._epoch, error, item.session, item.round)


def _drawn(command: Verify) -> dict[int, ProposalProbabilities]:
    """Return the distributions from which the trees of a command were drawn, by session; empty if
    they cannot be read."""
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
        return {}  # then no drawn tree passes its check
    parts = zip(
        command.items, torch.split(candidates, rows), torch.split(probabilities, rows), strict=True
    )
    return {
        item.session: ProposalProbabilities(ids, distribution) for item, ids, distribution in parts
    }


def _alike(verdicts: Sequence[Verdict]) -> Iterator[Sequence[Verdict]]:
    """Group the verdicts of a pass by the kind of their features; a group fits into an array."""
    for reads in dict.fromkeys(map(_shown, verdicts)):
        group: list[Verdict] = []
        held = 0
        for verdict in verdicts:
            if _shown(verdict) == reads:
                size = 0 if verdict.features is None else verdict.features.nbytes
                if group and held + size > MAX_ARRAY_BYTES:
                    yield group
                    group, held = [], 0
                group.append(verdict)
                held += size
        yield group


def _shown(verdict: Verdict) -> Reads | None:
    """Return the spec of a verdict's features; None if it has none."""
    return None if verdict.features is None else verdict.reads
