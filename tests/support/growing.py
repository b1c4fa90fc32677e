"""Trees grown from a table instead of a model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import GrowingTree, Nodes
from dovetail.workers.speculation.policy import Policy
from dovetail.workers.speculation.proposal import Shape

Path = tuple[int, ...]
Children = Callable[[Path], list[tuple[int, np.float32]]]
VOCABULARY = 5


@dataclass
class Table:
    """A made-up draft: for every path the children, best first, with their gains. Coarse gains give
    ties and children that do not exist."""

    seed: int
    coarse: bool

    def __call__(self, path: Path) -> list[tuple[int, np.float32]]:
        random = np.random.default_rng([self.seed, *path])
        tokens = random.permutation(VOCABULARY)
        gains = (
            random.choice([0.0, -0.5, -1.0, -np.inf], VOCABULARY)
            if self.coarse
            else -random.exponential(1.0, VOCABULARY)
        )
        return [
            (int(t), g)
            for t, g in zip(tokens, sorted(gains.astype(np.float32), reverse=True), strict=True)
        ]


def path_of(tree: GrowingTree, node: int) -> Path:
    """The tokens from below the root down to `node`."""
    path: Path = ()
    while node != ROOT:
        path, node = (int(tree.tokens[node]), *path), int(tree.parents[node])
    return path


def grow(
    tree: GrowingTree,
    policy: Policy,
    children: Children,
    shape: Shape,
    above: Path = (),
    *,
    most: Callable[[], int] = lambda: 1 << 20,
    kept: int = 0,
) -> list[list[Path]]:
    """Grows the tree below the path `above` as a drafter does that can expand so many nodes of the
    next pass; returns what each pass expanded.

    `kept`: children of a node, where they are more than the shape's width.
    """
    passes = []
    for wanted in policy.passes(tree, shape):
        nodes = wanted[: most()]
        passes.append([path_of(tree, node) for node in nodes.tolist()])
        expand(tree, nodes, children, above, max(shape.width, kept))
    return passes


def expand(tree: GrowingTree, nodes: Nodes, children: Children, above: Path, kept: int) -> None:
    """Gives `nodes` rows and the first `kept` of their children."""
    if nodes[0] != ROOT:
        tree.give_rows(nodes)
    table = [children(above + path_of(tree, node))[:kept] for node in nodes.tolist()]
    tree.add_children(
        nodes,
        np.array([[t for t, _ in row] for row in table], np.int32),
        np.array([[g for _, g in row] for row in table], np.float32),
    )


def proposal(tree: GrowingTree, policy: Policy, shape: Shape) -> list[tuple[Path, np.float32]]:
    """Return the nodes that are offered, as paths with their scores."""
    return [(path_of(tree, node), tree.scores[node]) for node in policy.select(tree, shape)]
