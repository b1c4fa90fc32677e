"""The engine of a draft head: it reads the target's features, and its own outputs where the target
has not computed any yet. Row j of a head consumes the feature of position j and the token of
position j + 1, has position j, and predicts the token of position j + 2. So of a log of n tokens,
the last of which is the root, rows 0..n-2 are *true*: their features came from the target, for the
prompt before the first round, later with each verdict. Row n-2 (the root's token) ranks the root's
children; a node's row consumes the state of its parent's row instead of a feature. Between rounds
the cache holds true rows only: guessed rows on the path to the new root are recomputed.

Without growth ahead, each round grows a new tree: there is almost nothing below the new root, since
likely nodes there had been offered and accepted. With a trained Dovetail head (15/8/10, 12 prompts)
the new root had been expanded in 0.6 % of the rounds at temperature 0 and 1.0 % at temperature 1;
keeping that subtree and ranking its top again gave the same tau (3.44, 2.39) with 4.21 passes a
round instead of 4.22.

With growth ahead, the subtree below the new root is kept. The root's true row is computed and ranks
its children again; the subtrees of children that remain are reused, though their rows were computed
from guessed states. They are replaced once the root moves past them.

Beyond the length that a head was trained with, its cache is a sliding window; positions are not
renumbered, since it has learned distances.

The row of a node of a head with a contrast output (Jakiro) also predicts what follows the node's
children, so the last level of a proposal needs no pass of its own.

The log, true rows and unread features of an ended session can be kept for another session. Since a
row consumes the next token, a prompt that shares n tokens with the log can reuse n - 1 rows."""

import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.arrays import Array
from dovetail.protocol.messages import Open, Reads
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.devices.base import Capture
from dovetail.workers.drafters.engine import FeatureReader, Keeper
from dovetail.workers.drafters.head_levels import (
    Level,
    adapts_shapes,
    compute_rows,
    open_levels,
)
from dovetail.workers.drafters.head_session import HeadLeft, HeadSession
from dovetail.workers.drafters.passes import EMPTY, Reading, Rows, Steps, read_alone
from dovetail.workers.drafters.ranking import Ranking
from dovetail.workers.drafters.session import THE_ROOT
from dovetail.workers.drafters.tree import CHUNK, Grower
from dovetail.workers.heads.head import Head, Predicted
from dovetail.workers.heads.reduced.rows import TokenCounts
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.sessions.wire import to_tensor
from dovetail.workers.speculation.growth import NO_ROW, Nodes
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.proposal import Order, Shape
from dovetail.workers.speculation.score_calibration import Scale

SHARPENING = 1.0
"""The initial value of sharpening "auto". Committed tokens a round on 16 of the demonstration
prompts with a Dovetail head of one block, gamma 15, depth 8, width 10: at 0.3 / 0.5 / 0.8 / 1.0 /
1.25 / 1.6 they are 3.13 / 3.32 / 3.46 / 3.42 / 3.28 / 2.96 at temperature 0 and 1.99 / 2.15 / 2.34
/ 2.42 / 2.41 / 2.31 at temperature 1, in 7.6 / 7.1 / 5.9 / 5.2 / 4.4 / 3.6 and about as many passes
of the head."""
NOISE_SHARE = 0.75
"""The share of the target's noise that a head adds: the initial value, or the fixed one if the
sharpening is given. If it knew the target's distribution, it would add all of it. But it only has a
mixture of the possible distributions, flatter than each of them, so the best guess of the target's
argmax(z + noise) adds less. tau at temperature 1, tree 15/8/10, a Dovetail head of one block and
the embedded target, 24 shipped prompts, with 0 / 0.25 / 0.5 / 0.75 / 1: 4.50 / 4.77 / 4.88 / 4.83 /
4.45. Share of nodes with ten children that contain the target's choice, on text unlike its training
data (GSM8K, MT-bench), with 0.5 / 0.75 / 1: 0.85 / 0.93 / 0.92 and 0.77 / 0.86 / 0.85."""
FORETOLD = -2
"""Marks a node without a row that has children: its row is only needed if something below them is
computed, in growth ahead."""


