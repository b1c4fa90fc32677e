"""Speculative sampling by rejection: whatever the draft's distribution and the shape of the tree,
what is emitted has the target's distribution."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor

from benchmarks import nodes
from dovetail.protocol.errors import TreeError
from dovetail.protocol.noise import gumbel, session_key
from dovetail.protocol.settings import Sampling
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.speculation.growth import GrowingTree
from dovetail.workers.speculation.noise import gumbel_noise_of
from dovetail.workers.speculation.policies import Path, Static
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.rejection import (
    CANDIDATES,
    Choices,
    Draws,
    ProposalProbabilities,
    Remaining,
    rejection_walk,
    stream,
)
from dovetail.workers.speculation.sampling import process_logits
from support.cases import everyday

Distribution = NDArray[np.float64]
Distributions = Callable[[Path], Distribution]
"""The distribution of the next token after a path."""
KEY = bytes(range(16))
SHAPES: dict[str, tuple[Path, ...]] = {
    "nothing": (),
    "a node": ((0,),),
    "a chain": ((0,), (0, 0)),
    "siblings": ((0,), (1,), (2,)),
    "all of it": tuple(
        path for length in (1, 2) for path in itertools.product(range(4), repeat=length)
    ),
    "uneven": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
}


# -- by enumeration --------------------------------------------------------------------------------


def orders(distribution: Distribution, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way to draw `count` tokens, or as many as there are, one by one without replacement,
    with its probability."""
    possible = int(np.count_nonzero(distribution))
    for order in itertools.permutations(
        np.flatnonzero(distribution).tolist(), min(count, possible)
    ):
        probability, left = 1.0, distribution.copy()
        for token in order:
            probability *= left[token] / left.sum()
            left[token] = 0.0
        yield order, float(probability)


def outcomes(
    target: Distribution, draft: Distribution, order: tuple[int, ...]
) -> Iterator[tuple[int, bool, float]]:
    """(token, whether it was drafted, probability) by the decisions of the real code."""
    candidates = np.flatnonzero(draft)
    remaining, reached = Remaining(target, candidates, draft[candidates]), 1.0
    for token in order:
        chance = min(1.0, remaining.chance(token))
        assert 0.0 <= chance <= 1.0
        yield token, True, reached * chance
        reached *= 1.0 - chance
        remaining.refuse(token)
        assert np.isfinite(remaining.distribution()).all()
        assert remaining.distribution().sum() == pytest.approx(1.0, abs=1e-12)
    for token, share in enumerate(remaining.distribution()):
        yield token, False, reached * float(share)


def emitted(
    target: Distributions,
    draft: Distributions,
    shape: tuple[Path, ...],
    size: int,
    above: Path = (),
    ranks: Path = (),
) -> dict[Path, float]:
    """The distribution of what one round emits below a node: over all draws, all tests and all last
    tokens."""
    distribution: dict[Path, float] = Counter()  # type: ignore[assignment]
    count = len([path for path in shape if path[:-1] == ranks and len(path) == len(ranks) + 1])
    for order, drawn in orders(draft(above), count):
        for token, drafted, probability in outcomes(target(above), draft(above), order):
            if probability == 0.0:
                continue
            if not drafted:
                distribution[(token,)] += drawn * probability
                continue
            below = emitted(
                target, draft, shape, size, (*above, token), (*ranks, order.index(token))
            )
            for rest, share in below.items():
                distribution[(token, *rest)] += drawn * probability * share
    return distribution


def completed(
    distribution: dict[Path, float], target: Distributions, size: int, length: int
) -> dict[Path, float]:
    """The distribution of the first `length` tokens: what a round emits, and what is missing from
    the target alone."""
    full: dict[Path, float] = Counter()  # type: ignore[assignment]
    for path, probability in distribution.items():
        for rest in itertools.product(range(size), repeat=max(0, length - len(path))):
            tokens = (*path, *rest)[:length]
            share = probability
            for t in range(len(path), length):
                share *= target(tokens[:t])[tokens[t]]
            full[tokens] += share
    return full


def one_hot(token: int, size: int) -> Distribution:
    return np.eye(size)[token]


