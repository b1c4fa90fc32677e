"""The time that a run still takes."""

import pytest

from dovetail.launch.bench.remaining import Remaining


class Clock:
    """Seconds that are set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def take(remaining: Remaining, clock: Clock, name: str, seconds: float) -> None:
    with remaining.timed(name):
        clock.now += seconds


def test_nothing_is_foretold_before_a_turn_has_ended() -> None:
    assert Remaining({"a": 3}, Clock()).seconds() is None


def test_every_kind_of_turn_is_foretold_from_its_own_and_an_unknown_one_from_all() -> None:
    clock = Clock()
    remaining = Remaining({"slow": 3, "fast": 3, "unknown": 2}, clock)
    take(remaining, clock, "slow", 10.0)
    assert remaining.seconds() == pytest.approx(2 * 10.0 + 3 * 10.0 + 2 * 10.0)
    take(remaining, clock, "fast", 1.0)
    assert remaining.seconds() == pytest.approx(2 * 10.0 + 2 * 1.0 + 2 * 5.5)


def test_time_passes_while_a_turn_is_under_way_and_never_below_nothing() -> None:
    clock = Clock()
    remaining = Remaining({"a": 3}, clock)
    take(remaining, clock, "a", 10.0)
    with remaining.timed("a"):
        clock.now += 4.0
        assert remaining.seconds() == pytest.approx(16.0)
        clock.now += 100.0
        assert remaining.seconds() == 0.0
