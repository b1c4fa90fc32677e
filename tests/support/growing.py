"""Trees grown from a table instead of a model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import GrowingTree
from dovetail.workers.speculation.policies import Policy
from dovetail.workers.speculation.proposal import Shape

Path = tuple[int, ...]
Children = Callable[[Path], list[tuple[int, np.float32]]]
VOCABULARY = 5


@dataclass
class Table:
    """What a draft would say: for every path the children, best first, with their gains. Coarse gains give ties and children that do not exist."""

    seed: int
    coarse: bool

    def __call__(self, path: Path) -> list[tuple[int, np.float32]]:
        random = np.random.default_rng([self.seed, *path])
        tokens = random.permutation(VOCABULARY)
        gains = random.choice([0.0, -0.5, -1.0, -np.inf], VOCABULARY) if self.coarse else -random.exponential(1.0, VOCABULARY)
        return [(int(t), g) for t, g in zip(tokens, sorted(gains.astype(np.float32), reverse=True), strict=True)]


def path_of(tree: GrowingTree, node: int) -> Path:
    """The tokens from below the root down to `node`."""
    path: Path = ()
    while node != ROOT:
        path, node = (int(tree.tokens[node]), *path), int(tree.parents[node])
    return path


def grow(
    tree: GrowingTree, policy: Policy, children: Children, shape: Shape, above: Path = (), *, most: Callable[[], int] = lambda: 1 << 20
) -> list[list[Path]]:
    """Grows the tree below the path `above` as a drafter does that can expand so many nodes of the next pass; returns what each pass expanded."""
    passes = []
    for wanted in policy.passes(tree, shape):
        nodes = wanted[: most()]
        passes.append([path_of(tree, node) for node in nodes.tolist()])
        if nodes[0] != ROOT:
            tree.give_rows(nodes)
        table = [children(above + path)[: shape.width] for path in passes[-1]]
        tree.add_children(nodes, np.array([[t for t, _ in row] for row in table], np.int32), np.array([[g for _, g in row] for row in table], np.float32))
    return passes


def proposal(tree: GrowingTree, policy: Policy, shape: Shape) -> list[tuple[Path, np.float32]]:
    """What is offered, as paths with their scores."""
    return [(path_of(tree, node), tree.scores[node]) for node in policy.select(tree, shape)]
