"""The drafter against plain passes over every path of its tree."""

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.noise import gumbel
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT, TokenTree
from dovetail.workers.drafters.model import Drafter, DraftSession
from dovetail.workers.drafters.passes import read_alone
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.speculation.growth import NO_ROW
from dovetail.workers.speculation.prices import START, PassTimes
from dovetail.workers.speculation.proposal import Price, Proposal, Shape
from support.models import (
    VOCABULARY,
    cache_row,
    reference_choice,
    reference_law,
    reference_logits,
    reference_processed,
    tiny_llama,
)
from support.opening import opening

KEY = bytes(range(16))
PROMPT = [3, 1, 4, 1, 5]
SHAPE = Shape(12, 4, 4)
TREE = TreeSettings(policy="dynamic", gamma=12, depth=4, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.5, top_k=20)
PENALTIES = {
    "repetition_penalty": 1.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 0.7,
    "logit_bias": ((3, 4.0), (7, -5.0)),
    "min_tokens": 9,
}
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": Sampling(**PENALTIES),
    "all": SAMPLED.model_copy(update=PENALTIES),
}
END = (1, 30)
CAPACITY = 90


def drafter(
    model: LanguageModel, clock: Callable[[], int] = time.monotonic_ns, *, ahead: bool = False
) -> Drafter:
    return Drafter(model, Spans(), ahead=ahead, clock=clock)


def opened(
    engine: Drafter,
    *,
    sampling: Sampling = GREEDY,
    prompt: list[int] = PROMPT,
    capacity: int = CAPACITY,
    tree: TreeSettings = TREE,
) -> DraftSession:
    return engine.open(
        opening(
            1,
            prompt,
            capacity=capacity,
            vocabulary_size=VOCABULARY,
            key=KEY,
            sampling=sampling,
            tree=tree,
            end=END,
        )
    )


def with_context(folder: Path, context: int) -> LanguageModel:
    return load_language_model(
        str(tiny_llama(folder, max_position_embeddings=context)), weights="fp32", device="cpu"
    )


def processed(folder: Path, log: list[int], sampling: Sampling) -> list[float]:
    """The logits after `log`, which begins with the prompt, as the processors before temperature
    leave them."""
    return reference_processed(
        reference_logits(folder, log)[-1].tolist(),
        sampling,
        log[: len(PROMPT)],
        log[len(PROMPT) :],
        END,
    )


def gain(folder: Path, path: list[int], session: DraftSession) -> float:
    """The log-probability of the last token of `path` after the others, sharpened, in plain
    numbers."""
    logits = processed(folder, path[:-1], session.ranking.sampling)
    if session.ranking.sampling.temperature > 0:
        law = reference_law(logits, session.ranking.sampling)
        logits = [
            math.log(p) + gumbel(KEY, len(path) - 1, v) if p else -math.inf
            for v, p in enumerate(law)
        ]
    return float(
        torch.log_softmax(torch.tensor(logits) / session.ranking.scales[0].sharpening, 0)[path[-1]]
    )


def row_of(model: LanguageModel, path: list[int]) -> torch.Tensor:
    """Keys and values of the last token of `path`, from a causal pass."""
    cache = model.new_cache(len(path))
    model.forward(torch.tensor(path), torch.arange(len(path)), [Segment(cache, 0, len(path))])
    return cache_row(cache, len(path) - 1)


def check_against_plain_passes(folder: Path, engine: Drafter, session: DraftSession) -> None:
    """Every node has the score, and every expanded one the cache row, that a plain pass over its
    path gives."""
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
            torch.testing.assert_close(
                cache_row(cache, cache.length + int(tree.rows[node])),
                row_of(engine.model, path),
                rtol=1e-3,
                atol=1e-4,
            )


@given(seed=st.integers(0, 1 << 32), sampling=st.sampled_from([*SAMPLINGS.values()]))
@settings(deadline=None, max_examples=3)
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
        bonus = (
            int(random.choice(below))
            if len(below) and random.random() < 0.7
            else int(random.integers(VOCABULARY))
        )


def choice(folder: Path, log: list[int], sampling: Sampling) -> int:
    """Return the token that a target would choose after `log`."""
    return reference_choice(processed(folder, log, sampling), sampling, KEY, len(log))


