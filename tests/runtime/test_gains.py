"""Tests of the gain that is predicted for moving a session to another target."""

import random
from collections.abc import Callable, Sequence

import pytest

from dovetail.runtime.moves.gains import LEAST_GAIN, WORTH, Gain, Place, Price, Seat, best_move

FREE = Price(0.0, 0.0)


def linear(sessions: int) -> float:
    """A pass that computes for each session."""
    return 0.01 * sessions


def flat(sessions: int) -> float:
    """A pass that reads the weights, for however many."""
    return 0.01 + 0.0001 * sessions


def place(name: bytes, sessions: Sequence[int], round_s: Callable[[int], float] = linear) -> Place:
    return Place(name, round_s, [Seat(number, rounds=100.0) for number in sessions])


def free(_session: int, _target: bytes) -> Price:
    return FREE


def balanced(places: Sequence[Place], price: Price = FREE) -> list[int]:
    """Make all moves that pay, which end, and return the number of sessions of each target."""
    for _ in range(100):
        gain = best_move(places, lambda *_: price)
        if gain is None:
            return [len(place.seats) for place in places]
        places = moved(places, gain)
    raise AssertionError("sessions move for ever")


def moved(places: Sequence[Place], gain: Gain) -> list[Place]:
    (seat,) = [seat for place in places for seat in place.seats if seat.session == gain.session]
    return [
        Place(
            place.name,
            place.round_s,
            [other for other in place.seats if other is not seat]
            + [seat] * (place.name == gain.new),
        )
        for place in places
    ]


def test_sessions_go_over_to_a_target_that_is_empty_until_both_are_alike() -> None:
    assert balanced([place(b"a", range(8)), place(b"b", ())]) == [4, 4]


def test_a_target_that_is_twice_as_fast_gets_twice_as_many() -> None:
    fast = place(b"b", (), lambda sessions: linear(sessions) / 2)
    assert balanced([place(b"a", range(9)), fast]) == [3, 6]


def test_where_passes_take_no_longer_for_several_nothing_moves() -> None:
    assert balanced([place(b"a", range(8), flat), place(b"b", (), flat)]) == [8, 0]


def test_a_log_that_takes_as_long_to_read_as_the_move_saves_stays() -> None:
    places = [place(b"a", range(2)), place(b"b", ())]
    gain = best_move(places, free)
    assert gain is not None
    for share, moves in ((0.9, True), (1.1, False)):
        price = Price(reading_s=9.0, pause_s=share * gain.saved_s / WORTH)
        assert (best_move(places, lambda *_, price=price: price) is not None) is moves


def test_what_is_over_before_the_log_has_been_read_does_not_move() -> None:
    places = [place(b"a", range(4)), place(b"b", ())]
    assert best_move(places, lambda *_: Price(1.0, 0.1, lag_s=1.0)) is not None
    assert best_move(places, lambda *_: Price(1.0, 0.1, lag_s=4.0)) is None


def test_reading_costs_every_session_that_is_there() -> None:
    full = [place(b"a", range(8)), place(b"b", range(8, 10))]
    gain = best_move(full, lambda *_: Price(reading_s=0.5, pause_s=0.25))
    assert gain is not None
    assert gain.cost_s == pytest.approx(0.25 + 2 * 0.5)


def test_both_rates_are_told() -> None:
    seats = [Seat(number, rounds=100.0, tokens=3.0) for number in range(4)]
    gain = best_move([Place(b"a", linear, seats), place(b"b", ())], free)
    assert gain is not None
    assert (gain.rate, gain.new_rate) == (pytest.approx(3 / 0.04), pytest.approx(3 / 0.01))


def test_who_may_not_move_stays_and_who_has_most_to_go_moves() -> None:
    seats = [Seat(1, 50.0), Seat(2, 100.0, movable=False), Seat(3, 80.0), Seat(4, 90.0)]
    places = [Place(b"a", linear, seats), place(b"b", ())]
    gain = best_move(places, lambda session, _: None if session == 4 else FREE)
    assert gain is not None
    assert gain.session == 3


def test_however_many_there_are_every_move_saves_and_they_end() -> None:
    chance = random.Random(5)
    for _ in range(200):
        slopes = [chance.choice((0.0, 0.1, 1.0)) * chance.random() for _ in range(3)]
        bases, counts = [chance.random() for _ in range(3)], [chance.randrange(9) for _ in range(3)]
        places, begun = list[Place](), 0
        for number, (slope, base, count) in enumerate(zip(slopes, bases, counts, strict=True)):
            seats = [Seat(begun + n, chance.randrange(1, 500)) for n in range(count)]
            begun += count
            places.append(
                Place(b"%d" % number, lambda n, slope=slope, base=base: base + slope * n, seats)
            )
        left_s = sum(place.left_s() for place in places)
        for _ in range(60):
            if (gain := best_move(places, free)) is None:
                break
            places = moved(places, gain)
            after_s = sum(place.left_s() for place in places)
            assert left_s - after_s == pytest.approx(gain.saved_s)
            left_s = after_s
        else:
            raise AssertionError("sessions move for ever")
    assert LEAST_GAIN > 0
