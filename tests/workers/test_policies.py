"""The policies against their definitions, written out slowly over paths."""

import heapq
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dovetail.protocol.settings import TreeSettings
from dovetail.protocol.settings.tree import POLICIES
from dovetail.protocol.tree import ROOT
from dovetail.workers.speculation.growth import NO_ROW, GrowingTree
from dovetail.workers.speculation.heterospec import Heterospec
from dovetail.workers.speculation.policies import (
    DECAY,
    EAGLE_1,
    NO_DECAY,
    Beam,
    BestFirst,
    Static,
    fixed_shape,
    open_policy,
)
from dovetail.workers.speculation.policy import Dynamic, Policy
from dovetail.workers.speculation.proposal import Shape
from support.growing import VOCABULARY, Children, Path, Table, expand, grow, path_of, proposal

Offered = list[tuple[Path, np.float32]]
DYNAMIC, BEAM, BUDGET = Dynamic(), Beam(), BestFirst(DECAY)


def expand_and_rerank(children: Children, shape: Shape) -> Offered:
    """EAGLE-2 by its definition: every level's best `width` are expanded, whatever it costs; then
    the best of the pool."""
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
    return [
        (path, score) for score, _, path in sorted(pool, key=lambda n: (-n[0], n[1]))[: shape.nodes]
    ]


def beam_search(children: Children, shape: Shape) -> Offered:
    """SubSpec by its definition: the best `width` of all children of a level's nodes are the next
    level; all levels together are the tree."""
    level: Offered = [((), np.float32(0))]
    kept: Offered = []
    for _ in range(shape.depth):
        below = [
            ((*path, token), np.float32(score + gain))
            for path, score in level
            for token, gain in children(path)
            if np.isfinite(gain)
        ]
        level = sorted(below, key=lambda n: -n[1])[: shape.width]
        kept += level
    return sorted(kept, key=lambda n: -n[1])[: shape.nodes]


def best_first_search(children: Children, shape: Shape, decay: np.float32 = DECAY) -> Offered:
    """SpecExec with a heap: the best node known is taken and its children become known."""
    known: list[tuple[float, int, Path, np.float32]] = [(0.0, 0, (), np.float32(0))]
    taken: Offered = []
    numbers = itertools.count(1)
    while known and len(taken) <= shape.nodes:
        _, _, path, score = heapq.heappop(known)
        taken.append((path, score))
        if len(path) < shape.depth:
            for token, gain in children(path)[: shape.width]:
                if np.isfinite(gain):
                    below = np.float32(score + gain)
                    heapq.heappush(
                        known,
                        (
                            -float(below + np.float32(len(path) + 1) * decay),
                            next(numbers),
                            (*path, token),
                            below,
                        ),
                    )
    return taken[1 : shape.nodes + 1]


def in_shape(children: Children, shape: Shape) -> Offered:
    """A fixed shape filled with a draft's tokens."""
    offered: Offered = []
    for ranks in fixed_shape(shape.nodes, shape.depth, shape.width):
        path, score = (), np.float32(0)
        for rank in ranks:
            there = [(t, g) for t, g in children(path) if np.isfinite(g)]
            if rank >= len(there):
                break
            path, score = (*path, there[rank][0]), np.float32(score + there[rank][1])
        else:
            offered.append((path, score))
    return offered


def named(policy: str, shape: Shape) -> Policy:
    return open_policy(
        TreeSettings(policy=policy, gamma=shape.nodes, depth=shape.depth, width=shape.width)
    )


DEFINITIONS: dict[str, Callable[[Children, Shape], Offered]] = {
    "static": in_shape,
    "dynamic": expand_and_rerank,
    "beam": beam_search,
    "budget": best_first_search,
    "goodput": partial(best_first_search, decay=NO_DECAY),
    # without thresholds there is one bin, and in it nothing is adapted
    "heterospec": expand_and_rerank,
}
shapes = st.builds(
    Shape, nodes=st.integers(0, 40), depth=st.integers(1, 5), width=st.integers(1, 6)
)
tables = st.builds(Table, seed=st.integers(0, 1 << 32), coarse=st.booleans())
fine_tables = st.builds(Table, seed=st.integers(0, 1 << 32), coarse=st.just(False))
policies = st.sampled_from(tuple(POLICIES))


