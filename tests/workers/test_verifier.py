"""Verification of any tree emits what transformers' own forward emits one token at a time."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from dovetail.protocol.errors import RequestError, StaleError
from dovetail.protocol.memory import Room
from dovetail.protocol.messages import VerifiedItem, VerifyItem
from dovetail.protocol.noise import session_key
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.sessions import room
from dovetail.workers.sessions.features import PREFILL_ROWS
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.verifier import Verifier, tree_paths
from support.cases import everyday
from support.models import (
    CONTEXT,
    VOCABULARY,
    reference_logits,
    reference_tokens,
    spoil,
    tiny_llama,
)
from support.opening import opening

GREEDY = Sampling()
WARM = Sampling(temperature=1.0)
PROCESSED = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
PENALISED = Sampling(
    repetition_penalty=1.6,
    presence_penalty=1.5,
    frequency_penalty=1.0,
    logit_bias=((3, 4.0), (30, -6.0)),
    min_tokens=16,
)
ALL = PENALISED.model_copy(update={"temperature": 1.2, "top_k": 30, "top_p": 0.95, "min_p": 0.01})
SAMPLINGS = {
    "greedy": GREEDY,
    "warm": WARM,
    "processed": PROCESSED,
    "penalised": PENALISED,
    "all": ALL,
}
END = (1, 22, 41)
PROMPT = (0, 3, 17, 9, 30)
LENGTH = 24
KEY = session_key(7, 0, PROMPT)
TREE = TreeSettings(policy="dynamic", gamma=12, depth=6)


@pytest.fixture(scope="module")
def expected(llama_folder: Path) -> dict[Sampling, list[int]]:
    return {
        sampling: reference_tokens(
            llama_folder, PROMPT, LENGTH, key=KEY, sampling=sampling, end=END
        )
        for sampling in SAMPLINGS.values()
    }


def new_verifier(model: LanguageModel) -> Verifier:
    return Verifier(model, Spans())


def open_session(
    verifier: Verifier,
    number: int = 1,
    *,
    prompt: tuple[int, ...] = PROMPT,
    sampling: Sampling = GREEDY,
    capacity: int = 60,
) -> list[int]:
    (first,) = verifier.open(
        opening(
            number,
            prompt,
            key=session_key(7, 0, prompt),
            capacity=capacity,
            sampling=sampling,
            tree=TREE,
            end=END,
        )
    )
    assert isinstance(first, First)
    assert first.margin >= 0.0
    return [*prompt, first.token]


def verify(verifier: Verifier, item: VerifyItem) -> VerifiedItem:
    verifier.check(item)
    (verdict,) = verifier.verify([item])
    assert isinstance(verdict, Verdict)
    return verdict.item


def item_for(log: Sequence[int], round: int, tree: TokenTree, session: int = 1) -> VerifyItem:
    return VerifyItem(
        session=session, round=round, prefix=len(log), tokens=tree.tokens, parents=tree.parents
    )


def append(log: list[int], tree: TokenTree, verdict: VerifiedItem) -> None:
    assert tree.is_path(verdict.accepted)
    assert len(verdict.margins) == len(verdict.accepted) + 1
    log += (*(tree.tokens[node] for node in verdict.accepted), verdict.bonus)


def guessed_tree(rng: random.Random, future: Sequence[int], most: int = 12) -> TokenTree:
    """A random tree into which the true continuation has been woven, sometimes: some of its nodes
    will be accepted."""
    tokens: list[int] = []
    parents: list[int] = []
    depths = {-1: 0}
    for _ in range(rng.randint(0, most)):
        parent = rng.choice([-1, *range(len(tokens)), len(tokens) - 1])
        depth = depths[parent]
        token = (
            future[depth]
            if rng.random() < 0.7 and depth < len(future)
            else rng.randrange(VOCABULARY)
        )
        if depth < 6 and (parent, token) not in zip(parents, tokens, strict=True):
            depths[len(tokens)] = depth + 1
            parents.append(parent)
            tokens.append(token)
    return TokenTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("seed", everyday(range(6), 0, 1))
def test_with_any_trees_the_tokens_are_those_of_one_at_a_time(
    llama: LanguageModel, expected: dict[Sampling, list[int]], sampling: Sampling, seed: int
) -> None:
    verifier, rng = new_verifier(llama), random.Random(seed)
    log, truth = open_session(verifier, sampling=sampling), [*PROMPT, *expected[sampling]]
    round, accepted = 0, 0
    while len(log) < len(truth):
        tree, round = guessed_tree(rng, truth[len(log) :]), round + 1
        verdict = verify(verifier, item_for(log, round, tree))
        append(log, tree, verdict)
        accepted += len(verdict.accepted)
    assert log[: len(truth)] == truth
    assert accepted > 3


@pytest.mark.parametrize("sampling", [GREEDY, ALL], ids=["greedy", "all"])
def test_without_trees_it_decodes_plainly(
    llama: LanguageModel, expected: dict[Sampling, list[int]], sampling: Sampling
) -> None:
    verifier = new_verifier(llama)
    log = open_session(verifier, sampling=sampling)
    for round in range(1, LENGTH):
        append(log, TokenTree(), verify(verifier, item_for(log, round, TokenTree())))
    assert log[len(PROMPT) :] == expected[sampling]


def test_suppressed_tokens_never_come_with_or_without_trees(
    llama_folder: Path, expected: dict[Sampling, list[int]]
) -> None:
    """As in transformers, whose reply is the oracle."""
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu")
    never = sorted({*expected[GREEDY][:4]})
    model.suppressed = (*never, VOCABULARY + 9)
    plain = AutoModelForCausalLM.from_pretrained(llama_folder).generate(
        torch.tensor([PROMPT]),
        do_sample=False,
        max_new_tokens=LENGTH,
        eos_token_id=VOCABULARY,
        suppress_tokens=never,
    )
    truths: dict[Sampling, list[int]] = {GREEDY: plain[0].tolist()}
    for sampling, trees in ((GREEDY, True), (WARM, False), (WARM, True)):
        verifier, rng, round = new_verifier(model), random.Random(3), 0
        log = open_session(verifier, sampling=sampling)
        while len(log) < len(PROMPT) + LENGTH:
            round += 1
            future = truths[sampling][len(log) :] if trees else []
            tree = guessed_tree(rng, future) if trees else TokenTree()
            append(log, tree, verify(verifier, item_for(log, round, tree)))
        assert (
            log[: len(PROMPT) + LENGTH]
            == truths.setdefault(sampling, log[:])[: len(PROMPT) + LENGTH]
        )
        assert not {*log[len(PROMPT) :]} & {*never}


def test_every_processor_that_looks_back_changes_the_reply_of_the_test(
    llama_folder: Path, expected: dict[Sampling, list[int]]
) -> None:
    """Otherwise the tests above would say nothing of it."""
    for field in (
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "min_tokens",
    ):
        without = PENALISED.model_copy(update={field: Sampling.model_fields[field].default})
        assert (
            reference_tokens(llama_folder, PROMPT, LENGTH, key=KEY, sampling=without, end=END)
            != expected[PENALISED]
        ), field


def test_margins_and_choices_are_the_same_bytes_whether_a_token_was_drafted_or_committed(
    llama: LanguageModel, expected: dict[Sampling, list[int]]
) -> None:
    """But for the model's own rounding: the same logits, so that nothing but the processors is
    compared."""
    truth = [*PROMPT, *expected[ALL]]
    verifiers = [new_verifier(llama), new_verifier(llama)]
    logs = [open_session(verifier, sampling=ALL) for verifier in verifiers]
    path = TokenTree(tuple(truth[len(logs[0]) :][:6]), (-1, 0, 1, 2, 3, 4))
    at_once = verify(verifiers[0], item_for(logs[0], 1, path))
    single = [
        verify(verifiers[1], item_for(truth[: len(logs[1]) + round - 1], round, TokenTree()))
        for round in range(1, 8)
    ]
    assert [*path.tokens, at_once.bonus] == [verdict.bonus for verdict in single]
    assert at_once.margins == pytest.approx([verdict.margins[0] for verdict in single], abs=1e-4)


def test_several_sessions_in_one_pass_emit_what_each_emits_alone(
    llama: LanguageModel, llama_folder: Path
) -> None:
    verifier, rng = new_verifier(llama), random.Random(1)
    prompts = {1: PROMPT, 2: (0, 4), 5: (0, 8, 8, 41, 2, 7, 7), 6: (9, 9)}
    samplings = {1: GREEDY, 2: WARM, 5: PROCESSED, 6: ALL}
    truths = {
        n: [
            *prompt,
            *reference_tokens(
                llama_folder,
                prompt,
                LENGTH,
                key=session_key(7, 0, prompt),
                sampling=samplings[n],
                end=END,
            ),
        ]
        for n, prompt in prompts.items()
    }
    logs = {
        n: open_session(verifier, n, prompt=prompt, sampling=samplings[n])
        for n, prompt in prompts.items()
    }
    for round in range(1, 8):
        trees = {n: guessed_tree(rng, truths[n][len(logs[n]) :]) for n in prompts}
        verdicts = verifier.verify([item_for(logs[n], round, trees[n], n) for n in prompts])
        for n, verdict in zip(prompts, verdicts, strict=True):
            assert isinstance(verdict, Verdict)
            assert verdict.item.session == n
            append(logs[n], trees[n], verdict.item)
    for n, log in logs.items():
        reached = min(len(log), len(truths[n]))
        assert log[:reached] == truths[n][:reached]


def test_margins_are_the_distances_to_the_runner_up(
    llama: LanguageModel, llama_folder: Path
) -> None:
    verifier = new_verifier(llama)
    log = open_session(verifier)
    verdict = verify(verifier, item_for(log, 1, TokenTree()))
    best = reference_logits(llama_folder, log)[-1].topk(2).values
    assert verdict.margins[0] == pytest.approx(float(best[0] - best[1]), abs=1e-3)


def test_long_prompts_are_prefilled_in_chunks(tmp_path: Path) -> None:
    tiny_llama(tmp_path, max_position_embeddings=1000)
    model = load_language_model(str(tmp_path), weights="fp32", device="cpu")
    rng = random.Random(3)
    for length in (PREFILL_ROWS - 1, PREFILL_ROWS, PREFILL_ROWS + 1, 2 * PREFILL_ROWS + 40):
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(length))
        log = open_session(verifier := new_verifier(model), prompt=prompt, capacity=length + 20)
        append(log, TokenTree(), verify(verifier, item_for(log, 1, TokenTree())))
        assert log[length:] == reference_tokens(tmp_path, prompt, 2, key=KEY, sampling=GREEDY)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_node_sees_the_root_its_ancestors_and_itself(seed: int) -> None:
    tree = guessed_tree(random.Random(seed), [1, 2, 3])
    paths = tree_paths(tree, 7)
    assert paths.prefix == 7
    assert [paths.row(node + 1).tolist() for node in range(-1, len(tree))] == [
        [7, *(8 + above for above in tree.path(node))] for node in range(-1, len(tree))
    ]


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 30])
def test_a_prompt_that_fills_the_context_is_refused_with_both_lengths(
    llama: LanguageModel, length: int
) -> None:
    verifier = new_verifier(llama)
    with pytest.raises(RequestError, match=f"{length} tokens.*{CONTEXT}.*{CONTEXT - 1}") as caught:
        open_session(verifier, prompt=(3,) * length, capacity=CONTEXT)
    assert caught.value.code == "prompt_too_long"
    assert len(verifier) == 0


@pytest.mark.parametrize("capacity", [len(PROMPT), CONTEXT + 1])
def test_a_capacity_without_room_or_beyond_the_context_is_refused(
    llama: LanguageModel, capacity: int
) -> None:
    with pytest.raises(RequestError, match="capacity of") as caught:
        open_session(new_verifier(llama), capacity=capacity)
    assert caught.value.code == "capacity"


def test_a_prompt_beyond_the_vocabulary_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(RequestError, match=f"token {VOCABULARY}, beyond the vocabulary"):
        open_session(new_verifier(llama), prompt=(0, VOCABULARY))


def test_a_bias_beyond_the_vocabulary_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(
        RequestError, match=f"logit_bias names token {VOCABULARY}, beyond the vocabulary"
    ):
        open_session(
            new_verifier(llama), sampling=Sampling(logit_bias=((3, 1.0), (VOCABULARY, 1.0)))
        )


def test_a_reply_may_fill_the_context_to_its_last_token(
    llama: LanguageModel, llama_folder: Path
) -> None:
    prompt = tuple(random.Random(0).randrange(VOCABULARY) for _ in range(CONTEXT - 3))
    verifier = new_verifier(llama)
    log = open_session(verifier, prompt=prompt, capacity=CONTEXT)
    truth = [*prompt, *reference_tokens(llama_folder, prompt, 3, key=KEY, sampling=GREEDY)]
    tree = TokenTree((truth[-2], truth[-1], 4, 4, 4), (-1, 0, 1, 2, 3))
    append(log, tree, verify(verifier, item_for(log, 1, tree)))
    assert log[:CONTEXT] == truth


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"session": 2}, "session"),
        ({"round": 3}, "prefix"),
        ({"prefix": 5}, "prefix"),
        ({"prefix": 7}, "prefix"),
        ({"tokens": (3,) * 13, "parents": tuple(range(-1, 12))}, "capacity"),
        ({"tokens": (VOCABULARY,), "parents": (-1,)}, "protocol"),
        ({"tokens": (3, 3), "parents": (-1, -1)}, "protocol"),
        ({"tokens": (3,), "parents": (0,)}, "protocol"),
        ({"tokens": (3,), "parents": ()}, "protocol"),
    ],
)
def test_an_item_that_cannot_be_done_is_refused_and_changes_nothing(
    llama: LanguageModel, changes: dict[str, object], code: str
) -> None:
    verifier = new_verifier(llama)
    log = open_session(verifier)
    good = item_for(log, 1, TokenTree((3,), (-1,)))
    with pytest.raises(RequestError) as caught:
        verifier.check(VerifyItem(**{**dict(good), **changes}))
    assert caught.value.code == code
    verify(verifier, good)


def test_a_round_that_is_done_is_stale(llama: LanguageModel) -> None:
    verifier = new_verifier(llama)
    log = open_session(verifier)
    item = item_for(log, 1, TokenTree())
    verify(verifier, item)
    with pytest.raises(StaleError):
        verifier.check(item)


def test_noise_of_the_next_positions_can_be_prepared_while_waiting(
    llama: LanguageModel, expected: dict[Sampling, list[int]]
) -> None:
    verifier = new_verifier(llama)
    assert not verifier.prepare_noise()
    log = open_session(verifier, sampling=WARM)
    for round in range(1, 6):
        prepared = 0
        while verifier.prepare_noise():
            prepared += 1
        assert (prepared >= 1) != kernels.available()  # these need none
        append(log, TokenTree(), verify(verifier, item_for(log, round, TokenTree())))
    assert log[len(PROMPT) :] == expected[WARM][:6]


def test_a_closed_session_is_gone(llama: LanguageModel) -> None:
    verifier = new_verifier(llama)
    open_session(verifier)
    verifier.close(1)
    verifier.close(1)
    assert len(verifier) == 0


def test_logits_that_are_not_numbers_fail_their_own_session_only(llama: LanguageModel) -> None:
    verifier = new_verifier(llama)
    logs = {n: open_session(verifier, n, prompt=(0, 3, n)) for n in (1, 2)}
    spoil(verifier._sessions[1].cache)
    verdicts = verifier.verify([item_for(logs[n], 1, TokenTree(), n) for n in (1, 2)])
    assert isinstance(verdicts[0], RequestError)
    assert isinstance(verdicts[1], Verdict)
    assert torch.isfinite(torch.tensor(verdicts[1].item.margins)).all()


def test_a_session_whose_keys_and_values_do_not_fit_into_memory_is_refused_and_hurts_no_other(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = new_verifier(llama)
    row_bytes = llama.new_cache(0).row_bytes
    left = Room(100 * row_bytes, "left in a test")
    monkeypatch.setattr(room, "CHECKED_BYTES", 0)
    monkeypatch.setattr(room, "read_room", lambda: left)
    log = open_session(verifier)  # 60 tokens and a tree of 12
    with pytest.raises(
        RequestError,
        match=r"keys and values of 72 tokens take .* GB, open sessions may take .* more, but "
        r"there are .* left in a test",
    ) as caught:
        open_session(verifier, 2)
    assert caught.value.code == "memory"
    assert len(verifier) == 1
    assert verify(verifier, item_for(log, 1, TokenTree())).accepted == ()
    verifier.close(1)
    open_session(verifier, 2)
