"""The cut against one that looks at every choice there is."""

from itertools import product
from math import exp, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.control.pricing import MOST_FLOOR, cut, least_probability

OFFER = st.lists(st.floats(-6.0, -0.01), max_size=5).map(
    lambda scores: sorted(scores, reverse=True)
)


def flat(rows: int) -> float:
    return 0.02 + 0.001 * rows


@given(
    offers=st.lists(OFFER, min_size=1, max_size=3),
    rate=st.floats(0.0, 500.0),
    steps=st.lists(st.floats(0.0, 0.01), min_size=24, max_size=24),
    fixed=st.integers(0, 5),
    most=st.none() | st.integers(0, 24),
)
def test_nothing_is_worth_more_than_what_is_cut(
    offers: list[list[float]], rate: float, steps: list[float], fixed: int, most: int | None
) -> None:
    def seconds(rows: int) -> float:
        return 0.01 + sum(steps[:rows])

    def worth(counts: tuple[int, ...]) -> float:
        tokens = sum(
            sum(map(exp, offer[:count])) for offer, count in zip(offers, counts, strict=True)
        )
        return tokens - rate * seconds(fixed + len(offers) + sum(counts))

    base = fixed + len(offers)
    chosen = cut(offers, rate=rate, seconds=seconds, fixed=fixed, most=most)
    allowed = [
        counts
        for counts in product(*(range(len(offer) + 1) for offer in offers))
        if most is None or base + sum(counts) <= max(most, base)
    ]
    assert chosen in allowed
    assert worth(chosen) == pytest.approx(max(map(worth, allowed)), abs=1e-9)


def test_ties_go_to_fewer_rows() -> None:
    assert cut([[log(0.5), log(0.25)]], rate=1.0, seconds=lambda rows: 0.5 * rows) == (0,)


def test_where_rows_are_free_all_is_verified_and_where_they_are_dear_nothing() -> None:
    offers = [[-0.1, -0.5, -3.0], [], [-0.2]]
    assert cut(offers, rate=10.0, seconds=lambda _: 1.0) == (3, 0, 1)
    assert cut(offers, rate=10.0, seconds=float) == (0, 0, 0)
    assert cut([], rate=10.0, seconds=float) == ()


def test_the_likelier_nodes_of_all_sessions_go_first() -> None:
    sure, unsure = [-0.01, -0.02, -0.03], [-2.0, -2.1, -2.2]
    assert cut([unsure, sure], rate=400.0, seconds=flat) == (0, 3)


def test_a_step_of_the_pass_is_climbed_only_for_enough_nodes() -> None:
    def stairs(rows: int) -> float:
        return 0.02 + 0.01 * ((rows - 1) // 4)

    assert cut([[log(0.6)] * 4], rate=80.0, seconds=stairs) == (3,)
    assert cut([[log(0.6)] * 7], rate=80.0, seconds=stairs) == (7,)


def test_an_offer_that_is_not_in_order_is_cut_at_a_beginning() -> None:
    assert cut([[-3.0, -0.1]], rate=100.0, seconds=flat) == (2,)
    assert cut([[-3.0, -0.1], [-1.0]], rate=200.0, seconds=flat) == (2, 1)


def test_a_node_need_be_no_likelier_than_the_cheapest_way_to_more_rows() -> None:
    assert least_probability(50.0, flat, 4, 16) == pytest.approx(0.05)
    assert least_probability(50.0, lambda rows: 1.0 if rows < 13 else 2.0, 4, 12) == 0.0
    assert least_probability(1e6, flat, 4, 16) == MOST_FLOOR
    assert least_probability(50.0, flat, 16, 16) == pytest.approx(0.05)