def table(seed: int, size: int, kind: str) -> Distributions:
    """A distribution after every path: random, sparse, one-hot, or on the even or the odd tokens
    only."""

    def distribution(path: Path) -> Distribution:
        random = np.random.default_rng([seed, len(kind), *path])
        weights = random.exponential(1.0, size) ** 2
        if kind == "sparse":
            weights *= random.random(size) < 0.6
        if kind in ("even", "odd"):
            weights *= np.arange(size) % 2 == (kind == "odd")
        if kind == "one-hot" or not weights.any():
            return one_hot(int(random.integers(size)), size)
        whole: Distribution = weights / weights.sum()
        return whole

    return distribution


KINDS = ("random", "sparse", "one-hot", "even", "odd")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", KINDS)
def test_by_enumeration_two_tokens_have_the_law_of_the_target(shape: str, p: str) -> None:
    tables = itertools.cycle(((3, 1), (3, 2), (4, 3)))
    for q, (size, seed) in zip(KINDS, tables, strict=False):
        target, draft = table(seed, size, p), table(seed + 100, size, q)
        distribution = completed(emitted(target, draft, SHAPES[shape], size), target, size, 2)
        for tokens in itertools.product(range(size), repeat=2):
            assert distribution.get(tokens, 0.0) == pytest.approx(
                target(())[tokens[0]] * target(tokens[:1])[tokens[1]], abs=1e-9
            )


@given(
    st.integers(0, 1 << 32), st.integers(2, 5), st.sampled_from([0.0, 1e-300, 1e-17, 1e-12, 1e-6])
)
@settings(deadline=None, max_examples=200)
def test_one_token_has_the_law_of_the_target_where_the_two_laws_are_nearly_equal_or_nearly_certain(
    seed: int, size: int, apart: float
) -> None:
    random = np.random.default_rng(seed)
    target = random.exponential(1.0, size) * random.choice([1.0, 1.0, 1e-9, 0.0], size)
    target = target / target.sum() if target.any() else one_hot(0, size)
    draft = target * (1.0 + apart * random.standard_normal(size))
    draft /= draft.sum()
    distribution = emitted(lambda path: target, lambda path: draft, SHAPES["siblings"], size)
    firsts = [
        sum(probability for path, probability in distribution.items() if path[0] == token)
        for token in range(size)
    ]
    np.testing.assert_allclose(firsts, target, atol=1e-9)


def test_equal_laws_accept_the_first_child_and_disjoint_ones_none() -> None:
    half = np.array([0.5, 0.5, 0.0, 0.0])
    same = Remaining(half, np.array([0, 1]), half[:2])
    assert same.chance(1) == 1.0
    other = Remaining(half, np.array([2, 3]), np.array([0.9, 0.1]))
    assert other.chance(2) == 0.0
    other.refuse(2)
    assert other.chance(3) == 0.0
    other.refuse(3)
    np.testing.assert_array_equal(other.distribution(), half)


def test_a_refusal_that_cannot_happen_leaves_a_law() -> None:
    remaining = Remaining(one_hot(1, 3), np.array([1]), np.array([1.0]))
    remaining.refuse(1)
    np.testing.assert_array_equal(remaining.distribution(), one_hot(1, 3))


# -- by drawing ------------------------------------------------------------------------------------


def drawn_tree(
    draws: Draws, shape: tuple[Path, ...], logits: Callable[[Path], Tensor]
) -> tuple[TokenTree, ProposalProbabilities]:
    """A tree as a draft worker grows it, from a table of processed logits."""
    tree, policy, bounds = GrowingTree(), Static(shape), Shape(64, 8, 8)
    for expanded in policy.passes(tree, bounds):
        if expanded[0] != ROOT:
            tree.give_rows(expanded)
        rows = torch.stack([logits(tuple(tree.path_tokens(node))) for node in expanded.tolist()])
        tree.add_children(expanded, *draws.children(expanded, rows, bounds.width))
    offered = policy.select(tree, bounds)
    return tree.token_tree(offered), draws.distributions(offered)


def logits_of(seed: int, size: int, sampling: Sampling) -> Callable[[Path], Tensor]:
    """Processed logits after every path."""

    def logits(path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *path)) % (1 << 32))
        return process_logits(2.0 * torch.randn(1, size, generator=generator), sampling)[0]

    return logits


def p_value(counts: dict[Path, int], distribution: dict[Path, float]) -> float:
    """Return the p-value of the counts under the distribution; cells with few expected are put
    together."""
    samples = sum(counts.values())
    assert all(distribution.get(cell, 0.0) > 0.0 for cell in counts)
    large = [cell for cell in distribution if distribution[cell] * samples >= 5]
    observed = [counts.get(cell, 0) for cell in large]
    expected = [distribution[cell] * samples for cell in large]
    if (rest := samples - sum(expected)) > 1e-6:
        observed.append(samples - sum(observed))
        expected.append(rest)
    if len(expected) < 2:
        return 1.0
    return float(chisquare(observed, np.array(expected) * sum(observed) / sum(expected)).pvalue)


SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.7, top_k=4),
    "cold": Sampling(temperature=0.5, top_p=0.8),
    "nearly greedy": Sampling(temperature=0.05),
    "one token": Sampling(temperature=1.0, top_k=1),
}


@pytest.mark.parametrize(
    ("shape", "p", "samples"),
    [
        *(
            # hardly anything is drawn of the last two
            pytest.param("uneven", p, 1500, marks=pytest.mark.slow)
            for p in ("hot", "cold", "plain", "nearly greedy", "one token")
        ),
        pytest.param("a chain", "cold", 1500, marks=pytest.mark.slow),
        ("siblings", "hot", 500),
    ],
)
def test_over_many_keys_the_tokens_of_real_rounds_have_the_law_of_the_target(
    shape: str, p: str, samples: int
) -> None:
    size = 6
    target, draft = logits_of(1, size, SAMPLINGS[p]), logits_of(2, size, Sampling(temperature=1.0))
    counts: Counter[Path] = Counter()
    for sample in range(samples):
        tokens: list[int] = []
        key = session_key(3, sample, [0])
        draws = Draws(key)
        while len(tokens) < 2:
            draws.begin(1 + len(tokens))
            tree, drawn = drawn_tree(
                draws, SHAPES[shape], lambda path, said=tuple(tokens): draft((*said, *path))
            )
            drawn.check(tree, size)
            paths = [
                (),
                *(tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))),
            ]
            accepted, bonus, margins = rejection_walk(
                tree,
                drawn,
                lambda row, said=tuple(tokens), paths=paths: target((*said, *paths[row])),
                Choices(key, 1 + len(tokens)),
            )
            assert tree.is_path(accepted)
            assert len(margins) == len(accepted) + 1
            assert min(margins) >= 0.0
            tokens += [*(tree.tokens[node] for node in accepted), bonus]
        counts[tuple(tokens[:2])] += 1
    distribution = {
        (a, b): float(target(()).double().softmax(0)[a] * target((a,)).double().softmax(0)[b])
        for a in range(size)
        for b in range(size)
    }
    assert (
        p_value(counts, {cell: share for cell, share in distribution.items() if share > 0.0}) > 1e-4
    )


@pytest.mark.parametrize("width", everyday([3, 5], 3))
def test_children_are_drawn_without_replacement_in_the_order_of_drawing(width: int) -> None:
    logits = torch.tensor([[1.0, 0.0, 2.0, -torch.inf, -1.0]])
    distribution = logits[0].double().softmax(0).numpy()
    counts: Counter[Path] = Counter()
    draws = Draws(KEY)
    for length in range(2000):
        draws.begin(length)
        tokens, gains = draws.children(np.array([ROOT]), logits, width)
        assert np.isfinite(gains[0, :4]).all()
        assert not np.isfinite(gains[0, 4:]).any()
        np.testing.assert_allclose(gains[0, :4], np.log(distribution[tokens[0, :4]]), rtol=1e-5)
        counts[tuple(tokens[0, :4].tolist())] += 1
    assert p_value(counts, dict(orders(distribution, min(width, 4)))) > 1e-4


def test_a_round_has_fresh_numbers_and_every_purpose_its_own() -> None:
    keys = {
        stream(KEY, purpose, length)
        for purpose in ("draws", "tests", "tokens")
        for length in range(50)
    }
    assert len(keys) == 150
    assert KEY not in keys
    draws, logits = Draws(KEY), torch.zeros(2, 500)
    parents = np.array([4, 5])
    rounds = []
    for length in (7, 8, 7):
        draws.begin(length)
        rounds.append(draws.children(parents, logits, 10)[0])
    np.testing.assert_array_equal(rounds[0], rounds[2])
    assert (rounds[0] != rounds[1]).any()
    assert (rounds[0][0] != rounds[0][1]).any()
    tests = {Choices(KEY, length).test(node) for length in range(10) for node in range(10)}
    assert len(tests) == 100
    assert all(0.0 < test < 1.0 for test in tests)


