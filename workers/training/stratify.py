"""Bins of entropy for the policy `heterospec`: from the rounds of many replies to a handful of
thresholds (HeteroSpec, Liu et al. 2025, section 4.2).

A regression tree of three levels splits the rounds by their cumulative meta-path entropy so that
the *terminal confidence rank* varies as little as possible within a bin. On one feature such a tree
is an ordered partition of at most eight intervals. The paper assumes that the mean rank rises from
bin to bin; where it does not, neighbours are merged (isotonic regression by pooling adjacent
violators), so that a lower bin is always more certain.

As in the paper, the rank of *fully accepted* paths is fitted; for other rounds the paper does not
define one. Here a round in which the target left the tree above its depth has the worst rank.
Without that distinction the mean is useless: a node eight levels down has rank 8 at best, so with
the embedded pair (368 rounds, 15/8/4, temperature 0) the most certain tenth, accepted to full
depth, has mean rank 8.5, and the least certain one, with two accepted tokens a round, 6.3.

Rounds are played and files written elsewhere. scikit-learn is an extra and imported where the tree
is fitted."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dovetail.protocol.errors import UserError

LEVELS = 3
LEAF_SHARE = 0.01  # the least share of all rounds in a bin: the mean rank of fewer is not reliable
DECIMALS = 4  # the decimals of a threshold, in nats
LEAST_ROUNDS = 100


class Round(NamedTuple):
    """The observation of one round."""

    entropy: float  # cumulative entropy of the tree's levels, in nats
    rank: int  # terminal confidence rank
    full: bool  # True if the accepted path reached the tree's depth


@dataclass(frozen=True)
class Bin:
    """The rounds between two thresholds."""

    rounds: int
    fitted_rank: float
    """Mean, with the worst rank for every round that was not fully accepted; rises from bin to
    bin."""
    mean_rank: float
    full_share: float  # the share of fully accepted rounds


@dataclass(frozen=True)
class Strata:
    """Bins by ascending entropy; `thresholds[i]` is the highest entropy that belongs to bin i."""

    thresholds: tuple[float, ...]
    bins: tuple[Bin, ...]


def terminal_confidence_rank(accepted: Sequence[int], nodes: int) -> int:
    """Return the rank, 1 for the best, of the last accepted node among the `nodes` that a round may
    offer, best first; the worst rank if none was accepted. `accepted`: places in the proposal, a
    path from below the root. (HeteroSpec, section 3.2.)"""
    return accepted[-1] + 1 if accepted else nodes


def stratify(rounds: Sequence[Round], nodes: int) -> Strata:
    """Return the bins of `rounds`, at least two; `nodes` is the worst rank. Raises `UserError` if
    there are too few rounds, or if rank does not rise with entropy."""
    if len(rounds) < LEAST_ROUNDS:
        remedy = "give more prompts (--rounds keeps what was played), or allow longer replies"
        raise UserError(
            f"{len(rounds)} rounds were played, but thresholds need {LEAST_ROUNDS}: {remedy}"
        )
    strata = _merged(
        rounds, nodes, sorted({round(split, DECIMALS) for split in _splits(rounds, nodes)})
    )
    if not strata.thresholds:
        raise UserError(
            f"the entropy of {len(rounds)} rounds does not predict what is accepted (mean rank "
            f"{strata.bins[0].fitted_rank:.1f} everywhere): give more prompts, of the kind "
            "that is to be decoded"
        )
    return strata


def fitted_rank(seen: Round, nodes: int) -> int:
    """Return the rank that the regression tree is fitted to."""
    return seen.rank if seen.full else nodes


def _splits(rounds: Sequence[Round], nodes: int) -> list[float]:
    """Return the thresholds of the regression tree."""
    try:
        from sklearn.tree import DecisionTreeRegressor
    except ImportError:
        raise UserError(
            "fitting thresholds needs scikit-learn: pip install 'dovetail-llm[stratify]'"
        ) from None
    entropies, ranks = (
        np.array([[seen.entropy] for seen in rounds]),
        np.array([fitted_rank(seen, nodes) for seen in rounds]),
    )
    fitted = (
        DecisionTreeRegressor(
            max_depth=LEVELS, min_samples_leaf=max(1, int(LEAF_SHARE * len(rounds))), random_state=0
        )
        .fit(entropies, ranks)
        .tree_
    )
    return [
        float(threshold)
        for feature, threshold in zip(fitted.feature, fitted.threshold, strict=True)
        if feature >= 0
    ]


def _merged(rounds: Sequence[Round], nodes: int, splits: Sequence[float]) -> Strata:
    """Return the bins between `splits`, merging neighbours whose mean rank does not rise."""
    groups: list[list[Round]] = [[] for _ in range(len(splits) + 1)]
    for seen in rounds:
        groups[bisect_left(splits, seen.entropy)].append(seen)
    merged: list[tuple[list[Round], Bin, float]] = []
    for group, bound in zip(groups, (*splits, np.inf), strict=True):
        while merged and (not group or merged[-1][1].fitted_rank >= _bin(group, nodes).fitted_rank):
            group = merged.pop()[0] + group
        merged.append((group, _bin(group, nodes), bound))
    return Strata(
        tuple(bound for _, _, bound in merged[:-1]), tuple(found for _, found, _ in merged)
    )


def _bin(group: Sequence[Round], nodes: int) -> Bin:
    columns = [(fitted_rank(seen, nodes), seen.rank, seen.full) for seen in group]
    fitted, rank, full = (float(np.mean(column)) for column in zip(*columns, strict=True))
    return Bin(len(group), fitted, rank, full)
