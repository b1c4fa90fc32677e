"""The fit of sharpening and noise share, against data drawn from known ones and against likelihoods
in plain numbers."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import ROOT
from dovetail.workers.drafters.model import SHARPENING, Drafter, DraftSession
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.speculation.growth import GrowingTree, likeliest
from dovetail.workers.speculation.noise import Noise
from dovetail.workers.speculation.proposal import Proposal, Shape
from dovetail.workers.speculation.score_calibration import (
    BACKLOG,
    CLASSES,
    GRID,
    LEAST,
    MEMORY,
    NO_CHILD,
    SHARES,
    WORK,
    Expectations,
    Observation,
    Scale,
    ScoreCalibration,
    class_of,
    fixed,
    peak,
)
from support.cases import everyday
from support.models import VOCABULARY
from support.opening import opening

SIZE, WIDTH = 40, 6
UNKNOWN, GREEDY = Scale(1.0, 1.0), Sampling()


def drawn(
    truth: Scale, count: int, *, sampled: bool, depth_class: int = 0, seed: int = 0
) -> list[Observation]:
    """Nodes whose outcome is drawn from softmax((logits + share * noise) / sharpening); the
    children are the likeliest as the draft begins."""
    chance = np.random.default_rng(seed)
    found = []
    for position in range(count):
        own = Noise(bytes([seed] * 16), position, SIZE)
        logits, noise = chance.normal(0.0, 2.0, SIZE), own.row.double().numpy()
        z = (logits + (truth.noise_share * noise if sampled else 0.0)) / truth.sharpening
        law = np.exp(z - z.max())
        children = np.argsort(-(logits + (noise if sampled else 0.0)))[:WIDTH].astype(np.int32)
        choice = int(chance.choice(SIZE, p=law / law.sum()))
        found.append(
            Observation(
                depth_class,
                torch.tensor(logits, dtype=torch.float32),
                Sampling(temperature=1.0 if sampled else 0.0),
                own if sampled else None,
                children,
                choice,
            )
        )
    return found


def learned(observations: Sequence[Observation], start: Scale = UNKNOWN) -> ScoreCalibration:
    score_calibration = ScoreCalibration(start)
    learn(score_calibration, observations)
    return score_calibration


def learn(score_calibration: ScoreCalibration, observations: Sequence[Observation]) -> None:
    for observation in observations:
        score_calibration.add([observation])
        while score_calibration.learn():
            pass


def plain_likelihood(observation: Observation, scale: Scale) -> float:
    """The logarithm of the outcome's probability by its definition, in loops."""
    logits = [
        value / (observation.sampling.temperature or 1.0) for value in observation.logits.tolist()
    ]
    noise = [0.0] * len(logits) if observation.noise is None else observation.noise.row.tolist()
    z = [
        (value + scale.noise_share * g) / scale.sharpening
        for value, g in zip(logits, noise, strict=True)
    ]
    total = math.log(math.fsum(math.exp(value - max(z)) for value in z)) + max(z)
    children = [token for token in observation.children.tolist() if token != NO_CHILD]
    if observation.choice in children:
        return z[observation.choice] - total
    return math.log(max(LEAST, 1.0 - math.fsum(math.exp(z[token] - total) for token in children)))


@pytest.mark.parametrize("truth", [0.1, 2.2])
def test_greedy_the_sharpening_comes_to_the_one_that_the_choices_were_drawn_with(
    truth: float,
) -> None:
    found = learned(drawn(Scale(truth), 1500, sampled=False)).scales(sampled=False)[0]
    assert found.sharpening == pytest.approx(truth, rel=0.12)


@pytest.mark.parametrize(
    "truth",
    everyday(
        [Scale(0.5, 0.25), Scale(1.2, 0.5), Scale(0.8, 0.75), Scale(0.5, 1.0)], Scale(0.8, 0.75)
    ),
)
def test_sampled_the_share_of_the_noise_is_found_with_it(truth: Scale) -> None:
    found = learned(drawn(truth, 500, sampled=True), Scale(1.0, 0.75)).scales(sampled=True)[0]
    assert found.noise_share == truth.noise_share
    assert found.sharpening == pytest.approx(truth.sharpening, rel=0.15)


