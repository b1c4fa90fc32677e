"""The engine of block drafters, which predict several positions in one pass (DFlash, DSpark,
DFlash-2, P-EAGLE).

A block of rows, the root's and those of mask tokens after it, follows the true rows of the log in
the cache and is dropped after the pass. Only P-EAGLE's first row, the last true one, stays. The
pass gives a *lattice*: logits of each position given the log alone, and for some kinds scores of
pairs of neighbouring tokens. Expanding a node of the tree needs no pass: its children are the
likeliest tokens of its position under the target's noise, which all nodes of a level share, with
the scores of pairs that its own token adds. The scores of pairs are computed for the likeliest
`candidates` of a position; the others keep their share of the probability.

A new lattice replaces the old one in each round, so nothing is kept when the root moves, and trees
do not grow ahead."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import Open
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.head import FORETOLD, HeadDrafter
from dovetail.workers.drafters.head_levels import Kind
from dovetail.workers.drafters.head_session import HeadLeft, HeadSession
from dovetail.workers.drafters.passes import EMPTY, Rows, Steps
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.drafters.session import MAX_TREE_ROWS
from dovetail.workers.heads.head import Head, Predicted
from dovetail.workers.heads.parts import Pairs
from dovetail.workers.models.segment import Segment
from dovetail.workers.speculation.growth import Floats, GrowingTree, Ints, Nodes
from dovetail.workers.speculation.proposal import Shape

BLOCK, TRUE_ROWS = Kind(true=False), Kind(true=True)


@dataclass
class Lattice:
    """The predictions of a block, by level: those of the root's children are the first."""

    logits: Tensor  # float32 [D, V]
    states: Tensor  # [D, H]
    root: int  # the token of the root
    pairs: Pairs | None
    candidates: int
    _ranked: dict[int, tuple[Ints, Floats]] = field(default_factory=dict)

    def children(
        self, ranking: Ranking, tree: GrowingTree, nodes: Nodes, position: int, width: int
    ) -> tuple[Ints, Floats]:
        """Return ids and gains [N, K] of the likeliest tokens after `nodes`, best first.
        `position`: of the root's children."""
        rows = NodeLogits(self, ranking, tree, nodes, position)
        if not ranking.plain:
            logits = torch.stack([rows[row] for row in range(len(nodes))])
            return ranking.children(logits, tree, nodes, position, width)
        tokens, gains = rows.ranked(width)
        ranking.note(tree, nodes, rows, position, tokens, gains)
        return tokens, gains

    def ranked(self, ranking: Ranking, level: int, position: int) -> tuple[Ints, Floats]:
        """Return ids and gains [C] of the likeliest tokens of a level, without pairs."""
        if level not in self._ranked:
            count = self.candidates
            tokens, gains = ranking.likeliest(
                self.logits[level : level + 1], level, position, count
            )
            self._ranked[level] = tokens[0], gains[0]
        return self._ranked[level]

    def pair_scores(self, level: int, previous: Ints, tokens: Ints) -> Tensor:
        """Return what the previous tokens [N] add to the logits of `tokens` [C] of a level, on the
        CPU, [N, C]."""
        assert self.pairs is not None
        device = self.logits.device
        before, after = (torch.from_numpy(ids).long().to(device) for ids in (previous, tokens))
        return self.pairs(self.states[level], before, after).cpu()


class NodeLogits:
    """The logits after some nodes of a tree, each made only when it is asked for."""

    def __init__(
        self, lattice: Lattice, ranking: Ranking, tree: GrowingTree, nodes: Nodes, position: int
    ) -> None:
        self._lattice, self._ranking, self._position = lattice, ranking, position
        self._levels = tree.levels_of(nodes)
        before = [lattice.root if node == ROOT else tree.tokens[node] for node in nodes.tolist()]
        self._previous = np.array(before, np.int32)

    def numel(self) -> int:
        """Return how many numbers are kept for these nodes alone."""
        return len(self._levels)

    def __getitem__(self, row: int) -> Tensor:
        """Return the logits [V] after a node."""
        lattice, level = self._lattice, int(self._levels[row])
        logits = lattice.logits[level, : self._ranking.vocabulary_size]
        if lattice.pairs is None:
            return logits
        tokens, _ = lattice.ranked(self._ranking, level, self._position)
        scores = lattice.pair_scores(level, self._previous[row : row + 1], tokens)
        ids = torch.from_numpy(tokens).long().to(logits.device)
        return logits.index_add(0, ids, scores[0].to(logits.device))

    def ranked(self, width: int) -> tuple[Ints, Floats]:
        """Return ids and gains [N, K] of the children of the nodes, best first."""
        lattice, count = self._lattice, len(self._levels)
        width = min(width, lattice.candidates, self._ranking.vocabulary_size)
        tokens, gains = np.zeros((count, width), np.int32), np.zeros((count, width), np.float32)
        for level in np.unique(self._levels).tolist():
            here = np.flatnonzero(self._levels == level)
            ids, alone = lattice.ranked(self._ranking, level, self._position)
            if lattice.pairs is None:
                tokens[here], gains[here] = ids[:width], alone[:width]
                continue
            scores = lattice.pair_scores(level, self._previous[here], ids)
            scores = scores / self._ranking.divisor(level)
            log_rest = np.log(max(1.0 - float(np.exp(alone, dtype=np.float64).sum()), 1e-12))
            z = torch.from_numpy(alone) + scores
            rest = torch.full((len(here), 1), log_rest)
            z = z - torch.cat([z, rest], dim=1).logsumexp(dim=1, keepdim=True)
            best = z.sort(dim=1, descending=True, stable=True)
            tokens[here] = ids[best.indices[:, :width].numpy()]
            gains[here] = best.values[:, :width].numpy()
        return tokens, gains


