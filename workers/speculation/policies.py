"""Tree policies, the draft's half: how a tree grows, and which nodes are offered.

A policy decides which nodes the next pass of the model expands and which are offered, best first.
The engine expands a node by computing its row and adding its likeliest children. The tree may
already hold nodes that have survived the last move of the root; nodes with a row are not expanded
again, and hidden ones are ignored. Every prefix of the offered nodes is a tree.

- `dynamic`: expands the best `width` nodes of every level in one pass, and offers the best `nodes`
  of the whole pool (EAGLE-2, Li et al. 2024; EAGLE-3 with depth 8). Presets gamma/depth/width:
  15/8/10, 6/5/10 for small machines, 59/8/10 for a GPU.
- `static`: always the same shape, only the tokens vary (EAGLE-1). Preset 25/5/10.
- `beam`: keeps the best `width` of all children of a level's nodes, and offers everything kept
  (SubSpec, 2025). gamma = width * depth; preset 288/48/6. A smaller gamma offers the best of them.
- `budget`: the best `nodes` of the whole tree that the draft could grow, found by best-first search
  (SpecExec, Svirschevski et al. 2024), with log(0.95) added to the score for every level; a pass
  expands the best `width` nodes not expanded yet. gamma is what counts; depth and width are bounds.
- `goodput`: best first like `budget`, without its decay, so that nodes are in the order of the
  probability to be accepted. The draft decides how many passes pay off, the coordinator how many
  nodes are verified; both take a prefix of this order.
- `heterospec`: `heterospec.py`."""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dovetail.protocol.settings import TreeSettings
from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import NO_ROW, Floats, GrowingTree, Nodes, best_first
from dovetail.workers.speculation.heterospec import Heterospec
from dovetail.workers.speculation.policy import Dynamic, Policy, root_pass, worthwhile
from dovetail.workers.speculation.proposal import Shape

Path = tuple[int, ...]
"""A node of a fixed shape as ranks: (0, 2) is the third child of the first child of the root. A
shape is listed parents first and siblings in rank order, so that every prefix of it is a shape."""

EAGLE_1: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The tree of EAGLE-1 (Li et al. 2024; `mc_sim_7b_63` of its code, tuned by its authors): 25 nodes,
5 levels, at most 4 children."""


@lru_cache(256)
def fixed_shape(gamma: int, depth: int, width: int) -> tuple[Path, ...]:
    """Return at most `gamma` nodes, `depth` levels and `width` children a node; best first.

    EAGLE-1's shape if that is requested. Otherwise the best `gamma` paths if each rank is half as
    likely to be accepted as the previous one: a child of rank r has probability 2^-(r + 1), hence a
    path 2^-(its length + the sum of its ranks); of equals, the shorter come first. At 25 nodes and
    5 levels 20 of these are EAGLE-1's."""
    if (gamma, depth) == (25, 5) and width > max(map(max, EAGLE_1)):
        return EAGLE_1
    shape: list[Path] = []
    waiting: list[tuple[int, int, Path]] = [(1, 1, (0,))]  # (length + sum of ranks, length, path)
    while waiting and len(shape) < gamma:
        unlikeliness, length, path = heapq.heappop(waiting)
        shape.append(path)
        if length < depth:
            heapq.heappush(waiting, (unlikeliness + 1, length + 1, (*path, 0)))
        if path[-1] + 1 < width:
            heapq.heappush(waiting, (unlikeliness + 1, length, (*path[:-1], path[-1] + 1)))
    return tuple(shape)


DECAY = np.float32(np.log(0.95))
"""The summand per level in the score of `budget` (SpecExec): it keeps long paths of near-certain
tokens from taking the whole budget."""
NO_DECAY = np.float32(0.0)


class Beam:
    """The best `width` nodes of every level, among the children of those kept on the level
    above."""

    entropy: ClassVar[float | None] = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield one pass per level."""
        yield from root_pass(tree, shape)
        kept: Nodes = np.zeros(0, np.intp)
        at_level = kept
        for level in range(1, shape.depth):
            at_level = _kept_at(tree, level, at_level, shape.width)
            kept = np.concatenate((kept, at_level))
            kept.sort()
            best = best_first(kept, tree.scores, shape.nodes)
            if len(nodes := worthwhile(at_level, best, tree, shape)):
                yield nodes

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return all nodes kept, or the best of them."""
        at_level: Nodes = np.zeros(0, np.intp)
        levels = [at_level]
        for level in range(1, shape.depth + 1):
            at_level = _kept_at(tree, level, at_level, shape.width)
            levels.append(at_level)
        return best_first(np.sort(np.concatenate(levels)), tree.scores, shape.nodes)


