"""The growing tree of a session: a *pool* of drafted nodes below a root that moves.

Expanding a node adds its likeliest children; a node's score is the sum of the log-probabilities along its path, in float32, so that no child scores above
its parent. In every order of nodes here, "best first" is (score descending, index ascending). A child's index is above its parent's, hence a parent always
comes first and **every prefix of a best-first list is a tree**. What is expanded and what is offered, a policy decides (`policies.py`).

Letters: N nodes, K children, V vocabulary. Knows numbers only: no model, no cache (but for the row that a node was given in it) and no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.tree import ROOT, TokenTree

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Nodes = NDArray[np.intp]

NO_ROW = -1


@dataclass(frozen=True)
class _Pool:
    """The nodes as columns of equal length."""

    tokens: Ints
    parents: Ints
    """Index of the parent, below the node's own; -1: the root."""
    levels: Ints
    """1 for the children of the root."""
    ranks: Ints
    """Among its siblings, 0 for the best."""
    rows: Ints
    """Which of the rows behind the committed ones holds the node's keys and values; -1: it was never expanded."""
    gains: Floats
    """Log-probability given the parent, at most 0."""
    scores: Floats
    """Sum of the gains from the root down."""


_INTS, _FLOATS = np.zeros(0, np.int32), np.zeros(0, np.float32)
_EMPTY = _Pool(_INTS, _INTS, _INTS, _INTS, _INTS, _FLOATS, _FLOATS)
_COLUMNS = tuple(_Pool.__dataclass_fields__)


