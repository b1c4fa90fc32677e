"""Records replies: the real target and the real draft in this process, a token a round, nothing
verified, and a large tree at every position.

torch comes in here, with the workers; whoever imports this has bound the process and set its thread
counts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

import numpy as np

from dovetail.launch.files.prompts import Prompt
from dovetail.launch.planning.acceptance import About, Position, Recording
from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import (
    Close,
    Draft,
    Event,
    Feed,
    Hello,
    Open,
    Opened,
    Prefilled,
    Verified,
    Verify,
    VerifyItem,
)
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.draft import DraftWorker
from dovetail.workers.speculation.growth import NO_ROW, GrowingTree, Nodes, best_first
from dovetail.workers.speculation.policy import root_pass
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.target import TargetWorker
from simulation.folder import Folder

WIDE = 20
"""The best so many nodes of every level are expanded, or as many as a node has children: twice what
the presets expand, so that what a policy keeps of a narrower pool is among them, but for rare
cases."""
MOST_ROWS = 64  # the most rows of a pass
EPOCH = 1


class Survey:
    """A growth policy that offers nothing: of every level the best nodes are expanded, and then the
    best of all, up to `nodes` of them."""

    entropy: ClassVar[None] = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        yield from root_pass(tree, shape)
        for level in range(1, shape.depth):
            nodes = best_first(tree.at_level(level), tree.scores, max(WIDE, shape.width))
            if len(nodes := nodes[tree.rows[nodes] == NO_ROW]):
                yield nodes
        while (left := shape.nodes - tree.rows_used) > 0:
            nodes = best_first(
                np.flatnonzero((tree.rows == NO_ROW) & (tree.levels < shape.depth)),
                tree.scores,
                min(left, MOST_ROWS),
            )
            if not len(nodes):
                return
            yield nodes

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        return np.empty(0, np.intp)


@dataclass(frozen=True)
class Order:
    """The order of what is to be recorded."""

    sampling: Sampling
    seed: int
    sharpening: float
    nodes: int
    depth: int
    width: int
    max_tokens: int

    @property
    def tree(self) -> TreeSettings:
        return TreeSettings(
            policy="budget",
            insist=True,
            gamma=self.nodes,
            depth=self.depth,
            width=self.width,
            sharpening=self.sharpening,
        )


def processors(sampling: Sampling) -> Sampling:
    """Return the processors alone: settings may be of a richer class."""
    return Sampling(**{name: getattr(sampling, name) for name in Sampling.model_fields})


def about(order: Order, target: Hello, draft: Hello) -> About:
    """Return the origin of a recording of these two workers."""
    assert target.vocabulary is not None
    assert target.limits is not None
    return About(
        target=str(target.fingerprint),
        target_model=target.model,
        draft_model=draft.model,
        head=draft.reads is not None,
        vocabulary_size=target.vocabulary.size,
        end=target.vocabulary.end,
        context=target.limits.context,
        **{
            name: getattr(order, name)
            for name in ("sampling", "seed", "sharpening", "nodes", "depth", "width", "max_tokens")
        },
    )


class Recorder:
    """Plays the coordinator to a target and a draft worker, session by session."""

    def __init__(self, target: TargetWorker, draft: DraftWorker[Any], order: Order) -> None:
        self._target, self._draft, self.order = target, draft, order
        self._told, self._said = target.hello(EPOCH), draft.hello(EPOCH)
        assert self._told.vocabulary is not None
        assert self._told.tokenizer is not None
        self._facts = self._told.vocabulary
        self._text = TextCodec(self._told.tokenizer.data, self._facts)
        self._numbers = count(1)
        self.about = about(order, self._told, self._said)

    def record_all(
        self, prompts: Sequence[Prompt], folder: Folder, step: Callable[[str], None]
    ) -> int:
        """Record the first turn of every prompt that the folder has no reply to; how many there
        were. A reply of a single token has nothing to draft."""
        recorded = 0
        for number, prompt in enumerate(prompts):
            if not folder.has(number, prompt.id):
                folder.write(number, self.record(prompt.id, self.tokens_of(prompt)))
                recorded += 1
            step(prompt.id)
        return recorded

    def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """The prompt as the target reads it; `UserError` if its context has no room for a reply."""
        tokens = self._text.encode_turns(prompt.turns[:1])
        if len(tokens) + 2 > self.about.context:
            raise UserError(
                f"the prompt {prompt.id!r} has {len(tokens)} tokens, and the target's context "
                f"is {self.about.context}: leave it out, or shorten it"
            )
        return tokens

    def record(self, id: str, prompt: tuple[int, ...]) -> Recording:
        """One reply, to its end or to `max_tokens`."""
        session, most = (
            next(self._numbers),
            min(self.order.max_tokens, self.about.context - len(prompt)),
        )
        tokens, positions, features = [self._open(session, prompt, most)], list[Position](), None
        while tokens[-1] not in self._facts.end and len(tokens) < most:
            positions.append(self._position(session, prompt, tokens, features))
            token, features = self._choice(session, len(prompt) + len(tokens), len(tokens))
            tokens.append(token)
        for worker in (self._target, self._draft):
            _done(worker.handle(Close(epoch=EPOCH, session=session)))
        return Recording(id, prompt, tuple(tokens), tuple(positions))

    def _open(self, session: int, prompt: tuple[int, ...], most: int) -> int:
        """Both have read the prompt; the target's first token."""
        order = self.order
        command = Open(
            epoch=EPOCH,
            session=session,
            key=session_key(order.seed, 0, prompt),
            prompt=prompt,
            capacity=len(prompt) + most,
            vocabulary_size=self._facts.size,
            end=self._facts.end,
            sampling=order.sampling,
            tree=order.tree,
            features=self._said.reads,
        )
        _done(self._draft.handle(command))
        self._draft.session(session).policy = Survey()
        bonus = None
        for event in _done(self._target.handle(command)):
            if isinstance(event, Prefilled):
                _done(
                    self._draft.handle(
                        Feed(
                            epoch=EPOCH, session=session, start=event.start, features=event.features
                        )
                    )
                )
            elif isinstance(event, Opened):
                bonus = event.bonus
        assert bonus is not None
        return bonus

    def _position(
        self, session: int, prompt: Sequence[int], tokens: Sequence[int], features: Array | None
    ) -> Position:
        """The draft's tree below the last of `tokens`."""
        order = self.order
        command = Draft(
            epoch=EPOCH,
            session=session,
            round=len(tokens),
            prefix=len(prompt) + len(tokens),
            accepted=(),
            bonus=tokens[-1],
            max_nodes=order.nodes,
            max_depth=order.depth,
            max_width=order.width,
            features=features,
        )
        _done(self._draft.handle(command))
        return _snapshot(self._draft.session(session).tree)

    def _choice(self, session: int, prefix: int, round: int) -> tuple[int, Array | None]:
        """The target's next token, and the features that come with it."""
        item = VerifyItem(session=session, round=round, prefix=prefix, tokens=(), parents=())
        verified = next(
            event
            for event in _done(self._target.handle(Verify(epoch=EPOCH, items=(item,))))
            if isinstance(event, Verified)
        )
        return verified.items[0].bonus, verified.features


def _done(events: Iterable[Event]) -> list[Event]:
    return list(events)


def _snapshot(tree: GrowingTree) -> Position:
    return Position(tree.tokens.copy(), tree.parents.copy(), tree.gains.copy(), tree.rows != NO_ROW)
