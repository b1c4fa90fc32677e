"""The engine of a Gemma 4 assistant in its target's process: it reads the target's keys and values
in place, so it has no cache, and siblings cost no memory.

A log of n tokens has n - 1 rows. The root's children are ranked from the target's state at position
n - 2 and the root's token; a node's from its parent's state and its own token. All of them have
position n - 1. Nothing survives a move of the root: every state below it was a guess."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open, Reads
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.engine import FeatureReader
from dovetail.workers.drafters.passes import EMPTY, Steps
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.drafters.session import GrowingSession
from dovetail.workers.drafters.shared import Borrow
from dovetail.workers.drafters.tree import Grower
from dovetail.workers.models.assistant import Assistant, KeysAndValues
from dovetail.workers.sessions.wire import to_tensor
from dovetail.workers.speculation.growth import Nodes
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.score_calibration import Scale

SCALE = Scale(1.0, 0.75)  # a head's (`drafters/head.py`): no published assistant was measured
FEATURES: Literal["float16"] = "float16"  # type of the target's states, which a norm bounds

Found = tuple[Tensor, Tensor]
"""Logits [N, V] and states [N, H] after N nodes."""


@dataclass(frozen=True)
class Asked:
    """Nodes of one session to compute: tokens int64 [N], states [N, H] before them. A part of a
    pass (`passes.py`)."""

    session: "AssistantSession"
    tokens: Tensor
    states: Tensor
    kind: None = None

    @property
    def count(self) -> int:
        return len(self.tokens)


@dataclass(kw_only=True)
class AssistantSession(GrowingSession):
    """One sequence. `states` [1 + rows, H]: the root's, then that of each row of the tree."""

    states: Tensor
    number: int = -1  # the session's number at coordinator and target
    fed: int = 0  # positions whose features have arrived
    last: Tensor = EMPTY  # [1, H]: the newest of them
    read: int = 0  # rows of the target in `buffers`
    buffers: Mapping[str, KeysAndValues] = field(default_factory=dict)
    """For each layer type the target's keys and values, with room for `capacity` rows."""

    @property
    def missing_rows(self) -> int:
        return 0

    @property
    def free_rows(self) -> int:
        return self.states.shape[0] - 1 - self.tree.rows_used

    @property
    def seen(self) -> Mapping[str, KeysAndValues]:
        """The keys and values that all nodes of a round attend to."""
        buffers = self.buffers.items()
        return {kind: (k[:, : self.read], v[:, : self.read]) for kind, (k, v) in buffers}


class AssistantDrafter(FeatureReader[AssistantSession], Grower[AssistantSession]):
    """Drafts with an assistant, one level a pass."""

    borrow: Borrow

    def __init__(self, assistant: Assistant, spans: Spans, *, merges: bool = False) -> None:
        """`merges`: see `Grower`."""
        super().__init__(spans, SCALE, merges=merges)
        self.assistant = assistant
        self.reads = Reads(
            taps=(),
            width=assistant.width,
            dtype=FEATURES,
            vocabulary_size=assistant.config.vocab_size,
        )

    def open(self, order: Open, base: None = None) -> AssistantSession:
        """Open a session, whose prompt only its target prefills."""
        rows, log = self._tree_rows(order.sampling, order.tree), list(order.prompt)
        return AssistantSession(
            log=log,
            tree=self._new_tree(),
            looked_up=self._look_up(order, log),
            cache=self.assistant.new_cache(),
            ranking=Ranking.begin(
                order,
                most_tokens=self.reads.vocabulary_size,
                score_calibration=self.score_calibration,
                device=torch.device("cpu"),
                constrained=self.constrained(order),
            ),
            policy=open_policy(order.tree),
            depth=order.tree.most_levels,
            capacity=order.capacity,
            rows_ahead=rows,
            states=torch.empty(1 + rows, self.assistant.width),
        )

    def feed(self, session: AssistantSession, start: int, features: Array) -> None:
        self._check_feed(session, start, features)
        self.take_features(session, features)

    def take_features(self, session: AssistantSession, features: Array) -> None:
        session.fed += features.shape[0]
        session.last = to_tensor(features)[-1:].float()

    def _move_root(
        self, session: AssistantSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        session.tree.clear()

    def _read_log(self, session: AssistantSession, shape: Shape) -> Steps:
        """Read the target's new rows, and compute the root; logits [1, V]."""
        self._take_rows(session)
        root = torch.tensor(session.log[-1:])
        found: Found = yield Asked(session, root, session.last)
        logits, session.states[:1] = found
        return logits

    def _read_nodes(self, session: AssistantSession, nodes: Nodes, shape: Shape) -> Steps:
        tree = session.tree
        first, above = 1 + tree.rows_used, 1 + tree.rows_of(tree.parents[nodes]).astype(np.int64)
        tree.give_rows(nodes)
        tokens = torch.from_numpy(tree.tokens[nodes].astype(np.int64))
        found: Found = yield Asked(session, tokens, session.states[torch.from_numpy(above)])
        logits, session.states[first : first + len(nodes)] = found
        return logits

    def _take_rows(self, session: AssistantSession) -> None:
        """Copy the target's rows of tokens committed since the last round. Raises `RequestError` if
        the target in this process has another log."""
        lent, stop = self.borrow(session.number), len(session.log) - 1
        if [*lent.log[: stop + 1]] != session.log or lent.cache.length < stop:
            text = f"its target here has another log of {len(lent.log)} tokens; open it again"
            raise RequestError("prefix", f"session {session.number}: {text}")
        for kind, parts in self.assistant.keys(lent.cache, session.read, stop).items():
            if kind not in session.buffers:
                heads, _, size = parts[0].shape
                room = (torch.empty(heads, session.capacity, size) for _ in parts)
                session.buffers = {**session.buffers, kind: (next(room), next(room))}
            for buffer, part in zip(session.buffers[kind], parts, strict=True):
                buffer[:, session.read : stop] = part
        session.read = stop

    def compute(self, parts: Sequence[Asked]) -> Sequence[Found]:
        """Compute the parts one by one: each attends to its own session's rows."""
        forward = self.assistant.forward
        return [forward(part.tokens, part.states, part.session.seen) for part in parts]
