"""heterospec against its definitions, written out slowly over paths, and by numbers made by
hand."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path as FilePath

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.arrays import Array
from dovetail.protocol.errors import RequestError
from dovetail.protocol.settings import MAX_DEPTH, MAX_GAMMA, Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.head_levels import TREE, FixedLevels, Level
from dovetail.workers.heads.head import Head, Predicted, open_head
from dovetail.workers.sessions.wire import TYPES, to_array
from dovetail.workers.speculation.growth import GrowingTree
from dovetail.workers.speculation.heterospec import Heterospec
from dovetail.workers.speculation.policies import open_policy
from dovetail.workers.speculation.policy import Dynamic
from dovetail.workers.speculation.proposal import Shape
from support.growing import Children, Path, Table, grow, path_of, proposal
from support.heads import write_head
from support.opening import opening

Offered = list[tuple[Path, np.float32]]


def tree_settings(gamma: int, depth: int, width: int, **otherwise: object) -> TreeSettings:
    return TreeSettings.model_validate(
        {"policy": "heterospec", "gamma": gamma, "depth": depth, "width": width, **otherwise}
    )


def largest(tree: TreeSettings) -> Shape:
    """Return the shape that the coordinator asks for."""
    return Shape(tree.most_nodes, tree.most_levels, tree.width)


# -- the definitions, slowly -----------------------------------------------------------------------


def expand_and_rerank(children: Children, width: int, levels: int) -> Offered:
    """The pool of EAGLE-2, best first: every level's best `width` are expanded."""
    pool: list[tuple[np.float32, int, Path]] = []
    level: list[tuple[np.float32, int, Path]] = [(np.float32(0), -1, ())]
    for _ in range(levels):
        grown: list[tuple[np.float32, int, Path]] = []
        for score, _, path in sorted(level, key=lambda n: (-n[0], n[1]))[:width]:
            for token, gain in children(path)[:width]:
                if np.isfinite(gain):
                    grown.append((np.float32(score + gain), len(pool) + len(grown), (*path, token)))
        pool += grown
        level = grown
    return [(path, score) for score, _, path in sorted(pool, key=lambda n: (-n[0], n[1]))]


def surest(tree: GrowingTree, depth: int) -> Path:
    """Return, of the paths to the deepest level there is, the one whose last token is the likeliest
    after its parent, and of equals the first that was drafted."""
    paths = [path_of(tree, node) for node in range(len(tree)) if tree.levels[node] <= depth]
    deepest = [path for path in paths if len(path) == max(map(len, paths))]
    gains = {path_of(tree, node): float(tree.gains[node]) for node in range(len(tree))}
    return max(deepest, key=lambda path: gains[path])  # max takes the first of equals


def cumulative_entropy(children: Children, path: Path, *, depth: int, width: int) -> float:
    """Equation 1, step by step; log K for a level that is missing."""
    total = 0.0
    for step in range(depth):
        if step >= len(path):
            total += math.log(width)
            continue
        likeliest = [
            math.exp(float(gain)) for _, gain in children(path[:step])[:width] if np.isfinite(gain)
        ]
        total -= sum(p / sum(likeliest) * math.log(p / sum(likeliest)) for p in likeliest)
    return total


def with_path(ranked: Offered, path: Path, count: int) -> Offered:
    """The best `count`, but that of the worst as many make place for `path` as it takes."""
    way = [path[: step + 1] for step in range(len(path))][:count]
    others = [entry for entry in ranked if entry[0] not in way][: count - len(way)]
    return [entry for entry in ranked if entry in others or entry[0] in way]


# -- entropy and bins ------------------------------------------------------------------------------

tables = st.builds(Table, seed=st.integers(0, 1 << 32), coarse=st.just(False))
sizes = st.tuples(st.integers(1, 24), st.integers(1, 5), st.integers(1, 5))


@given(tables, sizes)
@settings(deadline=None, max_examples=150)
def test_the_entropy_is_that_of_the_path_whose_last_token_is_the_surest(
    children: Table, size: tuple[int, int, int]
) -> None:
    wanted = tree_settings(*size)
    tree, policy = GrowingTree(), Heterospec(wanted)
    grow(tree, policy, children, largest(wanted))
    assert policy.entropy == pytest.approx(
        cumulative_entropy(
            children, surest(tree, wanted.depth), depth=wanted.depth, width=wanted.width
        ),
        abs=1e-5,
    )


