"""A target worker and a draft worker in this process, taken through sessions by the commands that a
coordinator would send."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import (
    Close,
    Draft,
    Drafted,
    Drafts,
    Event,
    Feed,
    Open,
    Opened,
    Prefilled,
    Reads,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.workers.serving.registration import Worker

EventT = TypeVar("EventT", bound=Event)
KEY = bytes(range(16))
AHEAD = 6
"""Bits of work that a draft does while it waits."""


@dataclass
class Run:
    """A session as it goes on."""

    number: int
    log: list[int]
    prompt: int
    """Tokens of the prompt."""
    sampling: Sampling
    tree: TreeSettings
    ahead: bool
    round: int = 0
    accepted: tuple[int, ...] = ()
    bonus: int = 0
    features: Array | None = None
    proposals: list[Drafted] = field(default_factory=list)

    @property
    def reply(self) -> list[int]:
        return self.log[self.prompt :]

    @property
    def tau(self) -> float:
        """Tokens that a round committed on average, bonus included."""
        return (len(self.reply) - 1) / self.round


class PairOfWorkers:
    """Both workers, and what the target is asked to show."""

    def __init__(self, target: Worker, draft: Worker) -> None:
        self.target, self.draft = target, draft
        facts = target.hello(1)
        assert facts.vocabulary is not None
        self.reads: Reads | None = draft.hello(1).reads
        self.vocabulary_size = facts.vocabulary.size
        self.grown_ahead = 0

    def open(
        self,
        number: int,
        prompt: Sequence[int],
        *,
        tokens: int,
        sampling: Sampling,
        tree: TreeSettings,
        ahead: bool = False,
        base: int | None = None,
        kept: int = 0,
    ) -> Run:
        """Begin a session of so many tokens; it goes on from the first `kept` tokens of the session
        `base`."""
        command = Open(
            epoch=1,
            session=number,
            key=KEY,
            prompt=tuple(prompt),
            capacity=len(prompt) + tokens,
            vocabulary_size=self.vocabulary_size,
            sampling=sampling,
            tree=tree,
            features=self.reads,
            base=base,
            kept=kept,
        )
        run = Run(number, list(prompt), len(prompt), sampling, tree, ahead)
        feeds = []
        for event in self.target.handle(command):
            if isinstance(event, Prefilled):
                feeds.append(
                    Feed(epoch=1, session=number, start=event.start, features=event.features)
                )
            elif isinstance(event, Opened):
                assert event.bonus is not None
                run.bonus = event.bonus
        _only(self.draft.handle(command), Opened)
        for feed in feeds:
            list(self.draft.handle(feed))
        run.log.append(run.bonus)
        return run

    def round(self, run: Run) -> None:
        """Draft, verify, commit; in between the draft does what it does while it waits."""
        self.round_together([run])

    def round_together(self, runs: Sequence[Run]) -> None:
        """Do a round of sessions that are drafted for in one command."""
        orders = [self._order(run) for run in runs]
        command = orders[0] if len(orders) == 1 else Drafts.of(orders)
        drafted = {}
        for event in self.draft.handle(command):
            assert isinstance(event, Drafted), event
            drafted[event.session] = event
        for _ in range(AHEAD):
            self.draft.idle()
        for run in runs:
            self._verify(run, drafted[run.number])

    def _order(self, run: Run) -> Draft:
        run.round += 1
        tree = run.tree
        return Draft(
            epoch=1,
            session=run.number,
            round=run.round,
            prefix=len(run.log),
            accepted=run.accepted,
            bonus=run.bonus,
            max_nodes=tree.most_nodes,
            max_depth=tree.most_levels,
            max_width=tree.width,
            ahead=run.ahead,
            features=run.features,
        )

    def _verify(self, run: Run, drafted: Drafted) -> None:
        run.proposals.append(drafted)
        item = VerifyItem(
            session=run.number,
            round=run.round,
            prefix=len(run.log),
            tokens=drafted.tokens,
            parents=drafted.parents,
        )
        command = Verify(
            epoch=1,
            items=(item,),
            candidates=drafted.candidates,
            probabilities=drafted.probabilities,
        )
        verified = _only(self.target.handle(command), Verified)
        verdict = verified.items[0]
        run.accepted, run.bonus, run.features = verdict.accepted, verdict.bonus, verified.features
        run.log += [*(drafted.tokens[node] for node in verdict.accepted), verdict.bonus]
        self.grown_ahead += drafted.ahead

    def close(self, run: Run, *, keep: bool) -> None:
        for worker in (self.target, self.draft):
            list(worker.handle(Close(epoch=1, session=run.number, keep=keep)))


def _only(events: Iterable[Event], wanted: type[EventT]) -> EventT:
    (event,) = events
    assert isinstance(event, wanted), event
    return event
