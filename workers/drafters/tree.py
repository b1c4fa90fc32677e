"""The base of engines with a model: a session's log, the growth of its tree, the ranking of
children, and the move of the root.

The policy (`speculation/policies.py`) chooses which nodes are expanded and offered. The engine
computes the rows of the log and of nodes, and decides which part of a tree survives a move of the
root: `model.py` with a small model, `head.py` with a draft head. Proposals never change the output,
only its speed."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.lookup import Matches
from dovetail.protocol.messages import MAX_PASSES, Open
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.ahead import GrowthAhead
from dovetail.workers.drafters.engine import Engine
from dovetail.workers.drafters.ngram import Guesses, LookupSession, guesses, look_up
from dovetail.workers.drafters.passes import Reading, Steps
from dovetail.workers.drafters.session import GrowingSession, WaitingTime, tree_rows
from dovetail.workers.drafters.side_by_side import Growth, SideBySide
from dovetail.workers.sessions.wire import to_array
from dovetail.workers.speculation.growth import GrowingTree, Nodes, Trust
from dovetail.workers.speculation.prices import PassTimes
from dovetail.workers.speculation.proposal import FREE, Order, Price, Proposal, Shape
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.speculation.score_calibration import Scale, ScoreCalibration

CHUNK = 256  # tokens of the log in one pass: bounds the mask and activations of a long prompt

NOTHING = Shape(0, 0, 0)


SessionT = TypeVar("SessionT", bound=GrowingSession)


class Grower(Engine[SessionT]):
    """Drafts for sessions, one pass at a time, which several of them share."""

    kept: int = 32
    """With growth ahead, the fewest children kept per node; those beyond the width are hidden from
    the policies, but one may become the next root. With the embedded small model, in 19 %
    (temperature 0) and 23 % (1) of the rounds the target's choice after the accepted nodes was
    among 32 and not among 10."""
    given_up: float = 0.03
    """With growth ahead, an order waits for no further pass once all remaining nodes would add less
    than this share of the expected tokens. Simulated with the embedded small model, tree 15/8/10,
    T_D = T_V, 14 shipped prompts: at 0.02 / 0.03 / 0.04 tau is 0.986 / 0.980 / 0.974 of tau without
    growth ahead at temperature 0, 0.988 / 0.988 / 0.976 at temperature 1."""

    def __init__(
        self,
        spans: Spans,
        start: Scale,
        *,
        ahead: bool = False,
        merges: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`start`: the initial scale of a draft of this kind. `ahead`: give sessions rows for
        growth ahead. `merges`: the guesses of a look-up join trees that size themselves."""
        self._merges, self.trust = merges, Trust()
        self.score_calibration = ScoreCalibration(start)
        self._spans = spans
        self._rows_for_ahead = ahead
        self._clock = clock
        self._times = PassTimes()
        self._ahead = GrowthAhead(self._times, clock)
        self._beside = SideBySide(self, self._times, spans)

    def now_ns(self) -> int:
        """The clock of passes and deadlines."""
        return self._clock()

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
        recalled: Matches = (),
    ) -> Proposal:
        """Draft for one session, as `draft_all` does, and raise instead of yielding an
        exception."""
        order = Order(session, accepted, bonus, shape, deadline_ns, more, price, ahead, recalled)
        for _, outcome in self.draft_all([order]):
            if isinstance(outcome, Exception):
                raise outcome
            return outcome
        raise RuntimeError("an order was not answered")

    @torch.inference_mode()
    def draft_all(
        self, orders: Sequence[Order[SessionT]]
    ) -> Iterator[tuple[int, Proposal | Exception]]:
        """Move the roots of different sessions, grow their trees side by side, and propose. Yield
        each order's place with its proposal, or with the exception that it failed with, as soon as
        it is done.

        A tree stops growing after the first pass that ends past the order's deadline, and before
        one that has no rows left or is not worth its price. If `Order.ahead` is set, it continues
        after the proposal was sent (`grow_all_ahead`)."""
        growths: list[Growth[SessionT]] = []
        for place, order in enumerate(orders):
            try:
                growths.append(self._begin(place, order))
            except Exception as error:
                yield place, error
        for growth in self._beside.grow(growths):
            try:
                outcome: Proposal | Exception = growth.error or self._end(growth)
            except Exception as error:
                outcome = error
            yield growth.place, outcome

    def _committed(self, order: Order[SessionT]) -> list[int]:
        """Return the tokens that an order commits."""
        session = order.session
        accepted = [int(session.tree.tokens[session.offered[node]]) for node in order.accepted]
        return [*accepted, order.bonus, *order.more]

    def _begin(self, place: int, order: Order[SessionT]) -> Growth[SessionT]:
        """Move the root of a session as ordered."""
        session, width = order.session, order.shape.width
        waited = self._ahead.end(session)
        drawn = (
            session.ranking.draws is not None
        )  # drawn trees are never cut, and keep nothing from earlier rounds
        ahead = order.ahead and not drawn
        waiting = WaitingTime(
            ahead=ahead, width=width, children=max(width, self.kept if ahead else 0)
        )
        with self._spans.finely("move"):
            hit, unused = self._follow(session, self._committed(order), waiting.children)
        session.tree.show(width)
        session.price, session.waiting_time = FREE if drawn else order.price, waiting
        shape = session.within_reach(order.shape) if session.readable else NOTHING
        growth = Growth(place, session, shape, order.deadline_ns, hit, unused, waited)
        if (looked_up := session.looked_up) is not None:
            looked_up.searched.recalled = order.recalled
            if shape.nodes and looked_up.searched.recurs:
                growth.guesses = guesses(looked_up, shape, order.price)
                growth.guessed = _take_guesses(session, growth.guesses)
        return growth

    def _end(self, growth: Growth[SessionT]) -> Proposal:
        """Propose the grown tree, which is empty without children of the root."""
        session, waited = growth.session, growth.waited
        if not session.tree.root_expanded:
            session.tree.clear()
            if (found := growth.guesses) is not None:
                _take_guesses(session, found)
        grown = sum(done.added for done in growth.passes) + growth.guessed
        wasted = growth.unused - (session.tree.unused - grown)
        times = [(done.rows, done.end_ns - done.start_ns) for done in growth.passes if done.rows]
        times += reversed(waited.passes)
        proposal = replace(
            self._propose(session, growth.shape),
            grown=grown,
            hit=growth.hit,
            ahead=waited.joined,
            wasted=wasted,
            passes=tuple(times[:MAX_PASSES]),
        )
        session.waiting_time.since_ns = self._clock()
        return proposal

    @torch.inference_mode()
    def grow_all_ahead(self, sessions: Sequence[SessionT]) -> Sequence[int]:
        """In one pass, expand the nodes that the next proposals of these sessions will most likely
        use, for the first ones that fit; return their places. Empty: the last orders did not
        request it, or nothing is worth a pass."""
        return self._ahead.grow(
            [
                (place, session)
                for place, session in enumerate(sessions)
                if self._may_grow_ahead(session)
            ],
            self,
        )

    def _may_grow_ahead(self, session: SessionT) -> bool:
        """Return whether a tree may grow ahead now, if the order requested it."""
        return True

    def _look_up(self, order: Open, log: list[int]) -> LookupSession | None:
        """Return the look-up in a session's log if its guesses join the tree."""
        merges = self._merges and order.tree.traits.sizes_itself and not order.sampling.rejects
        return look_up(order, log, self.constrained(order)) if merges else None

    def _new_tree(self) -> GrowingTree:
        return GrowingTree(self.trust)

    def _tree_rows(self, sampling: Sampling, tree: TreeSettings) -> int:
        """Return the rows of a session's trees. Under rejection sampling trees are drawn again in
        each round, and never ahead."""
        return tree_rows(tree, ahead=self._rows_for_ahead and not sampling.rejects)

    def prepare(self, session: SessionT) -> bool:
        """Precompute the noise of one more position for the next proposals; return False if none is
        left."""
        first = len(session.log)
        # a proposal covers `depth` positions, and the next one begins up to `depth` + 1 later
        return session.readable and session.ranking.prepare(
            first, min(2 * session.depth + 1, session.capacity - first)
        )

    def learn(self) -> bool:
        return self.score_calibration.learn()

    @abstractmethod
    def _move_root(
        self, session: SessionT, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Keep the part of the tree below `root`, the node after the committed `path` (pool nodes),
        with at most `width` children per node. None: keep nothing."""

    @abstractmethod
    def _read_log(self, session: SessionT, shape: Shape) -> Steps:
        """Compute the missing rows of the log; logits [1, V] after its last token."""

    @abstractmethod
    def _read_nodes(self, session: SessionT, nodes: Nodes, shape: Shape) -> Steps:
        """Compute the rows of `nodes`, whose parents have theirs; logits [N, V] after them."""

    @abstractmethod
    def compute(self, parts: Sequence[Any]) -> Sequence[Any]:
        """Compute parts of one kind, of several sessions, in one pass; return the result of
        each."""

    def steps(self, session: SessionT, nodes: Nodes, shape: Shape) -> Steps:
        """Compute the logits [N, V] after `nodes`; the root (-1) is always alone."""
        at_root = nodes[0] == ROOT
        return (
            self._read_log(session, shape) if at_root else self._read_nodes(session, nodes, shape)
        )

    def steps_ahead(self, session: SessionT, nodes: Nodes) -> Steps:
        """Like `steps`, for a pass ahead."""
        return self.steps(session, nodes, Shape(0, 0, session.waiting_time.width))

    def take(self, session: SessionT, reading: Reading) -> int:
        """Add the children of the computed nodes to the tree; return how many."""
        assert reading.logits is not None
        return self._add_children(
            session, reading.logits, reading.nodes, session.waiting_time.children
        )

    def release(self, session: SessionT) -> None:
        """Free the rows of a session that has failed and will be dropped."""
        session.cache.truncate(session.cache.restorable(0))
        session.cache.resize(session.cache.length)

    def rows_of_pass(self, session: SessionT, nodes: Nodes) -> Nodes:
        """Return how many rows the first 1, 2, ... of `nodes` take."""
        return np.arange(1, len(nodes) + 1)

    def _follow(self, session: SessionT, tokens: Sequence[int], width: int) -> tuple[bool, int]:
        """Append the committed tokens to the log, and move the root along them as far as the tree
        contains them. Return whether the new root was in the tree, and how many nodes were neither
        in the last proposal nor on the path."""
        tree = session.tree
        way = self._way(session, tokens)
        session.log += tokens
        if session.looked_up is not None:
            session.looked_up.history.extend(tokens)
        session.ranking.commit(tokens, len(session.log))
        tree.used[way] = 1
        unused = tree.unused
        known = len(way) == len(tokens)
        hit = known and session.ranking.draws is None
        self._move_root(session, way[:-1] if known else way, way[-1] if hit else None, width)
        return hit, unused

    def _way(self, session: SessionT, tokens: Sequence[int]) -> list[int]:
        """Return the pool nodes from below the root along `tokens`; nodes expanded on this path
        show how often an expansion finds the target's choice."""
        tree, way, node = session.tree, list[int](), ROOT
        for token in tokens:
            child = tree.child(node, token)
            if tree.is_expanded(node):
                session.chance.add(
                    child is not None
                    and tree.ranks[child] < tree.shown
                    and math.exp(tree.scores[child]) >= session.price.floor
                )
                if tree.guesses:
                    self.trust.learn(tree, node, token)
            if child is None:
                break
            way.append(child)
            node = child
        return way

    def _propose(self, session: SessionT, shape: Shape) -> Proposal:
        """Return the policy's selection, without nodes that would not be verified: a child is no
        likelier than its parent, so every prefix is a tree."""
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
        """Add children of `nodes`, after which the model has `logits` [N, V], to the tree; return
        how many."""
        tree, children = session.tree, session.children_of(logits, nodes, width)
        if tree.guesses and (tree.children_of(nodes) > 0).any():
            return tree.rank_again(nodes, *children)
        return tree.add_children(nodes, *children)


def _take_guesses(session: GrowingSession, found: Guesses) -> int:
    return session.tree.guess(found.tree, found.scores, found.kinds)


def _with_distributions(proposal: Proposal, drawn: ProposalProbabilities) -> Proposal:
    return replace(
        proposal, candidates=to_array(drawn.candidates), probabilities=to_array(drawn.probabilities)
    )
