"""A target worker and a draft worker in one process, which play round by round what the coordinator
has them play.

So a variant can be measured that no setting offers, such as a draft that does without the target's
noise. The workers are the real ones and are spoken to in the messages of the protocol; nothing
travels, so that times are those of the workers alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import (
    Close,
    Draft,
    Drafted,
    Event,
    Failed,
    Feed,
    Open,
    Opened,
    Prefilled,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.workers.draft import DraftWorker
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.serving.open_target import open_target_worker
from dovetail.workers.target import TargetWorker


@dataclass
class Reply:
    """A decoded reply and the rounds that it took. The target's own first token is in no round."""

    tokens: list[int]
    rounds: int = 0

    @property
    def decoded(self) -> int:
        return len(self.tokens) - 1


class Duet:
    """Both workers; one reply at a time."""

    def __init__(self, target: TargetWorker, draft: DraftWorker[Any]) -> None:
        self.target, self.draft = target, draft
        hello = self.target.hello(0)
        assert hello.vocabulary is not None
        assert hello.limits is not None
        assert hello.tokenizer is not None
        self.context, self.vocabulary, self.tokenizer = (
            hello.limits.context,
            hello.vocabulary,
            hello.tokenizer.data,
        )
        self._sessions = count(1)

    def decode(
        self,
        prompt: Sequence[int],
        *,
        key: bytes,
        sampling: Sampling,
        tree: TreeSettings,
        max_tokens: int,
        drafting: Sampling | None = None,
    ) -> Reply:
        """Decode one reply. It ends with an end token or with `max_tokens`.

        `drafting`: the sampling that the draft receives, if it differs.
        """
        session, reads = next(self._sessions), self.draft.hello(0).reads
        capacity = min(self.context, len(prompt) + max_tokens)
        opening = Open(
            epoch=0,
            session=session,
            key=key,
            prompt=tuple(prompt),
            capacity=capacity,
            vocabulary_size=self.vocabulary.size,
            end=self.vocabulary.end,
            sampling=sampling,
            tree=tree,
            features=reads,
        )
        done(
            self.draft.handle(
                opening.model_copy(
                    update={
                        "features": None,
                        **({"sampling": drafting} if drafting is not None else {}),
                    }
                )
            )
        )
        try:
            reply = Reply([self._open(opening)])
            self._play(reply, opening, max_tokens)
        finally:
            for worker in (self.target, self.draft):
                done(worker.handle(Close(epoch=0, session=session)))
        return reply

    def _open(self, opening: Open) -> int:
        """The first token; what the target says of the prompt goes to the draft."""
        for event in self.target.handle(opening):
            if isinstance(event, Prefilled):
                done(
                    self.draft.handle(
                        Feed(
                            epoch=0,
                            session=opening.session,
                            start=event.start,
                            features=event.features,
                        )
                    )
                )
            elif isinstance(event, Opened):
                assert event.bonus is not None
                return event.bonus
        raise AssertionError("the target opened nothing")

    def _play(self, reply: Reply, opening: Open, max_tokens: int) -> None:
        session, tree, verified = opening.session, opening.tree, None
        for number in count(1):
            if (
                any(token in opening.end for token in reply.tokens)
                or len(reply.tokens) >= max_tokens
            ):
                break
            length = len(opening.prompt) + len(reply.tokens)
            drafted = self._drafted(session, number, length, verified, reply, tree)
            verified = self._verified(session, number, length, drafted)
            verdict = verified.items[0]
            reply.rounds += 1
            reply.tokens += [*(drafted.tokens[node] for node in verdict.accepted), verdict.bonus]
        ends = [position for position, token in enumerate(reply.tokens) if token in opening.end]
        del reply.tokens[min([max_tokens, *(position + 1 for position in ends)]) :]

    def _drafted(
        self,
        session: int,
        number: int,
        length: int,
        verified: Verified | None,
        reply: Reply,
        tree: TreeSettings,
    ) -> Drafted:
        order = Draft(
            epoch=0,
            session=session,
            round=number,
            prefix=length,
            accepted=verified.items[0].accepted if verified is not None else (),
            bonus=reply.tokens[-1],
            features=verified.features if verified is not None else None,
            max_nodes=tree.most_nodes,
            max_depth=tree.most_levels,
            max_width=tree.width,
        )
        (drafted,) = done(self.draft.handle(order))
        assert isinstance(drafted, Drafted)
        return drafted

    def _verified(self, session: int, number: int, length: int, drafted: Drafted) -> Verified:
        item = VerifyItem(
            session=session,
            round=number,
            prefix=length,
            tokens=drafted.tokens,
            parents=drafted.parents,
        )
        order = Verify(
            epoch=0,
            items=(item,),
            candidates=drafted.candidates,
            probabilities=drafted.probabilities,
        )
        (verified,) = done(self.target.handle(order))
        assert isinstance(verified, Verified)
        return verified


def open_target(folder: str) -> TargetWorker:
    """A target worker with one thread."""
    return open_target_worker(TargetSettings(model=folder), name="target", threads=1)


def open_draft(folder: str, target: str) -> DraftWorker[Any]:
    """A draft worker for a target, on the CPU with one thread."""
    return open_draft_worker(
        DraftSettings(model=folder, device="cpu"), name="draft", threads=1, target=target
    )


def done(events: Iterable[Event]) -> list[Event]:
    """Return the answers of a worker; raise `RequestError` if one of them says that it failed."""
    answered = list(events)
    for event in answered:
        if isinstance(event, Failed):
            raise RequestError(event.code, event.text)
    return answered
