"""What the engines with a model share: a session's log, the growth of its tree, the ranking of
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
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.messages import MAX_PASSES, Open
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers import kernels
from dovetail.workers.kernels import ranking
from dovetail.workers.models.segment import Cache
from dovetail.workers.sessions.wire import to_array
from dovetail.workers.speculation.growth import (
    NO_ROW,
    Floats,
    GrowingTree,
    Ints,
    Nodes,
    best_first,
    likeliest,
)
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.policies import Policy
from dovetail.workers.speculation.prices import (
    Chance,
    PassTimes,
    Recent,
    most_used,
    worth_expanding,
)
from dovetail.workers.speculation.proposal import FREE, Price, Proposal, Shape
from dovetail.workers.speculation.rejection import Drawn, Draws
from dovetail.workers.speculation.sampling import LookingBack, process_logits
from dovetail.workers.speculation.sharpness import (
    Expectations,
    Scale,
    Scales,
    Sharpness,
    class_of,
    fixed,
)

CHUNK = 256
"""Tokens of the log read in one pass: bounds the mask and the activations of a long prompt."""
MAX_TREE_ROWS = 4096
"""Rows that the trees of one session may take at most, four times the nodes that a proposal can
have."""
PROPOSALS_AHEAD = 8
"""A tree that grows ahead has rows for so many proposals."""
LEAST_USED = 1e-3
"""A node that lies on the target's path with a smaller probability is not expanded ahead of the
orders."""
WIDEST_AHEAD = 64
"""Rows of a pass ahead at most."""

NOTHING = Shape(0, 0, 0)
NO_NODES: Nodes = np.zeros(0, np.intp)
THE_ROOT: Nodes = np.array([ROOT], np.intp)


@dataclass
class Ranking:
    """What a session's target is guessed to choose: the draft's logits under the target's
    processors, and with the target's noise.

    Or, where what is proposed is drawn at random (rejection), what is drawn.
    """

    sampling: Sampling
    scales: Scales
    """What logits are divided by, and how much of the target's noise is added, on each level; those
    of a tree change when its root moves."""
    vocabulary_size: int
    rank: Callable[..., tuple[Ints, Floats]]
    """`growth.likeliest`, or the kernels' of the same arguments."""
    processed: bool
    """Whether more is done to the logits than the ranking does on its way."""
    noise: NoiseCache | None
    """None: greedy."""
    looking_back: LookingBack | None
    """None: no processor looks back."""
    draws: Draws | None
    """None: children are ranked, not drawn."""
    sharpness: Sharpness | None
    """Where the scales come from and what the target chose goes to; None: they are fixed."""
    expected: Expectations

    @classmethod
    def begin(
        cls, order: Open, *, most_tokens: int, sharpness: Sharpness, device: torch.device
    ) -> "Ranking":
        """Return the ranking of a new session. No id at or beyond the target's vocabulary or
        `most_tokens`, the draft's, has a rank.

        A `sharpening` of "auto" is that of `sharpness`, which learns from the session unless its
        children are drawn.
        """
        key, sampling, sharpening = order.key, order.sampling, order.tree.sharpening
        vocabulary_size = min(order.vocabulary_size, most_tokens)
        noise = (
            NoiseCache(key, vocabulary_size, device)
            if sampling.temperature > 0 and not sampling.rejects
            else None
        )
        back = (
            LookingBack(
                sampling, order.prompt, order.end, vocabulary_size, device, replied=order.replied
            )
            if sampling.looks_back
            else None
        )
        rank = ranking.likeliest if device.type == "cpu" and kernels.available() else likeliest
        processed = sampling.temperature > 0 and (sampling.truncates or sampling.rejects)
        return cls(
            sampling=sampling,
            scales=sharpness.scales(sampled=noise is not None)
            if sharpening == "auto"
            else fixed(replace(sharpness.start, sharpening=sharpening)),
            vocabulary_size=vocabulary_size,
            rank=rank,
            processed=processed,
            noise=noise,
            looking_back=back,
            draws=Draws(key) if sampling.rejects else None,
            sharpness=sharpness if sharpening == "auto" and not sampling.rejects else None,
            expected=Expectations(0.0 if processed else sampling.temperature),
        )

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """The log has grown by `tokens` to `length`; the tree is still the one that they were
        guessed by."""
        if self.sharpness is not None:
            self.sharpness.add(self.expected.settle(tokens))
            self.scales = self.sharpness.scales(sampled=self.noise is not None)
        if self.looking_back is not None:
            self.looking_back.extend(tokens)
        if self.noise is not None:
            self.noise.drop_before(length)
        if self.draws is not None:
            self.draws.begin(length)

    def children(
        self, logits: Tensor, tree: GrowingTree, nodes: Nodes, root: int, width: int
    ) -> tuple[Ints, Floats]:
        """Of logits [N, V] after `nodes` the likeliest tokens, best first, or tokens drawn: ids and
        gains [N, K]. Below the root stands position `root`."""
        logits = logits[:, : self.vocabulary_size]
        if self.looking_back is not None:
            logits = self.looking_back.process(
                logits, [tree.path_tokens(node) for node in nodes.tolist()]
            )
        if self.processed:
            logits = process_logits(logits, self.sampling)
        if self.draws is not None:
            return self.draws.children(nodes, logits, width)
        levels = tree.levels_of(nodes)
        noise = (
            None
            if self.noise is None
            else [self.noise.row(root + level) for level in levels.tolist()]
        )
        tokens, gains = self._likeliest(logits, noise, class_of(levels + 1), width)
        if self.sharpness is not None:
            self.expected.note(tree, nodes, logits, noise, tokens, gains)
        return tokens, gains

    def _likeliest(
        self, logits: Tensor, noise: Sequence[Tensor] | None, classes: Ints, width: int
    ) -> tuple[Ints, Floats]:
        """By the scale of each row's depth class; rows [N, V] of one scale go together."""
        scales = [self.scales[depth_class] for depth_class in classes.tolist()]
        if len(different := set(scales)) == 1:
            return self._by_scale(logits, noise, scales[0], width)
        parts = []
        for scale in different:
            rows = [row for row, its in enumerate(scales) if its == scale]
            parts.append(
                (
                    rows,
                    *self._by_scale(
                        logits[rows],
                        None if noise is None else [noise[row] for row in rows],
                        scale,
                        width,
                    ),
                )
            )
        order = np.argsort(np.concatenate([rows for rows, _, _ in parts]))
        return np.concatenate([tokens for _, tokens, _ in parts])[order], np.concatenate(
            [gains for _, _, gains in parts]
        )[order]

    def _by_scale(
        self, logits: Tensor, noise: Sequence[Tensor] | None, scale: Scale, width: int
    ) -> tuple[Ints, Floats]:
        if noise is None:
            return self.rank(
                logits, width, temperature=0.0, noise=None, sharpening=scale.sharpening
            )
        # (z + share * noise) / sharpening, with the share moved to what stands beside the noise
        share = scale.noise_share
        if self.processed:
            logits, temperature = logits / share, 0.0
        else:
            temperature = self.sampling.temperature * share
        return self.rank(
            logits, width, temperature=temperature, noise=noise, sharpening=scale.sharpening / share
        )

    def prepare(self, first: int, count: int) -> bool:
        """Compute the noise of one of the positions first..first+count-1; False if there is none to
        compute."""
        self.expected.name()
        return self.noise is not None and self.noise.prepare(first, count)