def test_every_policy_that_is_built_has_a_definition_here() -> None:
    assert sorted(DEFINITIONS) == sorted(POLICIES), "write a slow definition into DEFINITIONS"
    assert [type(named(p, Shape(3, 3, 3))) for p in DEFINITIONS] == [
        Static,
        Dynamic,
        Beam,
        BestFirst,
        BestFirst,
        Heterospec,
    ]


def test_an_unknown_policy_is_not_taken_for_another() -> None:
    unchecked = TreeSettings().model_copy(update={"policy": "dynamite"})
    with pytest.raises(ValueError, match="unknown tree policy 'dynamite'"):
        open_policy(unchecked)


@given(policies, fine_tables, shapes)
@settings(deadline=None, max_examples=200)
def test_a_tree_grown_from_scratch_is_that_of_the_definition(
    policy: str, children: Table, shape: Shape
) -> None:
    tree, growing = GrowingTree(), named(policy, shape)
    grow(tree, growing, children, shape)
    assert proposal(tree, growing, shape) == DEFINITIONS[policy](children, shape)


@given(tables, shapes)
@settings(deadline=None, max_examples=100)
def test_with_ties_and_missing_children_too_dynamic_is_eagle_2_and_static_its_shape(
    children: Table, shape: Shape
) -> None:
    for policy in ("dynamic", "static"):
        tree, growing = GrowingTree(), named(policy, shape)
        grow(tree, growing, children, shape)
        assert proposal(tree, growing, shape) == DEFINITIONS[policy](children, shape)


@given(policies, tables, shapes, st.lists(st.integers(0, 1 << 16), max_size=3))
@settings(deadline=None, max_examples=200)
def test_every_prefix_of_a_proposal_is_a_tree_within_its_shape_wherever_the_root_moves(
    policy: str, children: Table, shape: Shape, moves: list[int]
) -> None:
    tree, above, growing = GrowingTree(), (), named(policy, shape)
    for move in [*moves, None]:
        grow(tree, growing, children, shape, above)
        offered = growing.select(tree, shape)
        sent = tree.token_tree(offered).check(VOCABULARY)
        assert [tuple(sent.tokens[n] for n in sent.path(i)) for i in range(len(sent))] == [
            path_of(tree, int(n)) for n in offered
        ]
        assert len(sent) <= shape.nodes
        assert max(sent.depths, default=0) <= shape.depth
        assert all(len(below) <= shape.width for below in sent.children.values())
        if policy in ("dynamic", "beam", "goodput"):
            assert (np.diff(tree.scores[offered]) <= 0).all()
        if move is not None and len(tree):
            above += path_of(tree, move % len(tree))
            tree.move_root(move % len(tree), shape.width)


@given(policies, tables, shapes, st.lists(st.integers(0, 1 << 16), max_size=3))
@settings(deadline=None, max_examples=150)
def test_children_that_are_hidden_and_what_is_below_them_change_no_pass_and_no_proposal(
    policy: str, children: Table, shape: Shape, moves: list[int]
) -> None:
    """Beside a tree that has no more children than the policy may see, wherever the root of both
    moves."""
    plain, richer, above, policies = (
        GrowingTree(),
        GrowingTree(),
        (),
        [named(policy, shape) for _ in range(2)],
    )
    for move in [*moves, None]:
        richer.show(shape.width)
        assert grow(richer, policies[0], children, shape, above, kept=VOCABULARY) == grow(
            plain, policies[1], children, shape, above
        )
        assert proposal(richer, policies[0], shape) == proposal(plain, policies[1], shape)
        unseen = np.flatnonzero(richer.hidden & (richer.rows == NO_ROW))
        if len(
            unseen := unseen[
                (richer.parents[unseen] == ROOT)
                | (richer.rows_of(richer.parents[unseen]) != NO_ROW)
            ]
        ):
            expand(richer, unseen[:2], children, above, VOCABULARY)
        if move is not None and len(plain):
            path = path_of(plain, move % len(plain))
            plain.move_root(move % len(plain), shape.width)
            richer.move_root(
                next(node for node in range(len(richer)) if path_of(richer, node) == path),
                VOCABULARY,
            )
            above += path


def test_what_a_tree_lacks_on_several_levels_dynamic_expands_in_one_pass_and_asks_for_once() -> (
    None
):
    tree, children, shape = GrowingTree(), Table(3, coarse=False), Shape(20, 4, 2)
    for nodes in ([ROOT], [0]):
        expand(tree, np.array(nodes), children, (), 2)
    assert [[path_of(tree, node) for node in nodes] for nodes in DYNAMIC.passes(tree, shape)] == [
        [path_of(tree, node) for node in (1, 2, 3)]
    ]


