"""Log-probabilities of prompt and reply are those of transformers' own forward, and no byte of them
depends on what was computed beside them."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import MAX_SCORED, Reads, TokenLogprobs, VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.sessions import opener as module
from dovetail.workers.sessions.features import PREFILL_ROWS
from dovetail.workers.sessions.logprobs import token_logprobs
from dovetail.workers.sessions.results import First, Part, ScoredPart, Verdict
from dovetail.workers.sessions.wire import to_tensor
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.speculation.rejection import ProposalProbabilities
from dovetail.workers.verifier import Verifier
from support.kernels import needs_kernels
from support.models import VOCABULARY, reference_logprobs
from support.opening import opening

PROMPT = (0, 3, 17, 9, 30, 3, 8)
TREE = TreeSettings(policy="static", gamma=12, depth=3, width=4)
SAMPLINGS = {
    "greedy": Sampling(),
    "warm": Sampling(temperature=1.3),
    "all": Sampling(
        temperature=1.1,
        top_k=20,
        top_p=0.9,
        repetition_penalty=1.5,
        logit_bias=((3, 5.0), (9, -5.0)),
    ),
    "rejection": Sampling(temperature=0.9, acceptance="rejection"),
}
TOP = 4


def check(found: Sequence[TokenLogprobs], folder: Path, log: Sequence[int], first: int) -> None:
    """Those of positions first, first + 1, ... of a log."""
    for position, said in enumerate(found, start=first):
        distribution = reference_logprobs(folder, log[: position + 1])[-1]
        assert said.logprob == pytest.approx(distribution[log[position]], abs=2e-3)
        best = sorted(
            range(VOCABULARY), key=lambda token, distribution=distribution: -distribution[token]
        )[: len(said.top)]
        assert [token for token, _ in said.top] == best
        assert [logprob for _, logprob in said.top] == pytest.approx(
            [distribution[token] for token in best], abs=2e-3
        )


def open_session(
    verifier: Verifier,
    number: int,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    scored: bool = False,
    top: int | None = TOP,
) -> list[object]:
    return [
        *verifier.open(
            opening(
                number,
                prompt,
                key=session_key(3, 0, prompt),
                capacity=90,
                sampling=sampling,
                tree=TREE,
                end=(1,),
                logprobs=top,
                scored=scored,
            )
        )
    ]


def first_of(steps: Sequence[object]) -> tuple[int, TokenLogprobs]:
    first = steps[-1]
    assert isinstance(first, First)
    assert first.logprobs is not None
    return first.token, first.logprobs


def decode(
    model: LanguageModel,
    prompts: Mapping[int, Sequence[int]],
    sampling: Sampling,
    tokens: int,
    *,
    drafts: bool,
) -> dict[int, tuple[list[int], list[TokenLogprobs]]]:
    """Return for each session, all verified together, its log and what was said of the tokens of
    its reply, `tokens` at least."""
    verifier, drafter = Verifier(model, Spans()), Drafter(model, Spans())
    logs, said, sessions = {}, {}, {}
    accepted: dict[int, tuple[int, ...]] = dict.fromkeys(prompts, ())
    for number, prompt in prompts.items():
        token, logprobs = first_of(open_session(verifier, number, prompt, sampling))
        logs[number], said[number] = [*prompt, token], [logprobs]
        key = session_key(3, 0, prompt)
        sessions[number] = drafter.open(
            opening(
                1,
                prompt,
                capacity=90,
                vocabulary_size=VOCABULARY,
                key=key,
                sampling=sampling,
                tree=TREE,
                end=(1,),
            )
        )
    round_ = 0
    while any(len(found) < tokens for found in said.values()):
        round_ += 1
        items, drawn = [], {}
        for number, log in logs.items():
            tree = TokenTree()
            if drafts:
                proposal = drafter.draft(
                    sessions[number], accepted[number], log[-1], Shape(12, 3, 4)
                )
                tree = proposal.tree
                if proposal.candidates is not None and proposal.probabilities is not None:
                    drawn[number] = ProposalProbabilities(
                        to_tensor(proposal.candidates), to_tensor(proposal.probabilities)
                    )
            items.append(
                VerifyItem(
                    session=number,
                    round=round_,
                    prefix=len(log),
                    tokens=tree.tokens,
                    parents=tree.parents,
                )
            )
        for item, verdict in zip(items, verifier.verify(items, drawn), strict=True):
            assert isinstance(verdict, Verdict)
            accepted[item.session] = verdict.item.accepted
            logs[item.session] += [
                *(item.tokens[node] for node in verdict.item.accepted),
                verdict.item.bonus,
            ]
            assert len(verdict.item.logprobs) == len(verdict.item.accepted) + 1
            said[item.session] += verdict.item.logprobs
    return {number: (logs[number], said[number]) for number in prompts}


def scored(
    model: LanguageModel, prompt: Sequence[int], *, top: int | None = TOP
) -> list[TokenLogprobs]:
    """Return what is said of a whole prompt, position by position from the second on."""
    found: list[TokenLogprobs] = []
    for step in open_session(Verifier(model, Spans()), 1, prompt, Sampling(), scored=True, top=top):
        if isinstance(step, ScoredPart):
            assert step.start == 1 + len(found)
            found += step.logprobs
    return found


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=9), st.integers(0, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_the_likeliest_come_first_and_of_equals_the_lowest(
    logits: list[int], top: int, data: st.DataObject
) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    (said,) = token_logprobs(torch.tensor([logits], dtype=torch.float32), [token], top)
    distribution = torch.tensor(logits, dtype=torch.float64).log_softmax(-1).tolist()
    assert [other for other, _ in said.top] == sorted(
        range(len(logits)), key=lambda v: (-logits[v], v)
    )[:top]
    assert [said.logprob, *(logprob for _, logprob in said.top)] == pytest.approx(
        [distribution[token], *(distribution[other] for other, _ in said.top)],
        abs=1e-6,  # the sum of a row is rounded to float32
    )


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=needs_kernels), False])
def test_a_large_vocabulary_is_gone_over_in_float32_with_and_without_kernels(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dovetail.workers.sessions.logprobs.ranks", lambda _: kernels)
    logits = torch.randn(3, 200_001, generator=torch.Generator().manual_seed(5)) * 4
    distribution = logits.double().log_softmax(-1)
    tokens, best = [7, 199_999, int(logits[2].argmax())], distribution.topk(5)
    for row, said in enumerate(token_logprobs(logits, tokens, 5)):
        assert said.logprob == pytest.approx(float(distribution[row, tokens[row]]), abs=1e-5)
        assert [token for token, _ in said.top] == best.indices[row].tolist()
        found = [logprob for _, logprob in said.top]
        assert found == pytest.approx(best.values[row].tolist(), abs=1e-5)


def test_logits_that_are_not_numbers_have_no_logarithm() -> None:
    with pytest.raises(RequestError, match="NaN logits"):
        token_logprobs(torch.tensor([[0.0, float("nan"), 1.0]]), [0], 2)


@pytest.mark.parametrize("backend", [pytest.param("kernels", marks=needs_kernels), "library"])
def test_a_prompt_is_scored_part_by_part_as_transformers_scores_it(
    llama_folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFILL_ROWS", 3)
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend=backend)
    steps = open_session(Verifier(model, Spans()), 1, PROMPT, Sampling(), scored=True)
    assert [(step.start, len(step.logprobs)) for step in steps if isinstance(step, ScoredPart)] == [
        (1, 3),
        (4, 3),
    ]
    check(scored(model, PROMPT), llama_folder, PROMPT, 1)
    token, said = first_of(steps)
    check([said], llama_folder, [*PROMPT, token], len(PROMPT))


def test_the_parts_of_a_prompt_fit_into_a_message() -> None:
    assert PREFILL_ROWS <= MAX_SCORED


def test_nothing_is_said_of_a_prompt_of_one_token_nor_where_it_was_not_asked(
    llama: LanguageModel,
) -> None:
    assert scored(llama, PROMPT[:1]) == []
    (first,) = open_session(Verifier(llama, Spans()), 1, PROMPT, Sampling(), top=None)
    assert isinstance(first, First)
    assert first.logprobs is None
    assert [said.top for said in scored(llama, PROMPT, top=None)] == [()] * (len(PROMPT) - 1)


def test_a_prompt_that_is_scored_has_no_base(llama: LanguageModel) -> None:
    verifier = Verifier(llama, Spans(), kept_tokens=100)
    open_session(verifier, 1, PROMPT, Sampling())
    verifier.close(1, keep=True)
    with pytest.raises(RequestError, match="cannot score a prompt that reuses rows of session 1"):
        list(
            verifier.open(
                opening(
                    2,
                    PROMPT,
                    key=bytes(16),
                    capacity=60,
                    sampling=Sampling(),
                    tree=TREE,
                    base=1,
                    kept=3,
                    logprobs=0,
                    scored=True,
                )
            )
        )
    assert (len(verifier.kept), len(verifier)) == (1, 0)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_tokens_of_a_reply_come_with_what_transformers_says_of_them_before_any_processor(
    llama: LanguageModel, llama_folder: Path, sampling: Sampling
) -> None:
    log, said = decode(llama, {1: PROMPT}, sampling, 16, drafts=True)[1]
    check(said, llama_folder, log, len(PROMPT))


@needs_kernels
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_byte_of_them_depends_on_trees_on_sessions_beside_them_or_on_whether_they_were_said_or_read(  # noqa: E501
    llama: LanguageModel, sampling: Sampling
) -> None:
    rng = random.Random(2)
    prompts = {
        1: PROMPT,
        **{n: tuple(rng.randrange(VOCABULARY) for _ in range(2 + n)) for n in (2, 3)},
    }
    together, alone = (
        decode(llama, prompts, sampling, 14, drafts=True),
        decode(llama, {1: PROMPT}, sampling, 14, drafts=False)[1],
    )
    log, said = together[1]
    if not sampling.rejects:
        assert said[:14] == alone[1][:14]
    assert said == scored(llama, log)[len(PROMPT) - 1 :]
    assert alone[1] == scored(llama, alone[0])[len(PROMPT) - 1 :]


def test_features_and_scores_of_a_part_come_together(llama: LanguageModel) -> None:
    reads = Reads(width=64, dtype="float16", vocabulary_size=VOCABULARY)
    steps = Verifier(llama, Spans()).open(
        opening(
            1,
            PROMPT,
            key=bytes(16),
            capacity=60,
            sampling=Sampling(),
            tree=TREE,
            features=reads,
            logprobs=0,
            scored=True,
        )
    )
    assert [type(step) for step in steps] == [Part, ScoredPart, First]
