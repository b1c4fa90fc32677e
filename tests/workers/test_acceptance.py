"""Whatever the tree, the emitted tokens have the target's law."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.speculation.acceptance import walk
from dovetail.workers.speculation.noise import gumbel_noise
from dovetail.workers.speculation.sampling import choose, process_logits
from support.cases import everyday

EMPTY = TokenTree()
FORK = TokenTree((5, 7, 6, 5, 8), (-1, -1, 0, 0, 2))
"""5 -> (6 -> 8, 5) and 7."""


@pytest.mark.parametrize(
    ("choices", "accepted", "bonus"),
    [
        ([9, 0, 0, 0, 0, 0], (), 9),
        ([7, 0, 3, 0, 0, 0], (1,), 3),
        ([5, 6, 0, 8, 0, 4], (0, 2, 4), 4),
        ([5, 5, 0, 0, 2, 0], (0, 3), 2),
        ([5, 8, 0, 0, 0, 0], (0,), 8),
    ],
)
def test_the_walk_follows_the_choices_down_and_ends_with_the_one_that_was_not_drafted(
    choices: list[int], accepted: tuple[int, ...], bonus: int
) -> None:
    assert walk(FORK, choices) == (accepted, bonus)


def test_without_a_tree_the_choice_after_the_root_is_the_bonus() -> None:
    assert walk(EMPTY, [3]) == ((), 3)


@given(st.data())
def test_the_accepted_nodes_are_a_path_whose_tokens_are_the_choices(data: st.DataObject) -> None:
    tree = data.draw(random_trees(vocabulary=3, most=8))
    choices = data.draw(st.lists(st.integers(0, 2), min_size=len(tree) + 1, max_size=len(tree) + 1))
    accepted, bonus = walk(tree, choices)
    assert tree.is_path(accepted)
    rows = [0, *(node + 1 for node in accepted)]
    assert [choices[row] for row in rows] == [*(tree.tokens[node] for node in accepted), bonus]
    assert bonus not in tree.children.get(accepted[-1] if accepted else ROOT, {})


@st.composite
def random_trees(draw: st.DrawFn, vocabulary: int, most: int) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        parent, token = draw(st.integers(-1, len(tokens) - 1)), draw(st.integers(0, vocabulary - 1))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return TokenTree(tuple(tokens), tuple(parents)).check(vocabulary)


Law = Callable[[tuple[int, ...]], list[Fraction]]


def random_law(vocabulary: int, seed: int) -> Law:
    """An exact conditional law of the next token for every history."""

    def law(history: tuple[int, ...]) -> list[Fraction]:
        weights = [random.Random(f"{seed}{history}{v}").randint(0, 9) for v in range(vocabulary)]
        weights[0] += 1
        return [Fraction(w, sum(weights)) for w in weights]

    return law


def emitted_law(
    tree: TokenTree, law: Law, vocabulary: int, length: int
) -> dict[tuple[int, ...], Fraction]:
    """The law of the first `length` tokens: one verification of the tree, then plain decoding, over
    every outcome of the choices after its rows."""
    paths = [()] + [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    total: dict[tuple[int, ...], Fraction] = Counter()  # type: ignore[assignment]
    for choices in itertools.product(range(vocabulary), repeat=len(paths)):
        probability = math.prod(
            (law(path)[choice] for path, choice in zip(paths, choices, strict=True)),
            start=Fraction(1),
        )
        if probability == 0:
            continue
        accepted, bonus = walk(tree, choices)
        emitted = (*(tree.tokens[node] for node in accepted), bonus)[:length]
        for rest in itertools.product(range(vocabulary), repeat=length - len(emitted)):
            tokens = emitted + rest
            total[tokens] += probability * math.prod(
                (law(tokens[:t])[tokens[t]] for t in range(len(emitted), length)), start=Fraction(1)
            )
    return {tokens: p for tokens, p in total.items() if p}


@pytest.mark.parametrize(
    "tree",
    [
        EMPTY,
        TokenTree((1,), (-1,)),
        TokenTree((0, 1, 2), (-1, -1, -1)),
        TokenTree((2, 0, 1), (-1, 0, 0)),
        TokenTree((0, 0, 0), (-1, 0, 1)),
        TokenTree((1, 2, 1, 2, 0), (-1, -1, 0, 1, 1)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_by_enumeration_the_emitted_tokens_have_exactly_the_law_of_the_target(
    tree: TokenTree, seed: int
) -> None:
    vocabulary, length = 3, 3
    law = random_law(vocabulary, seed)
    expected = {
        tokens: p
        for tokens in itertools.product(range(vocabulary), repeat=length)
        if (p := math.prod((law(tokens[:t])[tokens[t]] for t in range(length)), start=Fraction(1)))
    }
    assert emitted_law(tree, law, vocabulary, length) == expected


@pytest.mark.parametrize(
    "sampling",
    everyday(
        [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3, top_p=0.95)],
        Sampling(temperature=0.7, top_k=3, top_p=0.95),
    ),
)
def test_with_noise_of_many_keys_two_tokens_have_the_law_of_the_target(sampling: Sampling) -> None:
    """A table of logits stands for the target; the tree proposes what the noise itself makes
    likely, as a draft does."""
    vocabulary, samples = 4, 6000
    logits = 1.5 * torch.randn(
        vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(5)
    )
    processed = process_logits(logits, sampling)
    laws = processed.softmax(-1).double()
    counts: Counter[tuple[int, int]] = Counter()
    for sample in range(samples):
        key = session_key(1, sample, [2])
        noise = torch.stack([gumbel_noise(key, position, vocabulary) for position in (1, 2)])
        tree = TokenTree((int(noise[0].argmax()), (sample + 1) % vocabulary), (-1, 0))
        rows = torch.stack(
            [processed[vocabulary], processed[tree.tokens[0]], processed[tree.tokens[1]]]
        )
        choices = choose(rows, noise[[0, 1, 1]])[0].tolist()
        accepted, bonus = walk(tree, choices)
        first = tree.tokens[0] if accepted else bonus
        second = choices[1] if accepted else int(choose(processed[first][None], noise[1:])[0])
        counts[first, second] += 1
    cells = [
        (a, b)
        for a in range(vocabulary)
        for b in range(vocabulary)
        if laws[vocabulary, a] * laws[a, b] > 0
    ]
    assert set(counts) <= set(cells)
    expected = [float(laws[vocabulary, a] * laws[a, b]) * samples for a, b in cells]
    assert (
        chisquare(
            [counts[cell] for cell in cells], [e * samples / sum(expected) for e in expected]
        ).pvalue
        > 1e-4
    )
