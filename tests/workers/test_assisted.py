"""transformers' assisted generation as a peer: it is left as it comes, and at temperature 0 it says
what the target alone says."""

from pathlib import Path

import pytest
import torch

from dovetail.protocol.messages import VocabularyFacts
from dovetail.protocol.settings import Sampling
from peers.generated import Generated
from peers.model import AssistedModel, generation_config
from support.models import reference_tokens

PROMPT = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
END = VocabularyFacts(digest="", size=8, end=(2, 3))


@pytest.fixture(scope="module")
def assisted(llama_folder: Path) -> AssistedModel:
    return AssistedModel(str(llama_folder), str(llama_folder), weights="fp32")


def generate(model: AssistedModel, temperature: float = 0.0, seed: int = 1) -> Generated:
    return model.generate(
        PROMPT, sampling=Sampling(temperature=temperature), max_tokens=16, seed=seed, threads=1
    )


def test_at_temperature_0_it_says_what_the_target_alone_says(
    llama_folder: Path, assisted: AssistedModel
) -> None:
    tokens = list(generate(assisted).tokens)
    assert tokens == reference_tokens(
        llama_folder, PROMPT, len(tokens), key=bytes(16), sampling=Sampling()
    )


def test_every_round_tells_its_rows_and_what_it_committed(assisted: AssistedModel) -> None:
    reply = generate(assisted)
    assert sum(r.committed for r in reply.rounds) == len(reply.tokens)
    assert reply.rounds[0].rows >= len(PROMPT)
    assert all(r.committed <= r.rows for r in reply.rounds)
    times = [reply.began_ns, *(r.ended_ns for r in reply.rounds)]
    assert times == sorted(times)


def test_the_seed_decides_what_it_draws(assisted: AssistedModel) -> None:
    assert generate(assisted, 1.0, 7).tokens == generate(assisted, 1.0, 7).tokens
    assert generate(assisted, 1.0, 7).tokens != generate(assisted, 1.0, 8).tokens


def test_bf16_is_bf16_and_everything_else_fp32(llama_folder: Path) -> None:
    dtypes = [
        AssistedModel(str(llama_folder), str(llama_folder), weights=weights).dtype
        for weights in ("bf16", "half", "int8")
    ]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]


def test_a_checkpoint_s_own_sampling_has_no_say() -> None:
    sampled = generation_config(Sampling(temperature=0.7, top_p=0.9), 5, END)
    assert (
        sampled.do_sample,
        sampled.temperature,
        sampled.top_k,
        sampled.top_p,
        sampled.min_p,
    ) == (True, 0.7, 0, 0.9, None)
    greedily = generation_config(Sampling(), 5, END)
    assert (greedily.do_sample, greedily.max_new_tokens, greedily.eos_token_id) == (
        False,
        5,
        [2, 3],
    )
