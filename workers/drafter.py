"""The engine of a draft worker: a smaller causal model grows every session's tree, whose root moves with the verdicts.

A session holds the token log, the model's cache of it and the tree. Cache slots 0..length-1 are rows of the log; behind them lie the rows of the tree's
expanded nodes. When a verdict comes, rows of accepted nodes become rows of the log, rows of the surviving subtree stay behind them, and the rest is free.
The root is the last token of the log; it has a row as soon as it has been expanded. Nothing is thrown away after a proposal has left.

Knows neither messages nor rounds; what it proposes cannot change the output, only how fast it comes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.speculation.growth import NO_ROW, GrowingTree, Nodes, frontier, likeliest
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.speculation.sampling import LookingBack, process_logits

CHUNK = 256
"""Tokens of the log read in one pass: bounds the mask and the activations of a long prompt."""
MAX_TREE_ROWS = 4096
"""Rows that the trees of one session may take at most, four times the nodes that a proposal can have."""
SHARPENING = 1.0
"""What "auto" stands for. Committed tokens a round on 16 of the demonstration prompts with the embedded pair, gamma 15, depth 8, width 10: at 0.3 / 0.5 / 0.8 /
1.0 / 1.25 they are 5.62 / 5.66 / 5.78 / 5.74 / 5.62 at temperature 0 and 5.02 / 4.96 / 5.08 / 5.15 / 4.87 at temperature 1; the sharper, the more nodes
are grown for it (388 a round at 0.3, 329 at 1.0)."""


@dataclass
class DraftSession:
    """One sequence. `room` is the number of tokens of it that the draft can hold, `capacity` the number that it can come to."""

    log: list[int]
    cache: Cache
    noise: NoiseCache | None
    looking_back: LookingBack | None
    sampling: Sampling
    sharpening: float
    depth: int
    capacity: int
    room: int
    vocabulary_size: int
    tree: GrowingTree = field(default_factory=GrowingTree)
    offered: list[int] = field(default_factory=list)
    """Pool index of each node of the last proposal."""

    @property
    def readable(self) -> bool:
        """Whether the draft's context holds the whole log."""
        return len(self.log) <= self.room

    def within_reach(self, shape: Shape) -> Shape:
        """`shape` without the levels that the sequence has no place for (the bonus takes one) and those whose parents the draft cannot compute."""
        length = len(self.log)
        return Shape(shape.nodes, min(shape.depth, self.capacity - length - 1, self.room - length + 1), shape.width)

    def move_root(self, path: Sequence[int], bonus: int, width: int) -> bool:
        """Append the tokens of the accepted pool nodes and the bonus to the log, and carry over what is known below; says whether the bonus was known."""
        tree = self.tree
        committed = [*(int(tree.tokens[node]) for node in path), bonus]
        self.log += committed
        if self.looking_back is not None:
            self.looking_back.extend(committed)
        root = tree.child(path[-1] if path else ROOT, bonus)
        way = path if root is None else (*path, root)
        # a node with a child in the pool has a row: on the way only the last one may lack it, and then nothing is behind it
        accepted = [int(row) for row in tree.rows[list(way)] if row != NO_ROW]
        if root is None:
            survivors: list[int] = []
            tree.clear()
        else:
            survivors = tree.move_root(root, width)
        self.cache.keep([self.cache.length + row for row in (*accepted, *survivors)], len(accepted))
        return root is not None