def test_no_other_point_is_likelier_than_the_one_found() -> None:
    observations = drawn(Scale(0.7, 0.5), 60, sampled=True)
    found = learned(observations, Scale(1.0, 0.75)).scales(sampled=True)[0]
    weights = (1 - 1 / MEMORY) ** np.arange(len(observations))[::-1]

    def posterior(scale: Scale) -> float:
        past = (
            (1 - 1 / MEMORY) ** len(observations)
            * -16.0
            * (math.log(scale.sharpening) ** 2 + (scale.noise_share - 0.75) ** 2)
        )
        return past + sum(
            weight * plain_likelihood(node, scale)
            for weight, node in zip(weights, observations, strict=True)
        )

    every = [Scale(sharpening, share) for share in SHARES for sharpening in GRID.tolist()]
    assert posterior(found) >= max(map(posterior, every)) - 1e-3


@given(
    st.lists(st.floats(-20, 20, width=32) | st.just(-math.inf), min_size=3, max_size=9).filter(
        lambda logits: max(logits) > -math.inf
    ),
    st.sampled_from([0.0, 0.7, 1.0]),
    st.sampled_from(SHARES),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_likelihoods_are_those_of_the_definition(
    logits: list[float], temperature: float, share: float, data: st.DataObject
) -> None:
    finite = [token for token, logit in enumerate(logits) if logit > -math.inf]
    children = [*data.draw(st.lists(st.sampled_from(finite), unique=True)), NO_CHILD]
    position = data.draw(st.integers(0, 1 << 20))
    noise = Noise(bytes(16), position, len(logits)) if temperature else None
    choice = data.draw(st.integers(0, len(logits) - 1))
    observation = Observation(
        0,
        torch.tensor(logits),
        Sampling(temperature=temperature),
        noise,
        np.array(children, np.int32),
        choice,
    )
    expected = [
        plain_likelihood(observation, Scale(sharpening, share)) for sharpening in GRID.tolist()
    ]
    found = observation.likelihoods(observation.z(share), GRID)
    np.testing.assert_allclose(np.exp(found), np.exp(expected), rtol=1e-3, atol=2e-6)


def test_a_miss_says_how_little_was_left_and_no_less_than_a_millionth() -> None:
    logits = torch.tensor([9.0, 0.0, -9.0])
    hit, miss, sure = (
        Observation(0, logits, GREEDY, None, np.array(c, np.int32), y)
        for c, y in [([0], 0), ([0], 1), ([0, 1, 2], 7)]
    )
    assert [
        node.likelihoods(node.z(1.0), np.array([1.0]))[0] for node in (hit, miss, sure)
    ] == pytest.approx([-1.234e-4, -9.0001, math.log(LEAST)], rel=1e-3)


def test_what_was_long_ago_is_forgotten() -> None:
    score_calibration = learned(drawn(Scale(0.2), MEMORY, sampled=False))
    learn(score_calibration, drawn(Scale(1.5), 2 * MEMORY, sampled=False, seed=1))
    assert score_calibration.scales(sampled=False)[0].sharpening == pytest.approx(1.5, rel=0.15)


@given(st.floats(0.06, 2.5), st.sampled_from(SHARES))
@settings(deadline=None, max_examples=30)
def test_before_anything_is_learned_the_scale_is_the_one_it_starts_with(
    sharpening: float, share: float
) -> None:
    for sampled in (False, True):
        for scale in ScoreCalibration(Scale(sharpening, share)).scales(sampled=sampled):
            assert scale.sharpening == pytest.approx(sharpening)
            assert scale.noise_share == share


def test_few_nodes_move_it_little() -> None:
    found = learned(drawn(Scale(0.1), 3, sampled=False)).scales(sampled=False)[0]
    assert 0.6 < found.sharpening < 1.0


def test_greedy_and_sampled_and_every_depth_class_learn_by_themselves() -> None:
    score_calibration = learned(
        [
            *drawn(Scale(0.3), 200, sampled=False, depth_class=1),
            *drawn(Scale(0.3, 0.5), 100, sampled=True, depth_class=3),
        ]
    )
    assert score_calibration.nodes(sampled=False) == (0, 200, 0, 0)
    assert score_calibration.nodes(sampled=True) == (0, 0, 0, 100)
    moved = [
        [
            abs(math.log(scale.sharpening)) > 0.1
            for scale in score_calibration.scales(sampled=sampled)
        ]
        for sampled in (False, True)
    ]
    assert moved == [[False, True, False, False], [False, False, False, True]]


def test_levels_one_and_two_are_classes_three_and_four_another_and_all_below_the_last() -> None:
    assert class_of(np.array([1, 2, 3, 4, 5, 8, 9, 100], np.int32)).tolist() == [
        0,
        1,
        2,
        2,
        3,
        3,
        3,
        3,
    ]
    assert len(fixed(UNKNOWN)) == CLASSES


def test_a_large_vocabulary_is_learned_from_in_bits_and_to_the_same() -> None:
    logits = torch.randn(WORK // 4, generator=torch.Generator().manual_seed(0))
    node = Observation(0, logits, GREEDY, None, np.array([5, 6], np.int32), 5)
    score_calibration = ScoreCalibration(UNKNOWN)
    score_calibration.add([node])
    bits = sum(1 for _ in iter(score_calibration.learn, False))
    assert bits == len(GRID) / 4 + 1
    assert score_calibration.scales(sampled=False) == learned([node]).scales(sampled=False)
    assert score_calibration.scales(sampled=False)[0].sharpening > 1.0


def test_a_round_for_which_there_is_no_time_is_left_out_whole() -> None:
    short = drawn(UNKNOWN, 3, sampled=False)
    long = Observation(0, torch.zeros(1).expand(BACKLOG), GREEDY, None, np.array([0], np.int32), 0)
    score_calibration = ScoreCalibration(UNKNOWN)
    for observations in (short[:2], [long], short):
        score_calibration.add(observations)
    while score_calibration.learn():
        pass
    assert score_calibration.nodes(sampled=False)[0] == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_numbers_teach_nothing(bad: float) -> None:
    observations = drawn(Scale(0.3), 50, sampled=False)
    spoilt = Observation(0, torch.full((SIZE,), bad), GREEDY, None, np.array([0], np.int32), 0)
    assert learned([*observations, spoilt, *observations]).scales(sampled=False) == learned(
        [*observations, *observations]
    ).scales(sampled=False)


@given(st.floats(-0.49, 0.49), st.floats(0.01, 100.0))
@settings(deadline=None)
def test_a_parabola_is_highest_at_its_peak(offset: float, bend: float) -> None:
    values = -bend * (np.arange(-1, 2) - offset) ** 2
    assert peak(values, 1) == pytest.approx(offset, abs=1e-9)
    assert peak(values, 0) == peak(values, 2) == peak(np.zeros(3), 1) == 0.0


# -- whose outcome is known ------------------------------------------------------------------------


def grown(expectations: Expectations, expanded: Sequence[tuple[int, ...]]) -> GrowingTree:
    """A tree in which the nodes at the ends of these paths were expanded in turn: the children of
    each are the tokens 0, 1 and 2, and it has itself noted."""
    tree = GrowingTree()
    for path in expanded:
        node = ROOT
        for token in path:
            child = tree.child(node, token)
            assert child is not None
            node = child
        expand(expectations, tree, node, float(len(path)))
    return tree


def expand(expectations: Expectations, tree: GrowingTree, node: int, mark: float) -> None:
    """`mark`: the last logit, by which the pass is known again."""
    nodes, logits = np.array([node]), torch.tensor([[3.0, 2.0, 1.0, mark - 9.0]])
    tokens, gains = likeliest(logits, 3)
    expectations.note(tree, nodes, logits, None, tokens, gains)
    tree.add_children(nodes, tokens, gains)


def told(observations: Sequence[Observation]) -> list[tuple[int, float, int]]:
    """(depth class, mark, choice) of each."""
    return [(node.depth_class, float(node.logits[-1]) + 9.0, node.choice) for node in observations]


def test_the_root_and_the_nodes_on_the_target_s_path_are_known_as_far_as_they_were_expanded() -> (
    None
):
    expectations = Expectations(GREEDY)
    grown(expectations, [(), (0,), (1,), (1, 2)])
    assert told(expectations.settle((1, 2, 7))) == [(0, 0.0, 1), (1, 1.0, 2), (2, 2.0, 7)]
    assert told(expectations.settle((5,))) == []


def test_what_was_expanded_is_known_by_its_path_after_the_tree_is_pruned_or_cleared() -> None:
    for change in (lambda tree: tree.prune(1), GrowingTree.clear):
        expectations = Expectations(GREEDY)
        change(grown(expectations, [(), (0,), (1,), (2,)]))
        assert told(expectations.settle((2, 1))) == [(0, 0.0, 2), (1, 1.0, 1)]


def test_a_choice_that_is_no_child_is_known_too_and_what_lies_below_is_not() -> None:
    expectations = Expectations(GREEDY)
    grown(expectations, [(), (0,), (0, 0)])
    assert told(expectations.settle((0, 3, 0))) == [(0, 0.0, 0), (1, 1.0, 3)]


def test_what_lies_below_the_new_root_is_known_later_by_the_level_it_was_ranked_at() -> None:
    expectations = Expectations(GREEDY)
    tree = grown(expectations, [(), (0,), (0, 1), (0, 1, 2), (2,)])
    assert told(expectations.settle((0, 1))) == [(0, 0.0, 0), (1, 1.0, 1)]
    last = tree.child(0, 1)
    assert last is not None
    tree.move_root(last, 3)
    expand(expectations, tree, int(np.flatnonzero((tree.levels == 2) & (tree.tokens == 1))[0]), 8.0)
    assert told(expectations.settle((2, 1, 3))) == [(2, 2.0, 2), (2, 3.0, 1), (2, 8.0, 3)]


def test_a_node_that_was_ranked_anew_counts_as_it_was_ranked_last() -> None:
    expectations = Expectations(GREEDY)
    tree = grown(expectations, [(), (0,)])
    expand(expectations, tree, ROOT, 5.0)
    assert told(expectations.settle((0, 0))) == [(0, 5.0, 0), (1, 1.0, 0)]


def test_of_a_tree_that_was_thrown_away_nothing_is_learned() -> None:
    expectations = Expectations(GREEDY)
    tree = grown(expectations, [(), (0,), (0, 0)])
    expectations.settle((0,))
    tree.clear()
    expand(expectations, tree, ROOT, 5.0)
    assert told(expectations.settle((0, 0))) == [(0, 5.0, 0)]


# -- in an engine ----------------------------------------------------------------------------------

KEY, PROMPT, SHAPE = bytes(range(16)), [3, 1, 4, 1, 5], Shape(12, 5, 4)
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.2),
    Sampling(temperature=0.8, top_k=12, repetition_penalty=1.3),
]


