"""The drafter against plain causal passes over every path of its tree."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.errors import RequestError
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafter import Drafter, DraftSession, Proposal
from dovetail.workers.speculation.growth import NO_ROW, Shape
from tests.support.drafts import VOCABULARY, plain_choice, plain_logits, random_llama

MODEL = random_llama()
KEY = bytes(range(16))
PROMPT = [3, 1, 4, 1, 5]
SHAPE = Shape(12, 4, 4)
TREE = TreeSettings(gamma=12, depth=4, width=4)
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0, top_k=20)
CAPACITY = 90


def drafter(model=MODEL, clock: Callable[[], int] | None = None) -> Drafter:
    return Drafter(model, Spans()) if clock is None else Drafter(model, Spans(), clock=clock)


def opened(engine: Drafter, *, sampling: Sampling = GREEDY, prompt: list[int] = PROMPT, capacity: int = CAPACITY, tree: TreeSettings = TREE) -> DraftSession:
    return engine.open(prompt, capacity=capacity, vocabulary_size=VOCABULARY, key=KEY, sampling=sampling, tree=tree)


def check_against_plain_passes(engine: Drafter, session: DraftSession) -> None:
    """Every expanded node has the children, scores and cache rows that a plain pass over its path gives."""
    tree, cache, log = session.tree, session.cache, session.log
    assert cache.length == len(log) if tree.root_expanded else cache.length < len(log)
    for node in range(len(tree)):
        way, above = [], node
        while above != ROOT:
            way.insert(0, above)
            above = int(tree.parents[above])
        path = log + [int(tree.tokens[n]) for n in way]
        parent = int(tree.parents[node])
        ranking = engine._ranking(session, plain_logits(engine.model, path[:-1])[None], int(tree.levels[node]) - 1)[0]
        gain = torch.log_softmax(ranking / session.sharpening, -1)[path[-1]]
        assert tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent]) == pytest.approx(float(gain), abs=2e-3)
        if tree.rows[node] != NO_ROW:
            alone = engine.model.new_cache(len(path))
            from dovetail.workers.models.attention import Segment

            engine.model.forward(torch.tensor(path), torch.arange(len(path)), [Segment(alone, 0, len(path))])
            slot = cache.length + int(tree.rows[node])
            torch.testing.assert_close(cache.rows[:, :, :, slot], alone.rows[:, :, :, len(path) - 1], rtol=1e-3, atol=1e-3)


@given(st.integers(0, 1 << 32), st.booleans())
@settings(deadline=None, max_examples=12)
def test_every_node_is_what_a_plain_pass_over_its_path_gives_wherever_the_root_moves(seed: int, sampled: bool) -> None:
    random = np.random.default_rng(seed)
    engine = drafter()
    session = opened(engine, sampling=SAMPLED if sampled else GREEDY)
    accepted: tuple[int, ...] = ()
    bonus = int(random.integers(VOCABULARY))
    for _ in range(5):
        known = session.tree.child(session.offered[accepted[-1]] if accepted else ROOT, bonus)
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        assert proposal.hit == (known is not None)
        proposal.tree.check(VOCABULARY)
        check_against_plain_passes(engine, session)
        path = proposal.tree.path(int(random.integers(len(proposal.tree))))
        accepted = path[: random.integers(len(path) + 1)]
        last = session.offered[accepted[-1]] if accepted else ROOT
        below = session.tree.tokens[session.tree.parents == last]
        bonus = int(random.choice(below)) if len(below) and random.random() < 0.7 else int(random.integers(VOCABULARY))


def follow(engine: Drafter, session: DraftSession, sampling: Sampling, target, rounds: int) -> tuple[list[int], list[tuple[Proposal, int]]]:
    """The tokens that `target` chooses, and every proposal with the number of its nodes that were accepted."""
    log, accepted, history = list(PROMPT), (), []
    bonus = plain_choice(target, log, sampling, KEY)
    for _ in range(rounds):
        log.append(bonus)
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        node, path = ROOT, []
        while True:
            bonus = plain_choice(target, log, sampling, KEY)
            if bonus not in proposal.tree.children.get(node, {}):
                break
            node = proposal.tree.children[node][bonus]
            path.append(node)
            log.append(bonus)
        accepted = tuple(path)
        history.append((proposal, len(path)))
    return log, history


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_equal_to_its_target_is_accepted_to_its_full_depth_every_round(sampling: Sampling) -> None:
    engine = drafter()
    _, history = follow(engine, opened(engine, sampling=sampling), sampling, MODEL, rounds=6)
    assert [count for _, count in history] == [SHAPE.depth] * 6


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_what_a_session_proposes_does_not_depend_on_the_sessions_beside_it(sampling: Sampling) -> None:
    target = random_llama(seed=1)
    alone = drafter()
    expected = follow(alone, opened(alone, sampling=sampling), sampling, target, rounds=4)
    shared = drafter()
    mine, other = opened(shared, sampling=sampling), opened(shared, sampling=GREEDY, prompt=[9, 9])
    original = shared.draft

    def interleaved(*arguments, **options):
        original(other, (), 7, SHAPE)
        return original(*arguments, **options)

    shared.draft = interleaved
    assert follow(shared, mine, sampling, target, rounds=4) == expected


def test_an_order_bounds_nodes_depth_and_width() -> None:
    for shape in (Shape(0, 3, 3), Shape(1, 4, 4), Shape(5, 1, 9), Shape(7, 3, 1), Shape(30, 4, 3)):
        engine = drafter()
        tree = engine.draft(opened(engine), (), 2, shape).tree
        assert len(tree) <= shape.nodes
        assert max(tree.depths, default=0) <= shape.depth
        assert max((len(c) for c in tree.children.values()), default=0) <= shape.width


def test_rounds_without_a_proposal_are_caught_up_with_later() -> None:
    engine = drafter()
    session = opened(engine)
    for token in (7, 8, 9):
        assert len(engine.draft(session, (), token, Shape(0, 4, 4)).tree) == 0
    late = engine.draft(session, (), 10, SHAPE)
    fresh = opened(engine, prompt=[*PROMPT, 7, 8, 9])
    assert late.tree == engine.draft(fresh, (), 10, SHAPE).tree


def test_growth_ends_with_the_first_level_that_ends_after_the_deadline() -> None:
    ticks = iter(range(100))
    engine = drafter(clock=lambda: next(ticks))
    assert max(engine.draft(opened(engine), (), 2, Shape(40, 6, 4), deadline_ns=1).tree.depths) == 3


def test_a_surviving_tree_is_offered_at_once_though_the_deadline_allows_one_level() -> None:
    engine = drafter(clock=lambda: 10)
    session = opened(engine)
    first = engine.draft(session, (), 2, Shape(40, 4, 4))
    token = first.tree.tokens[0]
    second = engine.draft(session, (), token, Shape(40, 4, 4), deadline_ns=5)
    assert second.hit
    assert max(second.tree.depths) >= 3


def test_near_the_end_of_the_sequence_no_level_is_drafted_that_it_has_no_place_for() -> None:
    engine = drafter()
    session = opened(engine, capacity=len(PROMPT) + 5)
    depths = [max(engine.draft(session, (), token, Shape(12, 9, 2)).tree.depths, default=0) for token in range(6)]
    assert depths == [3, 2, 1, 0, 0, 0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_with_the_shorter_context_proposes_fewer_levels_and_then_nothing(sampling: Sampling) -> None:
    engine = drafter(random_llama(context=10))
    session = opened(engine, sampling=sampling)
    depths = [max(engine.draft(session, (), token, Shape(12, 4, 2)).tree.depths, default=0) for token in range(8)]
    assert depths == [4, 4, 3, 2, 1, 0, 0, 0]
    while engine.prepare(session):
        pass


def test_a_prompt_beyond_the_drafts_context_opens_a_session_that_proposes_nothing() -> None:
    engine = drafter(random_llama(context=4))
    session = opened(engine)
    assert not session.readable
    assert engine.draft(session, (), 2, SHAPE) == Proposal(engine.draft(session, (), 3, SHAPE).tree, (), 0, False)
    assert len(session.log) == len(PROMPT) + 2


def test_a_prompt_of_many_chunks_is_read_like_one_of_a_single_pass() -> None:
    model = random_llama(context=700)
    engine, prompt = drafter(model), np.random.default_rng(0).integers(VOCABULARY, size=600).tolist()
    session = opened(engine, prompt=prompt, capacity=650)
    tree = engine.draft(session, (), 2, Shape(1, 1, 1)).tree
    assert tree.tokens == (plain_choice(model, [*prompt, 2], GREEDY, KEY),)


def test_where_the_cache_has_no_slots_left_the_tree_stops_growing() -> None:
    engine = drafter()
    session = opened(engine, tree=TreeSettings(gamma=2, depth=1, width=1))
    proposal = engine.draft(session, (), 2, Shape(40, 6, 4))
    assert session.cache.length + session.tree.rows_used <= session.cache.capacity
    assert 0 < len(proposal.tree) <= 40
    session.cache.capacity = session.cache.length + session.tree.rows_used
    follow_up = engine.draft(session, (0,), 60, Shape(40, 6, 4))
    assert len(follow_up.tree) > 0


def test_ids_beyond_the_targets_vocabulary_are_never_proposed() -> None:
    engine = drafter()
    session = engine.open(PROMPT, capacity=CAPACITY, vocabulary_size=10, key=KEY, sampling=SAMPLED, tree=TREE)
    assert max(engine.draft(session, (), 2, Shape(60, 3, 10)).tree.tokens) < 10


def test_a_token_that_the_draft_has_no_row_for_is_refused() -> None:
    with pytest.raises(RequestError, match="token 61 is beyond the draft's vocabulary of 61"):
        drafter().check_tokens([5, VOCABULARY])


def test_noise_is_computed_ahead_and_changes_nothing() -> None:
    engine = drafter()
    prepared, unprepared = opened(engine, sampling=SAMPLED), opened(engine, sampling=SAMPLED)
    while engine.prepare(prepared):
        pass
    assert engine.draft(prepared, (), 2, SHAPE) == engine.draft(unprepared, (), 2, SHAPE)
    assert not engine.prepare(opened(engine))
