"""Deeper and narrower trees where the draft is certain: the draft's half of the policy `heterospec`
(HeteroSpec, Liu et al. 2025, section 4).

The tree grows as in `dynamic`, to the set depth. Then one number measures how predictable the text
is, the *cumulative meta-path top-K entropy*: along the path whose last token is the most certain,
the sum of the entropies of the distributions that generated its tokens, each over its K likeliest
tokens, renormalised. Thresholds sort the number into bins, from 0, the lowest. In low bins the
frontier grows some more levels, and fewer nodes are offered; in the others the tree is that of
`dynamic`. `TreeSettings.size_in` has the sizes.

K is the tree's width: the pool holds that many children of every expanded node. `dynamic` grows no
level from which nothing could be offered, so a tree may end above its depth; a missing level counts
as maximal entropy, log K. So a short path does not make an uncertain tree look certain, and nothing
is adapted where growth was cut off at the end of a reply. Thresholds come from
`training/stratify.py`."""

import math
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from dovetail.protocol.errors import RequestError
from dovetail.protocol.settings import TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import GrowingTree, Nodes, best_first
from dovetail.workers.speculation.policy import Dynamic, worthwhile
from dovetail.workers.speculation.proposal import Shape

NO_PATH = np.empty(0, np.intp)


class Heterospec:
    """Grows one session's tree, round by round. A round that ends before its entropy is known is
    one of `dynamic`."""

    def __init__(self, settings: TreeSettings) -> None:
        """`settings.thresholds` are numbers; none: one bin, in which nothing is adapted."""
        if isinstance(settings.thresholds, str) and settings.thresholds:
            text = f"tree.thresholds = {settings.thresholds!r} names a file: send the numbers in it"
            raise RequestError("settings", text)
        self._settings, self._dynamic = settings, Dynamic()
        self._bounds = tuple(map(float, settings.thresholds))
        self._path = NO_PATH
        self.entropy: float | None = None
        """The entropy of this round's tree, in nats; None if there is none."""
        self.stratum = len(self._bounds)  # the bin of this round

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield one pass per level; those below the set depth once the bin is known."""
        self.entropy, self.stratum, self._path = None, len(self._bounds), NO_PATH
        depth = min(self._settings.depth, shape.depth)
        yield from self._dynamic.passes(tree, Shape(shape.nodes, depth, shape.width))
        self.assess(tree, depth, shape.width)
        yield from self._longer(tree, self._size(shape), depth)

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return the best of the pool; in a low bin they always include the most certain path."""
        size = self._size(shape)
        return self.complete(self._dynamic.select(tree, size), tree, size)

    def assess(self, tree: GrowingTree, depth: int, width: int) -> None:
        """Find the entropy of the first `depth` levels, and its bin."""
        self._path = surest_path(tree, depth)
        if len(self._path):
            self.entropy = path_entropy(tree, self._path, width) + (
                self._settings.depth - len(self._path)
            ) * math.log(width)
            self.stratum = bisect_left(self._bounds, self.entropy)

    def complete(self, best: Nodes, tree: GrowingTree, size: Shape) -> Nodes:
        """Return `best`, in a low bin with the most certain path."""
        low = self.stratum < self._settings.low_bins
        return with_path(best, self._path[: size.nodes], tree, size.nodes) if low else best

    def _size(self, shape: Shape) -> Shape:
        nodes, levels = self._settings.size_in(self.stratum)
        return Shape(min(nodes, shape.nodes), min(levels, shape.depth), shape.width)

    def _longer(self, tree: GrowingTree, size: Shape, depth: int) -> Iterator[Nodes]:
        """Yield further passes from the frontier at `depth`."""
        for level in range(depth, size.depth):
            frontier = best_first(tree.at_level(level), tree.scores, size.width)
            if len(nodes := worthwhile(frontier, self._dynamic.select(tree, size), tree, size)):
                yield nodes


def surest_path(tree: GrowingTree, depth: int) -> Nodes:
    """Return the nodes from below the root down to the most certain token of the deepest level
    within `depth`; of equals the lowest index."""
    within = tree.within(depth)
    if not len(within):
        return NO_PATH
    levels = tree.levels[within]
    last = within[levels == levels.max()]
    path = [int(last[tree.gains[last].argmax()])]
    while (parent := int(tree.parents[path[-1]])) != ROOT:
        path.append(parent)
    return np.array(path[::-1], np.intp)


def path_entropy(tree: GrowingTree, path: Nodes, width: int) -> float:
    """Return the sum of the entropies (nats) of the distributions that generated the tokens of
    `path` (from below the root down), each over its `width` likeliest tokens and renormalised
    (HeteroSpec, equation 1)."""
    steps = np.full(len(tree) + 1, -1, np.intp)  # the last element is the root, index -1
    steps[np.concatenate(([ROOT], path[:-1]))] = np.arange(len(path))
    step = steps[tree.parents]
    children = np.flatnonzero((step >= 0) & (tree.ranks < width))
    step, gains = step[children], tree.gains[children].astype(np.float64)
    weights = np.exp(gains)
    # with p = w / W the entropy -sum(p log p) is log W - sum(w log w) / W
    total, weighted = (np.bincount(step, w, len(path)) for w in (weights, weights * gains))
    return float(np.maximum(np.log(total) - weighted / total, 0.0).sum())


def with_path(best: Nodes, path: Nodes, tree: GrowingTree, count: int) -> Nodes:
    """Return at most `count` nodes, all of `path` and the first of `best`, by (score descending,
    index ascending); every prefix is a tree."""
    chosen = np.zeros(len(tree), np.bool_)
    chosen[best] = True
    if chosen[path].all():
        return best[:count]
    chosen[path] = False
    others = best[chosen[best]][: count - len(path)]
    return best_first(np.sort(np.concatenate((path, others))), tree.scores)