def opened(engine: Drafter, sampling: Sampling, **tree: object) -> DraftSession:
    settings = TreeSettings(policy="dynamic", gamma=12, depth=5, width=4).model_copy(update=tree)
    return engine.open(
        opening(
            1,
            PROMPT,
            capacity=90,
            vocabulary_size=VOCABULARY,
            key=KEY,
            sampling=sampling,
            tree=settings,
        )
    )


def play(
    engine: Drafter, session: DraftSession, rounds: int, seed: int
) -> tuple[list[Proposal], int]:
    """Rounds with random verdicts and time to learn between them; what was proposed, and how many
    nodes had been expanded that turned out to be on the path."""
    chance, accepted, bonus, known = np.random.default_rng(seed), (), 2, 0
    proposals = []
    for _ in range(rounds):
        proposal = engine.draft(session, accepted, bonus, SHAPE)
        proposals.append(proposal)
        path = proposal.tree.path(int(chance.integers(len(proposal.tree))))
        accepted, bonus = path[: chance.integers(len(path) + 1)], int(chance.integers(VOCABULARY))
        expanded = {int(parent) for parent in session.tree.parents}
        known += sum(
            node in expanded for node in (ROOT, *(session.offered[node] for node in accepted))
        )
        while engine.prepare(session) or engine.learn():
            pass
    engine.draft(session, accepted, bonus, SHAPE)
    while engine.prepare(session) or engine.learn():
        pass
    return proposals, known


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "processed"])
@pytest.mark.parametrize("policy", ["dynamic", "goodput", "static"])
def test_a_session_teaches_its_engine_every_outcome_that_it_learns_of(
    llama: LanguageModel, sampling: Sampling, policy: str
) -> None:
    engine = Drafter(llama, Spans())
    session = opened(engine, sampling, policy=policy)
    proposals, known = play(engine, session, 6, seed=3)
    assert sum(engine.score_calibration.nodes(sampled=sampling.temperature > 0)) == known > 6
    assert sum(engine.score_calibration.nodes(sampled=sampling.temperature == 0)) == 0
    for proposal in proposals:
        above = [
            0.0 if parent == ROOT else proposal.scores[parent] for parent in proposal.tree.parents
        ]
        assert all(score <= parent for score, parent in zip(proposal.scores, above, strict=True))
        assert all(parent < node for node, parent in enumerate(proposal.tree.parents))


