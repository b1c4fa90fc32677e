"""The growing tree against the definition of expand and rerank, written out slowly over paths."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import GrowingTree, frontier, likeliest
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


def expand_and_rerank(children: Children, shape: Shape) -> list[tuple[Path, np.float32]]:
    """EAGLE-2 by its definition: every level's best `width` are expanded, whatever it costs; then the best of the pool."""
    pool: list[tuple[np.float32, int, Path]] = []
    level: list[tuple[np.float32, int, Path]] = [(np.float32(0), -1, ())]
    for _ in range(shape.depth):
        grown: list[tuple[np.float32, int, Path]] = []
        for score, _, path in sorted(level, key=lambda n: (-n[0], n[1]))[: shape.width]:
            for token, gain in children(path)[: shape.width]:
                if np.isfinite(gain):
                    grown.append((np.float32(score + gain), len(pool) + len(grown), (*path, token)))
        pool += grown
        level = grown
    return [(path, score) for score, _, path in sorted(pool, key=lambda n: (-n[0], n[1]))[: shape.nodes]]


def path_of(tree: GrowingTree, node: int) -> Path:
    path: Path = ()
    while node != ROOT:
        path, node = (int(tree.tokens[node]), *path), int(tree.parents[node])
    return path


def grow(tree: GrowingTree, children: Children, shape: Shape, above: Path = ()) -> int:
    """Grows the tree below the path `above` as a drafter does; returns the number of passes."""
    passes = 0
    for level in range(shape.depth):
        nodes = frontier(tree, level, shape)
        if not len(nodes):
            continue
        passes += 1
        if level:
            tree.give_rows(nodes)
        table = [children(above + path_of(tree, node))[: shape.width] for node in nodes]
        tree.add_children(nodes, np.array([[t for t, _ in row] for row in table], np.int32), np.array([[g for _, g in row] for row in table], np.float32))
    return passes


def proposal(tree: GrowingTree, shape: Shape) -> list[tuple[Path, np.float32]]:
    return [(path_of(tree, node), tree.scores[node]) for node in tree.best(shape.nodes, shape.depth)]


shapes = st.builds(Shape, nodes=st.integers(0, 40), depth=st.integers(1, 5), width=st.integers(1, 6))
tables = st.builds(Table, seed=st.integers(0, 1 << 32), coarse=st.booleans())


@given(tables, shapes)
@settings(deadline=None, max_examples=100)
def test_a_tree_grown_from_scratch_is_eagle_2_though_it_stops_early(children: Table, shape: Shape) -> None:
    tree = GrowingTree()
    grow(tree, children, shape)
    assert proposal(tree, shape) == expand_and_rerank(children, shape)


@given(tables, shapes, st.lists(st.integers(0, 1 << 16), max_size=3))
@settings(deadline=None, max_examples=100)
def test_every_prefix_of_a_proposal_is_a_tree_after_any_moves_of_the_root(children: Table, shape: Shape, moves: list[int]) -> None:
    tree, above = GrowingTree(), ()
    for move in [*moves, None]:
        grow(tree, children, shape, above)
        best = tree.best(shape.nodes, shape.depth)
        sent, scores = tree.token_tree(best).check(VOCABULARY), tree.scores[best]
        assert [tuple(sent.tokens[n] for n in sent.path(i)) for i in range(len(sent))] == [path_of(tree, int(n)) for n in best]
        assert (scores[:-1] >= scores[1:]).all()
        if move is not None and len(tree):
            above += path_of(tree, move % len(tree))
            tree.move_root(move % len(tree), shape.width)


@given(st.integers(0, 1 << 32), st.integers(1, 40), st.integers(0, 1 << 16), st.booleans())
@settings(deadline=None, max_examples=80)
def test_where_width_is_no_bound_a_moved_tree_regrows_to_the_one_from_scratch(seed: int, nodes: int, move: int, far: bool) -> None:
    children, shape, tree = Table(seed, coarse=False), Shape(nodes, 3, 200), GrowingTree()
    grow(tree, children, shape)
    node = int(tree.best(len(tree), 3)[move % len(tree)]) if far else 0
    above = path_of(tree, node)
    tree.move_root(node, shape.width)
    grow(tree, children, shape, above)
    assert proposal(tree, shape) == expand_and_rerank(lambda path: children(above + path), shape)


