"""The estimated costs of passes after what has been seen of them."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.protocol.calibration import ContextCurve, ExpertCosts, RowsSeconds
from dovetail.protocol.experts import Routing
from dovetail.runtime.costs.passes import FIRST_ROWS, KEPT, RowCosts, bucket
from dovetail.runtime.costs.rounds import Average, Lags, Messages, PairCosts

PROFILE = tuple(
    ContextCurve(
        context=context,
        t_v=RowsSeconds(
            rows=(1, 4, 8, 16, 32),
            seconds=tuple(0.02 + 0.001 * rows + 1e-5 * context for rows in (1, 4, 8, 16, 32)),
        ),
    )
    for context in (128, 512, 2048)
)


def seen(
    cost: Callable[[int, float], float],
    passes: list[tuple[int, float]],
    curves: tuple[ContextCurve, ...] = (),
) -> RowCosts:
    costs = RowCosts(curves)
    for rows, context in passes:
        costs.observe(rows, cost(rows, context), context)
    return costs


def test_nothing_is_known_of_nothing() -> None:
    assert not RowCosts().known
    assert RowCosts().at(5) == 0.0
    assert RowCosts().curve() is None
    assert PairCosts().alone_s(context=10) == 0.0


def test_a_profile_is_believed_until_passes_are_seen() -> None:
    costs = RowCosts(PROFILE)
    for rows, context in ((1, 128), (6, 320), (16, 512), (48, 2048), (4, 4096), (4, 16)):
        assert costs.at(rows, context) == pytest.approx(
            0.02 + 0.001 * rows + 1e-5 * max(128, context)
        )


def test_of_two_profiles_at_one_length_of_the_cache_the_last_one_counts() -> None:
    other = ContextCurve(context=512, t_v=RowsSeconds(rows=(1,), seconds=(0.5,)))
    assert RowCosts((*PROFILE, other)).at(6, 512) == pytest.approx(0.5)


def test_a_machine_that_is_slower_than_its_profile_is_slower_for_all_rows() -> None:
    costs = seen(
        lambda rows, context: 1.5 * (0.02 + 0.001 * rows + 1e-5 * context), [(8, 300)] * 10, PROFILE
    )
    for rows in (1, 8, 16, 64):
        assert costs.at(rows, 300) == pytest.approx(1.5 * (0.02 + 0.001 * rows + 0.003), rel=0.03)


def test_what_was_measured_counts_and_what_lies_between_follows() -> None:
    costs = seen(lambda rows, _: 0.02 + 0.001 * rows, [(1, 10), (9, 10), (17, 10)] * 8, PROFILE[:1])
    assert [costs.at(rows, 10) for rows in (1, 5, 9, 13, 17)] == pytest.approx(
        [0.021, 0.025, 0.029, 0.033, 0.037], rel=0.05
    )


def test_without_a_profile_rows_that_were_not_tried_are_thought_cheap_and_beyond_those_that_were_as_dear() -> (  # noqa: E501
    None
):
    costs = seen(lambda rows, _: 0.01 * rows, [(1, 10), (11, 10)] * 4)
    assert 0.01 < costs.at(6, 10) < 0.06
    assert costs.at(21, 10) >= 0.2
    assert costs.at(11, 10) == pytest.approx(0.11)


def test_interruptions_do_not_count() -> None:
    rng = random.Random(3)
    passes = [(rows, 50.0) for rows in (1, 5, 9) for _ in range(KEPT)]
    costs = seen(
        lambda rows, _: (0.02 + 0.001 * rows) * (20.0 if rng.random() < 0.15 else 1.0), passes
    )
    for rows in (1, 5, 9):
        assert costs.at(rows, 50) == pytest.approx(0.02 + 0.001 * rows, rel=0.05)


def test_an_old_state_of_the_machine_is_forgotten() -> None:
    costs = seen(lambda rows, _: 0.01 * rows, [(rows, 50.0) for rows in (1, 5)] * 100)
    for _ in range(KEPT):
        for rows in (1, 5):
            costs.observe(rows, 0.03 * rows, 50.0)
    assert [costs.at(rows, 50) for rows in (1, 5)] == pytest.approx([0.03, 0.15])


def test_passes_get_dearer_with_the_context_as_they_were_seen_to() -> None:
    def cost(rows: int, context: float) -> float:
        return 0.02 + 0.001 * rows + 2e-5 * context

    costs = seen(cost, [(1 + step % 6, 50.0 + step) for step in range(1000)])
    for rows, context in ((1, 1000.0), (4, 2000.0), (6, 600.0)):
        assert costs.at(rows, context) == pytest.approx(cost(rows, context), rel=0.1)


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.floats(1e-6, 10.0), st.floats(0.0, 4096.0)), max_size=40
    ),
    st.booleans(),
    st.floats(0.0, 8192.0),
)
@settings(max_examples=50, deadline=None)
def test_a_pass_over_more_rows_never_takes_less(
    passes: list[tuple[int, float, float]], profiled: bool, context: float
) -> None:
    costs = RowCosts(PROFILE if profiled else ())
    for rows, seconds, where in passes:
        costs.observe(rows, seconds, where)
    table = costs.table(250, context)
    assert table == sorted(table)
    assert min(table) >= 0.0
    assert costs.known == bool(passes or profiled)


def test_numbers_of_rows_are_told_apart_as_far_as_it_matters() -> None:
    assert [bucket(rows) for rows in (1, 2, 31, 32, 33, 34, 70, 1023)] == [
        1,
        2,
        31,
        32,
        32,
        34,
        68,
        992,
    ]


def test_a_round_takes_its_passes_its_hops_and_the_coordinator() -> None:
    pair = PairCosts()
    for _ in range(8):
        pair.target.observe(1, 0.02)
        pair.target.observe(5, 0.03)
    for average, value in (
        (pair.exposed_s, 0.01),
        (pair.draft_hop_s, 0.001),
        (pair.target_hop_s, 0.002),
        (pair.host_s, 0.0005),
        (pair.undrafted_s, 0.0022),
    ):
        average.add(value)
    assert pair.round_s(rows=5, context=0, exposed_s=0.011) == pytest.approx(0.0435)
    assert pair.round_s(rows=5, context=0, exposed_s=0.0) == pytest.approx(0.0322)
    assert pair.alone_s(context=0) == pytest.approx(0.0222)


def test_an_average_starts_with_the_first_value_and_forgets() -> None:
    average = Average(4.0)
    assert not average.known
    average.add(8.0)
    assert average.value == 8.0
    for _ in range(40):
        average.add(2.0)
    assert average.value == pytest.approx(2.0, abs=1e-3)


def test_without_a_profile_a_pass_has_at_most_twice_the_rows_of_the_largest_one_yet() -> None:
    costs = RowCosts()
    assert costs.most_rows == FIRST_ROWS
    for rows in (1, 16, 30):
        costs.observe(rows, 0.01)
    assert costs.most_rows == 60
    assert RowCosts(PROFILE).most_rows > 1024


def test_a_lag_is_that_of_what_was_nearest_in_length_and_longer_for_more() -> None:
    lags = Lags()
    assert lags.expect(100) is None
    for tokens, seconds in ((30, 0.002), (4000, 0.1), (0, 7.0)):
        lags.add(tokens, seconds)
    assert lags.expect(30) == 0.002
    assert lags.expect(60) == 0.004
    assert lags.expect(10) == 0.002
    assert lags.expect(2000) == 0.1
    lags.add(30, 0.003)
    assert lags.expect(30) == 0.003


def test_a_round_without_a_draft_costs_the_same_whoever_asks_and_whatever_is_known_of_such() -> (
    None
):
    costs = PairCosts()
    costs.target.observe(1, 0.02)
    costs.target_hop_s.add(0.001)
    costs.host_s.add(0.0005)
    for host_s in (0.0, 0.0002):
        expected = pytest.approx(0.021 + host_s)
        assert costs.alone_s() == costs.round_s(rows=1, exposed_s=0.0) == expected
        costs.undrafted_s.add(0.0012)


def test_messages_of_a_round_with_a_draft_are_twice_those_of_one_without() -> None:
    messages = Messages(hop_s=0.001, coordinator_s=0.01)
    assert messages.beside_s(drafted=False) == pytest.approx(0.012)
    assert messages.beside_s(drafted=True) == pytest.approx(0.024)
    served = Messages(0.001, 0.01, reply_s=0.002)
    assert served.beside_s(drafted=True) == pytest.approx(0.026), "HTTP sends once a round"
    measured = served.scaled(0.007)
    assert measured.beside_s(drafted=False) == pytest.approx(0.007)
    assert measured.beside_s(drafted=True) == pytest.approx(0.013)


# experts

ROUTING = Routing(row=48, most=768)
EXPERT_S = 1e-4


def with_experts(rows: int, experts: float) -> float:
    return 0.01 + 0.001 * rows + EXPERT_S * experts


def various(random_: random.Random, rows: int, variety: float) -> int:
    return round(ROUTING.unique(rows, variety * random_.uniform(0.9, 1.1)))


def learned(
    passes: int,
    *,
    slowness: Callable[[int], float] = lambda _: 1.0,
    varieties: tuple[float, ...] = (0.2, 0.7),
) -> tuple[RowCosts, RowCosts]:
    """Costs by rows and experts, and by rows alone, after passes over texts that change."""
    random_ = random.Random(4)
    both, alone = RowCosts(experts=ExpertCosts(routing=ROUTING)), RowCosts()
    for number in range(passes):
        rows = random_.choice((1, 2, 4, 8, 12))
        experts = various(random_, rows, varieties[number // 40 % len(varieties)])
        for costs in (both, alone):
            seconds = slowness(number) * with_experts(rows, experts) * random_.uniform(0.98, 1.02)
            costs.observe(rows, seconds, 50.0, experts if costs is both else 0)
    return both, alone


def test_passes_are_expected_by_the_experts_of_the_text_that_is_read() -> None:
    both, alone = learned(600)
    assert both.experts is not None
    assert both.experts.expert_s == pytest.approx(EXPERT_S, rel=0.2)
    for rows in (2, 4, 8, 12):
        experts = ROUTING.unique(rows, 0.7 if 600 // 40 % 2 == 0 else 0.2)
        assert both.at(rows, 50.0) == pytest.approx(with_experts(rows, experts), rel=0.08)
        few = round(ROUTING.unique(rows, 0.2))
        assert both.at(rows, 50.0, few) == pytest.approx(with_experts(rows, few), rel=0.05)
        assert alone.at(rows, 50.0, few) == alone.at(rows, 50.0)


def test_rows_that_were_never_seen_go_through_as_many_experts_as_the_text_has() -> None:
    both, _ = learned(200, varieties=(0.4,))
    assert both.experts is not None
    assert both.experts.at(6) == pytest.approx(ROUTING.unique(6, 0.4), rel=0.1)


def test_a_machine_that_becomes_slower_is_not_put_down_to_experts() -> None:
    both, _ = learned(600, slowness=lambda number: 1.0 if number // 40 % 2 else 1.5)
    assert both.experts is not None
    assert both.experts.expert_s < 2.0 * EXPERT_S
    steady = learned(600, slowness=lambda number: 1.0 + number / 600, varieties=(0.5,))[0]
    assert steady.experts is not None
    assert steady.experts.expert_s < 2.5 * EXPERT_S


def test_experts_take_no_more_than_a_pass_over_one_row() -> None:
    costs = RowCosts(experts=ExpertCosts(routing=ROUTING))
    for number in range(100):
        costs.observe(4, 0.01 + 0.01 * (number % 2), 0.0, 100 + number % 2)
    assert costs.experts is not None
    assert costs.experts.expert_s * ROUTING.row <= 0.011


def test_a_profile_of_random_text_is_bent_to_the_experts_of_the_text_that_is_read() -> None:
    rows = (1, 2, 4, 8, 16)
    measured = tuple((count, round(ROUTING.unique(count))) for count in rows)
    curve = ContextCurve(
        context=64,
        t_v=RowsSeconds(rows=rows, seconds=tuple(with_experts(m, u) for m, u in measured)),
    )
    costs = RowCosts([curve], ExpertCosts(routing=ROUTING, expert_s=EXPERT_S, passes=measured))
    assert costs.at(8, 64) == pytest.approx(with_experts(8, ROUTING.unique(8)), rel=0.01)
    for _ in range(8):
        few = round(ROUTING.unique(4, 0.2))
        costs.observe(4, with_experts(4, few), 64, few)
    for count in rows:
        expected = with_experts(count, ROUTING.unique(count, 0.2))
        assert costs.at(count, 64) == pytest.approx(expected, rel=0.02)


def test_a_pass_through_many_experts_is_not_taken_for_a_slow_machine() -> None:
    both, _ = learned(600)
    costs, many = PairCosts(both), round(ROUTING.unique(8, 0.7))
    told = {"rows": 8, "context": 50.0}
    slowness = costs.slowness(with_experts(8, many), **told, experts=many)
    assert slowness == pytest.approx(1.0, abs=0.06)


def test_a_number_of_rows_that_was_seen_twice_is_known_at_once() -> None:
    costs = RowCosts()
    for _ in range(60):
        costs.observe(1, 0.030)
    assert costs.at(16) < 0.040
    for _ in range(2):
        costs.observe(16, 0.078)
    assert costs.at(16) == pytest.approx(0.078, rel=0.05)
    assert costs.at(1) == pytest.approx(0.030, rel=0.05)