@dataclass
class WaitingTime:
    """What a session does between a proposal and the next order."""

    ahead: bool = False
    """Whether it grows."""
    width: int = 0
    """Nodes expanded a pass, and children that the policies see of a node."""
    children: int = 0
    """Kept of a node."""
    since_ns: int | None = None
    """When it began; None: there was no proposal yet."""
    done: bool = False
    """Whether there is nothing left that is worth a pass."""
    joined: int = 0
    """Nodes that have joined the pool."""
    passes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MAX_PASSES))
    """(rows, ns) of the last passes."""


@dataclass(kw_only=True)
class GrowingSession:
    """One sequence; `capacity` is the number of tokens that it can come to. Behind the cache's
    committed rows lie those of the tree."""

    log: list[int]
    cache: Cache
    ranking: Ranking
    policy: Policy
    depth: int
    capacity: int
    rows_ahead: int = MAX_TREE_ROWS
    """Rows that the tree may come to by growth ahead."""
    tree: GrowingTree = field(default_factory=GrowingTree)
    offered: list[int] = field(default_factory=list)
    """Pool index of each node of the last proposal."""
    price: Price = FREE
    """That of the last order."""
    chance: Chance = field(default_factory=Chance)
    waiting_time: WaitingTime = field(default_factory=WaitingTime)
    waits: Recent = field(default_factory=Recent)
    """How long it was between a proposal and the next order."""

    @property
    def readable(self) -> bool:
        """Whether the draft can read the whole log."""
        return True

    @property
    def rows(self) -> int:
        """Rows of the log so far."""
        return self.cache.length

    @property
    def missing_rows(self) -> int:
        """Rows of the log that the root's children wait for."""
        return len(self.log) - self.rows

    @property
    def free_rows(self) -> int:
        """How many more nodes can have a row."""
        return self.cache.capacity - self.cache.length - self.tree.rows_used

    def within_reach(self, shape: Shape) -> Shape:
        """`shape` without the levels that the sequence has no place for (the bonus takes one)."""
        return Shape(shape.nodes, min(shape.depth, self.capacity - len(self.log) - 1), shape.width)


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
    """Where the tree grows ahead, an order waits for no more passes once all that is left would add
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
        self.sharpness = Sharpness(start)
        self._spans = spans
        self._rows_for_ahead = ahead
        self._clock = clock
        self._times = PassTimes()

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
        waited = self._end_wait(session)
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
        did not ask for it, or nothing is worth it any more.

        A node is used if it lies on the target's path, and that has the node's path probability:
        the next root is a node of the pool, and what is below it survives.
        """
        waiting, tree = session.waiting_time, session.tree
        nodes = (
            self._likeliest_to_be_used(session)
            if waiting.ahead and not waiting.done and session.readable
            else NO_NODES
        )
        waiting.done = not len(nodes) or self._comes_too_late(session, nodes)
        if waiting.done:
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
        return self.sharpness.learn()

    @abstractmethod
    def _move_root(
        self, session: SessionT, path: Sequence[int], root: int | None, width: int
    ) -> None:
        """Of the tree, keep what is below `root`, which lies below the committed `path` (pool
        nodes), with at most `width` children a node; None: nothing."""

    @abstractmethod
    def _read_log(self, session: SessionT, shape: Shape) -> Tensor:
        """Compute the rows of the log that are missing; logits [1, V] after its last token."""

    @abstractmethod
    def _read_nodes(self, session: SessionT, nodes: Nodes, shape: Shape) -> Tensor:
        """Compute the rows of `nodes`, whose parents have theirs; logits [N, V] after them."""

    def _read_ahead(self, session: SessionT, nodes: Nodes, width: int) -> Tensor:
        """The same where nobody waits: of the root (-1) by itself, or of `nodes`."""
        shape = Shape(0, 0, width)
        return (
            self._read_log(session, shape)
            if nodes[0] == ROOT
            else self._read_nodes(session, nodes, shape)
        )

    def _rows_of_pass(self, session: SessionT, nodes: Nodes) -> Nodes:
        """How many rows the first 1, 2, ... of `nodes` take."""
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

    def _end_wait(self, session: SessionT) -> WaitingTime:
        """An order has come; what was done until then."""
        waited = session.waiting_time
        if waited.since_ns is not None:
            session.waits.add(self._clock() - waited.since_ns)
        return waited

    def _comes_too_late(self, session: SessionT, nodes: Nodes) -> bool:
        """Whether a pass over `nodes` would end after the next order is expected, and rather not be
        used: it would keep the order waiting for nothing."""
        since_ns, expected_ns = session.waiting_time.since_ns, session.waits.median_ns
        if (
            since_ns is None
            or expected_ns is None
            or nodes[0] == ROOT
            or session.tree.probabilities(nodes).sum() > 0.5
        ):
            return False
        return self._clock() - since_ns + self._times.estimate_ns(len(nodes)) > expected_ns

    def _grow_until(self, session: SessionT, shape: Shape, deadline_ns: int | None) -> list[_Pass]:
        """All passes up to the first that ends after the deadline. Without the root's own children
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
            given_up = not at_root and self._hardly_matters(session, shape)
            nodes = (
                NO_NODES
                if given_up
                else self._worth_a_pass(session, offer if at_root else offer[:free])
            )
            if len(nodes):
                yield self._expand(session, nodes, shape)
            else:
                left_out = offer

    def _hardly_matters(self, session: SessionT, shape: Shape) -> bool:
        """Whether the tree grows ahead, and by no price, and what the policy has not expanded of
        what it would offer would add next to nothing.

        One of a node's children takes the place of the last node of a full proposal.
        """
        tree = session.tree
        if not session.waiting_time.ahead or session.price.rate is not None:
            return False
        best = session.policy.select(tree, shape)
        probabilities = tree.probabilities(best)
        replaced = probabilities.min(initial=1.0) if len(best) == shape.nodes else 0.0
        left = (tree.rows[best] == NO_ROW) & (tree.levels[best] < shape.depth)
        gains = np.maximum(session.chance.value * probabilities[left] - replaced, 0.0)
        return bool(gains.sum() <= self.given_up * (1.0 + probabilities.sum()))

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

    def _worth_a_pass(self, session: SessionT, nodes: Nodes) -> Nodes:
        """Those of `nodes` that the next pass should expand, by the order's price; without one,
        all."""
        if session.price == FREE:
            return nodes
        if nodes[0] == ROOT:
            probabilities, rows = np.ones(1, np.float32), np.array([session.missing_rows])
        else:
            nodes = nodes[(-session.tree.scores[nodes]).argsort(kind="stable")]
            probabilities, rows = (
                session.tree.probabilities(nodes),
                self._rows_of_pass(session, nodes),
            )
        return nodes[
            : worth_expanding(probabilities, rows, session.price, self._times, session.chance)
        ]

    def _likeliest_to_be_used(self, session: SessionT) -> Nodes:
        """What a pass ahead expands, best first: the root if it has not been, else nodes without a
        row."""
        tree, width = session.tree, session.waiting_time.width
        reach = session.within_reach(Shape(MAX_TREE_ROWS, MAX_TREE_ROWS, width)).depth
        if not tree.root_expanded:
            return THE_ROOT if reach > 0 else NO_NODES
        free = min(WIDEST_AHEAD, session.free_rows, session.rows_ahead - tree.rows_used)
        nodes = best_first(tree.expandable(reach, LEAST_USED), tree.scores, max(free, 0))
        return (
            nodes[: most_used(tree.probabilities(nodes), width, self._times)]
            if len(nodes)
            else nodes
        )

    def _propose(self, session: SessionT, shape: Shape) -> Proposal:
        """What the policy selects, without what nobody would verify: a child is no likelier than
        its parent, so that every prefix is a tree still."""
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
            else _with_laws(proposal, draws.laws(best))
        )

    def _add_children(self, session: SessionT, logits: Tensor, nodes: Nodes, width: int) -> int:
        """Put children of `nodes`, after which the model has `logits` [N, V], into the tree; how
        many there were."""
        return session.tree.add_children(
            nodes, *session.ranking.children(logits, session.tree, nodes, len(session.log), width)
        )


def _with_laws(proposal: Proposal, drawn: Drawn) -> Proposal:
    return replace(
        proposal, candidates=to_array(drawn.candidates), probabilities=to_array(drawn.probabilities)
    )


def tree_rows(tree: TreeSettings, *, ahead: bool = False) -> int:
    """Rows for the tree: what one proposal can expand, and as much again for what survives of the
    last one; several times that where it grows ahead."""
    proposal = max(min(tree.width, tree.most_nodes) * tree.most_levels, tree.most_nodes)
    return min((PROPOSALS_AHEAD if ahead else 2) * proposal, MAX_TREE_ROWS)