class HeadDrafter(FeatureReader[HeadSession], Grower[HeadSession], Keeper[HeadSession]):
    """The engine of a draft head; makes one pass at a time."""

    reads: Reads
    counts: TokenCounts | None = None  # counts the tokens of replies, for a reduced output head
    held = 0  # true rows that are computed with a block only
    kept = 0
    """Keep no more children than an order requests: growth ahead continues from the head's own
    guesses, and children of unlikely tokens are nearly worthless. Simulated with the embedded
    Dovetail head, 32 lowered the rate by 0 to 2 % at two costs of rows and two T_D/T_V."""
    given_up = 0.02
    """From simulations of `Grower.given_up`, shipped prompts and MT-bench: at 0.01 / 0.02 / 0.03
    tau is 0.99 / 0.98 / 0.97 of tau without growth ahead."""

    def __init__(
        self,
        head: Head,
        spans: Spans,
        *,
        contrast: bool,
        capture: Capture | None = None,
        ahead: bool = False,
        merges: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`contrast`: take the last level from the contrast output, which the head must have.
        `capture`: capture and replay the levels with it. `ahead`: give sessions rows for growth
        ahead. `merges`: see `Grower`."""
        scale = Scale(SHARPENING, NOISE_SHARE)
        super().__init__(spans, scale, ahead=ahead, merges=merges, clock=clock)
        self.head = head
        self._contrast, self._capture = contrast, capture
        spec = head.spec
        self.reads = Reads(
            taps=spec.taps,
            width=spec.target_width,
            dtype=spec.dtype,
            vocabulary_size=spec.vocabulary_size,
            trained_for=head.trained_for,
        )

    def open(self, order: Open, base: HeadLeft | None = None) -> HeadSession:
        """Open a session, whose prompt is read with its features. `base`: the rows of a session
        that began with the first `kept` tokens, whose features are not sent again; it must not be
        used any more."""
        tree, spec, kept = order.tree, self.head.spec, order.kept
        ranking = Ranking.begin(
            order,
            most_tokens=self.reads.vocabulary_size,
            score_calibration=self.score_calibration,
            device=self.head.device,
            constrained=self.constrained(order),
        )
        window = max(1, min(order.capacity, spec.context - tree.most_levels))
        rows = self._tree_rows(order.sampling, tree)
        waiting: list[Tensor] = []
        if base is not None:
            waiting = [base.waiting[: kept - base.rows].clone()] if kept > base.rows else []
            base.cache.truncate(min(kept, base.rows) - base.dropped)
        cache, levels = open_levels(
            self.head,
            window + rows,
            self._capture,
            of_tree=rows,
            least_rows=1 if adapts_shapes(tree) else tree.width,
            cache=None if base is None else base.cache,
        )
        log = list(order.prompt)
        return self._new_session(
            log=log,
            tree=self._new_tree(),
            looked_up=self._look_up(order, log),
            ranking=ranking,
            policy=open_policy(tree),
            depth=tree.most_levels,
            capacity=order.capacity,
            rows_ahead=rows,
            cache=cache,
            levels=levels,
            window=window,
            waiting=waiting,
            dropped=0 if base is None else base.dropped,
            recent=self.head.recent_rows(order.prompt, order.end),
        )

    def _new_session(self, **fields: Any) -> HeadSession:
        return HeadSession(**fields)

    def keep(self, session: HeadSession) -> HeadLeft:
        session.cache.resize(session.cache.length)
        return self._left(session, 0)

    def left(self, session: HeadSession) -> HeadLeft:
        return self._left(session, max(0, session.missing_rows) + session.tree.rows_used)

    def _left(self, session: HeadSession, used: int) -> HeadLeft:
        waiting = torch.cat(session.waiting) if session.waiting else torch.empty(0, self.reads.row)
        window = {"dropped": session.dropped, "window": session.window}
        return HeadLeft(session.log, session.cache, used, **window, waiting=waiting)

    def restored(self, log: list[int], cache: Cache) -> HeadLeft:
        waiting = torch.empty(0, self.reads.row)
        return HeadLeft(log, cache, dropped=0, window=len(log), waiting=waiting)

    @property
    def shares(self) -> bool:
        return self.head.new_cache(0).branches

    @torch.inference_mode()
    def feed(self, session: HeadSession, start: int, features: Array) -> None:
        """Take the features of the positions from `start` on, and compute the rows whose tokens are
        known."""
        self._check_feed(session, start, features)
        with self._spans.measure("feed"):
            self.take_features(session, features)
            read_alone(self._read_true(session, predicted=False, contrast=False), self.compute)

    def take_features(self, session: HeadSession, features: Array) -> None:
        """Queue the features of the next positions; their rows are computed with the next
        proposal."""
        session.waiting.append(to_tensor(features).to(self.head.device))

    def _committed(self, order: Order[HeadSession]) -> list[int]:
        tokens = super()._committed(order)
        if order.session.recent is not None:
            order.session.recent.add(tokens)
        if self.counts is not None:
            self.counts.add(tokens)
        return tokens

    def learn(self) -> bool:
        saved = self.counts is not None and self.counts.save()
        return super().learn() or saved

    def _move_root(
        self, session: HeadSession, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Keep the nodes grown ahead below the new root, whose children will be ranked again. True
        rows replace those of the path."""
        tree, cache = session.tree, session.cache
        session.contrasts.clear()
        session.survives = root is not None and session.waiting_time.ahead
        if root is None or not session.survives:
            tree.clear()
            return
        way = tree.rows[[*path, root]].tolist()
        foretold = np.flatnonzero(tree.rows == FORETOLD)
        tree.ranks[np.isin(tree.parents, foretold)] = width  # too uncertain: parents without rows
        tree.rows[foretold] = NO_ROW
        survivors = tree.move_root(root, width)
        tree.root_expanded = False
        if survivors:
            session.states[1 : 1 + len(survivors)] = session.states[[1 + row for row in survivors]]
            cache.keep([cache.length + row for row in (*way, *survivors)], 0)

    def _read_log(self, session: HeadSession, shape: Shape) -> Steps:
        predicted = yield from self._read_true(
            session, predicted=True, contrast=self._contrast and shape.depth == 2
        )
        session.note_ranking(THE_ROOT, predicted.best)
        if predicted.best is None:  # else the pass has written it
            session.states[0] = predicted.states[0]
        if predicted.contrast is not None:
            session.contrasts[ROOT] = predicted.contrast[0]
        return predicted.logits

    def _read_true(
        self, session: HeadSession, *, predicted: bool, contrast: bool
    ) -> Generator[Rows, Predicted, Predicted]:
        """Compute the missing true rows whose tokens are known; if `predicted`, return the last
        one's prediction."""
        last = Predicted(EMPTY, EMPTY, None)
        while count := min(session.fed, len(session.log) - 1 - self.held) - session.rows:
            count = min(count, CHUNK, session.window)
            session.make_room(count)
            last = yield session.true_rows(count, predicted=predicted, contrast=contrast)
            session.commit(count)
        return last

    def _read_nodes(self, session: HeadSession, nodes: Nodes, shape: Shape) -> Steps:
        """Compute `nodes` as rows behind those of the tree. Nodes whose next tokens their parents
        have predicted (the contrast output) need no row."""
        tree, contrasts = session.tree, session.contrasts
        if not contrasts:
            return (yield from self._compute(session, nodes, shape.depth))
        foretold = self._foretold(session, nodes)
        tree.rows[nodes[foretold]] = FORETOLD
        if not foretold.any():
            return (yield from self._compute(session, nodes, shape.depth))
        computed = EMPTY
        if not foretold.all():
            computed = yield from self._compute(session, nodes[~foretold], shape.depth)
        guessed = torch.stack(
            [contrasts[parent] for parent in tree.parents[nodes[foretold]].tolist()]
        )
        if foretold.all():
            return guessed
        order = np.argsort(np.concatenate((np.flatnonzero(~foretold), np.flatnonzero(foretold))))
        return torch.cat((computed, guessed))[torch.from_numpy(order)]

    def steps_ahead(self, session: HeadSession, nodes: Nodes) -> Steps:
        """Like `steps`, without the contrast output: growth would end there."""
        return (
            self._read_log(session, Shape(0, 0, session.waiting_time.width))
            if nodes[0] == ROOT
            else self._compute(session, nodes, 0)
        )

    def rows_of_pass(self, session: HeadSession, nodes: Nodes) -> Nodes:
        rows: Nodes = np.cumsum(~self._foretold(session, nodes))
        return rows

    def _foretold(self, session: HeadSession, nodes: Nodes) -> NDArray[np.bool_]:
        """Return [N] which of `nodes` have next tokens predicted by their parents' contrast
        output."""
        return np.array(
            [parent in session.contrasts for parent in session.tree.parents[nodes].tolist()]
        )

    def _add_children(self, session: HeadSession, logits: Tensor, nodes: Nodes, width: int) -> int:
        """Add the best children of `nodes`. A node that already has children (the moved root, or
        one predicted by a contrast output) keeps those that are still among the best."""
        tree, children = session.tree, session.children_of(logits, nodes, width)
        some = session.survives or session.waiting_time.ahead or tree.guesses
        if not some or not (tree.children_of(nodes) > 0).any():
            return tree.add_children(nodes, *children)
        added = tree.rank_again(nodes, *children)
        if nodes[0] == ROOT:
            tree.prune(width)
        return added

    def _compute(self, session: HeadSession, nodes: Nodes, depth: int) -> Steps:
        """Compute logits [N, V] of `nodes`, in a tree of `depth` levels, by rows that start from
        their parents' states."""
        tree, cache = session.tree, session.cache
        parents, levels = tree.parents[nodes], tree.levels[nodes]
        first = tree.rows_used
        tree.give_rows(nodes)
        paths = Paths.behind(cache.length, *tree.lineage(nodes))
        level = Level(
            torch.from_numpy(tree.tokens[nodes].astype(np.int64)),
            torch.from_numpy(len(session.log) - 2 + levels.astype(np.int64)),
            Segment(cache, cache.length + first, len(nodes), paths),
            len(nodes),
            levels=session.levels,
            # the root has no row in the tree, and its state comes first
            above=1 + tree.rows_of(parents).astype(np.int64),
            into=1 + first,
            contrast=self._contrast and bool((levels == depth - 2).any()),
            ranking=session.ranking_of(nodes) if session.levels.ranks else None,
            recent=session.recent,
        )
        found: Predicted = yield session.levels.ask(level)
        session.levels.take(level, found)
        if found.contrast is not None:
            session.contrasts.update(
                (int(nodes[i]), found.contrast[i]) for i in np.flatnonzero(levels == depth - 2)
            )
        session.note_ranking(nodes, found.best)
        return found.logits

    def take(self, session: HeadSession, reading: Reading) -> int:
        """Put results into the tree; return how many nodes joined it. If numbers overflow fp16 the
        session fails, and sessions opened later use wider products."""
        try:
            return super().take(session, reading)
        except FloatingPointError:
            if self.head.wider is not None:
                self.head = self.head.wider()
                print(f"{self.head.source}: {self.head.said}", file=sys.stderr)
            raise

    def compute(self, parts: Sequence[Rows]) -> Sequence[Predicted]:
        return compute_rows(self.head, parts)
