"""The pool of a growing tree: what it holds after growth and after moves of its root."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import GrowingTree, best_first, likeliest
from dovetail.workers.speculation.policy import Dynamic
from dovetail.workers.speculation.proposal import Shape
from support.growing import VOCABULARY, Table, expand, grow, path_of

POLICY = Dynamic()
shapes = st.builds(
    Shape, nodes=st.integers(0, 40), depth=st.integers(1, 5), width=st.integers(1, 6)
)
tables = st.builds(Table, seed=st.integers(0, 1 << 32), coarse=st.booleans())


@given(tables, shapes, st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=100)
def test_what_survives_a_move_is_the_subtree_with_its_scores_from_the_new_root(
    children: Table, shape: Shape, move: int
) -> None:
    tree = GrowingTree()
    grow(tree, POLICY, children, shape)
    if not len(tree):
        return
    node = move % len(tree)
    root = path_of(tree, node)
    before = {path_of(tree, n): int(tree.rows[n]) for n in range(len(tree))}
    order = [
        path_of(tree, n)[len(root) :]
        for n in range(len(tree))
        if n != node and path_of(tree, n)[: len(root)] == root
    ]
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


def test_a_root_that_moves_to_the_unknown_leaves_nothing() -> None:
    tree = GrowingTree()
    grow(tree, POLICY, Table(0, coarse=False), Shape(10, 3, 3))
    tree.clear()
    assert (len(tree), tree.root_expanded, tree.rows_used) == (0, False, 0)


def test_a_node_sees_its_own_row_and_those_of_its_ancestors() -> None:
    children, shape, tree = Table(1, coarse=False), Shape(40, 5, 4), GrowingTree()
    grow(tree, POLICY, children, shape)
    expanded = np.flatnonzero(tree.rows >= 0)
    offsets, rows = tree.lineage(expanded)
    assert len(set(tree.levels_of(expanded).tolist())) > 1
    assert len(offsets) == len(expanded) + 1
    for node, first, stop in zip(expanded, offsets, offsets[1:], strict=False):
        path, above = [], int(node)
        while above != ROOT:
            path.append(int(tree.rows[above]))
            above = int(tree.parents[above])
        assert rows[first:stop].tolist() == path[::-1]


def test_a_child_is_found_by_its_parent_and_token() -> None:
    tree = GrowingTree()
    grow(tree, POLICY, Table(2, coarse=False), Shape(10, 2, 3))
    for node in range(len(tree)):
        assert tree.child(int(tree.parents[node]), int(tree.tokens[node])) == node
    assert tree.child(ROOT, VOCABULARY) is None


@given(st.integers(0, 1 << 32), st.integers(1, 12), st.sampled_from([0.2, 1.0, 3.0]))
@settings(deadline=None, max_examples=30)
def test_the_likeliest_children_are_those_of_a_sorted_log_softmax(
    seed: int, width: int, sharpening: float
) -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
    logits[1, 4] = -torch.inf
    tokens, gains = likeliest(logits, width, sharpening=sharpening)
    expected = torch.log_softmax(logits / sharpening, -1).sort(descending=True)
    assert tokens.tolist() == expected.indices[:, :width].tolist()
    np.testing.assert_allclose(gains, expected.values[:, :width].numpy(), rtol=1e-5, atol=1e-6)


def test_a_masked_token_is_no_child_and_a_gain_is_never_above_zero() -> None:
    tree = GrowingTree()
    added = tree.add_children(
        [ROOT], np.array([[4, 2, 1]], np.int32), np.array([[1e-7, -3.0, -np.inf]], np.float32)
    )
    assert (added, tree.tokens.tolist(), tree.scores.tolist()) == (2, [4, 2], [0.0, -3.0])


def test_logits_that_are_not_numbers_are_an_error() -> None:
    with pytest.raises(FloatingPointError, match="not numbers"):
        GrowingTree().add_children([ROOT], *likeliest(torch.full((1, 8), torch.nan), 2))


# -- growth ahead ----------------------------------------------------------------------------------


def slow_scores(tree: GrowingTree) -> list[np.float32]:
    """Return for every node the sum of the gains from the root down, as float32 adds them."""
    scores: list[np.float32] = []
    for node in range(len(tree)):
        parent = int(tree.parents[node])
        scores.append(
            tree.gains[node] if parent == ROOT else np.float32(scores[parent] + tree.gains[node])
        )
    return scores


@given(tables, tables, shapes, st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=100)
def test_children_that_are_ranked_again_keep_what_is_below_them(
    children: Table, again: Table, shape: Shape, chosen: int
) -> None:
    tree = GrowingTree()
    grow(tree, POLICY, children, shape)
    if not len(tree):
        return
    parents = np.unique(tree.parents).astype(np.intp)
    node = parents[chosen % len(parents)]
    above = path_of(tree, int(node))
    below = {path_of(tree, n): (int(tree.rows[n]), tree.gains[n]) for n in range(len(tree))}
    table = again((9,))[: shape.width]
    tokens, gains = (
        np.array([[t for t, _ in table]], np.int32),
        np.array([[g for _, g in table]], np.float32),
    )
    added = tree.rank_again(np.array([node]), tokens, gains)
    possible = {t: (rank, g) for rank, (t, g) in enumerate(table) if np.isfinite(g)}
    lowest = min((g for _, g in possible.values()), default=np.float32(0))
    after = {path_of(tree, n): n for n in range(len(tree))}
    assert set(after) == set(below) | {(*above, t) for t in possible}
    assert added == len(after) - len(below)
    assert tree.scores.tolist() == slow_scores(tree)
    for path, n in after.items():
        child = path[:-1] == above
        if child and path[-1] in possible:
            assert (tree.ranks[n], tree.gains[n]) == possible[path[-1]]
        elif child:
            assert tree.ranks[n] >= len(table)
            assert tree.gains[n] == min(below[path][1], lowest)
        else:
            assert tree.gains[n] == below[path][1]
        assert tree.rows[n] == below.get(path, (-1, 0))[0]


@given(tables, shapes, st.integers(0, 6))
@settings(deadline=None, max_examples=60)
def test_a_pruned_tree_has_the_best_children_of_every_node_and_their_rows(
    children: Table, shape: Shape, width: int
) -> None:
    tree = GrowingTree()
    grow(tree, POLICY, children, shape)
    ranks = {path_of(tree, n): int(tree.ranks[n]) for n in range(len(tree))}
    kept = [path for path in ranks if all(ranks[path[:i]] < width for i in range(1, len(path) + 1))]
    rows, used, expanded = (
        {path_of(tree, n): int(tree.rows[n]) for n in range(len(tree))},
        tree.rows_used,
        tree.root_expanded,
    )
    tree.prune(width)
    assert [path_of(tree, n) for n in range(len(tree))] == kept
    assert [int(row) for row in tree.rows] == [rows[path] for path in kept]
    assert (tree.rows_used, tree.root_expanded) == (used, expanded)


def check_what_is_seen(tree: GrowingTree, width: int) -> None:
    """Check by its definition what is seen: a node whose way from the root has the best `width`
    children only."""
    seen = []
    for node in range(len(tree)):
        ranks, above = [], node
        while above != ROOT:
            ranks.append(int(tree.ranks[above]))
            above = int(tree.parents[above])
        seen.append(max(ranks) < width)
    assert (tree.hidden == 0).tolist() == seen
    for level in range(7):
        assert tree.at_level(level).tolist() == [
            node for node in range(len(tree)) if seen[node] and tree.levels[node] == level
        ]
        assert tree.within(level).tolist() == [
            node for node in range(len(tree)) if seen[node] and tree.levels[node] <= level
        ]


@given(tables, shapes, st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 16))
@settings(deadline=None, max_examples=60)
def test_policies_see_the_best_children_of_every_node_that_they_see(
    children: Table, shape: Shape, width: int, later: int, move: int
) -> None:
    tree = GrowingTree()
    tree.show(width)
    grow(tree, POLICY, children, shape, kept=VOCABULARY)
    check_what_is_seen(tree, width)
    if len(left := tree.expandable(shape.depth + 1, 1e-6)):
        expand(tree, left[-2:], children, (), VOCABULARY)
        check_what_is_seen(tree, width)
    if len(tree):
        node = move % len(tree)
        table = children((9,))
        tree.rank_again(
            np.array([tree.parents[node]]),
            np.array([[t for t, _ in table]], np.int32),
            np.array([[g for _, g in table]], np.float32),
        )
        check_what_is_seen(tree, width)
        tree.move_root(node, VOCABULARY)
        check_what_is_seen(tree, width)
    tree.show(later)
    check_what_is_seen(tree, later)


def test_hidden_children_that_are_next_to_impossible_are_left_out() -> None:
    tree = GrowingTree()
    tree.show(1)
    assert (
        tree.add_children(
            [ROOT], np.array([[3, 4, 5]], np.int32), np.array([[-7.0, -6.9, -7.0]], np.float32)
        )
        == 2
    )
    assert tree.tokens.tolist() == [3, 4]


@given(tables, shapes, st.integers(1, 6), st.sampled_from([1e-3, 0.1, 0.5]))
@settings(deadline=None, max_examples=60)
def test_what_can_be_expanded_has_no_row_and_a_parent_that_has_one(
    children: Table, shape: Shape, depth: int, least: float
) -> None:
    tree = GrowingTree()
    grow(tree, POLICY, children, shape)
    expected = [
        n
        for n in range(len(tree))
        if tree.rows[n] < 0
        and tree.levels[n] < depth
        and np.exp(tree.scores[n]) >= np.float32(least)
        if tree.parents[n] == ROOT or tree.rows[tree.parents[n]] >= 0
    ]
    assert tree.expandable(depth, least).tolist() == expected


def test_a_pass_that_failed_leaves_no_rows() -> None:
    tree = GrowingTree()
    grow(tree, POLICY, Table(1, coarse=False), Shape(9, 3, 3))
    nodes = tree.expandable(9, 1e-3)
    before, used = tree.rows.copy(), tree.rows_used
    rows = tree.rows_of(nodes)
    tree.give_rows(nodes)
    tree.restore_rows(nodes, rows, used)
    assert (tree.rows.tolist(), tree.rows_used) == (before.tolist(), used)


@given(st.lists(st.integers(-3, 0).map(lambda n: n / 4), max_size=64), st.data())
@settings(deadline=None, max_examples=200)
def test_the_best_few_are_the_head_of_the_whole_order(
    gains: list[float], data: st.DataObject
) -> None:
    scores = np.array(gains, dtype=np.float32)
    nodes = np.array(
        sorted(data.draw(st.sets(st.sampled_from(range(len(gains))))) if gains else []),
        dtype=np.int64,
    )
    most = data.draw(st.integers(0, len(gains) + 1))
    order = sorted(nodes, key=lambda node: (-scores[node], node))
    assert best_first(nodes, scores, most).tolist() == order[:most]
    assert best_first(nodes, scores).tolist() == order
