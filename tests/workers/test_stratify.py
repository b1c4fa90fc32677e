"""The bins of entropy against a regression tree and an isotonic regression that are written out
slowly."""

from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest

from dovetail.protocol.errors import UserError
from dovetail.workers.training.stratify import (
    LEAF_SHARE,
    LEVELS,
    Bin,
    Round,
    Strata,
    stratify,
    terminal_confidence_rank,
)

NODES = 15


def spread(ranks: Sequence[float]) -> float:
    """Return what a split is to make small: the summed squared distance from the mean."""
    return sum((rank - sum(ranks) / len(ranks)) ** 2 for rank in ranks)


def fitted(seen: Round) -> int:
    return seen.rank if seen.full else NODES


def splits(rounds: Sequence[Round], levels: int, least: int) -> list[float]:
    """CART on one feature, trying every split."""
    ordered = sorted(rounds)
    ranks = [fitted(seen) for seen in ordered]
    places = [
        i
        for i in range(least, len(ordered) - least + 1)
        if 0 < i < len(ordered) and ordered[i - 1].entropy < ordered[i].entropy
    ]
    if not levels or not places or not spread(ranks):
        return []
    best = min(places, key=lambda i: spread(ranks[:i]) + spread(ranks[i:]))
    below, above = (
        splits(ordered[:best], levels - 1, least),
        splits(ordered[best:], levels - 1, least),
    )
    return [*below, (ordered[best - 1].entropy + ordered[best].entropy) / 2, *above]


def merged(rounds: Sequence[Round], bounds: list[float]) -> Strata:
    """Neighbours of which the lower one has no lower mean become one, until there are none."""
    while True:
        edges = [-np.inf, *bounds, np.inf]
        groups = [
            [seen for seen in rounds if low < seen.entropy <= high] for low, high in pairwise(edges)
        ]
        means = [sum(map(fitted, group)) / len(group) for group in groups]
        wrong = [i for i in range(len(bounds)) if means[i] >= means[i + 1]]
        if not wrong:
            found = [
                Bin(
                    len(group),
                    mean,
                    sum(seen.rank for seen in group) / len(group),
                    sum(seen.full for seen in group) / len(group),
                )
                for group, mean in zip(groups, means, strict=True)
            ]
            return Strata(tuple(bounds), tuple(found))
        bounds = [bound for i, bound in enumerate(bounds) if i != wrong[0]]


def played(seed: int, rise: float) -> list[Round]:
    """Rounds whose rank rises with their entropy, more or less; some of them were left early."""
    random = np.random.default_rng(seed)
    entropies = random.integers(0, 512, 150) / 64
    ranks = np.clip(rise * entropies + random.exponential(3.0, 150), 1, NODES).astype(int)
    return [
        Round(float(entropy), int(rank), bool(full))
        for entropy, rank, full in zip(entropies, ranks, random.random(150) < 0.7, strict=True)
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rise", [2.0, 0.4])
def test_bins_are_those_of_a_regression_tree_pooled_where_the_rank_does_not_rise(
    seed: int, rise: float
) -> None:
    rounds = played(seed, rise)
    expected, found = (
        merged(rounds, splits(rounds, LEVELS, int(LEAF_SHARE * len(rounds)))),
        stratify(rounds, NODES),
    )
    assert found.thresholds == pytest.approx(expected.thresholds, abs=1e-4)
    assert [astuple(b) for b in found.bins] == [pytest.approx(astuple(b)) for b in expected.bins]


def test_clear_steps_are_found_where_they_are() -> None:
    rounds = [
        Round(entropy / 10, 1 + 2 * (entropy >= 30), entropy < 60)
        for entropy in range(100)
        for _ in range(2)
    ]
    assert stratify(rounds, NODES) == Strata(
        (2.95, 5.95), (Bin(60, 1.0, 1.0, 1.0), Bin(60, 3.0, 3.0, 1.0), Bin(80, 15.0, 3.0, 0.0))
    )


def test_ranks_that_fall_with_entropy_are_one_bin_and_that_is_told() -> None:
    rounds = [Round(float(entropy), 200 - entropy, True) for entropy in range(200)]
    with pytest.raises(
        UserError, match=r"does not predict what is accepted \(mean rank 100.5 everywhere\)"
    ):
        stratify(rounds, 200)


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="99 rounds were played, but thresholds need 100"):
        stratify([Round(float(entropy), entropy, True) for entropy in range(99)], 100)


@pytest.mark.parametrize(("accepted", "rank"), [((), 15), ((0,), 1), ((0, 2, 6), 7), ((14,), 15)])
def test_the_rank_is_the_place_of_the_last_accepted_node(
    accepted: tuple[int, ...], rank: int
) -> None:
    assert terminal_confidence_rank(accepted, 15) == rank