class Drafter:
    """Opens sessions and proposes; one pass at a time."""

    def __init__(self, model: LanguageModel, spans: Spans, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.model = model
        self._spans = spans
        self._clock = clock

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """`RequestError` of code "vocabulary" if the model has no row for one of `tokens`."""
        if (largest := max(tokens)) >= self.model.vocabulary_size:
            raise RequestError(
                "vocabulary", f"token {largest} is beyond the draft's vocabulary of {self.model.vocabulary_size}; choose a draft of the same family"
            )

    def open(
        self, prompt: Sequence[int], *, capacity: int, vocabulary_size: int, key: bytes, sampling: Sampling, tree: TreeSettings, end: Sequence[int] = ()
    ) -> DraftSession:
        """A session with the prompt read, where the draft's context holds it; no id at or beyond `vocabulary_size`, the target's, will be proposed.

        `end`: ids that end the reply.
        """
        room = min(capacity, self.model.context)
        size = min(vocabulary_size, self.model.vocabulary_size)
        noise = NoiseCache(key, size, self.model.device) if sampling.temperature > 0 else None
        back = LookingBack(sampling, prompt, end, size, self.model.device) if sampling.looks_back else None
        sharpening = SHARPENING if tree.sharpening == "auto" else tree.sharpening
        cache = self.model.new_cache(room + _tree_rows(tree) if len(prompt) <= room else 0)
        session = DraftSession(list(prompt), cache, noise, back, sampling, sharpening, tree.depth, capacity, room, size)
        if session.readable:
            with self._spans.measure("prefill"):
                self._read_log(session)
        return session

    @torch.inference_mode()
    def draft(self, session: DraftSession, accepted: Sequence[int], bonus: int, shape: Shape, deadline_ns: int | None = None) -> Proposal:
        """Move the root of `session` below the `accepted` nodes of the last proposal to `bonus`, grow, and propose.

        Growth stops at the first level that ends after `deadline_ns` on the clock, or that the cache has no slots for.
        """
        hit = session.move_root([session.offered[node] for node in accepted], bonus, shape.width)
        if session.noise is not None:
            session.noise.drop_before(len(session.log))
        shape = session.within_reach(shape)
        grown = 0
        if session.readable and shape.nodes:
            for added in self._grow(session, shape):
                grown += added
                if deadline_ns is not None and self._clock() > deadline_ns:
                    break
        best = session.tree.best(shape.nodes, shape.depth) if session.readable else np.zeros(0, np.intp)
        session.offered = best.tolist()
        return Proposal(session.tree.token_tree(best), tuple(session.tree.scores[best].tolist()), grown, hit)

    def prepare(self, session: DraftSession) -> bool:
        """Compute the noise of one more position that the coming proposals look at; says whether there was one."""
        if session.noise is None or not session.readable:
            return False
        first = len(session.log)
        # a proposal looks at `depth` positions, and the next one begins up to `depth` + 1 tokens later
        return session.noise.prepare(first, min(2 * session.depth + 1, session.capacity - first))

    def _grow(self, session: DraftSession, shape: Shape) -> Iterator[int]:
        """One pass a level, from the root down; yields the nodes that each added."""
        for level in range(shape.depth):
            nodes = frontier(session.tree, level, shape)
            if level:
                nodes = nodes[: session.cache.capacity - session.cache.length - session.tree.rows_used]
            if not len(nodes):
                continue
            with self._spans.measure("level" if level else "root"):
                logits = self._read_nodes(session, nodes, level) if level else self._read_log(session)
                ranking = self._ranking(session, logits, level, nodes)
                added = session.tree.add_children(nodes, *likeliest(ranking, shape.width, session.sharpening))
            yield added

    def _read_log(self, session: DraftSession) -> Tensor:
        """Compute the rows of the log that are missing; logits [1, V] after its last token."""
        cache, logits = session.cache, torch.empty(0)
        while missing := session.log[cache.length : cache.length + CHUNK]:
            start, count = cache.length, len(missing)
            tokens, positions = torch.tensor(missing), torch.arange(start, start + count)
            logits = self.model.forward(tokens, positions, [Segment(cache, start, count)], rows=torch.tensor([count - 1]))
            cache.keep(range(start, start + count), count)
        return logits

    def _read_nodes(self, session: DraftSession, nodes: Nodes, level: int) -> Tensor:
        """Compute the rows of `nodes`, all of one level, behind those of the tree; logits [N, V] after them."""
        tree, cache = session.tree, session.cache
        segment_start = cache.length + tree.rows_used
        tree.give_rows(nodes)
        segment = Segment(cache, segment_start, len(nodes), Paths.seen(cache.length, tree.lineage(nodes)))
        tokens = torch.from_numpy(tree.tokens[nodes].astype(np.int64))
        return self.model.forward(tokens, torch.full((len(nodes),), len(session.log) - 1 + level), [segment])

    def _ranking(self, session: DraftSession, logits: Tensor, level: int, nodes: Nodes) -> Tensor:
        """What the target's choice below `nodes`, all of `level`, is guessed by [N, V]: processed logits, and the noise of that position if there is any."""
        logits = logits[:, : session.vocabulary_size]
        if session.looking_back is not None:
            logits = session.looking_back.process(logits, [session.tree.path_tokens(node) for node in nodes.tolist()])
        if session.noise is None:
            return logits
        return process_logits(logits, session.sampling) + session.noise.row(len(session.log) + level)


def _tree_rows(tree: TreeSettings) -> int:
    """Slots for the tree: what one proposal can expand, and as much again for what survives of the last one."""
    return min(2 * min(tree.width, tree.gamma) * tree.depth, MAX_TREE_ROWS)
