"""Tests of chunked prefill: the learned cost of its rows, and their shares among several logs."""

from hypothesis import given
from hypothesis import strategies as st

from dovetail.runtime.costs.reading import FIRST_ROWS, ReadingCosts, shares


def test_rows_are_few_until_their_cost_is_known() -> None:
    costs = ReadingCosts()
    assert costs.rows_within(10.0) == FIRST_ROWS
    costs.observe(0, 1.0)
    assert costs.rows_within(10.0) == FIRST_ROWS
    costs.observe(10, 0.01)
    assert costs.rows_within(0.015) == 15
    assert costs.rows_within(-1.0) == 0


def test_rows_that_cost_nothing_are_more_each_time() -> None:
    costs, read = ReadingCosts(), []
    for _ in range(5):
        read.append(costs.rows_within(0.05))
        costs.observe(read[-1], -0.001)
    assert read == [16, 32, 64, 128, 256]


def test_a_machine_that_becomes_slower_reads_fewer_rows_and_a_pause_hardly_counts() -> None:
    costs = ReadingCosts()
    for _ in range(3):
        costs.observe(256, 0.256)
    costs.observe(16, 3.0)
    assert costs.rows_within(0.1) == 100
    for _ in range(5):
        costs.observe(64, 0.256)
    assert costs.rows_within(0.1) == 25


def test_a_first_part_that_seemed_to_cost_nothing_is_forgotten_at_once() -> None:
    costs = ReadingCosts()
    costs.observe(16, -0.001)
    costs.observe(32, 0.032)
    assert costs.rows_within(0.05) == 50


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 600))
def test_rows_are_shared_equally_as_far_as_they_are_wanted(left: list[int], rows: int) -> None:
    given = shares(left, rows)
    assert sum(given) == min(rows, sum(left))
    assert all(0 <= some <= most for some, most in zip(given, left, strict=True))
    for some, most in zip(given, left, strict=True):
        assert some == most or all(other <= some + 1 for other in given)