@given(tables, shapes, st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=100)
def test_what_survives_a_move_is_the_subtree_with_its_scores_from_the_new_root(children: Table, shape: Shape, move: int) -> None:
    tree = GrowingTree()
    grow(tree, children, shape)
    if not len(tree):
        return
    node = move % len(tree)
    root = path_of(tree, node)
    before = {path_of(tree, n): int(tree.rows[n]) for n in range(len(tree))}
    order = [path_of(tree, n)[len(root) :] for n in range(len(tree)) if n != node and path_of(tree, n)[: len(root)] == root]
    old_rows = tree.move_root(node, shape.width)
    assert [path_of(tree, n) for n in range(len(tree))] == order
    assert tree.root_expanded == (before[root] >= 0)
    for n, path in enumerate(order):
        gains = [dict(children(root + path[:i]))[token] for i, token in enumerate(path)]
        assert tree.scores[n] == list(itertools.accumulate(gains, np.add))[-1]
        assert tree.levels[n] == len(path)
        old = before[root + path]
        assert (tree.rows[n] < 0) if old < 0 else (old_rows[tree.rows[n]] == old)
    assert sorted(r for r in tree.rows.tolist() if r >= 0) == list(range(tree.rows_used))


@given(tables, shapes)
@settings(deadline=None, max_examples=50)
def test_a_tree_that_is_grown_already_costs_no_pass(children: Table, shape: Shape) -> None:
    tree = GrowingTree()
    grow(tree, children, shape)
    assert grow(tree, children, shape) == 0


def test_a_chain_comes_out_of_a_moved_tree_when_the_width_falls_to_one() -> None:
    children, tree = Table(3, coarse=False), GrowingTree()
    grow(tree, children, Shape(30, 4, 4))
    root = path_of(tree, 0)
    tree.move_root(0, 1)
    grow(tree, children, Shape(8, 4, 1), root)
    assert proposal(tree, Shape(8, 4, 1)) == expand_and_rerank(lambda path: children(root + path), Shape(8, 4, 1))


def test_a_root_that_moves_to_the_unknown_leaves_nothing() -> None:
    tree = GrowingTree()
    grow(tree, Table(0, coarse=False), Shape(10, 3, 3))
    tree.clear()
    assert (len(tree), tree.root_expanded, tree.rows_used) == (0, False, 0)


def test_a_node_sees_its_own_row_and_those_of_its_ancestors() -> None:
    children, shape, tree = Table(1, coarse=False), Shape(40, 5, 4), GrowingTree()
    grow(tree, children, shape)
    expanded = np.flatnonzero(tree.rows >= 0)
    for node, sees in zip(expanded, tree.lineage(expanded), strict=True):
        ancestors, above = set(), int(node)
        while above != ROOT:
            ancestors.add(int(tree.rows[above]))
            above = int(tree.parents[above])
        assert set(np.flatnonzero(sees).tolist()) == ancestors


def test_a_child_is_found_by_its_parent_and_token() -> None:
    tree = GrowingTree()
    grow(tree, Table(2, coarse=False), Shape(10, 2, 3))
    for node in range(len(tree)):
        assert tree.child(int(tree.parents[node]), int(tree.tokens[node])) == node
    assert tree.child(ROOT, VOCABULARY) is None


@given(st.integers(0, 1 << 32), st.integers(1, 12), st.sampled_from([0.2, 1.0, 3.0]))
@settings(deadline=None, max_examples=30)
def test_the_likeliest_children_are_those_of_a_sorted_log_softmax(seed: int, width: int, sharpening: float) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    logits[1, 4] = -torch.inf
    tokens, gains = likeliest(logits, width, sharpening)
    expected = torch.log_softmax(logits / sharpening, -1).sort(descending=True)
    assert tokens.tolist() == expected.indices[:, :width].tolist()
    np.testing.assert_allclose(gains, expected.values[:, :width].numpy(), rtol=1e-5, atol=1e-6)


def test_a_masked_token_is_no_child_and_a_gain_is_never_above_zero() -> None:
    tree = GrowingTree()
    added = tree.add_children([ROOT], np.array([[4, 2, 1]], np.int32), np.array([[1e-7, -3.0, -np.inf]], np.float32))
    assert (added, tree.tokens.tolist(), tree.scores.tolist()) == (2, [4, 2], [0.0, -3.0])


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="not numbers"):
        GrowingTree().add_children([ROOT], *likeliest(torch.full((1, 8), torch.nan), 2, 1.0))
