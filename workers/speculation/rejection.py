"""The papers' speculative sampling, for trees of a static shape: children are drawn from the
draft's distribution, and accepted with probability p/q.

At a node the draft draws its children without replacement from its distribution q, truncated to the
likeliest K tokens. The target, with distribution p, tests them in the order in which they were
drawn: it accepts child x with probability min(1, r(x)/s(x)), where r = p and s = q at first; after
each rejection r becomes max(r - s, 0) and s loses x, both normalised. If all are rejected the token
is drawn from r; below a leaf, from p. The output has the distribution p, node by node: given the
rejections so far x has the distribution s, and one step of Leviathan, Kalman, Matias (2023) turns
it into an exact draw from r (Jeon et al., "Recursive speculative decoding", 2024; Chen et al.,
"Sequoia", 2024; EAGLE-1's rule). This requires that no drawn child is discarded because of its
token: the shape alone decides the number of draws.

The draws, the tests and the last tokens have separate streams of random numbers, derived from the
session's key and the length of its log, so every round has fresh ones. Everything is computed in
float64.

N nodes, K candidates, V vocabulary. Independent of models and messages."""

import hashlib
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.errors import TreeError
from dovetail.protocol.noise import KEY_BYTES, uniform
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.devices.opening import in_fp64
from dovetail.workers.speculation.growth import Floats, Ints, Nodes
from dovetail.workers.speculation.noise import gumbel_noise, gumbel_noise_of
from dovetail.workers.speculation.sampling import LARGEST_MARGIN, choose

CANDIDATES = 64
"""K: how many of the draft's likeliest tokens can be drawn. At least the greatest width; the rest
of a distribution has little weight, and every candidate is sent."""

Distribution = NDArray[np.float64]
UNDRAWN = np.zeros(0, np.intp), np.zeros(0)  # the distribution of no children


def stream(key: bytes, purpose: str, length: int) -> bytes:
    """Return the key of the random numbers for one purpose in the round that begins with a log of
    `length` tokens."""
    return hashlib.sha256(key + struct.pack("<Q", length) + purpose.encode()).digest()[:KEY_BYTES]


@dataclass(frozen=True)
class ProposalProbabilities:
    """The distributions from which the children of a tree's nodes were drawn: row 0 the root's, row
    i + 1 node i's; zeros for nodes without children."""

    candidates: Tensor  # [1 + N, K] token ids
    probabilities: Tensor  # [1 + N, K] float32

    @classmethod
    @cache
    def nothing(cls) -> "ProposalProbabilities":
        """Return the probabilities of a tree without nodes."""
        return cls(torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, 0))

    def check(self, tree: TokenTree, vocabulary_size: int) -> "ProposalProbabilities":
        """Return these distributions; raise `TreeError` naming the node unless all children of
        `tree` can have been drawn from them."""
        shape = self.candidates.shape
        if self.probabilities.shape != shape or len(shape) != 2 or shape[0] != len(tree) + 1:
            raise TreeError(
                f"distributions of {tuple(shape)} candidates and {tuple(self.probabilities.shape)} "
                f"probabilities do not fit a tree of {len(tree)} nodes"
            )
        if not bool((self.probabilities.isfinite() & (self.probabilities >= 0)).all()):
            raise TreeError("the distributions of a tree have numbers that are not probabilities")
        if (
            self.candidates.numel()
            and not 0 <= int(self.candidates.min()) <= int(self.candidates.max()) < vocabulary_size
        ):
            raise TreeError(
                "the distributions of a tree have candidates beyond the vocabulary of "
                f"{vocabulary_size}"
            )
        for node, children in tree.children.items():
            candidates = self.distribution(node)[0].tolist()
            if len(set(candidates)) != len(candidates):
                raise TreeError(f"the distribution below node {node} has a candidate twice")
            if missing := set(children).difference(candidates):
                raise TreeError(
                    f"node {node} has children {sorted(missing)} that its distribution cannot draw"
                )
        return self

    def distribution(self, node: int) -> tuple[NDArray[np.intp], Distribution]:
        """Return the candidates [K] below a node (-1: the root) with a probability above 0, and
        their probabilities, which sum to 1."""
        probabilities = self.probabilities[node + 1].double().numpy()
        possible = probabilities > 0
        candidates: NDArray[np.intp] = self.candidates[node + 1].numpy()[possible].astype(np.intp)
        return candidates, probabilities[possible] / max(
            probabilities.sum(), np.finfo(np.float64).tiny
        )