class GrowingTree:
    """The pool, which node of it has which row, and whether the root has been expanded."""

    def __init__(self) -> None:
        self._pool = _EMPTY
        self.root_expanded = False
        self.rows_used = 0

    def __len__(self) -> int:
        return len(self._pool.tokens)

    @property
    def tokens(self) -> Ints:
        return self._pool.tokens

    @property
    def parents(self) -> Ints:
        return self._pool.parents

    @property
    def levels(self) -> Ints:
        return self._pool.levels

    @property
    def ranks(self) -> Ints:
        return self._pool.ranks

    @property
    def scores(self) -> Floats:
        return self._pool.scores

    @property
    def rows(self) -> Ints:
        return self._pool.rows

    def token_tree(self, nodes: Nodes) -> TokenTree:
        """`nodes`, best first and none without its parent, as a tree to send."""
        numbers = np.full(len(self) + 1, ROOT, np.int32)  # the last element stands for the root, index -1
        numbers[nodes] = np.arange(len(nodes), dtype=np.int32)
        return TokenTree(tuple(self.tokens[nodes].tolist()), tuple(numbers[self.parents[nodes]].tolist()))

    def path_tokens(self, node: int) -> list[int]:
        """The tokens from below the root down to `node`; none for the root, -1."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return tokens[::-1]

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (-1: the root) with that token, if the pool has it."""
        found = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(found[0]) if len(found) else None

    def give_rows(self, nodes: Nodes) -> None:
        """Gives each of `nodes` the next free row."""
        self.rows[nodes] = self.rows_used + np.arange(len(nodes), dtype=np.int32)
        self.rows_used += len(nodes)

    def lineage(self, nodes: Nodes) -> NDArray[np.bool_]:
        """[N, rows_used]: which rows each of `nodes` sees: its own and its ancestors'. All of them have rows."""
        sees = np.zeros((len(nodes), self.rows_used), np.bool_)
        which, current = np.arange(len(nodes)), nodes
        while len(current):
            sees[which, self.rows[current]] = True
            above = self.parents[current]
            which, current = which[above != ROOT], above[above != ROOT].astype(np.intp)
        return sees

    def add_children(self, nodes: Sequence[int] | Nodes, tokens: Ints, gains: Floats) -> int:
        """Adds the children [N, K] of `nodes` (-1: the root), siblings best first; a gain of -inf is no child. Returns how many were added."""
        if np.isnan(gains).any():
            raise FloatingPointError("the draft's logits are not numbers: its weights overflow in this type, or are damaged")
        parents = np.repeat(np.asarray(nodes, np.int32), tokens.shape[1])
        ranks = np.tile(np.arange(tokens.shape[1], dtype=np.int32), len(nodes))
        # log_softmax may round to a little above 0, and a child above its parent would break the order that makes every prefix a tree
        flat = np.minimum(gains.reshape(-1), np.float32(0.0))
        below_root = parents == ROOT
        if below_root.any():
            self.root_expanded = True
        scores, levels = flat.copy(), np.ones(len(flat), np.int32)
        scores[~below_root] += self.scores[parents[~below_root]]
        levels[~below_root] += self.levels[parents[~below_root]]
        children = _Pool(tokens.reshape(-1), parents, levels, ranks, np.full(len(flat), NO_ROW, np.int32), flat, scores)
        if not (there := np.isfinite(flat)).all():
            children = _select(children, there)
        self._pool = _Pool(**{name: np.concatenate((getattr(self._pool, name), getattr(children, name))) for name in _COLUMNS})
        return len(children.tokens)

    def clear(self) -> None:
        """Forgets every node: the root has moved to where nothing was drafted."""
        self._pool, self.root_expanded, self.rows_used = _EMPTY, False, 0

    def move_root(self, node: int, width: int) -> list[int]:
        """Makes `node` the root and keeps what is below it, of every node's children the best `width`.

        Returns the rows that the surviving nodes had; from now on these nodes have the rows 0, 1, ... in that order. Order is kept, scores are summed
        anew from the new root, so that they carry no rounding of the path above.
        """
        pool = self._pool
        below = np.zeros(len(self) + 1, np.bool_)  # the last element stands for the old root, index -1
        below[node] = True
        for level in range(int(pool.levels[node]) + 1, int(pool.levels.max()) + 1):
            at_level = np.flatnonzero(pool.levels == level)
            below[at_level] = below[pool.parents[at_level]] & (pool.ranks[at_level] < width)
        self.root_expanded = bool(pool.rows[node] != NO_ROW)
        below[node] = False
        survivors = _select(pool, below[:-1])
        renumbered = np.full(len(self), ROOT, np.int32)  # the new root becomes -1
        renumbered[below[:-1]] = np.arange(len(survivors.tokens), dtype=np.int32)
        levels = survivors.levels - pool.levels[node]
        self._pool = replace(survivors, parents=renumbered[survivors.parents], levels=levels, scores=survivors.gains.copy())
        for level in range(2, int(levels.max(initial=0)) + 1):
            at_level = np.flatnonzero(levels == level)
            self.scores[at_level] += self.scores[self.parents[at_level]]
        expanded = np.flatnonzero(self.rows != NO_ROW)
        old_rows: list[int] = self.rows[expanded].tolist()
        self.rows_used = 0
        self.give_rows(expanded)
        return old_rows


def likeliest(logits: Tensor, width: int, sharpening: float) -> tuple[Ints, Floats]:
    """Of logits [N, V], the `width` highest ids [N, K] with log_softmax(logits / sharpening) over all V at them, best first; one transfer from the device."""
    scaled = logits.float() / sharpening
    values, ids = scaled.topk(min(width, logits.shape[1]))
    gains = values - scaled.logsumexp(-1, keepdim=True)
    tokens, bits = torch.stack((ids.to(torch.int32), gains.view(torch.int32))).cpu().unbind()
    return tokens.numpy(), bits.view(torch.float32).numpy()


def best_first(nodes: Nodes, scores: Floats) -> Nodes:
    """`nodes`, given in ascending order, by (score descending, index ascending)."""
    order: Nodes = nodes[np.argsort(-scores[nodes], kind="stable")]
    return order


def _select(pool: _Pool, mask: NDArray[np.bool_]) -> _Pool:
    return _Pool(**{name: getattr(pool, name)[mask] for name in _COLUMNS})