def test_of_equally_sure_paths_the_first_counts() -> None:
    def children(path: Path) -> list[tuple[int, np.float32]]:
        """Both ways end equally sure; the first step of the second is the more certain one of the
        two."""
        if path == ():
            return [(0, np.float32(math.log(0.5))), (1, np.float32(math.log(0.5)))]
        return [
            (2, np.float32(math.log(0.9))),
            (3, np.float32(math.log(0.1 if path == (0,) else 0.05))),
        ]

    wanted = tree_settings(15, 2, 2)
    policy = Heterospec(wanted)
    grow(GrowingTree(), policy, children, largest(wanted))
    step = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert policy.entropy == pytest.approx(math.log(2) + step, abs=1e-6)


@given(
    tables,
    sizes,
    st.lists(st.floats(0.125, 12, width=16), unique=True, max_size=7).map(sorted),
    st.sampled_from([("extend",), ("prune",), ("extend", "prune")]),
)
@settings(deadline=None, max_examples=200)
def test_in_every_bin_the_offer_is_that_of_the_definition(
    children: Table, size: tuple[int, int, int], bounds: list[float], adapt: tuple[str, ...]
) -> None:
    wanted = tree_settings(*size, thresholds=bounds, adapt=adapt)
    tree, policy = GrowingTree(), Heterospec(wanted)
    grow(tree, policy, children, largest(wanted))
    assert policy.entropy is not None
    assert policy.stratum == sum(bound < policy.entropy for bound in bounds)
    nodes, levels = wanted.size_in(policy.stratum)
    ranked = expand_and_rerank(children, wanted.width, levels)
    low = policy.stratum < min(3, len(bounds))
    expected = (
        with_path(ranked, surest(tree, wanted.depth), nodes) if low else ranked[: wanted.gamma]
    )
    assert proposal(tree, policy, largest(wanted)) == expected


@given(
    st.builds(Table, seed=st.integers(0, 1 << 32), coarse=st.booleans()),
    sizes,
    st.integers(1, 40),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=150)
def test_every_prefix_of_an_offer_is_a_tree_within_what_was_asked_for(
    children: Table, size: tuple[int, int, int], nodes: int, levels: int
) -> None:
    wanted = tree_settings(*size, thresholds=[100.0, 101.0])
    tree, policy, shape = GrowingTree(), Heterospec(wanted), Shape(nodes, levels, wanted.width)
    grow(tree, policy, children, shape)
    offered = policy.select(tree, shape).tolist()
    assert len(offered) <= min(nodes, wanted.most_nodes)
    for place, node in enumerate(offered):
        assert tree.parents[node] in (ROOT, *offered[:place])
        assert tree.levels[node] <= levels
    keys = [(-tree.scores[node], node) for node in offered]
    assert keys == sorted(keys)


@given(tables, sizes)
@settings(deadline=None, max_examples=100)
def test_without_thresholds_everything_is_as_with_dynamic(
    children: Table, size: tuple[int, int, int]
) -> None:
    wanted = tree_settings(*size)
    mine, plain, shape = GrowingTree(), GrowingTree(), Shape(*size)
    policy = open_policy(wanted)
    assert grow(mine, policy, children, shape) == grow(plain, Dynamic(), children, shape)
    assert proposal(mine, policy, shape) == proposal(plain, Dynamic(), shape)


@pytest.mark.parametrize(("likelier", "passes"), [(0.97, 4 + 2), (0.6, 4)])
def test_growth_goes_on_from_the_frontier_one_pass_a_level_and_only_where_the_text_is_predictable(
    likelier: float, passes: int
) -> None:
    row = [(0, np.float32(math.log(likelier))), (1, np.float32(math.log(1 - likelier)))]
    wanted = tree_settings(12, 4, 2, thresholds=[1.0])
    assert len(grow(GrowingTree(), Heterospec(wanted), lambda _: row, largest(wanted))) == passes


