"""The growing tree of a session: a *pool* of drafted nodes below a root that moves.

Expanding a node adds its likeliest children; a node's score is the sum of the log-probabilities
along its path, in float32, so no child scores above its parent. "Best first" always means (score
descending, index ascending). A child's index is above its parent's, so a parent always comes first
and **every prefix of a best-first list is a tree**. A policy decides what is expanded and offered
(`policies.py`).

A node may have more children than the policies consider. All but the best `shown` children are
*hidden* from them, with their subtrees; they are kept because one of them may become the next root.

Letters: N nodes, K children, V vocabulary. Independent of models, clocks and, except for the rows
of nodes, caches.

Guesses of another drafter (a look-up) can join the pool before the model has expanded anything.
They have scores of their own, and once the model has ranked the same children a share of them
(`Trust`). A guess that the model does not propose ranks behind all of its children, is never
hidden, and leaves when the root moves."""

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.tree import ROOT, TokenTree

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Nodes = NDArray[np.intp]

NO_ROW = -1
ALL = 1 << 30  # a number of children that means all
LEAST_HIDDEN = math.log(1e-3)  # hidden children of smaller gains are left out
FEW = 4  # partition first if the pool is more than this multiple of the number wanted
SMALLEST_POOL = 1024  # initial places of a pool, enough for most proposals; doubled when full
TOKENS, PARENTS, LEVELS, RANKS, ROWS, USED, HIDDEN, KINDS = range(8)  # the integer columns
GAINS, SCORES, GUESSED = range(3)
"""The float32 columns: the model's log-probability given the parent, at most 0 (-inf: only
guessed); the sum from the root down, in which guesses have a share; the log-probability of a guess
given the parent (-inf: not guessed)."""
TRUST = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
"""The initial trust in guesses by the class of their match (`protocol/lookup.py`)."""
PACE = 0.03  # the step of learning it


