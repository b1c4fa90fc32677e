"""The page of the algorithm: it says what the target alone says, and what the workers say that
serve users."""

from collections.abc import Sequence
from itertools import chain, islice

import pytest
import torch
from torch import Tensor

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.settings.tree import POLICIES
from dovetail.runtime.client import Client
from dovetail.runtime.text.tokenizer import TextCodec
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.speculation.decode import Model, speculative_decode
from support.cases import everyday
from support.losslessness import difference

TOKENS = 16
PENALISED = Sampling(
    temperature=1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.3, logit_bias=((5, 1.5),)
)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0), "penalised": PENALISED}
QUESTION = "Why is the sky blue?"


def by_whole_passes(model: LanguageModel) -> Model:
    """The slow obvious way: every path is read from its beginning."""

    def logits(log: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        return torch.cat([row(model, [*log, *path]) for path in paths])

    return logits


def row(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    segment = Segment(model.new_cache(len(tokens)), 0, len(tokens))
    return model.forward(
        torch.tensor(tokens),
        torch.arange(len(tokens)),
        [segment],
        rows=torch.tensor([len(tokens) - 1]),
    )


@pytest.fixture(scope="module")
def models() -> tuple[LanguageModel, LanguageModel]:
    target, draft = (
        load_language_model(str(DEMO_FOLDER / name), weights="fp32", device="cpu")
        for name in ("target", "draft")
    )
    return target, draft


def prompt_of(target: LanguageModel) -> list[int]:
    codec = TextCodec(target.checkpoint.tokenizer, target.checkpoint.vocabulary)
    return list(codec.encode_turns([QUESTION]))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_page_says_what_the_workers_say_and_its_draft_saves_passes(
    models: tuple[LanguageModel, LanguageModel], client: Client, sampling: Sampling
) -> None:
    target, draft = models
    tree, prompt = (
        TreeSettings(policy="dynamic", insist=True, gamma=6, depth=4, width=3),
        prompt_of(target),
    )
    served = client.complete(
        client.submit(
            tokens=prompt, sampling=sampling, max_tokens=TOKENS, seed=7, end=(), tree=tree
        )
    )
    decoded = speculative_decode(
        prompt,
        by_whole_passes(target),
        by_whole_passes(draft),
        tree=tree,
        sampling=sampling,
        key=session_key(7, 0, prompt),
        vocabulary_size=target.vocabulary_size,
    )
    rounds, said = 0, list[int]()
    while len(said) < TOKENS:
        rounds, said = rounds + 1, said + next(decoded)
    assert difference(served, said[:TOKENS]) is None
    assert rounds < 0.7 * TOKENS


@pytest.mark.parametrize(
    "policy",
    everyday((policy for policy in POLICIES if policy != "heterospec"), "dynamic", "goodput"),
)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_tree_of_no_draft_changes_a_token(policy: str, sampling: Sampling) -> None:
    target, like_it, other = table(0, 1.0), table(0, 0.7), table(1, 1.0)
    found = []
    for draft in (like_it, other):
        tree = TreeSettings(policy=policy, gamma=7, depth=3, width=3)
        decoded = speculative_decode(
            (1, 2), target, draft, tree=tree, sampling=sampling, key=bytes(16), vocabulary_size=11
        )
        found.append([*islice(chain.from_iterable(decoded), 40)])
    alone = speculative_decode(
        (1, 2),
        target,
        other,
        tree=TreeSettings(gamma=0),
        sampling=sampling,
        key=bytes(16),
        vocabulary_size=11,
    )
    assert found == [[*islice(chain.from_iterable(alone), 40)]] * 2


def table(seed: int, scale: float) -> Model:
    """A model that says something of its own after every two tokens."""

    def logits(log: Sequence[int], paths: Sequence[Sequence[int]]) -> Tensor:
        def after(tokens: Sequence[int]) -> Tensor:
            random = torch.Generator().manual_seed(1000 * seed + 11 * tokens[-2] + tokens[-1])
            return scale * 3.0 * torch.randn(11, generator=random)

        return torch.stack([after([*log, *path]) for path in paths])

    return logits
