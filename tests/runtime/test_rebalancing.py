"""Sessions that move to a target that is there again, in virtual time: when, in which order, and
how long they wait."""

from collections.abc import Sequence

import pytest

from dovetail.protocol.codec import REPLY
from dovetail.protocol.messages import Emitted
from dovetail.runtime.engine.running import RunningRequest
from support.loaded import CLIENT, FIXED, Crowded, Pace, Stream, rate

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
    assert house.coordinator._tally.rebalanced <= 5


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