class Draws:
    """The draft's half for one session: draws children, and stores their distributions."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._stream = b""
        self._distributions: dict[int, tuple[Ints, Floats]] = {}

    def begin(self, length: int) -> None:
        """Begin a round with a log of `length` tokens, forgetting earlier draws."""
        self._stream = stream(self._key, "draws", length)
        self._distributions.clear()

    def children(self, nodes: Nodes, logits: Tensor, width: int) -> tuple[Ints, Floats]:
        """Draw children of `nodes` (-1: the root) by processed logits [N, V], without replacement.
        Return at most `width` ids [N, width] in the order in which they were drawn, and their
        log-probabilities; -inf where no more can be drawn."""
        values, ids = logits.float().topk(min(CANDIDATES, logits.shape[1]))
        probabilities = in_fp64(values).softmax(-1).float().cpu()
        candidates = ids.to(torch.int32).cpu()
        for node, tokens, distribution in zip(
            nodes.tolist(), candidates.numpy(), probabilities.numpy(), strict=True
        ):
            self._distributions[node] = tokens, distribution
        logarithms = probabilities.double().log()
        # sorting log q + Gumbel noise draws one by one without replacement (Gumbel-top-k; Kool et
        # al., 2019)
        noise = gumbel_noise_of(self._stream, [node + 1 for node in nodes.tolist()], candidates)
        order = (logarithms + noise).argsort(-1, descending=True)[:, :width]
        return candidates.gather(1, order).numpy(), logarithms.gather(1, order).float().numpy()

    def distributions(self, offered: Nodes) -> ProposalProbabilities:
        """Return the distributions below the root and the `offered` nodes, in their order."""
        candidates = np.zeros((len(offered) + 1, CANDIDATES), np.int32)
        probabilities = np.zeros((len(offered) + 1, CANDIDATES), np.float32)
        for row, node in enumerate((ROOT, *offered.tolist())):
            if node in self._distributions:
                tokens, distribution = self._distributions[node]
                candidates[row, : len(tokens)], probabilities[row, : len(distribution)] = (
                    tokens,
                    distribution,
                )
        return ProposalProbabilities(torch.from_numpy(candidates), torch.from_numpy(probabilities))


class Remaining:
    """The distributions at a node after some rejections: r of the token, and s of the next child.
    Only the candidates' part of r is updated; the rest keeps its proportions."""

    def __init__(
        self, target: Distribution, candidates: NDArray[np.intp], probabilities: Distribution
    ) -> None:
        """`target`: p [V]. `candidates`, `probabilities`: q [K], all above 0."""
        self._candidates = candidates
        self._place = {token: place for place, token in enumerate(candidates.tolist())}
        self._rest = target.copy()
        self._rest[candidates] = 0.0
        # summed, not 1 - the candidates' share: it must be exactly 0 if nothing else is possible
        self._rest_share = float(self._rest.sum())
        self._r, self._s, self._scale = target[candidates], probabilities.copy(), 1.0

    def chance(self, token: int) -> float:
        """Return r/s of a candidate not rejected yet: the probability of accepting it, if below
        1."""
        place = self._place[token]
        return float(self._r[place] / self._s[place])

    def refuse(self, token: int) -> None:
        """Note that a candidate was rejected."""
        left = np.maximum(self._r - self._s, 0.0)
        total = float(left.sum()) + self._scale * self._rest_share
        if (
            total > 0.0
            # else r equals s, and a rejection has probability 0: r stays a distribution
        ):
            self._r, self._scale = left / total, self._scale / total
        self._s[self._place[token]] = 0.0
        if (share := float(self._s.sum())) > 0.0:
            self._s /= share

    def distribution(self) -> Distribution:
        """r [V]."""
        distribution: Distribution = self._rest * self._scale
        distribution[self._candidates] = self._r
        return distribution


class Choices:
    """The random numbers for the target's side of a round."""

    def __init__(self, key: bytes, length: int) -> None:
        self._tests, self._tokens = stream(key, "tests", length), stream(key, "tokens", length)

    def test(self, node: int) -> float:
        """Uniform in (0, 1), to accept a node."""
        return uniform(self._tests, 0, node)

    def noise(self, level: int, size: int) -> Tensor:
        """Gumbel noise [V] for the token that follows a path of `level` nodes."""
        return gumbel_noise(self._tokens, level, size)


def rejection_walk(
    tree: TokenTree,
    drawn: ProposalProbabilities,
    processed: Callable[[int], Tensor],
    choices: Choices,
) -> tuple[tuple[int, ...], int, tuple[float, ...]]:
    """Return the accepted nodes, the bonus, and the margin of each of these tokens to another
    outcome (nats).

    `processed(row)`: the target's processed logits [V] after the root (row 0) or node row - 1;
    called only for rows on the accepted path. `drawn` has been checked."""
    accepted: list[int] = []
    margins: list[float] = []
    node = ROOT
    while True:
        target = in_fp64(processed(node + 1)).softmax(-1).cpu().numpy()
        children = tree.children.get(node, {})
        remaining = Remaining(target, *(drawn.distribution(node) if children else UNDRAWN))
        child, margin = _accept(remaining, children, choices)
        if child is None:
            break
        accepted.append(child)
        margins.append(margin)
        node = child
    logits = torch.from_numpy(remaining.distribution()).log()
    bonus, distance = choose(
        logits.unsqueeze(0), choices.noise(len(accepted), len(logits)).double().unsqueeze(0)
    )
    return tuple(accepted), int(bonus[0]), (*margins, float(distance[0]))


def _accept(
    remaining: Remaining, children: Mapping[int, int], choices: Choices
) -> tuple[int | None, float]:
    """Return the first of the children (token -> node, in the order in which they were drawn) that
    passes its test, and its margin; None if all are rejected."""
    for token, node in children.items():
        chance, test = remaining.chance(token), choices.test(node)
        if test < chance:
            return node, min(math.log(chance / test), LARGEST_MARGIN)
        remaining.refuse(token)
    return None, 0.0