def follow(
    engine: Drafter,
    session: DraftSession,
    folder: Path,
    rounds: int,
    *,
    besides: Callable[[], object] = tuple,
) -> list[tuple[Proposal, int]]:
    """Every proposal, and how many of its nodes the model in `folder` accepts as a target;
    `besides` is done before each."""
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
def test_a_draft_equal_to_its_target_is_accepted_to_its_full_depth_every_round(
    llama: LanguageModel, llama_folder: Path, sampling: Sampling
) -> None:
    engine = drafter(llama)
    sharp = TREE.model_copy(
        update={"sharpening": 0.01}
    )  # the likeliest path comes before all others
    history = follow(engine, opened(engine, sampling=sampling, tree=sharp), llama_folder, rounds=6)
    assert [count for _, count in history] == [SHAPE.depth] * 6


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


def test_growth_ends_with_the_first_level_that_ends_after_the_deadline(
    llama: LanguageModel,
) -> None:
    ticks = iter(range(100))
    engine = drafter(llama, clock=lambda: next(ticks))
    assert (
        max(engine.draft(opened(engine), (), 2, Shape(40, 6, 4), deadline_ns=4).tree.depths) == 3
    )  # a pass is two ticks


def test_a_surviving_tree_is_offered_at_once_though_the_deadline_allows_one_level(
    llama: LanguageModel,
) -> None:
    engine = drafter(llama, clock=lambda: 10)
    session = opened(engine)
    first = engine.draft(session, (), 2, Shape(40, 4, 4))
    token = first.tree.tokens[0]
    second = engine.draft(session, (), token, Shape(40, 4, 4), deadline_ns=5)
    assert second.hit
    assert max(second.tree.depths) >= 3


