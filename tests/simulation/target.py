"""A target that has chosen already: its verdicts are read off recorded replies, and only the time
of its passes is made up."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dovetail.launch.planning.acceptance import About, Recording
from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    MAX_SPANS,
    Close,
    Closed,
    Command,
    Event,
    Fingerprint,
    Hello,
    Limits,
    Open,
    Opened,
    Verified,
    VerifiedItem,
    Verify,
    VerifyItem,
    VocabularyFacts,
)
from dovetail.protocol.settings import MAX_GAMMA
from dovetail.protocol.tree import ROOT
from dovetail.protocol.vocabulary import read_vocabulary, vocabulary_digest
from simulation.clockwork import Clock, ClockSpans
from simulation.prices import PlacedCosts

MARGIN = 1.0  # the margin given for every choice: margins are not recorded
PREFILL_ROWS = 64
"""Rows of a part of the prompt, to put a price on it; nothing that is reported depends on it."""


@dataclass(frozen=True)
class Language:
    """A vocabulary of the recorded size, whose tokens have names and no meaning."""

    facts: VocabularyFacts
    tokenizer: bytes

    @classmethod
    def of(cls, about: About) -> "Language":
        entries = ",".join(f'"<{token}>":{token}' for token in range(about.vocabulary_size))
        model = f'{{"type":"WordLevel","unk_token":"<0>","vocab":{{{entries}}}}}'
        text = f'{{"version":"1.0","added_tokens":[],"pre_tokenizer":null,"normalizer":null,"post_processor":null,"decoder":null,"model":{model}}}'  # noqa: E501
        tokenizer = text.encode()
        facts = VocabularyFacts(
            digest=vocabulary_digest(read_vocabulary(tokenizer)),
            size=about.vocabulary_size,
            end=about.end,
        )
        return cls(facts, tokenizer)


class RecordedTarget:
    """A worker of the target's role."""

    def __init__(
        self,
        about: About,
        language: Language,
        recordings: Sequence[Recording],
        costs: PlacedCosts,
        clock: Clock,
    ) -> None:
        self._about, self._language, self._costs, self._clock = about, language, costs, clock
        self._replies: Mapping[tuple[int, ...], Recording] = {
            recording.prompt: recording for recording in recordings
        }
        self._open: dict[int, Recording] = {}
        self._spans = ClockSpans(clock)
        self._epoch = 0

    @property
    def sessions(self) -> int:
        return len(self._open)

    def hello(self, epoch: int) -> Hello:
        self._epoch = epoch
        about, tokenizer = self._about, self._language.tokenizer
        return Hello(
            epoch=epoch,
            roles=("target",),
            name="target",
            host="target.simulated",
            pid=1,
            model="recorded",
            device="simulated",
            threads=1,
            fingerprint=Fingerprint(checkpoint="recorded", weights="simulated", kernels="none"),
            limits=Limits(context=about.context, nodes=MAX_GAMMA),
            vocabulary=self._language.facts,
            tokenizer=Array(dtype="uint8", shape=(len(tokenizer),), data=tokenizer),
            curves=self._costs.t_v.curves,
        )

    def handle(self, command: Command) -> Iterable[Event]:
        match command:
            case Open():
                return [self._opened(command)]
            case Verify():
                return [self._verified(command)]
            case Close():
                self._open.pop(command.session, None)
                return [Closed(epoch=self._epoch, session=command.session)]
            case _:
                raise RequestError("role", f"a target worker does not take {command.type!r}")

    def idle(self) -> bool:
        return False

    def _opened(self, command: Open) -> Opened:
        reply = self._open[command.session] = self._replies[command.prompt]
        with self._spans.measure("prefill"):
            self._clock.advance(
                self._costs.verify_s(PREFILL_ROWS, 0) * len(command.prompt) / PREFILL_ROWS
            )
        return Opened(
            epoch=self._epoch,
            session=command.session,
            bonus=reply.tokens[0],
            margin=MARGIN,
            spans=self._spans.take(MAX_SPANS),
        )

    def _verified(self, command: Verify) -> Verified:
        rows = sum(1 + len(item.tokens) for item in command.items)
        context = sum(item.prefix for item in command.items) // len(command.items)
        with self._spans.measure("verify"):
            self._clock.advance(self._costs.verify_s(rows, context))
        items = tuple(self._verdict(item) for item in command.items)
        return Verified(epoch=self._epoch, items=items, spans=self._spans.take(MAX_SPANS))

    def _verdict(self, item: VerifyItem) -> VerifiedItem:
        """The recorded choices, as far down the tree as there are nodes for them. A pass beyond
        the end of a reply is wasted: it chooses the last token again, which is dropped."""
        reply = self._open[item.session]
        said = reply.tokens[item.prefix - len(reply.prompt) :] or reply.tokens[-1:]
        accepted: list[int] = []
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(item.parents, item.tokens, strict=True))
        }
        for token in said[:-1]:
            node = children.get((accepted[-1] if accepted else ROOT, token))
            if node is None:
                break
            accepted.append(node)
        margins = (MARGIN,) * (len(accepted) + 1)
        return VerifiedItem(
            session=item.session,
            round=item.round,
            accepted=tuple(accepted),
            bonus=said[len(accepted)],
            margins=margins,
        )
