"""Spans and the offset between two clocks."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.spans import MAX_BESIDE, MERGED_NS, NAMES, Beside, ClockOffset, Spans


def test_a_measured_span_lies_between_the_readings_around_it() -> None:
    spans = Spans()
    before = time.monotonic_ns()
    with spans.measure("draft"):
        pass
    after = time.monotonic_ns()
    ((name, start, duration),) = spans.take(10)
    assert name == "draft"
    assert before <= start <= start + duration <= after


def test_a_span_that_ends_with_an_error_is_recorded() -> None:
    spans = Spans()
    with pytest.raises(KeyError), spans.measure("verify"):
        raise KeyError
    assert [span[0] for span in spans.take(10)] == ["verify"]


@given(st.integers(0, 8), st.integers(0, 8))
def test_take_gives_the_newest_and_forgets_all(count: int, limit: int) -> None:
    spans = Spans()
    for i in range(count):
        spans.add(str(i), i, i + 1)
    assert [int(name) for name, _, _ in spans.take(limit)] == list(range(count))[
        max(0, count - limit) :
    ]
    assert spans.take(100) == ()


@pytest.mark.parametrize("fine", [False, True])
@given(
    st.lists(
        st.tuples(
            st.sampled_from([(1, 1), (1, 2), (None, None)]),
            st.sampled_from([0, MERGED_NS, MERGED_NS + 1]),
            st.integers(0, 9),
        ),
        max_size=8,
    )
)
def test_what_is_done_beside_commands_without_a_pause_is_one_span_unless_somebody_looks(
    fine: bool, steps: list[tuple[tuple[int | None, int | None], int, int]]
) -> None:
    spans, expected, now = Spans(), list[Beside](), 1000
    spans.fine = fine
    for place, ((session, round), pause, duration) in enumerate(steps):
        last = expected[-1] if expected else None
        spans.add_beside("grow", now + pause, now + pause + duration, session=session, round=round)
        if (
            last is not None
            and not fine
            and last[:2] == (session, round)
            and pause <= MERGED_NS
            and place
        ):
            expected[-1] = (
                session,
                round,
                ("grow", last[2][1], now + pause + duration - last[2][1]),
            )
        else:
            expected.append((session, round, ("grow", now + pause, duration)))
        now += pause + duration
    assert spans.take(100) == ()
    assert spans.take_beside(3) == tuple(expected[:3])
    assert spans.take_beside(100) == tuple(expected[3:])


def test_nothing_piles_up_that_nobody_takes() -> None:
    spans = Spans()
    spans.fine = True
    for number in range(3 * MAX_BESIDE):
        spans.add_beside("send", number, number)
    taken = spans.take_beside(10 * MAX_BESIDE)
    assert MAX_BESIDE // 2 <= len(taken) <= MAX_BESIDE
    assert taken[-1] == (None, None, ("send", 3 * MAX_BESIDE - 1, 0))


def test_a_fine_span_is_measured_while_somebody_looks() -> None:
    spans = Spans()
    with spans.finely("choose"):
        pass
    assert spans.take(10) == ()
    spans.fine = True
    with spans.finely("choose"):
        pass
    assert [name for name, _, _ in spans.take(10)] == ["choose"]


def test_the_names_of_spans_fit_into_a_message() -> None:
    assert all(0 < len(name) <= 64 and meaning for name, meaning in NAMES.items())


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=40),
)
def test_the_true_offset_lies_within_the_bound(offset: int, probes: list[tuple[int, int]]) -> None:
    clock = ClockOffset()
    now = 10**15
    for there_ns, back_ns in probes:
        clock.add(now, now + there_ns + offset, now + there_ns + back_ns)
        now += 10**10
    assert abs(clock.offset_ns - offset) <= clock.bound_ns + 1
    assert clock.bound_ns <= min(there + back for there, back in probes[-32:])


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_last_probes_count(keep: int) -> None:
    clock = ClockOffset(keep=keep)
    clock.add(0, 500, 2)
    for _ in range(keep):
        clock.add(0, 700, 100)
    assert clock.offset_ns == 650


def test_nothing_is_known_before_the_first_probe() -> None:
    clock = ClockOffset()
    assert not clock.known
    assert (clock.offset_ns, clock.bound_ns) == (0, 0)