def test_near_the_end_of_the_sequence_no_level_is_drafted_that_it_has_no_place_for(
    llama: LanguageModel,
) -> None:
    engine = drafter(llama)
    session = opened(engine, capacity=len(PROMPT) + 5)
    depths = [
        max(engine.draft(session, (), token, Shape(12, 9, 2)).tree.depths, default=0)
        for token in range(6)
    ]
    assert depths == [3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_with_the_shorter_context_proposes_fewer_levels_and_then_nothing(
    tmp_path: Path, sampling: Sampling
) -> None:
    engine = drafter(with_context(tmp_path, 10))
    session = opened(engine, sampling=sampling)
    depths = [
        max(engine.draft(session, (), token, Shape(12, 4, 2)).tree.depths, default=0)
        for token in range(8)
    ]
    assert depths == [4, 4, 3, 2, 1, 0, 0, 0]
    while engine.prepare(session):
        pass


def test_a_prompt_beyond_the_drafts_context_opens_a_session_that_proposes_nothing(
    tmp_path: Path,
) -> None:
    engine = drafter(with_context(tmp_path, 4))
    session = opened(engine)
    assert not session.readable
    assert engine.draft(session, (), 2, SHAPE) == Proposal(TokenTree(), (), 0, False)
    assert session.log == [*PROMPT, 2]


def test_a_prompt_of_many_chunks_is_read_like_one_of_a_single_pass(tmp_path: Path) -> None:
    engine, prompt = (
        drafter(with_context(tmp_path, 700)),
        np.random.default_rng(0).integers(VOCABULARY, size=600).tolist(),
    )
    session = opened(engine, prompt=prompt, capacity=650)
    tree = engine.draft(session, (), 2, Shape(1, 1, 1)).tree
    assert tree.tokens == (choice(tmp_path, [*prompt, 2], GREEDY),)


def test_where_the_cache_has_no_slots_left_the_tree_stops_growing(
    llama: LanguageModel, llama_folder: Path
) -> None:
    engine, accepted = drafter(llama), ()
    session = opened(
        engine,
        capacity=len(PROMPT) + 12,
        tree=TreeSettings(policy="dynamic", gamma=2, depth=1, width=2),
    )
    for token in (2, 40, 7):
        tree = engine.draft(session, accepted, token, Shape(40, 6, 4)).tree
        check_against_plain_passes(llama_folder, engine, session)
        assert session.cache.length + session.tree.rows_used == session.cache.capacity
        assert len(tree) == 40
        accepted = tree.path(len(tree) - 1)[:2]


def test_ids_beyond_the_targets_vocabulary_are_never_proposed(llama: LanguageModel) -> None:
    engine = drafter(llama)
    session = engine.open(
        opening(
            1, PROMPT, capacity=CAPACITY, vocabulary_size=10, key=KEY, sampling=SAMPLED, tree=TREE
        )
    )
    assert max(engine.draft(session, (), 2, Shape(60, 3, 10)).tree.tokens) < 10


def test_noise_is_computed_ahead_and_changes_nothing(llama: LanguageModel) -> None:
    engine = drafter(llama)
    prepared, unprepared = opened(engine, sampling=SAMPLED), opened(engine, sampling=SAMPLED)
    while engine.prepare(prepared):
        pass
    assert engine.draft(prepared, (), 2, SHAPE) == engine.draft(unprepared, (), 2, SHAPE)
    assert not engine.prepare(opened(engine))


# -- ahead -----------------------------------------------------------------------------------------


def grown_afresh(model: LanguageModel, session: DraftSession, sampling: Sampling) -> DraftSession:
    """A new session with the same log in which the same nodes have been expanded, one after the
    other."""
    engine = drafter(model, ahead=True)
    fresh = opened(engine, sampling=sampling)
    first, *rest = session.log[len(PROMPT) :]
    engine.draft(fresh, (), first, Shape(1, 1, SHAPE.width), more=rest, ahead=True)
    with torch.inference_mode():
        for node in np.flatnonzero(session.tree.rows != NO_ROW).tolist():
            same = np.array([node_of(fresh, tuple(session.tree.path_tokens(node)))])
            engine._add_children(
                fresh,
                read_alone(engine.steps(fresh, same, SHAPE), engine.compute),
                same,
                fresh.waiting_time.children,
            )
    return fresh


def node_of(session: DraftSession, path: tuple[int, ...]) -> int:
    node = ROOT
    for token in path:
        found = session.tree.child(node, token)
        assert found is not None
        node = found
    return node


def known_of(session: DraftSession) -> dict[tuple[int, ...], float]:
    """Path -> score."""
    return {
        tuple(session.tree.path_tokens(node)): float(session.tree.scores[node])
        for node in range(len(session.tree))
    }


def check_against_a_fresh_session(
    model: LanguageModel, session: DraftSession, sampling: Sampling
) -> None:
    tree, cache = session.tree, session.cache
    if not tree.root_expanded:
        assert len(tree) == 0
        return
    fresh = grown_afresh(model, session, sampling)
    assert known_of(session) == pytest.approx(known_of(fresh), abs=1e-4)
    for slot in range(cache.length):
        torch.testing.assert_close(
            cache_row(cache, slot), cache_row(fresh.cache, slot), rtol=1e-4, atol=1e-5
        )
    for node in np.flatnonzero(tree.rows != NO_ROW).tolist():
        same = fresh.cache.length + int(
            fresh.tree.rows[node_of(fresh, tuple(tree.path_tokens(node)))]
        )
        torch.testing.assert_close(
            cache_row(cache, cache.length + int(tree.rows[node])),
            cache_row(fresh.cache, same),
            rtol=1e-4,
            atol=1e-5,
        )


def verdict(
    session: DraftSession, tree: TokenTree, random: np.random.Generator
) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Accepted nodes, a bonus that is often in the pool, and sometimes more tokens, which follow
    the pool for a while."""
    path = tree.path(int(random.integers(len(tree)))) if len(tree) else ()
    accepted = path[: random.integers(len(path) + 1)]
    node, tokens = session.offered[accepted[-1]] if accepted else ROOT, []
    for _ in range(1 + int(random.choice([0, 0, 1, 3]))):
        below = session.tree.tokens[session.tree.parents == node] if node is not None else []
        tokens.append(
            int(random.choice(below))
            if len(below) and random.random() < 0.8
            else int(random.integers(VOCABULARY))
        )
        node = None if node is None else session.tree.child(node, tokens[-1])
    return accepted, tokens[0], tuple(tokens[1:])


@given(
    seed=st.integers(0, 1 << 32),
    sampling=st.sampled_from([GREEDY, SAMPLINGS["all"]]),
    policy=st.sampled_from(["dynamic", "goodput", "static"]),
)
@settings(deadline=None, max_examples=2)
def test_whatever_grew_ahead_and_wherever_the_root_moves_the_tree_is_that_of_a_fresh_session(
    llama: LanguageModel, seed: int, sampling: Sampling, policy: str
) -> None:
    random, engine = np.random.default_rng(seed), drafter(llama, ahead=True)
    session = opened(engine, sampling=sampling, tree=TREE.model_copy(update={"policy": policy}))
    accepted, bonus, more = (), int(random.integers(VOCABULARY)), ()
    for _ in range(5):
        before, ahead = len(session.tree), session.waiting_time.joined
        way = {tuple(session.tree.path_tokens(session.offered[node])) for node in accepted}
        committed = [
            *(int(session.tree.tokens[session.offered[node]]) for node in accepted),
            bonus,
            *more,
        ]
        pool = set(known_of(session))
        way |= {tuple(committed[: i + 1]) for i in range(len(committed))} & pool
        offered = {tuple(session.tree.path_tokens(node)) for node in session.offered}
        price = (
            Price(
                rate=float(random.choice([0.0, 1.0, 1e3])), floor=float(random.choice([0.0, 0.02]))
            )
            if random.random() < 0.5
            else Price()
        )
        proposal = engine.draft(session, accepted, bonus, SHAPE, more=more, price=price, ahead=True)
        assert proposal.hit == (tuple(committed) in pool)
        assert proposal.ahead == ahead
        survivors = (
            {
                path
                for path in pool
                if path[: len(committed)] == tuple(committed) and len(path) > len(committed)
            }
            if proposal.hit
            else set()
        )
        assert len(session.tree) == len(survivors) + proposal.grown
        assert proposal.wasted == before - len(survivors | offered | way)
        assert all(math.exp(score) >= price.floor * (1 - 1e-6) for score in proposal.scores)
        proposal.tree.check(VOCABULARY)
        check_against_a_fresh_session(llama, session, sampling)
        for _ in range(int(random.integers(6))):  # wherever it is interrupted
            engine.grow_all_ahead([session])
        check_against_a_fresh_session(llama, session, sampling)
        accepted, bonus, more = verdict(session, proposal.tree, random)


def test_growth_ahead_takes_what_is_likeliest_to_be_used_and_offers_it_next_time_without_a_pass(
    llama: LanguageModel, llama_folder: Path
) -> None:
    ticks = iter(range(10**6))
    engine = drafter(llama, lambda: next(ticks), ahead=True)
    session = opened(engine)
    bonus = choice(llama_folder, PROMPT, GREEDY)
    for round_ in range(3):
        proposal = engine.draft(
            session, (), bonus, SHAPE, price=Price(rate=1e9) if round_ else Price(), ahead=True
        )  # a pass of a tick is worth a token
        if round_:
            assert proposal.hit
            assert (proposal.grown, len(proposal.tree)) == (0, SHAPE.nodes)
        for ahead in range(2):
            left = session.tree.expandable(99, 1e-3)
            if not engine.grow_all_ahead([session]):
                assert ahead, "with one pass there is time for another, and much to do"
                break
            taken, others = (
                left[session.tree.rows[left] != NO_ROW],
                left[session.tree.rows[left] == NO_ROW],
            )
            assert (
                not len(others)
                or session.tree.scores[taken].min() >= session.tree.scores[others].max()
            )
        bonus = choice(llama_folder, session.log, GREEDY)
        assert session.tree.child(ROOT, bonus) is not None


def test_no_pass_ahead_begins_that_would_keep_the_next_order_waiting_unless_it_is_more_likely_used_than_not(  # noqa: E501
    llama: LanguageModel,
) -> None:
    now = [0]
    engine = drafter(llama, lambda: now[0], ahead=True)
    session = opened(engine, tree=TREE.model_copy(update={"sharpening": 5.0}))  # nothing is likely
    engine.draft(session, (), 2, SHAPE, ahead=True)
    now[0] = 100
    engine.draft(session, (), 3, SHAPE, ahead=True)
    for now[0], begins in ((189, True), (191, False), (150, False)):
        engine._times = engine._ahead._times = PassTimes()
        engine._times.add(1, 10)
        assert bool(engine.grow_all_ahead([session])) == begins


def test_a_tree_that_survived_is_offered_without_the_passes_that_hardly_matter(
    llama: LanguageModel,
) -> None:
    """If all that is left unexpanded is unlikely, the policy's passes over it are left out; the
    same tree without growth ahead gets them."""
    passes = []
    for ahead in (True, False):
        engine = drafter(llama, lambda: 0, ahead=True)
        session = opened(engine, tree=TREE.model_copy(update={"sharpening": 0.2}))
        first = engine.draft(session, (), 2, SHAPE, ahead=ahead)
        while engine.grow_all_ahead([session]):
            pass
        best = int(
            session.tree.tokens[int(np.argmax(session.tree.scores[session.tree.parents == ROOT]))]
        )
        proposal = engine.draft(session, (), best, SHAPE, ahead=ahead)
        assert len(first.tree) == len(proposal.tree) == SHAPE.nodes
        passes.append(proposal.grown)
    assert passes[0] == 0 < passes[1]


def test_a_token_that_was_hidden_from_the_policy_is_a_hit_and_what_grew_below_it_is_offered(
    llama: LanguageModel,
) -> None:
    engine = drafter(llama, lambda: 0, ahead=True)
    session, narrow = (
        opened(engine, tree=TREE.model_copy(update={"sharpening": 3.0})),
        Shape(12, 4, 2),
    )
    first = engine.draft(session, (), 2, narrow, ahead=True)
    while engine.grow_all_ahead([session]):
        pass
    tree = session.tree
    unseen = next(
        node
        for node in range(len(tree))
        if tree.levels[node] == 1 and tree.ranks[node] >= narrow.width and tree.is_expanded(node)
    )
    assert max(len(below) for below in first.tree.children.values()) <= narrow.width
    waits = engine.draft(session, (), int(tree.tokens[unseen]), Shape(2, 1, 2), ahead=True)
    assert (waits.hit, waits.grown, len(waits.tree)) == (True, 0, 2)


def test_growth_ahead_goes_on_only_where_it_was_ordered_and_until_its_rows_are_used_up(
    llama: LanguageModel,
) -> None:
    engine = drafter(llama, lambda: 0, ahead=True)
    session = opened(
        engine, tree=TreeSettings(policy="dynamic", gamma=4, depth=2, width=2), capacity=40
    )
    assert not engine.grow_all_ahead([session])
    engine.draft(session, (), 2, Shape(4, 2, 4), ahead=False)
    assert not engine.grow_all_ahead([session])
    engine.draft(session, (), 3, Shape(4, 2, 4), ahead=True)
    passes = 0
    while engine.grow_all_ahead([session]):
        passes += 1
    assert session.tree.rows_used == session.rows_ahead == 8 * 4
    assert not engine.grow_all_ahead([session])
    later = engine.draft(session, (), int(session.tree.tokens[0]), Shape(4, 2, 4))
    assert later.ahead > 4 * passes
    assert len(later.passes) >= passes > 4
    assert all(1 <= rows <= 4 for rows, _ in later.passes)
    assert not engine.grow_all_ahead([session])


def test_what_is_drawn_at_random_never_grows_ahead(llama: LanguageModel) -> None:
    engine = drafter(llama, ahead=True)
    sampling, tree = (
        SAMPLED.model_copy(update={"acceptance": "rejection"}),
        TREE.model_copy(update={"policy": "static"}),
    )
    session = opened(engine, sampling=sampling, tree=tree)
    proposal = engine.draft(session, (), 2, SHAPE, price=Price(rate=1e9, floor=0.5), ahead=True)
    assert len(proposal.tree) > 4
    assert not engine.grow_all_ahead([session])
    assert engine.draft(session, (), proposal.tree.tokens[0], SHAPE).hit is False


def test_ahead_too_no_level_is_drafted_that_the_sequence_or_the_context_has_no_place_for(
    tmp_path: Path,
) -> None:
    for model, capacity in (
        (with_context(tmp_path / "a", 60), len(PROMPT) + 4),
        (with_context(tmp_path / "b", len(PROMPT) + 2), CAPACITY),
    ):
        engine = drafter(model, ahead=True)
        session = opened(engine, capacity=capacity)
        for token in range(6):
            engine.draft(session, (), token, Shape(4, 1, 3), ahead=True)
            while engine.grow_all_ahead([session]):
                pass
            reach = min(capacity - len(session.log) - 1, session.room - len(session.log) + 1)
            assert max(session.tree.levels, default=0) == max(reach, 0)


@pytest.mark.parametrize("error", [MemoryError, IndexError])
def test_a_pass_ahead_that_fails_leaves_the_tree_as_it_was(
    llama: LanguageModel, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """A pass for which memory runs out is left out, and is no failure."""

    def fail(*arguments: object, **named: object) -> None:
        raise error

    engine = drafter(llama, ahead=True)
    session = opened(engine)
    proposal = engine.draft(session, (), 2, SHAPE, ahead=True)
    engine.grow_all_ahead([session])
    with monkeypatch.context() as patch:
        patch.setattr(llama, "forward", fail)
        with nullcontext() if error is MemoryError else pytest.raises(error):
            engine.grow_all_ahead([session])
    assert not engine.grow_all_ahead([session])
    check_against_a_fresh_session(llama, session, GREEDY)
    path = proposal.tree.path(len(proposal.tree) - 1)
    assert engine.draft(session, path, 5, SHAPE, ahead=True).ahead > 0
    check_against_a_fresh_session(llama, session, GREEDY)


# -- prices ----------------------------------------------------------------------------------------


def test_at_too_high_a_price_nothing_is_grown_and_a_rate_of_nothing_grows_what_the_policy_asks_for(
    llama: LanguageModel,
) -> None:
    tree = TREE.model_copy(update={"policy": "goodput"})
    free, priced = drafter(llama), drafter(llama)
    expected = free.draft(opened(free, tree=tree), (), 2, SHAPE)
    assert priced.draft(opened(priced, tree=tree), (), 2, SHAPE, price=Price(rate=0.0)) == expected
    session = opened(priced, tree=tree)
    nothing = priced.draft(session, (), 2, SHAPE, price=Price(rate=1e9))
    assert (nothing.tree, nothing.grown, nothing.passes) == (TokenTree(), 0, ())
    assert (
        priced.draft(session, (), 3, SHAPE).tree
        == free.draft(opened(free, tree=tree, prompt=[*PROMPT, 2]), (), 3, SHAPE).tree
    )


def test_the_dearer_a_pass_the_fewer_of_them(llama: LanguageModel) -> None:
    """A pass takes a millisecond whatever its rows."""
    grown = []
    for rate in (0.0, 20.0, 100.0, 400.0, 700.0, 900.0):
        ticks = iter(range(0, 10**12, 10**6))
        engine = drafter(llama, clock=lambda ticks=ticks: next(ticks))
        session = opened(
            engine, tree=TREE.model_copy(update={"policy": "goodput", "sharpening": 0.3})
        )
        engine._times.add(1, 10**6)
        proposal = engine.draft(session, (), 2, Shape(40, 8, 4), price=Price(rate=rate))
        grown.append(len(proposal.passes))
        assert all(duration_ns == 10**6 for _, duration_ns in proposal.passes)
    assert grown == sorted(grown, reverse=True)
    assert grown[0] > grown[2] > grown[-1] == 0


def test_what_is_less_likely_than_the_floor_is_neither_offered_nor_expanded(
    llama: LanguageModel,
) -> None:
    for policy in ("goodput", "dynamic", "static", "beam", "budget"):
        engine = drafter(llama)
        session = opened(engine, tree=TREE.model_copy(update={"policy": policy, "sharpening": 0.5}))
        proposal = engine.draft(session, (), 2, SHAPE, price=Price(floor=0.05))
        assert 0 < len(proposal.tree) <= SHAPE.nodes
        assert min(proposal.scores) >= math.log(0.05)
        expanded = np.flatnonzero(session.tree.rows != NO_ROW)
        assert len(expanded)
        assert session.tree.scores[expanded].min() >= math.log(0.05)
        proposal.tree.check(VOCABULARY)


def test_the_chance_of_a_pass_follows_the_verdicts(llama: LanguageModel) -> None:
    engine = drafter(llama)
    found, missed = opened(engine), opened(engine)
    for _ in range(8):
        tree = found.tree
        engine.draft(found, (), int(tree.tokens[0]) if len(tree) else 2, SHAPE)
        engine.draft(
            missed,
            (),
            next(token for token in range(VOCABULARY) if missed.tree.child(ROOT, token) is None),
            SHAPE,
        )
    assert missed.chance.value < START < found.chance.value
