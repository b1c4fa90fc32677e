"""The processors that look back, over tensors and in plain numbers, against transformers' own and
OpenAI's definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from dovetail.protocol.settings import Sampling
from dovetail.workers.speculation.history import History
from dovetail.workers.speculation.sampling import LookingBack

VOCABULARY = 50
PROMPT = [3, 3, 17, 9]
REPLY = [9, 20, 9, 21, 3]
END = (1, 40)
EVERYTHING = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.6,
    frequency_penalty=-0.35,
    logit_bias=((3, 2.5), (20, -100.0), (33, 7.25)),
    min_tokens=9,
)


def rows(count: int = 4) -> torch.Tensor:
    """Logits of both signs."""
    return 3.0 * torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(count))


def looking_back(sampling: Sampling, reply: list[int] = REPLY) -> LookingBack:
    back = LookingBack(sampling, PROMPT, END, VOCABULARY)
    for token in reply:
        back.extend([token])
    return back


def processed(sampling: Sampling, logits: torch.Tensor, reply: list[int] = REPLY) -> torch.Tensor:
    return looking_back(sampling, reply).process(logits, [()] * len(logits))


def log(logits: torch.Tensor) -> torch.Tensor:
    """Prompt and reply as transformers' processors take them."""
    return torch.tensor([[*PROMPT, *REPLY]] * len(logits))


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 3.0])
def test_repetition_is_that_of_transformers_over_prompt_and_reply(penalty: float) -> None:
    logits = rows()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(log(logits), logits.clone())
    assert torch.equal(processed(Sampling(repetition_penalty=penalty), logits), expected)


@pytest.mark.parametrize("least", [0, len(REPLY), len(REPLY) + 1, 100])
def test_the_least_number_of_tokens_is_that_of_transformers(least: int) -> None:
    logits = rows()
    expected = MinNewTokensLengthLogitsProcessor(len(PROMPT), least, list(END), device="cpu")(
        log(logits), logits.clone()
    )
    assert torch.equal(processed(Sampling(min_tokens=least), logits), expected)


def test_a_bias_is_that_of_transformers() -> None:
    logits, biases = rows(), ((0, -100.0), (9, 0.3), (49, 100.0))
    expected = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases})(
        log(logits), logits.clone()
    )
    assert torch.equal(processed(Sampling(logit_bias=biases), logits), expected)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(0.5, 0.0), (0.0, 0.75), (-2.0, 2.0), (1.1, -0.3)]
)
def test_presence_and_frequency_are_as_openai_defines_them_over_the_reply_alone(
    presence: float, frequency: float
) -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence"""
    logits = rows()
    counts = torch.bincount(torch.tensor(REPLY), minlength=VOCABULARY).double()
    expected = logits.double() - counts * frequency - (counts > 0).double() * presence
    torch.testing.assert_close(
        processed(
            Sampling(presence_penalty=presence, frequency_penalty=frequency), logits
        ).double(),
        expected,
        rtol=0,
        atol=1e-6,
    )


def test_they_follow_one_another_in_the_promised_order() -> None:
    """The least number of tokens after everything: neither a bias nor a negative penalty brings an
    end back."""
    logits, counts = rows(), torch.bincount(torch.tensor(REPLY), minlength=VOCABULARY).float()
    chain = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(t,): b for t, b in EVERYTHING.logit_bias}),
            RepetitionPenaltyLogitsProcessor(EVERYTHING.repetition_penalty),
        ]
    )
    expected = (
        chain(log(logits), logits.clone())
        - counts * EVERYTHING.frequency_penalty
        - (counts > 0) * EVERYTHING.presence_penalty
    )
    expected[:, list(END)] = -math.inf
    torch.testing.assert_close(processed(EVERYTHING, logits), expected, rtol=1e-6, atol=1e-6)


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=6)


@settings(max_examples=100, deadline=None)
@given(reply=TOKENS, paths=st.lists(TOKENS, min_size=1, max_size=4))
def test_a_token_on_a_path_has_the_bytes_that_it_has_in_the_log(
    reply: list[int], paths: list[list[int]]
) -> None:
    logits = rows(len(paths))
    found = looking_back(EVERYTHING, reply).process(logits, paths)
    for row, path in enumerate(paths):
        assert torch.equal(
            found[row : row + 1], processed(EVERYTHING, logits[row : row + 1], [*reply, *path])
        )


@settings(max_examples=50, deadline=None)
@given(reply=TOKENS, path=TOKENS)
def test_plain_numbers_and_tensors_agree(reply: list[int], path: list[int]) -> None:
    logits, history = rows(1), History(EVERYTHING, PROMPT, END)
    history.extend(reply)
    expected = [history.process(token, float(logit), path) for token, logit in enumerate(logits[0])]
    torch.testing.assert_close(
        looking_back(EVERYTHING, reply).process(logits, [path])[0],
        torch.tensor(expected),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(min_tokens=9),
        Sampling(logit_bias=((3, 1.0),)),
        Sampling(presence_penalty=0.0, min_tokens=1),
    ],
)
def test_logits_that_are_handed_in_stay_as_they_are(sampling: Sampling) -> None:
    logits = rows()
    looking_back(sampling).process(logits, [(7,)] * len(logits))
    assert torch.equal(logits, rows())


def test_what_lies_beyond_a_smaller_vocabulary_is_left_out() -> None:
    """A draft may have fewer logits than its target."""
    back = LookingBack(EVERYTHING, PROMPT, (1, 90), VOCABULARY - 10)
    assert back.process(rows()[:, :-10], [()] * 4).shape == (4, VOCABULARY - 10)


@pytest.mark.parametrize(
    ("sampling", "looks"),
    [
        (Sampling(), False),
        (Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1), False),
        (Sampling(repetition_penalty=1.1), True),
        (Sampling(presence_penalty=-0.1), True),
        (Sampling(frequency_penalty=0.1), True),
        (Sampling(logit_bias=((0, 0.0),)), True),
        (Sampling(min_tokens=1), True),
    ],
)
def test_a_sampling_knows_whether_it_looks_back(sampling: Sampling, looks: bool) -> None:
    assert sampling.looks_back is looks
