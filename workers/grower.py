"""What the engines with a model share: a session's log, the growth of its tree, the ranking of children, and the move of the root.

What is expanded and what is offered is the policy's business (`speculation/policies.py`). How the rows of the log and of nodes are computed, and what of a
tree survives the move of its root, an engine says: `drafter.py` with a smaller model, `head_drafter.py` with a head of the target's.

Knows neither messages nor rounds; what is proposed cannot change the output, only how fast it comes.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers import kernels
from dovetail.workers.kernels import ranking
from dovetail.workers.models.segment import Cache
from dovetail.workers.speculation.growth import Floats, GrowingTree, Ints, Nodes, likeliest
from dovetail.workers.speculation.noise import NoiseCache
from dovetail.workers.speculation.policies import Policy
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.speculation.rejection import Drawn, Draws
from dovetail.workers.speculation.sampling import LookingBack, process_logits
from dovetail.workers.wire import to_array

CHUNK = 256
"""Tokens of the log read in one pass: bounds the mask and the activations of a long prompt."""
MAX_TREE_ROWS = 4096
"""Rows that the trees of one session may take at most, four times the nodes that a proposal can have."""

NOTHING = Shape(0, 0, 0)


@dataclass
class Ranking:
    """What a session's target is guessed to choose: the draft's logits under the target's processors, and with the target's noise.

    Or, where what is proposed is drawn at random (rejection), what is drawn.
    """

    sampling: Sampling
    sharpening: float
    noise_share: float
    """How much of the target's noise is added."""
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

    @classmethod
    def begin(
        cls,
        prompt: Sequence[int],
        *,
        vocabulary_size: int,
        key: bytes,
        sampling: Sampling,
        sharpening: float,
        noise_share: float,
        end: Sequence[int],
        device: torch.device,
    ) -> "Ranking":
        """That of a session that begins with `prompt`; `end`: ids that end the reply. No id at or beyond `vocabulary_size` has a rank."""
        noise = NoiseCache(key, vocabulary_size, device) if sampling.temperature > 0 and not sampling.rejects else None
        back = LookingBack(sampling, prompt, end, vocabulary_size, device) if sampling.looks_back else None
        rank = ranking.likeliest if device.type == "cpu" and kernels.available() else likeliest
        processed = sampling.temperature > 0 and (sampling.truncates or sampling.rejects)
        return cls(sampling, sharpening, noise_share, vocabulary_size, rank, processed, noise, back, Draws(key) if sampling.rejects else None)

    def commit(self, tokens: Sequence[int], length: int) -> None:
        """The log has grown by `tokens` to `length`."""
        if self.looking_back is not None:
            self.looking_back.extend(tokens)
        if self.noise is not None:
            self.noise.drop_before(length)
        if self.draws is not None:
            self.draws.begin(length)

    def children(self, logits: Tensor, tree: GrowingTree, nodes: Nodes, root: int, width: int) -> tuple[Ints, Floats]:
        """Of logits [N, V] after `nodes` the likeliest tokens, best first, or tokens drawn: ids and gains [N, K]. Below the root stands position `root`."""
        logits = logits[:, : self.vocabulary_size]
        if self.looking_back is not None:
            logits = self.looking_back.process(logits, [tree.path_tokens(node) for node in nodes.tolist()])
        if self.processed:
            logits = process_logits(logits, self.sampling)
        if self.draws is not None:
            return self.draws.children(nodes, logits, width)
        noise = None if self.noise is None else [self.noise.row(root + level) for level in tree.levels_of(nodes).tolist()]
        if noise is None:
            return self.rank(logits, width, temperature=0.0, noise=None, sharpening=self.sharpening)
        # (z + share * noise) / sharpening, with the share moved to what stands beside the noise
        if self.processed:
            logits, temperature = logits / self.noise_share, 0.0
        else:
            temperature = self.sampling.temperature * self.noise_share
        return self.rank(logits, width, temperature=temperature, noise=noise, sharpening=self.sharpening / self.noise_share)

    def prepare(self, first: int, count: int) -> bool:
        """Compute the noise of one of the positions first..first+count-1; False if there is none to compute."""
        return self.noise is not None and self.noise.prepare(first, count)


@dataclass(kw_only=True)
class GrowingSession:
    """One sequence; `capacity` is the number of tokens that it can come to. Behind the cache's committed rows lie those of the tree."""

    log: list[int]
    cache: Cache
    ranking: Ranking
    policy: Policy
    depth: int
    capacity: int
    tree: GrowingTree = field(default_factory=GrowingTree)
    offered: list[int] = field(default_factory=list)
    """Pool index of each node of the last proposal."""

    @property
    def readable(self) -> bool:
        """Whether the draft can read the whole log."""
        return True

    @property
    def free_rows(self) -> int:
        """How many more nodes can have a row."""
        return self.cache.capacity - self.cache.length - self.tree.rows_used

    def within_reach(self, shape: Shape) -> Shape:
        """`shape` without the levels that the sequence has no place for (the bonus takes one)."""
        return Shape(shape.nodes, min(shape.depth, self.capacity - len(self.log) - 1), shape.width)


