"""Sessions of a target and a draft whose layers have states: the tokens of transformers, in rounds
of trees that grow over several passes, and where a session goes on from what another has left."""

from pathlib import Path

import pytest
import torch

from dovetail.protocol.settings import DraftSettings, Sampling, TargetSettings, TreeSettings
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.serving.open_target import open_target_worker
from support.architectures import VOCABULARY, write_tiny
from support.cases import everyday
from support.kernels import needs_kernels
from support.models import reference_tokens
from support.pairs import KEY, PairOfWorkers, Run

pytestmark = needs_kernels

TREE = TreeSettings(policy="dynamic", insist=True, gamma=12, depth=4, width=4)
SIZES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent") / "model"
    write_tiny("qwen3_5_text", folder, **SIZES)
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> PairOfWorkers:
    """The model drafts for itself in other bits, so that much is accepted and not all."""
    return PairOfWorkers(
        open_target_worker(TargetSettings(model=str(folder)), name="target", threads=1),
        open_draft_worker(
            DraftSettings(model=str(folder), weights="int8"),
            name="draft",
            threads=1,
            target=str(folder),
        ),
    )


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


def rounds(pair: PairOfWorkers, run: Run, tokens: int) -> None:
    while len(run.reply) < tokens:
        pair.round(run)


def check(run: Run, folder: Path) -> None:
    expected = reference_tokens(
        folder, run.log[: run.prompt], len(run.reply), key=KEY, sampling=run.sampling
    )
    assert run.reply == expected


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], 1.0))
def test_rounds_give_the_tokens_of_transformers(
    pair: PairOfWorkers, folder: Path, temperature: float, ahead: bool
) -> None:
    sampling = Sampling(temperature=temperature)
    runs = [
        pair.open(number, prompt(length), tokens=60, sampling=sampling, tree=TREE, ahead=ahead)
        for number, length in ((1, 5), (2, 40))
    ]
    for run in runs:
        rounds(pair, run, 24)
    for run in runs:
        check(run, folder)
        assert run.tau > 1.0
        pair.close(run, keep=False)


def test_the_next_turn_of_a_conversation_gives_the_tokens_of_transformers(
    pair: PairOfWorkers, folder: Path
) -> None:
    """It parts from the last one within the reply, within the prompt, or not at all."""
    number = 10
    for kept in (3, 50, 58, 70):
        sampling = Sampling(temperature=1.0)
        first = pair.open(number, prompt(60), tokens=60, sampling=sampling, tree=TREE)
        rounds(pair, first, 16)
        pair.close(first, keep=True)
        again = [*first.log[:kept], *prompt(9)]
        second = pair.open(
            number + 1, again, tokens=60, sampling=sampling, tree=TREE, base=number, kept=kept
        )
        rounds(pair, second, 12)
        check(second, folder)
        pair.close(second, keep=False)
        number += 2
