"""Tests of chunked prefill: the learned cost of its rows, and their shares among several logs."""

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.messages import Open, VerifyItem
from dovetail.runtime.costs.reading import FIRST_ROWS, ReadingCosts, reading_order, shares
from dovetail.runtime.engine.reading import AHEAD_ROWS, LATENCY, observe_pass, share
from dovetail.runtime.engine.sending import CommandSender
from dovetail.runtime.fleet.peers import Pass, Worker
from dovetail.runtime.fleet.scheduler import Rest, Turns


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


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(0, 600), st.integers(1, 8))
def test_rows_are_shared_equally_by_the_first_logs_as_far_as_they_are_wanted(
    left: list[int], rows: int, at_once: int
) -> None:
    given = shares(left, rows, at_once=at_once)
    assert sum(given) == min(rows, sum(left))
    assert all(0 <= some <= most for some, most in zip(given, left, strict=True))
    unread = [place for place, most in enumerate(left) if given[place] < most]
    if at_once >= len(left):
        assert all(other <= given[place] + 1 for place in unread for other in given)
    assert not any(given[place] for place in unread[at_once:])


def test_logs_are_read_in_the_order_in_which_they_came_and_one_of_each_owner_first() -> None:
    owners = ["a", "a", "a", "b", "a", "b", "c"]
    waited_s = [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    order = reading_order(owners, waited_s=waited_s, reading_s=[0.1] * 7)
    assert order == [0, 3, 6, 1, 5, 2, 4]


def test_a_long_log_is_overtaken_by_short_ones_for_no_longer_than_it_takes() -> None:
    for waited_s, first in ((0.5, 1), (2.5, 0)):
        order = reading_order(["a", "b"], waited_s=[waited_s, 0.2], reading_s=[2.0, 0.1])
        assert order[0] == first


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 100), st.floats(0, 10)), max_size=20))
def test_every_log_has_one_place_in_the_order(logs: list[tuple[int, float, float]]) -> None:
    order = reading_order(
        [str(owner) for owner, _, _ in logs],
        waited_s=[waited for _, waited, _ in logs],
        reading_s=[reading for _, _, reading in logs],
    )
    assert sorted(order) == list(range(len(logs)))


# -- how much is read beside streams ---------------------------------------------------------------

PASS_S, ROUND_S, ROW_S = 0.012, 0.02, 0.001
STREAM, NEWCOMER = 1, 2


def worker(role: str) -> Worker:
    """A worker whose costs are known: a pass, a round of its sessions, and a row of a log."""
    hello, limits = SimpleNamespace(roles=(role,)), SimpleNamespace(prompt_rows=256)
    one = Worker(b"", hello, limits, None, Turns(epoch=1), 0)  # type: ignore[arg-type]
    for _ in range(40):
        one.verifying.observe(1, PASS_S, 100.0)
        one.round_s.add(ROUND_S)
        one.reading.observe(256, 256 * ROW_S)
    return one


def rows_beside(
    reader: Worker, target: Worker, *, verifies: bool, latency_ms: Any = "auto", moves: bool = False
) -> int:
    """The rows of a long log in the next pass, with one stream; `moves`: with none, before one
    moves here."""
    about = SimpleNamespace(length=100, request=SimpleNamespace(owner=""), number=STREAM)
    about.accounts = SimpleNamespace(began_ns=0)
    stream = SimpleNamespace(decoding=not moves, target=target, draft=reader, session=about)
    stream.reads_for = stream if moves else None
    item = VerifyItem(session=STREAM, round=1, prefix=100, tokens=(), parents=())
    command = Open.model_construct(session=NEWCOMER, prompt=(3,) * 2000)
    unread = Rest(command, 0)
    running: Any = {STREAM: stream, NEWCOMER: stream}
    (rows,) = share(reader, [item] if verifies else [], [unread], running, 0, latency_ms)
    return rows


def test_a_round_with_a_chunk_takes_three_rounds_at_most_or_its_pass_what_is_set() -> None:
    target = worker("target")
    within_s = rows_beside(target, target, verifies=True) * ROW_S
    assert 0.0 <= (LATENCY - 1.0) * ROUND_S - within_s < 1.01 * ROW_S
    within_s = rows_beside(target, target, verifies=True, latency_ms=30) * ROW_S
    assert within_s == pytest.approx(0.03 - PASS_S, abs=ROW_S)


def test_the_log_of_a_session_that_will_move_is_read_in_small_chunks() -> None:
    target = worker("target")
    assert rows_beside(target, target, verifies=False, moves=True) == AHEAD_ROWS < 256


def test_a_chunk_in_a_pass_of_its_own_takes_what_streams_spend_elsewhere_meanwhile() -> None:
    target, draft = worker("target"), worker("draft")
    on_target_s = rows_beside(target, target, verifies=False) * ROW_S
    assert on_target_s == pytest.approx(ROUND_S - PASS_S, abs=ROW_S)
    on_draft_s = rows_beside(draft, target, verifies=False) * ROW_S
    assert on_draft_s == pytest.approx(PASS_S, abs=ROW_S)


def test_beside_a_chunk_fewer_nodes_are_verified_since_each_takes_the_place_of_a_row() -> None:
    target, others = worker("target"), range(1, 9)
    for rows in others:  # further rows cost a target little that reads its weights anyway
        target.verifying.observe(rows, PASS_S + 1e-5 * rows, 100.0)
    controller = SimpleNamespace(cuts=True, rate=lambda _: 150.0)
    scores = [log(0.8**depth) for depth in others]
    session = SimpleNamespace(length=100, scores=scores)
    stream = SimpleNamespace(controller=controller, session=session, decoding=True, target=target)
    tree = tuple(others), tuple(range(-1, 7))
    item = VerifyItem(session=STREAM, round=1, prefix=100, tokens=tree[0], parents=tree[1])
    sender: Any = SimpleNamespace(_running={STREAM: stream})
    (alone,) = CommandSender.cut(sender, target, [item])
    command = Open.model_construct(session=NEWCOMER, prompt=(3,) * 2000)
    target.turns.waiting.append((NEWCOMER, Rest(command, 0)))
    (beside,) = CommandSender.cut(sender, target, [item])
    worth = 2 * 150.0 * ROW_S  # of the stream, and of whoever waits for the prompt
    assert alone == len(others)
    assert beside == sum(0.8**depth > worth for depth in others) < alone


def test_the_sessions_of_passes_are_counted_by_rounds_as_their_seconds_are() -> None:
    target = worker("target")
    for sessions in [1] * 50 + [8] * 6 + [1, 8] * 9:
        event: Any = SimpleNamespace(items=range(sessions), spans=(), experts=0)
        observe_pass(target, Pass(sessions, 100.0, 0), event, 0)
        for _ in range(sessions):
            target.round_s.add(sessions * ROUND_S)
        reads: Any = SimpleNamespace(items=range(3), spans=(), experts=0)
        observe_pass(target, Pass(3, 100.0, 64), reads, 0)
    assert target.sharing.value == pytest.approx(target.round_s.value / ROUND_S, rel=0.01)