SessionT = TypeVar("SessionT", bound=GrowingSession)


class Grower(ABC, Generic[SessionT]):
    """Proposes for sessions, one pass at a time."""

    def __init__(self, spans: Spans, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._spans = spans
        self._clock = clock

    @torch.inference_mode()
    def draft(self, session: SessionT, accepted: Sequence[int], bonus: int, shape: Shape, deadline_ns: int | None = None) -> Proposal:
        """Move the root of `session` below the `accepted` nodes of the last proposal to `bonus`, grow, and propose.

        Growth stops at the first level that ends after `deadline_ns` on the clock, or that there are no rows for.
        """
        hit = self._follow(session, [session.offered[node] for node in accepted], bonus, shape.width)
        shape = session.within_reach(shape) if session.readable else NOTHING
        grown = 0
        for added in self._grow(session, shape):
            grown += added
            if deadline_ns is not None and self._clock() > deadline_ns:
                break
        best = session.policy.select(session.tree, shape)
        session.offered = best.tolist()
        proposal = Proposal(session.tree.token_tree(best), tuple(session.tree.scores[best].tolist()), grown, hit)
        draws = session.ranking.draws
        return proposal if draws is None or not session.offered else _with_laws(proposal, draws.laws(best))

    def prepare(self, session: SessionT) -> bool:
        """Compute the noise of one more position that the coming proposals look at; says whether there was one."""
        first = len(session.log)
        # a proposal looks at `depth` positions, and the next one begins up to `depth` + 1 tokens later
        return session.readable and session.ranking.prepare(first, min(2 * session.depth + 1, session.capacity - first))

    @abstractmethod
    def _move_root(self, session: SessionT, path: Sequence[int], root: int | None, width: int) -> None:
        """Of the tree, keep what is below `root`, which lies below the accepted `path` (pool nodes), with at most `width` children a node; None: nothing."""

    @abstractmethod
    def _read_log(self, session: SessionT, shape: Shape) -> Tensor:
        """Compute the rows of the log that are missing; logits [1, V] after its last token."""

    @abstractmethod
    def _read_nodes(self, session: SessionT, nodes: Nodes, shape: Shape) -> Tensor:
        """Compute the rows of `nodes`, whose parents have theirs; logits [N, V] after them."""

    def _follow(self, session: SessionT, path: Sequence[int], bonus: int, width: int) -> bool:
        """Append the tokens of the accepted pool nodes and the bonus to the log and move the root; says whether the bonus was in the tree."""
        tree = session.tree
        committed = [*(int(tree.tokens[node]) for node in path), bonus]
        session.log += committed
        session.ranking.commit(committed, len(session.log))
        root = tree.child(path[-1] if path else ROOT, bonus)
        if session.ranking.draws is not None:  # what is left over from a draw is none
            root = None
        self._move_root(session, path, root, width)
        return root is not None

    def _grow(self, session: SessionT, shape: Shape) -> Iterator[int]:
        """The passes of the policy, as far as there are rows; yields how many nodes each added."""
        for nodes in session.policy.passes(session.tree, shape):
            if nodes[0] == ROOT:
                with self._spans.measure("root"):
                    added = self._add_children(session, self._read_log(session, shape), nodes, shape.width)
            elif free := session.free_rows:
                with self._spans.measure("level"):
                    added = self._add_children(session, self._read_nodes(session, nodes[:free], shape), nodes[:free], shape.width)
            else:
                return
            yield added

    def _add_children(self, session: SessionT, logits: Tensor, nodes: Nodes, width: int) -> int:
        """Put children of `nodes`, after which the model has `logits` [N, V], into the tree; how many there were."""
        return session.tree.add_children(nodes, *session.ranking.children(logits, session.tree, nodes, len(session.log), width))


def _with_laws(proposal: Proposal, drawn: Drawn) -> Proposal:
    return replace(proposal, candidates=to_array(drawn.candidates), probabilities=to_array(drawn.probabilities))


def tree_rows(tree: TreeSettings) -> int:
    """Rows for the tree: what one proposal can expand, and as much again for what survives of the last one."""
    return min(2 * max(min(tree.width, tree.gamma) * tree.depth, tree.gamma), MAX_TREE_ROWS)