def test_what_is_learned_counts_from_the_next_root_on(llama: LanguageModel) -> None:
    engine = Drafter(llama, Spans())
    session, begun = (
        opened(engine, Sampling()),
        ScoreCalibration(Scale(SHARPENING)).scales(sampled=False),
    )
    play(engine, session, 1, seed=4)
    assert (
        session.ranking.scales
        != (learned := engine.score_calibration.scales(sampled=False))
        != begun
    )
    engine.draft(session, (), 3, SHAPE)
    assert session.ranking.scales == learned


def test_a_draft_that_is_never_right_becomes_less_sure_in_every_session(
    llama: LanguageModel,
) -> None:
    engine = Drafter(llama, Spans())
    session = opened(engine, Sampling())
    for _ in range(40):
        proposal = engine.draft(
            session, (), max(set(range(VOCABULARY)) - set(session.tree.tokens.tolist())), SHAPE
        )
        while engine.prepare(session) or engine.learn():
            pass
    first = engine.score_calibration.scales(sampled=False)
    assert first[0].sharpening > 1.2 * SHARPENING
    assert np.exp(proposal.scores[0]) < np.exp(
        engine.draft(
            opened(engine, Sampling(), sharpening=SHARPENING), (), session.log[-1], SHAPE
        ).scores[0]
    )
    assert opened(engine, Sampling()).ranking.scales == first
    assert opened(engine, Sampling(temperature=1.0)).ranking.scales == ScoreCalibration(
        Scale(SHARPENING)
    ).scales(sampled=True)


