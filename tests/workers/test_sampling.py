"""Processors and choice against transformers' own and against plain numbers."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dovetail.protocol.settings import Sampling
from dovetail.workers.speculation.sampling import choose, process_logits
from support.models import reference_law


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities after transformers' warpers in the order in which its generate applies
    them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers(torch.zeros(1, 1, dtype=torch.long), logits.clone()).softmax(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_processors_give_the_law_of_transformers(temperature: float) -> None:
    logits = 3.0 * torch.randn(20, 200, generator=torch.Generator().manual_seed(3))
    for top_k, top_p, min_p in itertools.product(
        (0, 1, 7, 1000), (0.1, 0.9, 1.0), (0.0, 0.05, 1.0)
    ):
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        found, expected = process_logits(logits, sampling).softmax(-1), warped(logits, sampling)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7), sampling


def test_a_nucleus_larger_than_the_first_guess_is_found_whole() -> None:
    """Nearly all of the vocabulary belongs to that of a flat law; one row of the batch has a narrow
    one."""
    logits = (
        0.5
        * torch.randn(
            3, 3000, generator=torch.Generator().manual_seed(4), dtype=torch.float64
        ).float()
    )
    logits[1, 7] = 60.0
    found = process_logits(logits, Sampling(temperature=1.0, top_p=0.9)).softmax(-1)
    for row in range(3):
        torch.testing.assert_close(
            found[row],
            torch.tensor(reference_law(logits[row].tolist(), Sampling(temperature=1.0, top_p=0.9))),
            rtol=1e-4,
            atol=1e-9,
        )
        assert torch.equal(
            found[row],
            process_logits(logits[row : row + 1], Sampling(temperature=1.0, top_p=0.9)).softmax(-1)[
                0
            ],
        )


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(
        st.sampled_from([-50.0, -1.0, 0.0, 0.0, 1.0, 2.0, 50.0]), min_size=1, max_size=9
    ),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 10),
    top_p=st.sampled_from([0.05, 0.33, 0.77, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_ties_are_settled_as_in_plain_numbers(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """In top-p the lowest ids come first; at the edge of top-k all equals stay."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = process_logits(torch.tensor([logits]), sampling).softmax(-1)[0]
    torch.testing.assert_close(
        found, torch.tensor(reference_law(logits, sampling)), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 100.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_extreme_values_still_leave_a_law(temperature: float, scale: float) -> None:
    processed = process_logits(
        torch.tensor([[1.0, 3.0, 2.0]]) * scale,
        Sampling(temperature=temperature, top_p=0.9, min_p=0.1),
    )
    assert torch.isfinite(processed.softmax(-1)).all()
    assert processed.argmax() == 1


def test_at_temperature_zero_nothing_is_processed() -> None:
    logits = torch.randn(2, 9)
    assert process_logits(logits, Sampling(temperature=0.0, top_k=2, top_p=0.5)) is logits


def test_the_lowest_id_wins_a_tie_and_the_margin_is_zero() -> None:
    ids, margins = choose(torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 1.0, 0.5, 2.0]]))
    assert ids.tolist() == [1, 0]
    assert margins.tolist() == [0.0, 0.0]


def test_noise_is_added_before_the_choice() -> None:
    ids, margins = choose(torch.tensor([[1.0, 0.0, -math.inf]]), torch.tensor([[0.0, 3.0, 9.0]]))
    assert ids.tolist() == [1]
    assert margins.tolist() == [2.0]


@pytest.mark.parametrize("logits", [[[0.0, -math.inf]], [[4.0]]])
def test_the_margin_of_an_only_token_is_large_and_finite(logits: list[list[float]]) -> None:
    ids, margins = choose(torch.tensor(logits))
    assert ids.tolist() == [0]
    assert 1e30 < float(margins[0]) < math.inf
