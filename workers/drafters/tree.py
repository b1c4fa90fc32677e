"""The common part of engines with a model: a session's log, the growth of its tree, the ranking of
children, and the move of the root.

What is expanded and what is offered is the policy's business (`speculation/policies.py`). How the
rows of the log and of nodes are computed, and what of a tree survives the move of its root, an
engine says: `model.py` with a smaller model, `head.py` with a head of the target.

Knows neither messages nor rounds; what is proposed cannot change the output, only how fast it
comes.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.messages import MAX_PASSES
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.ahead import GrowthAhead
from dovetail.workers.drafters.session import NO_NODES, GrowingSession, WaitingTime, tree_rows
from dovetail.workers.drafters.worth import hardly_matters, worth_a_pass
from dovetail.workers.sessions.wire import to_array
from dovetail.workers.speculation.growth import Nodes
from dovetail.workers.speculation.prices import PassTimes
from dovetail.workers.speculation.proposal import FREE, Price, Proposal, Shape
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.speculation.score_calibration import Scale, ScoreCalibration

CHUNK = 256
"""Tokens of the log read in one pass: bounds the mask and the activations of a long prompt."""

NOTHING = Shape(0, 0, 0)


class _Pass(NamedTuple):
    """One pass of the model: how many nodes joined the pool, how many rows were computed for them,
    and when it began and ended on the clock."""

    added: int
    rows: int
    start_ns: int
    end_ns: int


SessionT = TypeVar("SessionT", bound=GrowingSession)


class Grower(ABC, Generic[SessionT]):
    """Proposes for sessions, one pass at a time."""

    kept: int = 32
    """Children of a node that a tree that grows ahead keeps at least, hidden from the policies
    beyond the width: one of them may be the next root. With the embedded small model, in 19 %
    (temperature 0) and 23 % (1) of the rounds the target's choice behind the accepted nodes was
    among 32 and not among 10."""
    given_up: float = 0.03
    """While the tree grows ahead, an order waits for no more passes once all that is left would add
    less than this share of the expected tokens. Simulated with the embedded small model, tree
    15/8/10, T_D = T_V, 14 shipped prompts: at 0.02 / 0.03 / 0.04 tau is 0.986 / 0.980 / 0.974 of
    what it is without growth ahead at temperature 0, 0.988 / 0.988 / 0.976 at temperature 1."""

    def __init__(
        self,
        spans: Spans,
        start: Scale,
        *,
        ahead: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`start`: the scale of a draft of this kind before anything has been learned of it.
        `ahead`: sessions get rows for growth ahead of the orders."""
        self.score_calibration = ScoreCalibration(start)
        self._spans = spans
        self._rows_for_ahead = ahead
        self._clock = clock
        self._times = PassTimes()
        self._ahead = GrowthAhead(self._times, clock)

    @torch.inference_mode()
    def draft(
        self,
        session: SessionT,
        accepted: Sequence[int],
        bonus: int,
        shape: Shape,
        deadline_ns: int | None = None,
        *,
        more: Sequence[int] = (),
        price: Price = FREE,
        ahead: bool = False,
    ) -> Proposal:
        """Move the root of `session` below the `accepted` nodes of the last proposal over `bonus`
        and what was committed behind it, grow, and propose.

        Growth stops at the first level that ends after `deadline_ns` on the clock, that there are
        no rows for, or that is not worth its `price`. `ahead`: it goes on when the proposal has
        left (`grow_ahead`).
        """
        waited = self._ahead.end(session)
        drawn = (
            session.ranking.draws is not None
        )  # nothing is left out of what is drawn, and what is left over from a draw is none
        ahead = ahead and not drawn
        waiting = WaitingTime(
            ahead=ahead, width=shape.width, children=max(shape.width, self.kept if ahead else 0)
        )
        tokens = [
            *(int(session.tree.tokens[session.offered[node]]) for node in accepted),
            bonus,
            *more,
        ]
        with self._spans.finely("move"):
            hit, unused = self._follow(session, tokens, waiting.children)
        session.tree.show(shape.width)
        session.price, session.waiting_time = FREE if drawn else price, waiting
        shape = session.within_reach(shape) if session.readable else NOTHING
        passes = self._grow_until(session, shape, deadline_ns)
        grown = sum(p.added for p in passes)
        wasted = unused - (session.tree.unused - grown)
        times = [(p.rows, p.end_ns - p.start_ns) for p in passes if p.rows] + [
            *reversed(waited.passes)
        ]
        proposal = replace(
            self._propose(session, shape),
            grown=grown,
            hit=hit,
            ahead=waited.joined,
            wasted=wasted,
            passes=tuple(times[:MAX_PASSES]),
        )
        session.waiting_time.since_ns = self._clock()
        return proposal

    @torch.inference_mode()
    def grow_ahead(self, session: SessionT) -> bool:
        """Expand what the next proposals will most probably use, in one pass; False: the last order
        did not ask for it, or nothing is worth it any more."""
        waiting, tree = session.waiting_time, session.tree
        if not len(nodes := self._ahead.next_nodes(session)):
            return False
        rows, used = tree.rows_of(nodes), tree.rows_used
        try:
            done = self._pass(
                session, nodes, lambda: self._read_ahead(session, nodes, waiting.width)
            )
        except BaseException:  # nodes without rows are what they were
            waiting.done = True
            tree.restore_rows(nodes, rows, used)
            raise
        waiting.joined += done.added
        if done.rows:
            waiting.passes.append((done.rows, done.end_ns - done.start_ns))
        return True

    def _tree_rows(self, sampling: Sampling, tree: TreeSettings) -> int:
        """Rows for the trees of a session; what is drawn at random is drawn anew, and never
        ahead."""
        return tree_rows(tree, ahead=self._rows_for_ahead and not sampling.rejects)

    def prepare(self, session: SessionT) -> bool:
        """Compute the noise of one more position that the coming proposals look at; False: there is
        none to compute."""
        first = len(session.log)
        # a proposal looks at `depth` positions, and the next one begins up to `depth` + 1 tokens
        # later
        return session.readable and session.ranking.prepare(
            first, min(2 * session.depth + 1, session.capacity - first)
        )

    def learn(self) -> bool:
        """Learn a bit from what the targets chose; False: there is nothing to learn from."""
        return self.score_calibration.learn()

    @abstractmethod
    def _move_root(
        self, session: SessionT, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Keep what is in the tree below `root`, which lies below the committed `path` (pool
        nodes), with at most `width` children a node; None: nothing."""

    @abstractmethod
    def _read_log(self, session: SessionT, shape: Shape) -> Tensor:
        """Compute the rows of the log that are missing; logits [1, V] after its last token."""

    @abstractmethod
    def _read_nodes(self, session: SessionT, nodes: Nodes, shape: Shape) -> Tensor:
        """Compute the rows of `nodes`, whose parents have theirs; logits [N, V] after them."""

    def _read_ahead(self, session: SessionT, nodes: Nodes, width: int) -> Tensor:
        """Compute logits where nobody waits: of the root (-1) by itself, or of `nodes`."""
        shape = Shape(0, 0, width)
        return (
            self._read_log(session, shape)
            if nodes[0] == ROOT
            else self._read_nodes(session, nodes, shape)
        )

    def _rows_of_pass(self, session: SessionT, nodes: Nodes) -> Nodes:
        """Return how many rows the first 1, 2, ... of `nodes` take."""
        return np.arange(1, len(nodes) + 1)

    def _follow(self, session: SessionT, tokens: Sequence[int], width: int) -> tuple[bool, int]:
        """Append the committed tokens to the log and move the root down along them, as far as they
        are in the tree.

        Returns whether the new root was in the tree, and how many nodes there were that had neither
        been offered last nor lie on the way.
        """
        tree = session.tree
        way = self._way(session, tokens)
        session.log += tokens
        session.ranking.commit(tokens, len(session.log))
        tree.used[way] = 1
        unused = tree.unused
        known = len(way) == len(tokens)
        hit = known and session.ranking.draws is None
        self._move_root(session, way[:-1] if known else way, way[-1] if hit else None, width)
        return hit, unused

    def _way(self, session: SessionT, tokens: Sequence[int]) -> list[int]:
        """The pool nodes from below the root down along `tokens`; what was expanded on the way
        tells whether expanding finds what the target chooses."""
        tree, way, node = session.tree, list[int](), ROOT
        for token in tokens:
            if not tree.is_expanded(node):
                break
            child = tree.child(node, token)
            session.chance.add(
                child is not None
                and tree.ranks[child] < tree.shown
                and math.exp(tree.scores[child]) >= session.price.floor
            )
            if child is None:
                break
            way.append(child)
            node = child
        return way

    def _grow_until(self, session: SessionT, shape: Shape, deadline_ns: int | None) -> list[_Pass]:
        """Make passes up to the first that ends after the deadline. Without the root's own children
        there is no tree."""
        passes: list[_Pass] = []
        for done in self._grow(session, shape):
            passes.append(done)
            if deadline_ns is not None and done.end_ns > deadline_ns:
                break
        if not session.tree.root_expanded:
            session.tree.clear()
        return passes

    def _grow(self, session: SessionT, shape: Shape) -> Iterator[_Pass]:
        """The passes of the policy, as far as there are rows and they are worth what they keep
        waiting."""
        left_out = NO_NODES
        for offer in session.policy.passes(session.tree, shape):
            at_root, free = offer[0] == ROOT, session.free_rows
            if not (at_root or free) or np.array_equal(offer, left_out):
                return  # there is no place, or the policy has nothing else
            given_up = not at_root and hardly_matters(session, shape, self.given_up)
            nodes = (
                NO_NODES
                if given_up
                else worth_a_pass(
                    session, offer if at_root else offer[:free], self._times, self._rows_of_pass
                )
            )
            if len(nodes):
                yield self._expand(session, nodes, shape)
            else:
                left_out = offer

    def _expand(self, session: SessionT, nodes: Nodes, shape: Shape) -> _Pass:
        """A pass that is waited for; only such passes have spans."""
        if nodes[0] == ROOT:
            with self._spans.measure("root"):
                return self._pass(session, nodes, lambda: self._read_log(session, shape))
        with self._spans.measure("level"):
            return self._pass(session, nodes, lambda: self._read_nodes(session, nodes, shape))

    def _pass(self, session: SessionT, nodes: Nodes, read: Callable[[], Tensor]) -> _Pass:
        """Logits after `nodes`, and what follows from them put into the tree."""
        before, start_ns = session.rows + session.tree.rows_used, self._clock()
        added = self._add_children(session, read(), nodes, session.waiting_time.children)
        done = _Pass(added, session.rows + session.tree.rows_used - before, start_ns, self._clock())
        if done.rows:
            self._times.add(done.rows, done.end_ns - done.start_ns)
        return done

    def _propose(self, session: SessionT, shape: Shape) -> Proposal:
        """Return what the policy selects, without what nobody would verify: a child is no likelier
        than its parent, so that every prefix is a tree still."""
        tree = session.tree
        best = session.policy.select(tree, shape)
        if session.price.floor > 0.0:
            best = best[tree.probabilities(best) >= session.price.floor]
        session.offered = best.tolist()
        tree.used[:] = 0
        tree.used[best] = 1
        proposal = Proposal(
            tree.token_tree(best),
            tuple(tree.scores[best].tolist()),
            0,
            hit=False,
            entropy=session.policy.entropy,
        )
        draws = session.ranking.draws
        return (
            proposal
            if draws is None or not session.offered
            else _with_distributions(proposal, draws.distributions(best))
        )

    def _add_children(self, session: SessionT, logits: Tensor, nodes: Nodes, width: int) -> int:
        """Put children of `nodes`, after which the model has `logits` [N, V], into the tree; how
        many there were."""
        return session.tree.add_children(
            nodes, *session.ranking.children(logits, session.tree, nodes, len(session.log), width)
        )


def _with_distributions(proposal: Proposal, drawn: ProposalProbabilities) -> Proposal:
    return replace(
        proposal, candidates=to_array(drawn.candidates), probabilities=to_array(drawn.probabilities)
    )