def test_a_sharpening_that_was_given_stays_and_nothing_is_learned(llama: LanguageModel) -> None:
    engine = Drafter(llama, Spans())
    session = opened(engine, Sampling(temperature=1.0), sharpening=0.7)
    play(engine, session, 4, seed=2)
    assert session.ranking.scales == fixed(Scale(0.7, 1.0))
    assert engine.score_calibration.nodes(sampled=True) == (0,) * CLASSES


def test_where_children_are_drawn_nothing_is_learned(llama: LanguageModel) -> None:
    engine = Drafter(llama, Spans())
    session = opened(engine, Sampling(temperature=1.0, acceptance="rejection"), policy="static")
    play(engine, session, 4, seed=2)
    assert (
        engine.score_calibration.nodes(sampled=True)
        == engine.score_calibration.nodes(sampled=False)
        == (0,) * CLASSES
    )


def test_children_of_several_levels_are_ranked_each_by_its_scale(llama: LanguageModel) -> None:
    engine = Drafter(llama, Spans())
    session = opened(engine, Sampling(temperature=1.0))
    proposal = engine.draft(session, (), 2, SHAPE)
    nodes = np.array(
        [ROOT, *(int(np.flatnonzero(session.tree.levels == level)[0]) for level in (1, 3, 2))]
    )
    assert max(proposal.tree.depths) > 3
    session.ranking.scales = (Scale(0.3, 0.5), Scale(2.0, 1.0), Scale(0.5, 0.25), Scale(1.0, 0.75))
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    together = session.ranking.children(logits, session.tree, nodes, len(session.log), 4)
    for row, node in enumerate(nodes):
        alone = session.ranking.children(
            logits[row : row + 1], session.tree, nodes[row : row + 1], len(session.log), 4
        )
        assert together[0][row].tolist() == alone[0][0].tolist(), node
        assert together[1][row].tolist() == alone[1][0].tolist(), node