def test_the_noise_of_single_tokens_is_the_definition() -> None:
    tokens = torch.tensor([[3, 0], [70000, 12]])
    noise = gumbel_noise_of(KEY, [5, 0], tokens)
    for row, position in enumerate((5, 0)):
        for column in range(2):
            assert float(noise[row, column]) == pytest.approx(
                gumbel(KEY, position, int(tokens[row, column])), rel=1e-6
            )


@pytest.mark.parametrize("children", [1, 2, 4])
def test_a_child_is_accepted_as_often_as_theory_says(children: int) -> None:
    """One child: 1 less the distance of the distributions by rejection, at least a half of that
    odds coupled (Daliri et al.); more children: coupled is ahead."""
    generator = torch.Generator().manual_seed(children)
    target = 2.0 * torch.randn(400, 30, generator=generator)
    draft = target + 0.8 * torch.randn(400, 30, generator=generator)
    overlap = torch.minimum(target.softmax(-1), draft.softmax(-1)).sum(-1).double()
    by_rule = {
        "coupled": float(nodes.coupled(target, draft, children, KEY).mean()),
        "rejected": float(nodes.rejected(target, draft, children, KEY).mean()),
        "matched": float(nodes.matched(target, draft, children).mean()),
    }
    if children == 1:
        assert by_rule["rejected"] == pytest.approx(float(overlap.mean()), abs=0.03)
        assert by_rule["coupled"] > float((overlap / (2.0 - overlap)).mean()) - 0.05
    else:
        assert by_rule["coupled"] > by_rule["rejected"] > by_rule["matched"]


# -- what travels ----------------------------------------------------------------------------------


def offered(size: int = 6) -> tuple[TokenTree, ProposalProbabilities]:
    draws = Draws(KEY)
    draws.begin(9)
    return drawn_tree(draws, SHAPES["uneven"], logits_of(5, size, Sampling(temperature=1.0)))


def test_the_laws_of_a_tree_name_its_children_and_nothing_below_its_leaves() -> None:
    tree, drawn = offered()
    assert drawn.candidates.shape == drawn.probabilities.shape == (len(tree) + 1, CANDIDATES)
    assert drawn.check(tree, 6) is drawn
    for node in range(ROOT, len(tree)):
        candidates, probabilities = drawn.distribution(node)
        assert (len(candidates) == 6) == (node in tree.children)
        assert probabilities.sum() == pytest.approx(float(node in tree.children), abs=1e-12)


def test_of_a_large_vocabulary_the_likeliest_candidates_travel() -> None:
    draws, logits = Draws(KEY), torch.randn(1, 500, generator=torch.Generator().manual_seed(1))
    draws.begin(1)
    tokens, _ = draws.children(np.array([ROOT]), logits, 5)
    candidates, probabilities = draws.distributions(np.zeros(0, np.intp)).distribution(ROOT)
    assert candidates.tolist() == logits[0].topk(CANDIDATES).indices.tolist()
    np.testing.assert_allclose(
        probabilities, logits[0].topk(CANDIDATES).values.double().softmax(0).numpy(), rtol=1e-6
    )
    assert set(tokens[0].tolist()) <= set(candidates.tolist())


def spoilt(
    place: tuple[int, int], *, token: int | None = None, probability: float | None = None
) -> ProposalProbabilities:
    _, drawn = offered()
    candidates, probabilities = drawn.candidates.clone(), drawn.probabilities.clone()
    if token is not None:
        candidates[place] = token
    if probability is not None:
        probabilities[place] = probability
    return ProposalProbabilities(candidates, probabilities)


@pytest.mark.parametrize(
    ("drawn", "complaint"),
    [
        (ProposalProbabilities.nothing(), "do not fit a tree of 5 nodes"),
        (spoilt((0, 0), probability=-0.1), "numbers that are not probabilities"),
        (spoilt((0, 0), probability=float("nan")), "numbers that are not probabilities"),
        (spoilt((0, 0), token=6), "beyond the vocabulary of 6"),
        (spoilt((0, 1), token=int(offered()[1].candidates[0, 0])), "a candidate twice|cannot draw"),
        (
            ProposalProbabilities(torch.zeros(6, 4, dtype=torch.int32), torch.zeros(6, 4)),
            "that its distribution cannot draw",
        ),
    ],
)
def test_distributions_that_do_not_fit_their_tree_are_refused(
    drawn: ProposalProbabilities, complaint: str
) -> None:
    with pytest.raises(TreeError, match=complaint):
        drawn.check(offered()[0], 6)
