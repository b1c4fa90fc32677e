"""The worth of a pass, against the sums written out."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.workers.speculation.prices import (
    LONGER,
    REMEMBERED,
    START,
    Candidates,
    Chance,
    PassTimes,
    most_used,
    worth_expanding,
)
from dovetail.workers.speculation.proposal import FREE, Price


def times(**known: int) -> PassTimes:
    """`r8=5000`: a pass of eight rows takes 5 us."""
    taken = PassTimes()
    for name, duration_ns in known.items():
        taken.add(int(name[1:]), duration_ns)
    return taken


def test_what_a_pass_takes_is_known_for_all_numbers_of_rows_between_two_powers_of_two() -> None:
    taken = times(r1=10, r3=20, r8=50)
    assert [taken.estimate_ns(rows) for rows in (0, 1, 2, 3, 4, 5, 8, 9, 500)] == [
        0,
        10,
        10,
        20,
        20,
        50,
        50,
        50,
        50,
    ]


def test_what_is_not_known_is_taken_for_less() -> None:
    assert PassTimes().estimate_ns(4) == 0.0
    assert times(r8=50, r64=90).estimate_ns(2) == 50
    assert times(r8=50, r64=90).estimate_ns(32) == 50


def test_the_first_slow_passes_and_one_that_was_disturbed_are_forgotten() -> None:
    taken = times(r1=10**9)
    for duration_ns in (10**9, *range(100, 100 + REMEMBERED - 1), 10**8):
        taken.add(1, duration_ns)
    assert 100 <= taken.estimate_ns(1) < 100 + REMEMBERED


def test_the_chance_follows_what_happens() -> None:
    chance = Chance()
    assert chance.value == START
    for found in [True] * 1000:
        chance.add(found)
    assert chance.value == pytest.approx(1.0, abs=1e-3)
    for found in [True, False] * 1000:
        chance.add(found)
    assert chance.value == pytest.approx(0.5, abs=0.02)


@given(
    probabilities=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=20),
    floor=st.sampled_from([0.0, 0.01, 0.3]),
    rate=st.one_of(st.none(), st.floats(0.0, 1e5)),
    taken=st.dictionaries(st.integers(1, 32), st.integers(1, 1 << 24), max_size=4),
    foretold=st.integers(0, 3),
)
@settings(max_examples=200, deadline=None)
def test_the_pass_is_the_one_whose_gain_is_furthest_above_its_price(
    probabilities: list[float],
    floor: float,
    rate: float | None,
    taken: dict[int, int],
    foretold: int,
) -> None:
    path = np.array(sorted(probabilities, reverse=True), np.float32)
    rows = np.maximum(np.arange(1, len(path) + 1) - foretold, 0)
    known, chance = times(**{f"r{rows}": ns for rows, ns in taken.items()}), Chance(0.7)
    (found,) = worth_expanding([Candidates(path, rows, Price(rate, floor), chance)], known)
    allowed = [float(p) for p in path if p >= np.float32(floor)]
    if rate is None:
        assert found == len(allowed)
        return
    nets = [
        0.0,
        *(
            math.fsum(max(0.0, 0.7 * p - floor) for p in allowed[:n])
            - rate * 1e-9 * known.estimate_ns(int(rows[n - 1]))
            for n in range(1, len(allowed) + 1)
        ),
    ]
    assert 0 <= found <= len(allowed)
    assert nets[found] == pytest.approx(max(nets), abs=1e-9)


def test_without_a_price_everything_is_worth_a_pass() -> None:
    node = Candidates(np.array([1e-30], np.float32), np.array([1]), FREE, Chance(0.0))
    assert worth_expanding([node], times(r1=10**9)) == [1]


def trees(rate: float | None, *paths: list[float]) -> list[Candidates]:
    return [
        Candidates(
            np.array(path, np.float32), np.arange(1, len(path) + 1), Price(rate), Chance(1.0)
        )
        for path in paths
    ]


def test_trees_that_share_a_pass_share_its_price() -> None:
    known = times(r1=1000, r2=1100, r4=1200)
    alone, together = trees(6e5, [0.4]), trees(6e5, [0.4], [0.35], [0.01])
    assert worth_expanding(alone, known) == [0]
    assert worth_expanding(together, known) == [1, 1, 0]


def test_rows_of_a_pass_that_is_made_in_any_case_cost_what_they_add() -> None:
    known = times(r1=1000, r2=1100)
    assert worth_expanding(trees(6e5, [0.2]), known) == [0]
    assert worth_expanding(trees(6e5, [0.2]), known, others=1) == [1]
    assert worth_expanding([*trees(6e5, [0.2]), *trees(None, [1e-9])], known) == [1, 1]


@given(
    probabilities=st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=40),
    width=st.integers(1, 12),
    taken=st.dictionaries(st.integers(1, 64), st.integers(1, 1000), min_size=1, max_size=6),
)
@settings(max_examples=200, deadline=None)
def test_a_pass_that_nobody_waits_for_is_used_most_for_its_time_and_not_much_longer_than_the_orders(
    probabilities: list[float], width: int, taken: dict[int, int]
) -> None:
    path = np.array(sorted(probabilities, reverse=True), np.float32)
    known = times(**{f"r{rows}": ns for rows, ns in taken.items()})
    found = most_used(path, width, known)
    short = [
        n
        for n in range(1, len(path) + 1)
        if known.estimate_ns(n) <= LONGER * known.estimate_ns(width)
    ]
    if short:
        use = {n: math.fsum(path[:n].tolist()) / known.estimate_ns(n) for n in short}
        assert use[found] == pytest.approx(max(use.values()))
    else:
        assert found == 1


def test_as_long_as_no_pass_was_timed_one_is_as_wide_as_the_order() -> None:
    assert [most_used(np.full(n, 0.1, np.float32), 4, PassTimes()) for n in (1, 4, 9)] == [1, 4, 4]
    assert most_used(np.full(64, 0.1, np.float32), 4, times(r4=100)) == 64