@given(policies, tables, shapes)
@settings(deadline=None, max_examples=100)
def test_a_tree_that_is_grown_already_costs_no_pass(
    policy: str, children: Table, shape: Shape
) -> None:
    tree, growing = GrowingTree(), named(policy, shape)
    grow(tree, growing, children, shape)
    assert grow(tree, growing, children, shape) == []


@given(policies, tables, shapes)
@settings(deadline=None, max_examples=100)
def test_no_pass_expands_more_than_the_width_nor_anything_twice_nor_below_the_depth(
    policy: str, children: Table, shape: Shape
) -> None:
    passes = grow(GrowingTree(), named(policy, shape), children, shape)
    expanded = [path for nodes in passes for path in nodes]
    assert passes[:1] == [[()]][: shape.nodes]
    assert len(expanded) == len(set(expanded))
    assert all(len(path) < shape.depth for path in expanded)
    if policy != "static":
        assert all(len(nodes) <= shape.width for nodes in passes)
    if policy not in ("budget", "goodput"):
        assert all(len({len(path) for path in nodes}) == 1 for nodes in passes)
        assert len(passes) <= shape.depth


@given(
    st.sampled_from(["budget", "goodput"]),
    fine_tables,
    shapes,
    st.lists(st.integers(1, 6), min_size=1),
)
@settings(deadline=None, max_examples=100)
def test_best_first_comes_to_the_same_however_few_nodes_of_a_pass_are_expanded(
    policy: str, children: Table, shape: Shape, affordable: list[int]
) -> None:
    tree, growing, counts = GrowingTree(), named(policy, shape), itertools.cycle(affordable)
    grow(tree, growing, children, shape, most=lambda: next(counts))
    assert proposal(tree, growing, shape) == DEFINITIONS[policy](children, shape)


@given(fine_tables, shapes.filter(lambda shape: shape.depth <= 3))
@settings(deadline=None, max_examples=100)
def test_goodput_offers_the_likeliest_of_all_the_nodes_that_there_could_be(
    children: Table, shape: Shape
) -> None:
    tree, whole, growing = GrowingTree(), GrowingTree(), named("goodput", shape)
    grow(tree, growing, children, shape)
    grow(whole, BestFirst(), children, Shape(1000, shape.depth, shape.width))
    assert (
        tree.scores[growing.select(tree, shape)].tolist()
        == np.sort(whole.scores)[::-1][: shape.nodes].tolist()
    )


@given(
    st.sampled_from(["static", "beam", "budget", "goodput"]),
    fine_tables,
    shapes,
    st.integers(0, 1 << 16),
)
@settings(deadline=None, max_examples=150)
def test_whatever_the_last_tree_left_the_next_is_the_one_from_scratch(
    policy: str, children: Table, shape: Shape, move: int
) -> None:
    """Not so with `dynamic`, which goes on from more than it would have grown."""
    tree, growing = GrowingTree(), named(policy, shape)
    grow(tree, growing, children, shape)
    assume(len(tree))
    above = path_of(tree, move % len(tree))
    tree.move_root(move % len(tree), shape.width)
    grow(tree, growing, children, shape, above)
    assert proposal(tree, growing, shape) == DEFINITIONS[policy](
        lambda path: children(above + path), shape
    )


@given(fine_tables, st.integers(1, 40), st.integers(0, 1 << 16), st.booleans())
@settings(deadline=None, max_examples=25)
def test_where_width_is_no_bound_a_moved_dynamic_tree_regrows_to_the_one_from_scratch(
    children: Table, nodes: int, move: int, far: bool
) -> None:
    shape, tree = Shape(nodes, 3, 64), GrowingTree()
    grow(tree, DYNAMIC, children, shape)
    node = move % len(tree) if far else 0
    above = path_of(tree, node)
    tree.move_root(node, shape.width)
    grow(tree, DYNAMIC, children, shape, above)
    assert proposal(tree, DYNAMIC, shape) == expand_and_rerank(
        lambda path: children(above + path), shape
    )


def test_a_chain_comes_out_of_a_moved_tree_when_the_width_falls_to_one() -> None:
    children, tree = Table(3, coarse=False), GrowingTree()
    grow(tree, DYNAMIC, children, Shape(30, 4, 4))
    root = path_of(tree, 0)
    tree.move_root(0, 1)
    grow(tree, DYNAMIC, children, Shape(8, 4, 1), root)
    assert proposal(tree, DYNAMIC, Shape(8, 4, 1)) == expand_and_rerank(
        lambda path: children(root + path), Shape(8, 4, 1)
    )