def test_a_tree_that_ended_early_passes_for_no_sure_one() -> None:
    def children(path: Path) -> list[tuple[int, np.float32]]:
        """Nobody knows what comes first; what follows is certain."""
        return (
            [(token, np.float32(-math.log(5))) for token in range(5)]
            if path == ()
            else [(0, np.float32(0.0))]
        )

    wanted = tree_settings(4, 6, 5, thresholds=[2.0])
    tree, policy = GrowingTree(), Heterospec(wanted)
    grow(tree, policy, children, Shape(4, 2, 5))  # the reply ends soon
    assert policy.entropy == pytest.approx(math.log(5) * (1 + 4), abs=1e-5)
    assert policy.stratum == 1


def test_a_round_that_was_cut_off_is_one_of_dynamic() -> None:
    children, wanted = Table(3, coarse=False), tree_settings(8, 4, 3, thresholds=[50.0])
    tree, policy = GrowingTree(), Heterospec(wanted)
    grow(tree, policy, children, largest(wanted))
    assert policy.stratum == 0
    tree.clear()
    for nodes in policy.passes(tree, largest(wanted)):
        row = children(())[: wanted.width]
        tree.add_children(
            nodes,
            np.array([[t for t, _ in row]], np.int32),
            np.array([[g for _, g in row]], np.float32),
        )
        break
    assert (policy.entropy, policy.stratum) == (None, 1)
    assert proposal(tree, policy, largest(wanted)) == proposal(tree, Dynamic(), Shape(8, 4, 3))


def test_what_lies_below_the_set_depth_already_does_not_change_the_entropy() -> None:
    children, wanted = Table(11, coarse=False), tree_settings(20, 3, 3)
    shallow, deep, policy = GrowingTree(), GrowingTree(), Heterospec(wanted)
    grow(shallow, policy, children, Shape(20, 3, 3))
    alone = policy.entropy
    grow(deep, Dynamic(), children, Shape(20, 3, 3))
    grow(deep, Dynamic(), children, Shape(20, 6, 3))
    grow(deep, policy, children, Shape(20, 3, 3))
    assert deep.levels.max() > 3
    assert policy.entropy == alone


# -- sizes -----------------------------------------------------------------------------------------

BOUNDS = (1.0, 2.0, 3.0, 4.0)
BY_HAND = {
    # rows: ceil(0.3 * 16) + 4 = 9, but a path of 12 levels needs 13; ceil(0.6 * 16) + 3 = 13; 16 +
    # 2 = 18
    (15, 8, 10): [(12, 12), (12, 11), (17, 10), (15, 8)],
    # ceil(0.3 * 60) + 4 = 22; 36 + 3 = 39; 60 + 2 = 62: the paper's for LLaMA 3.1 8B
    (59, 8, 10): [(21, 12), (38, 11), (61, 10), (59, 8)],
    # ceil(0.3 * 7) + 2 = 5, a path of 7 levels needs 8; ceil(0.6 * 7) + 1 = 6, of 6 levels 7; 7 + 0
    (6, 5, 10): [(7, 7), (6, 6), (6, 5), (6, 5)],
    (6, 1, 10): [(2, 1), (4, 1), (6, 1), (6, 1)],
    (0, 8, 10): [(0, 8)] * 4,
}


@pytest.mark.parametrize("shape", BY_HAND, ids=str)
def test_sizes_of_the_bins_are_those_computed_by_hand(shape: tuple[int, int, int]) -> None:
    wanted = tree_settings(*shape, thresholds=BOUNDS)
    assert [wanted.size_in(stratum) for stratum in range(4)] == BY_HAND[shape]
    assert (wanted.most_nodes, wanted.most_levels) == (
        max(n for n, _ in BY_HAND[shape]),
        max(d for _, d in BY_HAND[shape]),
    )


@pytest.mark.parametrize(
    ("adapt", "expected"),
    [
        ((), [(15, 8)] * 4),
        (("extend",), [(15, 12), (15, 11), (15, 10), (15, 8)]),
        (("prune",), [(8, 8), (9, 8), (15, 8), (15, 8)]),
        (("compute",), [(15, 8)] * 4),
    ],
)
def test_each_switch_does_its_part_alone(
    adapt: tuple[str, ...], expected: list[tuple[int, int]]
) -> None:
    wanted = tree_settings(15, 8, 10, thresholds=BOUNDS, adapt=adapt)
    assert [wanted.size_in(stratum) for stratum in range(4)] == expected