@dataclass(kw_only=True)
class BlockSession(HeadSession):
    """One sequence. Nodes of the tree have no rows in the cache."""

    block: int  # rows of a block
    deepest: int  # levels of a lattice
    lattice: Lattice | None = None

    @property
    def missing_rows(self) -> int:
        return super().missing_rows + self.block

    @property
    def free_rows(self) -> int:
        return MAX_TREE_ROWS

    def within_reach(self, shape: Shape) -> Shape:
        reach = super().within_reach(shape)
        return Shape(reach.nodes, min(reach.depth, self.deepest), reach.width)


class BlockDrafter(HeadDrafter):
    """The engine of a drafter whose pass predicts several positions."""

    given_up = 0.0  # growing a tree costs no pass

    def __init__(self, head: Head, spans: Spans, **more: Any) -> None:
        super().__init__(head, spans, contrast=False, **more)
        self.held, self.levels = int(head.mask_features is not None), head.spec.levels

    def open(self, order: Open, base: HeadLeft | None = None) -> HeadSession:
        if base is not None and min(order.kept, base.rows) + self.held >= len(order.prompt):
            text = "each block computes the last row of the prompt; open the session without a base"
            raise RequestError("prefix", text)
        return super().open(order, base)

    def _new_session(self, **fields: Any) -> HeadSession:
        return BlockSession(**fields, block=self.head.spec.block, deepest=self.head.spec.levels)

    def _tree_rows(self, sampling: Sampling, tree: TreeSettings) -> int:
        return self.head.spec.block

    @property
    def shares(self) -> bool:
        # the kernels' paths cannot include rows of another session
        windows = any(view.window and not view.causal for view in self.head.spec.views)
        return super().shares and not windows

    def _may_grow_ahead(self, session: HeadSession) -> bool:
        return False

    def _move_root(
        self, session: HeadSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        session.tree.clear()

    def rows_of_pass(self, session: HeadSession, nodes: Nodes) -> Nodes:
        return np.zeros(len(nodes), np.intp)

    def _read_log(self, session: HeadSession, shape: Shape) -> Steps:
        assert isinstance(session, BlockSession)
        yield from self._read_true(session, predicted=False, contrast=False)
        found: Predicted = yield self._block_of(session)
        if self.held:
            session.commit(self.held)
        pairs, candidates = self.head.pairs, self.head.spec.candidates
        session.lattice = Lattice(found.logits, found.states, session.log[-1], pairs, candidates)
        return found.logits[:1]

    def _block_of(self, session: BlockSession) -> Rows:
        """Return the rows of a block after the true rows as part of a pass."""
        spec, cache, mask = self.head.spec, session.cache, self.head.mask_features
        first, behind = len(session.log) - 1 - self.held, spec.block - 1
        features = torch.zeros(spec.block, spec.hidden)
        if mask is not None:
            features = torch.cat([session.next_features(1).float(), mask.expand(behind, -1)])
        return Rows(
            torch.tensor([session.log[-1], *[spec.mask_token] * behind]),
            torch.arange(first, first + spec.block),
            Segment(cache, cache.length, spec.block),
            spec.levels,
            kind=BLOCK if mask is None else TRUE_ROWS,
            features=features,
            recent=session.recent,
        )

    def _read_nodes(self, session: HeadSession, nodes: Nodes, shape: Shape) -> Steps:
        session.tree.rows[nodes] = FORETOLD
        return EMPTY
        yield  # makes this a generator, of no parts

    def _add_children(self, session: HeadSession, logits: Tensor, nodes: Nodes, width: int) -> int:
        assert isinstance(session, BlockSession)
        assert session.lattice is not None
        position, tree = len(session.log), session.tree
        children = session.lattice.children(session.ranking, tree, nodes, position, width)
        return tree.add_children(nodes, *children)