def test_subspec_verifies_its_width_times_its_depth_in_as_many_passes_as_levels() -> None:
    children, shape, tree = Table(5, coarse=False), Shape(3 * 9, 9, 3), GrowingTree()
    passes = grow(tree, BEAM, children, shape)
    offered = [path for path, _ in proposal(tree, BEAM, shape)]
    assert [len(nodes) for nodes in passes] == [1] + [3] * 8
    assert sorted(map(len, offered)) == [level for level in range(1, 10) for _ in range(3)]


def test_a_sharp_beam_of_many_levels_does_not_underflow() -> None:
    """SubSpec's products of probabilities in half precision are 0 after a few levels; sums of
    logarithms are not."""
    tree, shape = GrowingTree(), Shape(2 * 100, 100, 2)
    grow(tree, BEAM, lambda path: [(0, np.float32(-1e-3)), (1, np.float32(-30.0))], shape)
    offered = dict(proposal(tree, BEAM, shape))
    assert (0,) * 100 in offered
    assert all(np.isfinite(list(offered.values())))


def test_the_decay_of_budget_prefers_the_short_of_two_paths_that_are_equally_likely() -> None:
    gains = {(): [(0, np.float32(-0.1)), (1, np.float32(-0.12))], (0,): [(2, np.float32(-0.01))]}
    tree, shape = GrowingTree(), Shape(2, 2, 2)
    missing = [(3, np.float32(-np.inf)), (4, np.float32(-np.inf))]
    grow(tree, BUDGET, lambda path: (gains.get(path, []) + missing)[:2], shape)
    assert [path for path, _ in proposal(tree, BUDGET, shape)] == [(0,), (1,)]
    assert [path for path, _ in proposal(tree, DYNAMIC, shape)] == [(0,), (0, 2)]


def test_eagle_1_has_25_nodes_and_five_levels() -> None:
    assert len(set(EAGLE_1)) == 25
    assert max(map(len, EAGLE_1)) == 5
    assert fixed_shape(25, 5, 10) == fixed_shape(25, 5, 4) == EAGLE_1 != fixed_shape(25, 5, 3)
    assert [len([p for p in EAGLE_1 if len(p) == level]) for level in range(1, 6)] == [
        4,
        8,
        8,
        3,
        2,
    ]


@given(st.integers(0, 60), st.integers(1, 8), st.integers(1, 6))
@settings(deadline=None)
def test_a_fixed_shape_is_within_its_bounds_and_lists_parents_and_older_siblings_first(
    gamma: int, depth: int, width: int
) -> None:
    shape = fixed_shape(gamma, depth, width)
    whole = sum(width**level for level in range(1, depth + 1))
    assert len(set(shape)) == len(shape) == min(gamma, whole)
    for i, path in enumerate(shape):
        assert len(path) <= depth
        assert max(path) < width
        assert len(path) == 1 or path[:-1] in shape[:i]
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in shape[:i]


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None)
def test_a_fixed_shape_has_the_likeliest_paths_of_its_model(
    gamma: int, depth: int, width: int
) -> None:
    assume((gamma, depth) != (25, 5))
    every = [
        path
        for length in range(1, depth + 1)
        for path in itertools.product(range(width), repeat=length)
    ]
    probability = [2.0 ** -(len(path) + sum(path)) for path in fixed_shape(gamma, depth, width)]
    assert (
        probability
        == sorted((2.0 ** -(len(path) + sum(path)) for path in every), reverse=True)[:gamma]
    )


def test_near_the_end_of_a_reply_the_shape_loses_its_deepest_levels_and_nothing_else() -> None:
    children, tree = Table(7, coarse=False), GrowingTree()
    policy = Static(EAGLE_1)
    grow(tree, policy, children, Shape(25, 3, 10))
    assert len(policy.select(tree, Shape(25, 3, 10))) == 20
    assert len(policy.select(tree, Shape(10, 3, 10))) == 10


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", [Shape(0, 3, 3), Shape(5, 0, 3), Shape(5, -2, 3)])
def test_where_nothing_can_be_offered_nothing_is_computed(policy: str, shape: Shape) -> None:
    growing, tree = named(policy, Shape(5, 3, 3)), GrowingTree()
    assert list(growing.passes(tree, shape)) == []
    assert len(growing.select(tree, shape)) == 0
