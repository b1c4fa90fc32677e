"""Sessions that move to a target that is there again, in virtual time: when, in which order, and
how long they wait."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dovetail.protocol.codec import REPLY
from dovetail.protocol.messages import Emitted, Open
from dovetail.runtime.engine.running import RunningRequest
from dovetail.runtime.moves.rebalancing import (
    LEAST_GAIN,
    WORTH,
    Gain,
    Price,
    Seat,
    TargetLoad,
    best_move,
)
from dovetail.runtime.session.actions import Ask
from dovetail.runtime.session.draft_sync import Joining
from dovetail.runtime.session.state import State
from support.houses import House
from support.loaded import CLIENT, FIXED, Crowded, Pace, Stream, rate
from support.scripted import ScriptedDraft

FREE = Price(0.0, 0.0)


def linear(sessions: int) -> float:
    """A pass that computes for each session."""
    return 0.01 * sessions


def flat(sessions: int) -> float:
    """A pass that reads the weights, for however many."""
    return 0.01 + 0.0001 * sessions


def place(
    name: bytes, sessions: Sequence[int], round_s: Callable[[int], float] = linear
) -> TargetLoad:
    return TargetLoad(name, round_s, [Seat(number, rounds=100.0) for number in sessions])


def free(_session: int, _target: bytes) -> Price:
    return FREE


def balanced(places: Sequence[TargetLoad], price: Price = FREE) -> list[int]:
    """Make all moves that pay, which end, and return the number of sessions of each target."""
    for _ in range(100):
        gain = best_move(places, lambda *_: price)
        if gain is None:
            return [len(place.seats) for place in places]
        places = moved(places, gain)
    raise AssertionError("sessions move for ever")


def moved(places: Sequence[TargetLoad], gain: Gain) -> list[TargetLoad]:
    (seat,) = [seat for place in places for seat in place.seats if seat.session == gain.session]
    return [
        TargetLoad(
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
    gain = best_move([TargetLoad(b"a", linear, seats), place(b"b", ())], free)
    assert gain is not None
    assert (gain.rate, gain.new_rate) == (pytest.approx(3 / 0.04), pytest.approx(3 / 0.01))


def test_who_may_not_move_stays_and_who_has_most_to_go_moves() -> None:
    seats = [Seat(1, 50.0), Seat(2, 100.0, movable=False), Seat(3, 80.0), Seat(4, 90.0)]
    places = [TargetLoad(b"a", linear, seats), place(b"b", ())]
    gain = best_move(places, lambda session, _: None if session == 4 else FREE)
    assert gain is not None
    assert gain.session == 3


def test_however_many_there_are_every_move_saves_and_they_end() -> None:
    chance = random.Random(5)
    for _ in range(200):
        slopes = [chance.choice((0.0, 0.1, 1.0)) * chance.random() for _ in range(3)]
        bases, counts = [chance.random() for _ in range(3)], [chance.randrange(9) for _ in range(3)]
        places, begun = list[TargetLoad](), 0
        for number, (slope, base, count) in enumerate(zip(slopes, bases, counts, strict=True)):
            seats = [Seat(begun + n, chance.randrange(1, 500)) for n in range(count)]
            begun += count
            places.append(
                TargetLoad(
                    b"%d" % number, lambda n, slope=slope, base=base: base + slope * n, seats
                )
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


def drafting() -> House:
    """A house with two drafts and one session, which waits for its draft."""
    house = House()
    house.add(ScriptedDraft, "draft", name="another")
    house.submit()
    for _ in range(3):
        house.coordinator.pump()
        for worker in house.workers:
            worker.step()
    house.coordinator.pump()
    (live,) = house.coordinator._running.values()
    assert live.session.state is State.DRAFTING
    return house


def noted(house: House) -> list[tuple[Any, ...]]:
    """Note from now on what is to be done to sessions."""
    acts, found = house.coordinator._acts, list[tuple[Any, ...]]()
    for name in ("perform", "forget_on", "broken", "decide"):
        setattr(acts, name, lambda *what, name=name: found.append((name, *what)))
    return found


def test_a_session_whose_target_goes_is_forgotten_there_and_goes_on_where_it_can() -> None:
    house = drafting()
    (live,), moving = house.coordinator._running.values(), house.coordinator._moving
    target, acts = live.target, noted(house)
    moving.part_with(target, "has gone")
    assert acts == [("forget_on", target, live), ("perform", live, [])]
    assert live.session.state is State.WAITING
    acts.clear()
    moving.resettle()  # it has come back
    (decided, words), (performed, _, (ask,)) = acts
    assert (decided, performed) == ("decide", "perform")
    assert "continues on target" in words
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Open)


def test_a_draft_that_is_not_available_any_more_is_left_for_one_that_is() -> None:
    house = drafting()
    (live,), moving = house.coordinator._running.values(), house.coordinator._moving
    left, drafts = live.draft, house.coordinator.registry.workers.values()
    (other,) = (one for one in drafts if one.plays("draft") and one is not left)
    assert left is not None
    left.leaving = True
    acts = noted(house)
    assert moving.seek(live) == Joining()
    forgotten, (decided, words) = acts
    assert forgotten == ("forget_on", left, live)
    assert decided == "decide"
    assert f"uses the draft {other.name}" in words
    assert live.draft is other


def test_a_fault_of_ours_at_one_session_keeps_no_other_from_being_seen_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = drafting()
    house.submit((9, 8))
    house.coordinator.pump()
    first, second = house.coordinator._running.values()
    moving, error = house.coordinator._moving, KeyError("x")

    def fail() -> None:
        raise error

    monkeypatch.setattr(first.session, "target_lost", fail)
    acts = noted(house)
    moving.part_with(first.target, "has gone")
    assert acts == [
        ("forget_on", first.target, first),
        ("broken", first, error),
        ("forget_on", first.target, second),
        ("perform", second, []),
    ]


LINEAR = Pace(pass_s=lambda rows: 0.01 * rows, row_s=0.002, kept=1 << 16)
"""A target that computes: a session more makes every pass as much longer."""
FLAT = Pace(pass_s=lambda rows: 0.04 + 0.00001 * rows, row_s=0.002, kept=1 << 16)
"""A target that reads its weights, for however many sessions."""


def running(house: Crowded) -> list[RunningRequest]:
    return [one for one in house.coordinator._running.values() if not one.trial]


def held(house: Crowded) -> list[tuple[float, list[int]]]:
    """Watch how many sessions each target has, at every tick."""
    seen: list[tuple[float, list[int]]] = []
    tick = house.coordinator.tick

    def watched() -> None:
        tick()
        counts = [
            sum(one.target is worker and one.loss is None for one in running(house))
            for worker in house.coordinator.registry.workers.values()
            if worker.plays("target")
        ]
        seen.append((house.hub.clock() / 1e9, counts))

    house.coordinator.tick = watched  # type: ignore[method-assign]
    return seen


def moves(streams: Sequence[Stream]) -> list[int]:
    return [stream.result.moves for stream in streams]


def alone(house: Crowded, streams: int, tokens: int) -> list[tuple[int, ...]]:
    """The tokens of the same streams where nothing moves."""
    other = Crowded(house.pace)
    return [s.result.token_ids for s in other.run(streams, tokens, speculate=False)]


@pytest.mark.parametrize("speculate", [False, True])
def test_sessions_go_over_to_a_target_that_joins_until_both_are_alike_and_are_done_sooner(
    speculate: bool,
) -> None:
    plain = rate(Crowded(LINEAR).run(8, 200, speculate=speculate, tree=FIXED))
    house = Crowded(LINEAR)
    seen = held(house)
    house.join_after(1.0)
    streams = house.run(8, 200, speculate=speculate, tree=FIXED)
    assert max(min(counts) for _, counts in seen if len(counts) > 1) >= 3
    assert max(moves(streams)) <= 1
    assert rate(streams) > 1.4 * plain
    assert [s.result.token_ids for s in streams] == alone(house, 8, 200)
    assert house.coordinator.report().totals.rebalanced == sum(moves(streams))


def test_where_a_second_target_brings_nothing_one_session_finds_that_out() -> None:
    house = Crowded(FLAT)
    house.join_after(1.0)
    assert sum(moves(house.run(8, 150, speculate=False))) == 1


def test_where_that_is_known_nobody_moves() -> None:
    house = Crowded(FLAT, profiled=True)
    house.join_after(1.0)
    assert moves(house.run(8, 150, speculate=False)) == [0] * 8


def test_a_slow_target_gets_as_many_sessions_as_are_faster_there() -> None:
    """Passes of the second target take three times as long, which shows once it has a session."""
    house = Crowded(LINEAR)
    seen = held(house)
    slow = Pace(pass_s=lambda rows: 0.03 * rows, row_s=0.006, kept=1 << 16)
    house.join_after(0.5, slow)
    house.run(8, 250, speculate=False)
    most = max(counts[1] for _, counts in seen if len(counts) > 1)
    assert 1 <= most <= 3
    assert house.coordinator._shared.tally.rebalanced <= 5


def test_targets_that_are_alike_keep_their_sessions() -> None:
    house = Crowded(LINEAR, targets=2)
    assert moves(house.run(8, 200, speculate=False)) == [0] * 8


def test_when_one_target_becomes_empty_sessions_of_the_other_go_there() -> None:
    """Replies of even numbers are long, and placement gives them to one target; the others end
    soon."""
    house = Crowded(LINEAR, targets=2)
    streams = house.run(8, [20 if number % 2 else 300 for number in range(8)], speculate=False)
    assert sum(moves(streams)) == 2


def pauses_s(house: Crowded, after_s: float) -> list[float]:
    """Watch the pauses between two times that a client is told tokens, after so long."""
    pauses, last, hear = list[float](), dict[int, float](), house._hear
    since_s = house.hub.clock() / 1e9 + after_s

    def heard(frames: list[bytes], time_ns: int) -> None:
        reply, now_s = REPLY.decode(frames), time_ns / 1e9
        if isinstance(reply, Emitted):
            before_s = last.get(reply.request)
            if before_s is not None and before_s > since_s:
                pauses.append(now_s - before_s)
            last[reply.request] = now_s
        hear(frames, time_ns)

    house.hub.join(CLIENT, heard)
    return pauses


@pytest.mark.parametrize("kept", [1 << 16, 0])
def test_the_old_target_serves_a_session_while_the_new_one_reads_its_log(kept: int) -> None:
    """Unless that keeps nothing: then it waits until all of its log is read there."""
    house = Crowded(Pace(pass_s=lambda rows: 0.01 * rows, row_s=0.002, kept=kept))
    name, pauses = house.join_after(6.0), pauses_s(house, 6.0)
    streams = house.run(2, 400, speculate=False, prompt=200)
    assert sum(moves(streams)) == 1
    longest_s, whole_s = max(pauses), 0.002 * 200
    assert (longest_s < 0.25 * whole_s) if kept else (longest_s > whole_s)
    whole = [tokens for tokens in house.workers[name].read if tokens >= 200]
    assert len(whole) == 1, "the log is read whole once"


def test_with_a_target_on_the_same_cores_nothing_is_shared() -> None:
    house = Crowded(LINEAR)
    (target,) = [
        worker for worker in house.coordinator.registry.workers.values() if worker.plays("target")
    ]
    target.hello = target.hello.model_copy(update={"cores": (0, 1), "host": "one"})
    house.join_after(1.0, cores=(1, 2), host="one")
    assert moves(house.run(8, 100, speculate=False)) == [0] * 8
