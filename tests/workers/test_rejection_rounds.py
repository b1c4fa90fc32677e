"""Rounds of a real drafter and a real verifier that accept by rejection: every token has the
target's distribution given those before it."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import kstest

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.ngram import Lookup
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.sessions.wire import to_tensor
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.verifier import Verifier
from support.models import VOCABULARY, reference_law, reference_logits, reference_processed
from support.opening import opening

PROMPT = [3, 1, 4, 1, 5]
SHAPE = Shape(12, 3, 4)
TREE = TreeSettings(policy="static", gamma=12, depth=3, width=4)
SAMPLED = Sampling(temperature=0.9, top_p=0.97, acceptance="rejection")
PENALISED = SAMPLED.model_copy(
    update={"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 4}
)
END = (1, 30)


@pytest.fixture(scope="module")
def relative(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> LanguageModel:
    """The target with its weights a little off."""
    folder = tmp_path_factory.mktemp("relative") / "model"
    shutil.copytree(llama_folder, folder)
    generator = torch.Generator().manual_seed(4)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {
            name: weight + 0.05 * torch.randn(weight.shape, generator=generator)
            for name, weight in weights.items()
        },
        folder / "model.safetensors",
    )
    return load_language_model(str(folder), weights="fp32", device="cpu")


def drawn_of(proposal: Proposal) -> ProposalProbabilities | None:
    if proposal.candidates is None or proposal.probabilities is None:
        return None
    return ProposalProbabilities(to_tensor(proposal.candidates), to_tensor(proposal.probabilities))


def decode(
    target: LanguageModel, draft: LanguageModel, key: bytes, tokens: int, sampling: Sampling
) -> tuple[list[int], int]:
    """Return at least so many tokens of a reply, and how many of them had been drafted."""
    verifier, drafter = Verifier(target, Spans()), Drafter(draft, Spans())
    (first,) = verifier.open(
        opening(1, PROMPT, key=key, capacity=80, sampling=sampling, tree=TREE, end=END)
    )
    session = drafter.open(
        opening(
            1,
            PROMPT,
            capacity=80,
            vocabulary_size=VOCABULARY,
            key=key,
            sampling=sampling,
            tree=TREE,
            end=END,
        )
    )
    assert isinstance(first, First)
    reply, accepted, drafted, round_ = [first.token], (), 0, 0
    while len(reply) < tokens:
        round_ += 1
        proposal = drafter.draft(session, accepted, reply[-1], SHAPE)
        tree, drawn = proposal.tree, drawn_of(proposal)
        item = VerifyItem(
            session=1,
            round=round_,
            prefix=len(PROMPT) + len(reply),
            tokens=tree.tokens,
            parents=tree.parents,
        )
        verifier.check(item, drawn)
        (verdict,) = verifier.verify([item], {} if drawn is None else {1: drawn})
        assert isinstance(verdict, Verdict)
        accepted = verdict.item.accepted
        drafted += len(accepted)
        reply += [*(tree.tokens[node] for node in accepted), verdict.item.bonus]
    return reply, drafted


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_every_token_of_many_replies_has_the_law_of_the_target_given_those_before_it(
    llama: LanguageModel, llama_folder: Path, relative: LanguageModel, sampling: Sampling
) -> None:
    """The place of each token in its own distribution is uniform and independent of the others
    (Rosenblatt, 1952), whatever the distributions are."""
    random, places, drafted = np.random.default_rng(1), [], 0
    for sample in range(80):
        reply, accepted = decode(llama, relative, session_key(5, sample, PROMPT), 12, sampling)
        drafted += accepted
        rows = reference_logits(llama_folder, PROMPT + reply)[len(PROMPT) - 1 :]
        for said, token in enumerate(reply):
            distribution = np.array(
                reference_law(
                    reference_processed(rows[said].tolist(), sampling, PROMPT, reply[:said], END),
                    sampling,
                )
            )
            assert distribution[token] > 0.0
            places.append(distribution[:token].sum() + random.random() * distribution[token])
    assert drafted > 0.3 * len(places)
    assert kstest(places, "uniform").pvalue > 1e-3
    assert kstest(np.abs(np.diff(places)), lambda x: 2 * x - x**2).pvalue > 1e-3


def test_what_is_drawn_is_of_the_shape_whatever_the_scores(relative: LanguageModel) -> None:
    drafter = Drafter(relative, Spans())
    session = drafter.open(
        opening(
            1,
            PROMPT,
            capacity=80,
            vocabulary_size=VOCABULARY,
            key=bytes(16),
            sampling=SAMPLED,
            tree=TREE,
            end=END,
        )
    )
    shapes = set()
    for bonus in (2, 3, 9):
        proposal = drafter.draft(session, (), bonus, SHAPE)
        assert not proposal.hit
        drawn = drawn_of(proposal)
        assert drawn is not None
        drawn.check(proposal.tree, VOCABULARY)
        shapes.add(proposal.tree.parents)
    assert len(shapes) == 1
    assert len(shapes.pop()) == 12


def test_at_temperature_0_it_is_the_greedy_rule_and_nothing_is_drawn(
    llama: LanguageModel, relative: LanguageModel
) -> None:
    greedy = Sampling(acceptance="rejection")
    drafter = Drafter(relative, Spans())
    session = drafter.open(
        opening(
            1,
            PROMPT,
            capacity=80,
            vocabulary_size=VOCABULARY,
            key=bytes(16),
            sampling=greedy,
            tree=TREE,
            end=END,
        )
    )
    assert drawn_of(drafter.draft(session, (), 2, SHAPE)) is None
    reply, drafted = decode(llama, relative, bytes(16), 20, greedy)
    assert drafted
    assert reply[:20] == decode(llama, llama, bytes(range(16)), 20, Sampling())[0][:20]


def test_a_tree_without_the_laws_that_it_was_drawn_from_is_refused(llama: LanguageModel) -> None:
    verifier = Verifier(llama, Spans())
    (first,) = verifier.open(
        opening(1, PROMPT, key=bytes(16), capacity=80, sampling=SAMPLED, tree=TREE)
    )
    assert isinstance(first, First)
    item = VerifyItem(session=1, round=1, prefix=len(PROMPT) + 1, tokens=(5,), parents=(-1,))
    with pytest.raises(RequestError, match="do not fit a tree of 1 nodes"):
        verifier.check(item)
    verifier.check(item.model_copy(update={"tokens": (), "parents": ()}))
    (verdict,) = verifier.verify([item.model_copy(update={"tokens": (), "parents": ()})])
    assert isinstance(verdict, Verdict)
    assert verdict.item.accepted == ()


def test_a_lookup_refuses_what_it_cannot_do() -> None:
    known = {"capacity": 80, "vocabulary_size": VOCABULARY, "key": bytes(16)}
    with pytest.raises(RequestError, match="needs a draft that draws from probabilities"):
        Lookup().open(opening(1, PROMPT, sampling=SAMPLED, tree=TREE, **known))
    beam = TREE.model_copy(update={"policy": "beam"})
    with pytest.raises(
        RequestError,
        match=r"grows its tree best first: set tree\.policy to 'dynamic' or 'budget' or "
        r"'goodput', not 'beam'",
    ):
        Lookup().open(opening(1, PROMPT, sampling=Sampling(), tree=beam, **known))
    budget = TREE.model_copy(update={"policy": "budget"})
    session = Lookup().open(opening(1, [1, 2, 3, 1, 2], sampling=Sampling(), tree=budget, **known))
    assert Lookup().draft(session, (), 3, SHAPE).tree != TokenTree()