@pytest.mark.parametrize(
    ("bounds", "prune", "low"),
    [
        ((), (0.3, 0.6, 1.0), 0),
        ((1.0,), (0.3, 0.6, 1.0), 1),
        ((1.0, 2.0, 3.0, 4.0), (0.3, 0.6, 1.0), 3),
        ((1.0, 2.0), (), 0),
    ],
)
def test_the_bin_without_an_upper_bound_is_never_a_low_one(
    bounds: Sequence[float], prune: Sequence[float], low: int
) -> None:
    assert tree_settings(15, 8, 10, thresholds=bounds, prune=prune).low_bins == low
    assert TreeSettings(thresholds=tuple(bounds)).low_bins == 0


def test_no_size_is_beyond_what_a_message_may_ask_for() -> None:
    wanted = tree_settings(MAX_GAMMA, MAX_DEPTH, 10, thresholds=BOUNDS)
    assert (wanted.most_nodes, wanted.most_levels) == (MAX_GAMMA, MAX_DEPTH)


def test_a_worker_reads_no_file_of_thresholds() -> None:
    with pytest.raises(RequestError, match=r"tree.thresholds = 'here.toml' names a file"):
        open_policy(tree_settings(15, 8, 10, thresholds="here.toml"))


# -- computational adaptation ----------------------------------------------------------------------


def shapes_of(head: Head, adapt: str, bounds: Sequence[float]) -> tuple[list[int], list[int]]:
    """Rows of the passes that were captured for a session, and of the tree's passes, in three
    rounds of it."""
    captured: list[int] = []
    asked: list[int] = []

    def capture(function: Callable[[], Predicted]) -> Callable[[], Predicted]:
        captured.append(len(function().logits))
        return function

    engine, wanted = (
        HeadDrafter(head, Spans(), contrast=False, capture=capture),
        tree_settings(12, 4, 6, thresholds=bounds, adapt=("extend", "prune", adapt)),
    )
    log, random = [3, 1, 4, 1, 5], torch.Generator().manual_seed(0)

    def features(count: int) -> Array:
        return to_array(
            torch.randn(count, engine.reads.row, generator=random).to(TYPES[engine.reads.dtype])
        )

    session = engine.open(
        opening(
            1, log, capacity=60, vocabulary_size=48, key=bytes(16), sampling=Sampling(), tree=wanted
        )
    )

    class Watched(FixedLevels):
        def compute(self, parts: Sequence[Level]) -> Sequence[Predicted]:
            before = len(captured)
            found = super().compute(parts)
            if parts[0].kind == TREE:
                asked.append(len(parts[0].tokens))
            else:
                del captured[before:]  # a pass over true rows
            return found

    session.levels.__class__ = Watched
    engine.feed(session, 0, features(len(log)))
    for bonus in (2, 7, 9):
        engine.draft(session, (), bonus, largest(wanted))
        engine.take_features(session, features(1))
    return captured, asked


@pytest.mark.parametrize(
    "bounds", [(), (1.0, 2.0), (100.0,)], ids=["one bin", "high bin", "low bin"]
)
def test_each_shape_that_a_bin_leads_to_is_captured_once_and_one_for_all_where_that_is_switched_off(
    tmp_path: FilePath, llama_folder: FilePath, bounds: Sequence[float]
) -> None:
    folder = str(write_head(tmp_path, "eagle"))
    one, other = (
        open_head(folder, target=str(llama_folder), weights="fp32", device="cpu", backend="library")
        for _ in range(2)
    )
    captured, asked = shapes_of(one, "compute", bounds)
    assert sorted(captured) == sorted({1 << (rows - 1).bit_length() for rows in asked})
    assert shapes_of(one, "compute", bounds) == ([], asked)  # the next session has them already
    captured, again = shapes_of(other, "prune", bounds)
    assert again == asked
    assert captured == [8]
