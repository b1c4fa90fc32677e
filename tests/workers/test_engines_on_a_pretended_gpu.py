"""Whole engines of every draft kind on a pretended GPU: every session is drafted for in every
round, and the target's tokens are its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from dovetail.protocol.settings import (
    DraftSettings,
    Sampling,
    TargetSettings,
    TreeSettings,
)
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.serving.open_target import open_target_worker
from pretended.device import POSSIBLE, device
from support.block_heads import write_drafter
from support.cases import everyday
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import reference_tokens, tiny_llama
from support.pairs import KEY, PairOfWorkers, Run

needs_the_rig = pytest.mark.skipif(
    not POSSIBLE, reason="this version of torch cannot be told of a device from Python"
)
pytestmark = [needs_the_rig, needs_kernels]

PROMPT = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TREE = TreeSettings(policy="dynamic", gamma=10, depth=4, width=4)
ADAPTIVE = TreeSettings(
    policy="heterospec", gamma=10, depth=4, width=4, thresholds=(0.5, 1.25), prune=(0.3, 0.6)
)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)
PROCESSED = Sampling(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    logit_bias=((3, 1.0),),
    min_tokens=4,
)
DRAWN = Sampling(temperature=1.0, acceptance="rejection")
TOKENS = 14


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target"), intermediate_size=128, context=256)


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 16 bits, which streams."""
    return tiny_llama(
        tmp_path_factory.mktemp("half"), intermediate_size=128, context=256, dtype=torch.float16
    )


@dataclass(frozen=True)
class Kind:
    """A draft to open."""

    head: str = ""  # a variant of `support.heads`; empty: a model
    weights: str = "auto"
    contrast: bool = True

    def settings(self, folder: Path, where: str) -> DraftSettings:
        return DraftSettings(
            model=str(folder),
            weights=self.weights,
            device=where,
            contrast="auto" if self.contrast else False,
        )


KINDS = {
    "small": Kind(),
    "small-bf16": Kind(weights="bf16"),
    "small-fp32": Kind(weights="fp32"),
    "eagle": Kind("eagle"),
    "eagle-fp32": Kind("eagle", "fp32"),
    "eagle-int8": Kind("eagle", "int8"),
    "eagle3": Kind("eagle3"),
    "eagle3-bf16": Kind("eagle3", "bf16"),
    "dovetail": Kind("dovetail"),
    "dovetail-of-three": Kind("dovetail-3", "fp16"),
    "dovetail-int4": Kind("dovetail", "int4"),
    "jakiro": Kind("jakiro"),
    "jakiro-without-contrast": Kind("jakiro", contrast=False),
    "jakiro-int8": Kind("jakiro", "int8"),
    "jakiro-star": Kind("jakiro-star", "fp16"),
}


@pytest.fixture(scope="module")
def folder_of(
    tmp_path_factory: pytest.TempPathFactory, target_folder: Path
) -> Callable[[Kind], Path]:
    @cache
    def written(head: str, int4: bool) -> Path:
        sizes = {"hidden": 64, "intermediate": 128} if int4 else {}
        return write_head(
            tmp_path_factory.mktemp(head), head, gain=1.0, **sizes
        )  # states that grow would leave fp16

    return lambda kind: written(kind.head, kind.weights == "int4") if kind.head else target_folder


def open_pair(target: Path, settings: DraftSettings, **of_target: object) -> PairOfWorkers:
    wanted = TargetSettings(model=str(target), device="cpu", **of_target)  # type: ignore[arg-type]
    return PairOfWorkers(
        open_target_worker(wanted, name="target", threads=1),
        open_draft_worker(settings, name="draft", threads=1, target=str(target)),
    )


def check(run: Run, folder: Path, sampling: Sampling) -> None:
    """Every round had a full tree, and the target committed what it would have without."""
    for drafted in run.proposals:
        assert len(drafted.tokens) >= min(run.tree.most_nodes, 4)
        assert all(score <= 0.0 for score in drafted.scores)
    assert max(depth(drafted.parents) for drafted in run.proposals) >= 2
    if not sampling.rejects:
        assert run.reply == reference_tokens(
            folder, run.log[: run.prompt], len(run.reply), key=KEY, sampling=sampling
        )


def depth(parents: tuple[int, ...]) -> int:
    levels: list[int] = []
    for parent in parents:
        levels.append(1 if parent < 0 else 1 + levels[parent])
    return max(levels, default=0)


def rounds(pair: PairOfWorkers, *runs: Run, tokens: int = TOKENS) -> None:
    """Play rounds in turn until each has so many tokens."""
    while left := [run for run in runs if len(run.reply) + TREE.most_levels < tokens]:
        for run in left:
            pair.round(run)