class Branches(NamedTuple):
    """The paths to the nodes of a tree."""

    tokens: Ints
    parents: Ints

    def path(self, node: int) -> tuple[int, ...]:
        """Return the tokens from below the root down to `node`; none for the root, -1."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(int(self.tokens[node]))
            node = int(self.parents[node])
        return (*reversed(tokens),)


class Trust:
    """The trust in the guesses of a look-up where the model has ranked the same children: a guess
    of probability g that the model gives o < g has o + trust * (g - o), learned from the target's
    choices."""

    def __init__(self) -> None:
        self.by_kind = np.array(TRUST)

    def probabilities(self, tree: "GrowingTree", nodes: Nodes) -> NDArray[np.float64]:
        """Return the probabilities of guessed nodes [N] given their parents."""
        own = np.exp(tree.gains[nodes].astype(np.float64))
        more = np.maximum(np.exp(tree.guessed[nodes]) - own, 0.0)
        parents = tree.parents[nodes]
        ranked = np.where(parents == ROOT, tree.root_expanded, tree.rows_of(parents) != NO_ROW)
        found: NDArray[np.float64] = own + more * np.where(
            ranked, self.by_kind[tree.kinds[nodes]], 1.0
        )
        return found

    def learn(self, tree: "GrowingTree", node: int, token: int) -> None:
        """Learn that the target chose `token` after an expanded node (-1: the root), by a gradient
        step on its log-probability."""
        nodes = np.flatnonzero((tree.parents == node) & (tree.guessed > tree.gains))
        if not len(nodes):
            return
        found = np.clip(self.probabilities(tree, nodes), 0.02, 0.98)
        more = np.exp(tree.guessed[nodes]) - np.exp(tree.gains[nodes])
        right = tree.tokens[nodes] == token
        steps = PACE * more * (right - found) / (found * (1.0 - found))
        np.add.at(self.by_kind, tree.kinds[nodes], steps)
        np.clip(self.by_kind, 0.01, 1.0, out=self.by_kind)


class GrowingTree:
    """The pool, the rows of nodes, and whether the root has been expanded."""

    def __init__(self, trust: Trust | None = None) -> None:
        self._trust = trust or Trust()
        # place 0 is the root's, and node i has place i + 1, so lookups of parents include the root
        self._ints = np.zeros((8, SMALLEST_POOL), np.int32)
        self._floats = np.zeros((3, SMALLEST_POOL), np.float32)
        self._ints[(PARENTS, ROWS), 0] = ROOT, NO_ROW
        self._lines: dict[int, tuple[int, ...]] = {}
        """The lineage of nodes with rows; cleared when rows are renumbered."""
        self._stop = 1
        self.root_expanded = False
        self.guesses = False  # True if nodes of the pool have been guessed
        self.rows_used = 0
        self.shown = ALL

    def __len__(self) -> int:
        return self._stop - 1

    @property
    def tokens(self) -> Ints:
        return self._ints[TOKENS, 1 : self._stop]

    @property
    def parents(self) -> Ints:
        """Index of the parent, below the node's own; -1: the root."""
        return self._ints[PARENTS, 1 : self._stop]

    @property
    def levels(self) -> Ints:
        """1 for the children of the root."""
        return self._ints[LEVELS, 1 : self._stop]

    @property
    def ranks(self) -> Ints:
        """Among its siblings, 0 for the best."""
        return self._ints[RANKS, 1 : self._stop]

    @property
    def rows(self) -> Ints:
        """The row, counted after the committed ones, with the node's keys and values; -1: it was
        never expanded."""
        return self._ints[ROWS, 1 : self._stop]

    @property
    def used(self) -> Ints:
        """1 for nodes of the last proposal or on the path to the next root, else 0."""
        return self._ints[USED, 1 : self._stop]

    @property
    def unused(self) -> int:
        """The number of nodes that are neither."""
        return len(self) - int(self.used.sum())

    @property
    def hidden(self) -> Ints:
        """1 for nodes hidden from the policies, else 0."""
        return self._ints[HIDDEN, 1 : self._stop]

    @property
    def kinds(self) -> Ints:
        """The class of the longest match of each guess."""
        return self._ints[KINDS, 1 : self._stop]

    @property
    def gains(self) -> Floats:
        """The model's log-probability of each node given its parent, -inf for a guess of another
        drafter; the children of an expanded node are the likeliest tokens after it."""
        return self._floats[GAINS, 1 : self._stop]

    @property
    def scores(self) -> Floats:
        return self._floats[SCORES, 1 : self._stop]

    @property
    def guessed(self) -> Floats:
        """The log-probability of each node given its parent by another drafter; -inf: it was not
        guessed."""
        return self._floats[GUESSED, 1 : self._stop]

    def guessed_below(self, nodes: Nodes) -> NDArray[np.float64]:
        """Return the probability of the guessed children of each of `nodes` (-1: the root)."""
        below = np.bincount(self.parents + 1, np.exp(self.guessed), len(self) + 1)
        return np.minimum(below[nodes + 1], 1.0)

    def probabilities(self, nodes: Nodes) -> Floats:
        """Return the probability of each of `nodes` to lie on the target's path."""
        probabilities: Floats = np.exp(self.scores[nodes])
        return probabilities

    def at_level(self, level: int) -> Nodes:
        """Return the nodes of a level that policies see."""
        found: Nodes = ((self.levels == level) & (self.hidden == 0)).nonzero()[0]
        return found

    def within(self, depth: int) -> Nodes:
        """Return the nodes of the first `depth` levels that policies see, and guesses of any
        level."""
        reached = self.levels <= depth
        if self.guesses:
            reached |= self.guessed > -np.inf
        return np.flatnonzero(reached & (self.hidden == 0))

    def levels_of(self, nodes: Nodes) -> Ints:
        """Return the levels of `nodes`; the root (-1) has level 0."""
        levels: Ints = self._ints[LEVELS, nodes + 1]
        return levels

    def rows_of(self, nodes: Nodes | Ints) -> Ints:
        """Return the rows of `nodes`; -1 for the root (-1) and for nodes never expanded."""
        rows: Ints = self._ints[ROWS, nodes + 1]
        return rows

    def token_tree(self, nodes: Nodes) -> TokenTree:
        """Return `nodes`, best first and each with its parent, as a tree to send."""
        numbers = np.full(
            len(self) + 1, ROOT, np.int32
        )  # the last element stands for the root, index -1
        numbers[nodes] = np.arange(len(nodes), dtype=np.int32)
        return TokenTree(
            tuple(self.tokens[nodes].tolist()), tuple(numbers[self.parents[nodes]].tolist())
        )

    def path_tokens(self, node: int) -> list[int]:
        """Return the tokens from below the root down to `node`; none for the root, -1."""
        return [*Branches(self.tokens, self.parents).path(node)]

    def branches(self) -> "Branches":
        """Return a copy of the present nodes."""
        return Branches(self.tokens.copy(), self.parents.copy())

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` (-1: the root) with that token, if the pool has it."""
        found = np.flatnonzero((self.parents == node) & (self.tokens == token))
        return int(found[0]) if len(found) else None

    def is_expanded(self, node: int) -> bool:
        """Return whether `node` (-1: the root) has been expanded."""
        return self.root_expanded if node == ROOT else bool(self.rows[node] != NO_ROW)

    def expandable(self, depth: int, least: float) -> Nodes:
        """Return the nodes without a row whose parents have one, above level `depth` and with a
        path probability of at least `least`."""
        every = np.arange(len(self))
        return np.flatnonzero(
            (self.rows < 0)
            & self.below_rows(every)
            & (self.levels < depth)
            & (self.scores >= math.log(least))
        )

    def below_rows(self, nodes: Nodes) -> NDArray[np.bool_]:
        """Return which of `nodes` have an expanded root or a row above them."""
        parents = self.parents[nodes]
        found: NDArray[np.bool_] = self.rows_of(parents) >= 0
        return found | (parents == ROOT) if self.root_expanded else found

    def show(self, width: int) -> None:
        """Let policies see the best `width` children of every node from now on."""
        if width != self.shown:
            self.shown = width
            self._pass_down()

    def give_rows(self, nodes: Nodes) -> None:
        """Give each of `nodes` the next free row."""
        self.rows[nodes] = self.rows_used + np.arange(len(nodes), dtype=np.int32)
        self.rows_used += len(nodes)

    def restore_rows(self, nodes: Nodes, rows: Ints, rows_used: int) -> None:
        """Undo `give_rows`: `nodes` (-1: the root) have `rows` again."""
        self._ints[ROWS, nodes + 1] = rows
        self.rows_used = rows_used
        self._lines.clear()

    def lineage(self, nodes: Nodes) -> tuple[Ints, Ints]:
        """Return offsets [N + 1] and the rows that each of `nodes` attends to, by depth, its own
        last: those of node i are rows[offsets[i] : offsets[i + 1]]. All of them have rows."""
        parents, rows = self._ints[PARENTS, nodes + 1], self._ints[ROWS, nodes + 1].tolist()
        lines = []
        for parent, above, row in zip(
            parents.tolist(), self._ints[ROWS, parents + 1].tolist(), rows, strict=True
        ):
            before = () if parent == ROOT else self._lines.get(above) or self._line_of(parent)
            line = self._lines[row] = (*before, row)
            lines.append(line)
        offsets = np.array([*accumulate(map(len, lines), initial=0)], np.int32)
        return offsets, np.array([*chain.from_iterable(lines)], np.int32)

    def _line_of(self, node: int) -> tuple[int, ...]:
        """Return the rows of the nodes from below the root down to `node`, skipping those without
        one."""
        rows: list[int] = []
        while node != ROOT:
            rows.append(int(self.rows[node]))
            node = int(self.parents[node])
        return tuple(row for row in reversed(rows) if row != NO_ROW)

    def add_children(self, nodes: Sequence[int] | Nodes, tokens: Ints, gains: Floats) -> int:
        """Add the children [N, K] of `nodes` (-1: the root), siblings best first; a gain of -inf
        means no child, and unlikely hidden ones are left out. Return how many were added."""
        # log_softmax may round above 0; a child above its parent would break the order
        gains = np.minimum(gains, np.float32(0.0))
        if hides := tokens.shape[1] > self.shown:
            behind = gains[:, self.shown :]
            behind[behind < LEAST_HIDDEN] = -np.inf
        if math.isnan(lowest := gains.min(initial=0.0)):
            raise FloatingPointError(
                "the draft's logits are not numbers: its weights overflow in this type, or are "
                "damaged"
            )
        first, above = self._stop, np.asarray(nodes, np.intp)[:, None] + 1
        self._reserve(first + tokens.size)
        self._stop += tokens.size
        ints = self._ints[:, first : self._stop].reshape(8, *tokens.shape)
        over = self._ints[:, above]
        ints[TOKENS], ints[PARENTS], ints[LEVELS] = tokens, above - 1, over[LEVELS] + 1
        ints[RANKS], ints[ROWS], ints[USED] = np.arange(tokens.shape[1]), NO_ROW, 0
        ints[HIDDEN] = over[HIDDEN] | (ints[RANKS] >= self.shown) if hides else over[HIDDEN]
        floats = self._floats[:, first : self._stop].reshape(3, *tokens.shape)
        floats[GAINS], floats[SCORES] = gains, self._floats[SCORES, above] + gains
        floats[GUESSED] = -np.inf
        if math.isinf(lowest):
            left = first + np.flatnonzero(np.isfinite(gains))
            self._keep(np.concatenate((np.arange(first), left)))
        self.root_expanded |= not above.all()
        return self._stop - first

    def clear(self) -> None:
        """Remove every node: the root has moved to a token that was not drafted."""
        self._stop, self.root_expanded, self.rows_used = 1, False, 0
        self.guesses = False
        self._lines.clear()

    def guess(self, guesses: TokenTree, scores: Sequence[float], kinds: Sequence[int]) -> int:
        """Add the guesses of another drafter below the root, with its log-probabilities of their
        paths and the classes of their matches. Return how many were not in the pool."""
        known = {
            place: node
            for node, place in enumerate(
                zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
            )
        }
        levels, nodes, gains, new = self.levels.tolist(), list[int](), list[float](), []
        for token, parent, score in zip(guesses.tokens, guesses.parents, scores, strict=True):
            above = ROOT if parent == ROOT else nodes[parent]
            node = known.get((above, token), len(levels))
            if node == len(levels):
                levels.append(1 if above == ROOT else levels[above] + 1)
                new.append((token, above, levels[-1], ALL, NO_ROW, 0, 0, 0))
            nodes.append(node)
            gains.append(score if parent == ROOT else score - scores[parent])
        if new:
            self._reserve(self._stop + len(new))
            self._ints[:, self._stop : self._stop + len(new)] = np.array(new, np.int32).T
            self._floats[:, self._stop : self._stop + len(new)] = -np.inf
            self._stop += len(new)
        self.kinds[nodes] = kinds
        self.guessed[nodes] = np.minimum(np.array(gains, np.float32), np.float32(0.0))
        self.guesses = self.guesses or bool(nodes)
        self._pass_down()
        return len(new)

    def move_root(self, node: int, width: int) -> list[int]:
        """Make `node` the root and keep the best `width` children of every node below it. Return
        the former rows of the surviving nodes, which now have the rows 0, 1, ... in that order. The
        order of nodes is kept; scores are recomputed from the new root, so that they contain no
        rounding of the path above."""
        level = int(self.levels[node])
        root_expanded = bool(self.rows[node] != NO_ROW)
        self.guessed[:], self.guesses = -np.inf, False
        self._keep_below(node, width)
        self.root_expanded = root_expanded
        self.levels[:] -= level
        self._pass_down()
        expanded = np.flatnonzero(self.rows != NO_ROW)
        old_rows: list[int] = self.rows[expanded].tolist()
        self.rows_used = 0
        self._lines.clear()
        self.give_rows(expanded)
        return old_rows

    def rank_again(self, nodes: Nodes, tokens: Ints, gains: Floats) -> int:
        """Rank the children [N, K] of `nodes` (-1: the root) again. Existing children keep their
        subtrees and get the new gains; children that are not among the new ones get at most the
        last one's gain, and rank behind them. Return how many were added."""
        left, gains = np.full(gains.shape, -np.inf, np.float32), np.minimum(gains, np.float32(0.0))
        for place, node in enumerate(nodes.tolist()):
            there = np.flatnonzero(self.parents == node)
            same = tokens[place][None, :] == self.tokens[there][:, None]
            same &= np.isfinite(gains[place])
            again, ranks = same.any(axis=1), same.argmax(axis=1)
            lowest = gains[place][np.isfinite(gains[place])].min(initial=0.0)
            self.gains[there] = np.where(
                again, gains[place][ranks], np.minimum(self.gains[there], lowest)
            )
            self.ranks[there] = np.where(again, ranks, tokens.shape[1] + np.arange(len(there)))
            new = ~same.any(axis=0)
            left[place, new] = gains[place, new]
        added = self.add_children(nodes, tokens, left)
        self._pass_down()
        return added

    def prune(self, width: int) -> None:
        """Keep the best `width` children of every node, with their subtrees. Rows keep their
        numbers; those of removed nodes are not freed."""
        self._keep_below(ROOT, width)

    def children_of(self, nodes: Nodes) -> NDArray[np.intp]:
        """Return the number of children of each of `nodes` (-1: the root)."""
        counts = np.bincount(self.parents + 1, minlength=len(self) + 1)
        return counts[nodes + 1]

    def _keep_below(self, node: int, width: int) -> None:
        """Keep only the best `width` children of every node below `node` (-1: the root), and
        guesses. Its children become the root's."""
        level = 0 if node == ROOT else int(self.levels[node])
        below = np.zeros(len(self) + 1, np.bool_)  # the last element is the old root, index -1
        below[node] = True
        for deeper in range(level + 1, int(self.levels.max(initial=0)) + 1):
            at_level = np.flatnonzero(self.levels == deeper)
            kept = (self.ranks[at_level] < width) | (self.guessed[at_level] > -np.inf)
            below[at_level] = below[self.parents[at_level]] & kept
        below[node] = False
        survivors = np.flatnonzero(below[:-1])
        renumbered = np.full(len(self) + 1, ROOT, np.int32)  # the new root becomes -1
        renumbered[survivors] = np.arange(len(survivors), dtype=np.int32)
        self._keep(np.concatenate(([0], survivors + 1)))
        self.parents[:] = renumbered[self.parents]

    def _pass_down(self) -> None:
        """Recompute scores, and which nodes are hidden, level by level."""
        scores, hidden = self.scores, self.hidden
        scores[:], hidden[:] = self.gains, self.ranks >= self.shown
        if self.guesses:
            guessed = np.flatnonzero(self.guessed > -np.inf)
            scores[guessed] = np.log(self._trust.probabilities(self, guessed))
            np.minimum(scores, np.float32(0.0), out=scores)
            hidden[guessed] = 0
        for level in range(2, int(self.levels.max(initial=0)) + 1):
            at_level = np.flatnonzero(self.levels == level)
            above = self.parents[at_level]
            scores[at_level] += scores[above]
            hidden[at_level] |= hidden[above]

    def _reserve(self, places: int) -> None:
        """Make sure that the pool has this many places."""
        if places > (there := self._ints.shape[1]):
            more = ((0, 0), (0, max(places, 2 * there) - there))
            self._ints, self._floats = np.pad(self._ints, more), np.pad(self._floats, more)

    def _keep(self, places: Nodes) -> None:
        """Keep only these places, in their order, ascending."""
        self._stop = len(places)
        self._ints[:, : self._stop], self._floats[:, : self._stop] = (
            self._ints[:, places],
            self._floats[:, places],
        )


def likeliest(
    logits: Tensor,
    width: int,
    *,
    noise: Sequence[Tensor] | None = None,
    sharpening: float | Tensor = 1.0,
) -> tuple[Ints, Floats]:
    """Return the `width` largest ids [N, K] of z = (logits [N, V] + noise, a row [V] for each) /
    sharpening (of all rows, or [N, 1]), and log_softmax(z) at them, best first. One transfer from
    the device."""
    z = logits.float() if noise is None else logits.float() + torch.stack(list(noise))
    z = z / sharpening
    values, ids = z.topk(min(width, z.shape[1]))
    gains = values - z.logsumexp(-1, keepdim=True)
    tokens, bits = torch.stack((ids.to(torch.int32), gains.view(torch.int32))).cpu().unbind()
    return tokens.numpy(), bits.view(torch.float32).numpy()


def best_first(nodes: Nodes, scores: Floats, most: int | None = None) -> Nodes:
    """Return the best `most` (None: all) of `nodes`, which are in ascending order, by (score
    descending, index ascending)."""
    order: Floats = -scores[nodes]
    if most is not None and 0 < most < len(nodes) // FEW:
        parted = order.copy()  # sorting the whole pool takes longer
        parted.partition(most - 1)
        among = order <= parted[most - 1]
        nodes, order = nodes[among], order[among]
    return nodes[order.argsort(kind="stable")][:most]