@dataclass(frozen=True)
class BestFirst:
    """Best first up to the number of nodes: `budget` with its decay, `goodput` without one."""

    decay: np.float32 = NO_DECAY  # added to a score for every level, at most 0
    entropy: ClassVar[float | None] = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield passes until every offered node that may have children has been expanded."""
        yield from root_pass(tree, shape)
        while True:
            best = self.select(tree, shape)
            nodes = worthwhile(best[tree.levels[best] < shape.depth], best, tree, shape)[
                : shape.width
            ]
            if not len(nodes):
                return
            yield nodes

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return the best of the pool by their decayed scores; rounding is monotonic, so no child
        precedes its parent."""
        decayed: Floats = tree.scores + tree.levels.astype(np.float32) * self.decay
        return best_first(tree.within(shape.depth), decayed, shape.nodes)


@dataclass(frozen=True)
class Static:
    """A fixed shape. Nodes are offered in its order, siblings by rank, regardless of scores."""

    paths: tuple[Path, ...]
    entropy: ClassVar[float | None] = None

    def passes(self, tree: GrowingTree, shape: Shape) -> Iterator[Nodes]:
        """Yield one pass a level, of the nodes that have children in the shape."""
        yield from root_pass(tree, shape)
        below = _below(self.paths, shape)
        inner: NDArray[np.bool_] = np.any(below >= 0, axis=1)
        for level in range(1, shape.depth):
            at_level = np.flatnonzero((tree.levels == level) & (tree.rows == NO_ROW))
            if len(nodes := at_level[inner[_places(tree, below, level)[at_level]]]):
                yield nodes

    def select(self, tree: GrowingTree, shape: Shape) -> Nodes:
        """Return the nodes that have a place in the shape; if a node has fewer children than
        places, the rest stay empty."""
        places = _places(tree, _below(self.paths, shape), shape.depth)
        nodes = np.flatnonzero(places > 0)
        order: Nodes = nodes[np.argsort(places[nodes])]
        return order


def _kept_at(tree: GrowingTree, level: int, above: Nodes, width: int) -> Nodes:
    """Return the nodes of a level that `beam` keeps, in ascending order: the best children of the
    nodes `above`."""
    candidates = tree.at_level(level)
    if level > 1:
        kept = np.zeros(len(tree), np.bool_)
        kept[above] = True
        candidates = candidates[kept[tree.parents[candidates]]]
    best = best_first(candidates, tree.scores, width)
    best.sort()
    return best


@lru_cache(256)
def _below(paths: tuple[Path, ...], shape: Shape) -> NDArray[np.intp]:
    """Return [places, ranks]: the place of the child of that rank, -1 if it has none in `shape`.
    Place 0 is the root, place i node i - 1 of the shape, and the last place means none; the last
    rank stands for all ranks beyond the shape."""
    cut = [path for path in paths if len(path) <= shape.depth and max(path) < shape.width][
        : shape.nodes
    ]
    places = {(): 0, **{path: place for place, path in enumerate(cut, start=1)}}
    table = np.full((len(cut) + 2, max(map(max, cut), default=0) + 2), -1, np.intp)
    for path, place in places.items():
        if path:
            table[places[path[:-1]], path[-1]] = place
    return table


def _places(tree: GrowingTree, below: NDArray[np.intp], depth: int) -> NDArray[np.intp]:
    """Return the place of every node of the first `depth` levels, -1 for none."""
    places = np.full(len(tree) + 1, -1, np.intp)  # the last element is the root, index -1
    places[ROOT] = 0
    for level in range(1, depth + 1):
        nodes = np.flatnonzero(tree.levels == level)
        places[nodes] = below[
            places[tree.parents[nodes]], np.minimum(tree.ranks[nodes], below.shape[1] - 1)
        ]
    return places[:-1]


OPENERS: dict[str, Callable[[TreeSettings], Policy]] = {
    "static": lambda tree: Static(fixed_shape(tree.gamma, tree.depth, tree.width)),
    "dynamic": lambda tree: Dynamic(),
    "beam": lambda tree: Beam(),
    "budget": lambda tree: BestFirst(DECAY),
    "goodput": lambda tree: BestFirst(),
    "heterospec": Heterospec,
}
"""Every policy of `protocol/settings/tree.py`, with the function that makes it for a session."""


def open_policy(settings: TreeSettings) -> Policy:
    """Return a new policy for `settings.policy`; raise `ValueError` if the name is unknown."""
    if settings.policy not in OPENERS:
        raise ValueError(f"unknown tree policy {settings.policy!r}")
    return OPENERS[settings.policy](settings)