@pytest.mark.parametrize("name", everyday(KINDS, "dovetail"))
def test_an_engine_there_drafts_in_every_round(
    name: str, target_folder: Path, folder_of: Callable[[Kind], Path]
) -> None:
    """Two sessions at a time, greedy and sampled, with growth ahead; then one that goes on from
    what is kept; then processors, and what is drawn."""
    kind = KINDS[name]
    pair = open_pair(target_folder, kind.settings(folder_of(kind), "pretended"))
    greedy = pair.open(1, PROMPT, tokens=TOKENS, sampling=GREEDY, tree=TREE, ahead=True)
    sampled = pair.open(2, PROMPT[::-1], tokens=TOKENS, sampling=SAMPLED, tree=TREE, ahead=True)
    rounds(pair, greedy, sampled)
    assert pair.grown_ahead > 0
    pair.close(greedy, keep=True)
    pair.close(sampled, keep=False)
    kept = len(PROMPT) + 4
    again = pair.open(
        3,
        [*greedy.log[: kept + 1], 7, 8, 9],
        tokens=TOKENS,
        sampling=GREEDY,
        tree=TREE,
        base=1,
        kept=kept,
    )
    rounds(pair, again)
    adaptive = pair.open(4, PROMPT, tokens=TOKENS, sampling=PROCESSED, tree=ADAPTIVE)
    drawn = pair.open(
        5,
        PROMPT,
        tokens=TOKENS,
        sampling=DRAWN,
        tree=TreeSettings(policy="beam", gamma=8, depth=4, width=2),
    )
    rounds(pair, drawn, adaptive)
    for run in (greedy, sampled, again, drawn):
        check(run, target_folder, run.sampling)
    assert adaptive.reply == reference_tokens(
        target_folder, PROMPT, len(adaptive.reply), key=KEY, sampling=PROCESSED
    )
    assert all(drafted.tokens for drafted in adaptive.proposals)


@pytest.mark.parametrize(
    "name", everyday(["dflash-mixed", "dspark-deepspec", "dflash2"], "dflash2")
)
def test_a_block_drafter_there_drafts_in_every_round(
    name: str, target_folder: Path, tmp_path: Path
) -> None:
    """Two sessions at a time, then one that goes on from what is kept."""
    folder = write_drafter(tmp_path, name)
    pair = open_pair(target_folder, DraftSettings(model=str(folder), device="pretended"))
    greedy = pair.open(1, PROMPT, tokens=TOKENS, sampling=GREEDY, tree=TREE)
    sampled = pair.open(2, PROMPT[::-1], tokens=TOKENS, sampling=PROCESSED, tree=TREE)
    rounds(pair, greedy, sampled)
    pair.close(greedy, keep=True)
    kept = len(PROMPT) + 4
    turn = [*greedy.log[: kept + 1], 7, 8, 9]
    again = pair.open(3, turn, tokens=TOKENS, sampling=GREEDY, tree=TREE, base=1, kept=kept)
    rounds(pair, again)
    for run in (greedy, sampled, again):
        check(run, target_folder, run.sampling)


PLACES = {
    "split": {"split": {"device": "pretended", "layers": 1}},
    "streamed": {"device": "pretended", "resident": 0},
    "read there": {"prefill": "pretended"},
    "whole": {"device": "pretended"},
}


@pytest.mark.parametrize("place", everyday(PLACES, "split", "read there"))
def test_a_target_there_is_drafted_for_from_there(
    place: str, sixteen: Path, target_folder: Path, folder_of: Callable[[Kind], Path]
) -> None:
    """A head reads what the target shows of layers on the device."""
    whole = place == "whole"
    folder, weights = (target_folder, "fp32") if whole else (sixteen, "half")
    pair = open_pair_there(
        folder,
        weights,
        PLACES[place],
        KINDS["eagle3"].settings(folder_of(KINDS["eagle3"]), "pretended"),
    )
    greedy = pair.open(1, PROMPT, tokens=TOKENS, sampling=GREEDY, tree=TREE)
    sampled = pair.open(2, PROMPT[::-1], tokens=TOKENS, sampling=PROCESSED, tree=TREE)
    drawn = pair.open(
        3,
        PROMPT,
        tokens=TOKENS,
        sampling=DRAWN,
        tree=TreeSettings(policy="beam", insist=True, gamma=8, depth=4, width=2),
    )
    rounds(pair, greedy, sampled, drawn, tokens=10)
    for run in (greedy, sampled, drawn):
        check(run, folder, run.sampling)


def open_pair_there(
    folder: Path, weights: str, place: dict[str, object], draft: DraftSettings
) -> PairOfWorkers:
    target = TargetSettings.model_validate(
        {"model": str(folder), "weights": weights, "device": "cpu", **place}
    )
    return PairOfWorkers(
        open_target_worker(target, name="target", threads=1),
        open_draft_worker(draft, name="draft", threads=1, target=str(folder)),
    )


@pytest.fixture
def place() -> torch.device:
    return device()


def test_what_cuda_refuses_is_refused_there(place: torch.device) -> None:
    """The refusals are those of the `device_check` of torch's native_functions.yaml, and of the
    checks of its indexing."""
    there, here = torch.arange(6.0, device=place), torch.arange(6.0)
    index = torch.tensor([1, 2])
    refused: list[Callable[[], object]] = [
        lambda: there.index_select(0, index),
        lambda: there.gather(0, index),
        lambda: there.index_select(0, torch.tensor(1)),
        lambda: torch.nn.functional.embedding(index, there.unsqueeze(1)),
        lambda: here[index.to(place)],
        lambda: there.index_put_((index,), here[:2]),
        lambda: there.scatter_(0, index, 1.0),
        lambda: torch.cat([there, torch.tensor([1.0])]),
        lambda: torch.stack([there[0], torch.tensor(1.0)]),
        lambda: there.add_(here),
        lambda: torch.rand(2, device=place, generator=torch.Generator()),
    ]
    for operation in refused:
        with pytest.raises(RuntimeError):
            operation()
    assert there[index].tolist() == [1.0, 2.0]
    assert (there + torch.tensor(1.0)).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    there[index] = torch.tensor(9.0)
    assert there.masked_fill(there > 8, torch.tensor(0.0)).tolist() == [
        0.0,
        0.0,
        0.0,
        3.0,
        4.0,
        5.0,
    ]
