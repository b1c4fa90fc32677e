"""Fixed tree shapes: a node is a path of ranks, so (0, 2) is the third child of the first child of
the root.

A shape is listed parents first and siblings in rank order, so that every prefix of the list is a
shape."""

import heapq
from functools import lru_cache

Path = tuple[int, ...]

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

    EAGLE-1's shape if that is what was asked for. Otherwise the best `gamma` paths if every rank is
    half as likely to be accepted as the one before it: the child of rank r with probability 2^-(r +
    1), hence a path with 2^-(its length + the sum of its ranks); of equals the shorter come first.
    At 25 nodes and 5 levels 20 of these are EAGLE-1's."""
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
