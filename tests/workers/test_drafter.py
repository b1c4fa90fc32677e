"""The drafter against plain passes over every path of its tree."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.errors import RequestError
from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.drafter import Drafter, DraftSession
from dovetail.workers.models.language_model import LanguageModel, load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.speculation.growth import NO_ROW
from dovetail.workers.speculation.proposal import Proposal, Shape
from support.models import VOCABULARY, cache_row, reference_choice, reference_law, reference_logits, reference_processed, tiny_llama

KEY = bytes(range(16))
PROMPT = [3, 1, 4, 1, 5]
SHAPE = Shape(12, 4, 4)
TREE = TreeSettings(gamma=12, depth=4, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.5, top_k=20)
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.7, "logit_bias": ((3, 4.0), (7, -5.0)), "min_tokens": 9}
SAMPLINGS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": Sampling(**PENALTIES), "all": SAMPLED.model_copy(update=PENALTIES)}
END = (1, 30)
CAPACITY = 90


def drafter(model: LanguageModel, clock: Callable[[], int] | None = None) -> Drafter:
    return Drafter(model, Spans()) if clock is None else Drafter(model, Spans(), clock=clock)


def opened(engine: Drafter, *, sampling: Sampling = GREEDY, prompt: list[int] = PROMPT, capacity: int = CAPACITY, tree: TreeSettings = TREE) -> DraftSession:
    return engine.open(prompt, capacity=capacity, vocabulary_size=VOCABULARY, key=KEY, sampling=sampling, tree=tree, end=END)


def with_context(folder: Path, context: int) -> LanguageModel:
    return load_language_model(str(tiny_llama(folder, max_position_embeddings=context)), weights="fp32", device="cpu")


def processed(folder: Path, log: list[int], sampling: Sampling) -> list[float]:
    """The logits after `log`, which begins with the prompt, as the processors before temperature leave them."""
    return reference_processed(reference_logits(folder, log)[-1].tolist(), sampling, log[: len(PROMPT)], log[len(PROMPT) :], END)


def gain(folder: Path, path: list[int], session: DraftSession) -> float:
    """The log-probability of the last token of `path` after the others, sharpened, in plain numbers."""
    logits = processed(folder, path[:-1], session.ranking.sampling)
    if session.ranking.sampling.temperature > 0:
        law = reference_law(logits, session.ranking.sampling)
        logits = [math.log(p) + gumbel(KEY, len(path) - 1, v) if p else -math.inf for v, p in enumerate(law)]
    return float(torch.log_softmax(torch.tensor(logits) / session.ranking.sharpening, 0)[path[-1]])


def row_of(model: LanguageModel, path: list[int]) -> torch.Tensor:
    """Keys and values of the last token of `path`, from a causal pass."""
    cache = model.new_cache(len(path))
    model.forward(torch.tensor(path), torch.arange(len(path)), [Segment(cache, 0, len(path))])
    return cache_row(cache, len(path) - 1)


def check_against_plain_passes(folder: Path, engine: Drafter, session: DraftSession) -> None:
    """Every node has the score, and every expanded one the cache row, that a plain pass over its path gives."""
    tree, cache = session.tree, session.cache
    assert cache.length == len(session.log)
    for node in range(len(tree)):
        path, above = [], node
        while above != ROOT:
            path.insert(0, int(tree.tokens[above]))
            above = int(tree.parents[above])
        path = session.log + path
        parent = int(tree.parents[node])
        found = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent])
        assert found == pytest.approx(gain(folder, path, session), abs=1e-3)
        if tree.rows[node] != NO_ROW:
            torch.testing.assert_close(cache_row(cache, cache.length + int(tree.rows[node])), row_of(engine.model, path), rtol=1e-3, atol=1e-4)


@given(seed=st.integers(0, 1 << 32), sampling=st.sampled_from([*SAMPLINGS.values()]))
@settings(deadline=None, max_examples=16)
def test_every_node_is_what_a_plain_pass_over_its_path_gives_wherever_the_root_moves(
    llama: LanguageModel, llama_folder: Path, seed: int, sampling: Sampling
) -> None:
    random = np.random.default_rng(seed)
    engine = drafter(llama)
    session = opened(engine, sampling=sampling)
    accepted: tuple[int, ...] = ()
    bonus = int(random.integers(VOCABULARY))
    for _ in range(5):
        known = session.tree.child(session.offered[accepted[-1]] if accepted else ROOT, bonus)
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        assert proposal.hit == (known is not None)
        proposal.tree.check(VOCABULARY)
        check_against_plain_passes(llama_folder, engine, session)
        path = proposal.tree.path(int(random.integers(len(proposal.tree))))
        accepted = path[: random.integers(len(path) + 1)]
        last = session.offered[accepted[-1]] if accepted else ROOT
        below = session.tree.tokens[session.tree.parents == last]
        bonus = int(random.choice(below)) if len(below) and random.random() < 0.7 else int(random.integers(VOCABULARY))


def choice(folder: Path, log: list[int], sampling: Sampling) -> int:
    """What a target would choose after `log`."""
    return reference_choice(processed(folder, log, sampling), sampling, KEY, len(log))


def follow(engine: Drafter, session: DraftSession, folder: Path, rounds: int, *, besides: Callable[[], object] = tuple) -> list[tuple[Proposal, int]]:
    """Every proposal, and how many of its nodes the model in `folder` accepts as a target; `besides` is done before each."""
    sampling, log, accepted, history = session.ranking.sampling, list(PROMPT), (), []
    bonus = choice(folder, log, sampling)
    for _ in range(rounds):
        log.append(bonus)
        besides()
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        node, path = ROOT, []
        while True:
            bonus = choice(folder, log, sampling)
            if bonus not in proposal.tree.children.get(node, {}):
                break
            node = proposal.tree.children[node][bonus]
            path.append(node)
            log.append(bonus)
        accepted = tuple(path)
        history.append((proposal, len(path)))
    return history


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_draft_equal_to_its_target_is_accepted_to_its_full_depth_every_round(llama: LanguageModel, llama_folder: Path, sampling: Sampling) -> None:
    engine = drafter(llama)
    sharp = TREE.model_copy(update={"sharpening": 0.01})  # the likeliest path comes before all others
    history = follow(engine, opened(engine, sampling=sampling, tree=sharp), llama_folder, rounds=6)
    assert [count for _, count in history] == [SHAPE.depth] * 6


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_a_session_proposes_does_not_depend_on_the_sessions_beside_it(llama: LanguageModel, tmp_path: Path, sampling: Sampling) -> None:
    target, engine = tiny_llama(tmp_path, seed=1), drafter(llama)
    expected = follow(engine, opened(engine, sampling=sampling), target, rounds=4)
    other = opened(engine, prompt=[9, 9])
    assert follow(engine, opened(engine, sampling=sampling), target, rounds=4, besides=lambda: engine.draft(other, (), 7, SHAPE)) == expected


def test_an_order_bounds_nodes_depth_and_width(llama: LanguageModel) -> None:
    for shape in (Shape(0, 3, 3), Shape(1, 4, 4), Shape(5, 1, 9), Shape(7, 3, 1), Shape(30, 4, 3)):
        engine = drafter(llama)
        tree = engine.draft(opened(engine), (), 2, shape).tree
        assert len(tree) <= shape.nodes
        assert max(tree.depths, default=0) <= shape.depth
        assert max((len(c) for c in tree.children.values()), default=0) <= shape.width


def test_rounds_without_a_proposal_are_caught_up_with_later(llama: LanguageModel) -> None:
    engine = drafter(llama)
    session = opened(engine)
    for token in (7, 8, 9):
        assert len(engine.draft(session, (), token, Shape(0, 4, 4)).tree) == 0
    late = engine.draft(session, (), 10, SHAPE)
    fresh = opened(engine, prompt=[*PROMPT, 7, 8, 9])
    assert late.tree == engine.draft(fresh, (), 10, SHAPE).tree


def test_growth_ends_with_the_first_level_that_ends_after_the_deadline(llama: LanguageModel) -> None:
    ticks = iter(range(100))
    engine = drafter(llama, clock=lambda: next(ticks))
    assert max(engine.draft(opened(engine), (), 2, Shape(40, 6, 4), deadline_ns=1).tree.depths) == 3


def test_a_surviving_tree_is_offered_at_once_though_the_deadline_allows_one_level(llama: LanguageModel) -> None:
    engine = drafter(llama, clock=lambda: 10)
    session = opened(engine)
    first = engine.draft(session, (), 2, Shape(40, 4, 4))
    token = first.tree.tokens[0]
    second = engine.draft(session, (), token, Shape(40, 4, 4), deadline_ns=5)
    assert second.hit
    assert max(second.tree.depths) >= 3


def test_near_the_end_of_the_sequence_no_level_is_drafted_that_it_has_no_place_for(llama: LanguageModel) -> None:
    engine = drafter(llama)
    session = opened(engine, capacity=len(PROMPT) + 5)
    depths = [max(engine.draft(session, (), token, Shape(12, 9, 2)).tree.depths, default=0) for token in range(6)]
    assert depths == [3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_with_the_shorter_context_proposes_fewer_levels_and_then_nothing(tmp_path: Path, sampling: Sampling) -> None:
    engine = drafter(with_context(tmp_path, 10))
    session = opened(engine, sampling=sampling)
    depths = [max(engine.draft(session, (), token, Shape(12, 4, 2)).tree.depths, default=0) for token in range(8)]
    assert depths == [4, 4, 3, 2, 1, 0, 0, 0]
    while engine.prepare(session):
        pass


def test_a_prompt_beyond_the_drafts_context_opens_a_session_that_proposes_nothing(tmp_path: Path) -> None:
    engine = drafter(with_context(tmp_path, 4))
    session = opened(engine)
    assert not session.readable
    assert engine.draft(session, (), 2, SHAPE) == Proposal(TokenTree(), (), 0, False)
    assert session.log == [*PROMPT, 2]


def test_a_prompt_of_many_chunks_is_read_like_one_of_a_single_pass(tmp_path: Path) -> None:
    engine, prompt = drafter(with_context(tmp_path, 700)), np.random.default_rng(0).integers(VOCABULARY, size=600).tolist()
    session = opened(engine, prompt=prompt, capacity=650)
    tree = engine.draft(session, (), 2, Shape(1, 1, 1)).tree
    assert tree.tokens == (choice(tmp_path, [*prompt, 2], GREEDY),)


def test_where_the_cache_has_no_slots_left_the_tree_stops_growing(llama: LanguageModel, llama_folder: Path) -> None:
    engine, accepted = drafter(llama), ()
    session = opened(engine, capacity=len(PROMPT) + 12, tree=TreeSettings(gamma=2, depth=1, width=2))
    for token in (2, 40, 7):
        tree = engine.draft(session, accepted, token, Shape(40, 6, 4)).tree
        check_against_plain_passes(llama_folder, engine, session)
        assert session.cache.length + session.tree.rows_used == session.cache.capacity
        assert len(tree) == 40
        accepted = tree.path(len(tree) - 1)[:2]


def test_ids_beyond_the_targets_vocabulary_are_never_proposed(llama: LanguageModel) -> None:
    engine = drafter(llama)
    session = engine.open(PROMPT, capacity=CAPACITY, vocabulary_size=10, key=KEY, sampling=SAMPLED, tree=TREE)
    assert max(engine.draft(session, (), 2, Shape(60, 3, 10)).tree.tokens) < 10


def test_a_token_that_the_draft_has_no_row_for_is_refused(llama: LanguageModel) -> None:
    with pytest.raises(RequestError, match="token 48 is beyond the draft's vocabulary of 48"):
        drafter(llama).check_tokens([5, VOCABULARY])


def test_noise_is_computed_ahead_and_changes_nothing(llama: LanguageModel) -> None:
    engine = drafter(llama)
    prepared, unprepared = opened(engine, sampling=SAMPLED), opened(engine, sampling=SAMPLED)
    while engine.prepare(prepared):
        pass
    assert engine.draft(prepared, (), 2, SHAPE) == engine.draft(unprepared, (), 2, SHAPE)
    assert not engine.prepare(opened(engine))
