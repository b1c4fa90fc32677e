"""The choice of the replica that gets a request."""

from dataclasses import replace
from typing import Any

import pytest

from dovetail.protocol.calibration import RowsSeconds
from dovetail.protocol.messages import Reported, WorkerState
from dovetail.runtime.router.choice import (
    AGE_S,
    BLOCK,
    MOST_BLOCKS,
    USUAL_TOKENS,
    Replica,
    ReplicaLoad,
    agree_on_rates,
    choose,
    wanted,
)
from dovetail.runtime.telemetry.picture import load_of

MEASURED = ReplicaLoad(
    epoch="1",
    seconds_per_token=0.01,
    further_seconds_per_token=0.004,
    reading_seconds_per_token=0.0005,
)
STORY = "Once upon a time there was a hedgehog who had lost his red balloon. " * 40


def replicas(*loads: ReplicaLoad) -> list[Replica]:
    there = [Replica(f"http://r{n}:1", ready=True, load=load) for n, load in enumerate(loads)]
    agree_on_rates(there)
    return there


def chat(*turns: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    said = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return {"messages": said, **fields}


def chosen(there: list[Replica], body: Any, key: bytes = b"", now_s: float = 1.0) -> int | None:
    found = choose(there, wanted(body, key), now_s)
    return None if found is None else there.index(found)


def test_a_conversation_stays_where_its_beginning_has_been_read() -> None:
    there = replicas(MEASURED, MEASURED)
    assert chosen(there, chat(STORY), now_s=1) == 0
    assert chosen(there, chat("Something else."), now_s=2) == 1
    for turn in range(3, 9):
        assert chosen(there, chat(STORY, "A reply.", "Go on."), now_s=turn) == 0


def test_a_conversation_leaves_a_replica_that_is_slower_by_more_than_reading_it_again() -> None:
    there = replicas(MEASURED, MEASURED)
    assert chosen(there, chat(STORY)) == 0
    reading_s = len(STORY) / 4 * 0.0005
    costs_s = 0.004 * USUAL_TOKENS  # of one session more, for the whole reply
    there[0].in_flight = int(reading_s / costs_s) + 2
    assert chosen(there, chat(STORY, "A reply.", "Go on.")) == 1
    there = replicas(MEASURED, MEASURED)
    assert chosen(there, chat(STORY * 20)) == 0
    there[0].in_flight = 2
    assert chosen(there, chat(STORY * 20, "A reply.", "Go on."), now_s=9) == 0


def test_no_conversation_is_taken_for_that_of_another_key() -> None:
    there = replicas(MEASURED, MEASURED)
    assert chosen(there, chat(STORY * 20), b"Bearer one", now_s=1) == 0
    assert chosen(there, chat(STORY * 20), b"Bearer two", now_s=2) == 1


def test_requests_spread_by_predicted_rate() -> None:
    fast = replace(MEASURED, seconds_per_token=0.005, further_seconds_per_token=0.002)
    there = replicas(MEASURED, fast)
    taken = [0, 0]
    for turn in range(60):
        number = chosen(there, chat(f"Question {turn}."), now_s=turn)
        assert number is not None
        there[number].in_flight += 1
        taken[number] += 1
    assert 1.7 < taken[1] / taken[0] < 2.5


def test_replicas_whose_measured_rates_are_near_each_other_share_requests_evenly() -> None:
    near = [
        replace(MEASURED, seconds_per_token=alone_s, further_seconds_per_token=further_s)
        for alone_s, further_s in ((0.01, 0.0015), (0.012, 0.002), (0.0115, 0.001))
    ]
    there, taken = replicas(*near, replace(MEASURED, seconds_per_token=0.04)), [0] * 4
    for turn in range(9):
        number = chosen(there, chat(f"Question {turn}."), now_s=turn + 1)
        assert number is not None
        there[number].in_flight += 1
        taken[number] += 1
    assert taken == [3, 3, 3, 0]


def test_replicas_of_one_rate_take_turns_also_where_nothing_is_known_yet() -> None:
    for load in (ReplicaLoad(), MEASURED):
        there = replicas(load, load, load)
        taken = [0, 0, 0]
        for turn in range(30):
            number = chosen(there, chat(f"Question {turn}."), now_s=turn + 1)
            assert number is not None
            taken[number] += 1
        assert taken == [10, 10, 10]


def test_an_idle_replica_that_was_slow_once_is_tried_again_when_its_word_is_old() -> None:
    slow = replace(MEASURED, seconds_per_token=0.04)
    there, taken = replicas(ReplicaLoad(), ReplicaLoad()), list[tuple[int, int]]()
    for second in range(0, 3 * round(AGE_S), 10):
        rounds = sum(number == 0 for number, _ in taken)
        there[0].told(replace(MEASURED, seconds_per_token=0.01 + 1e-6 * rounds), second)
        there[1].told(MEASURED if (1, AGE_S) in taken else slow, second)
        agree_on_rates(there, second)
        number = chosen(there, chat(f"Question {second}."), now_s=second)
        assert number is not None
        taken.append((number, second))
    of_slow = [second for number, second in taken if number == 1]
    assert of_slow[0] == AGE_S
    assert 25 < len(of_slow) < 35, "no slower than the other, it gets half of what came since"


def test_a_replica_that_is_slow_gets_a_request_when_its_word_is_old_and_no_more() -> None:
    there, taken = replicas(ReplicaLoad(), ReplicaLoad()), list[int]()
    for second in range(0, 3 * round(AGE_S), 10):
        there[0].told(replace(MEASURED, seconds_per_token=0.01 + 1e-6 * second), second)
        tried = taken.count(1)
        there[1].told(replace(MEASURED, seconds_per_token=0.04 + 1e-6 * tried), second)
        agree_on_rates(there, second)
        number = chosen(there, chat(f"Question {second}."), now_s=second)
        assert number is not None
        taken.append(number)
    assert taken.count(1) == 2


def test_requests_of_others_count_and_our_own_count_once() -> None:
    told = replace(MEASURED, sessions=5, queued=2, in_flight=3)
    replica = Replica("http://r:1", ready=True, load=told, in_flight=4)
    assert replica.running == 4 + (5 + 2 - 3)


def test_prompts_that_a_replica_still_reads_keep_others_away_until_it_has_read_them() -> None:
    fast = replace(MEASURED, seconds_per_token=0.0095)
    there = replicas(fast, MEASURED)
    assert chosen(there, chat(STORY * 20), now_s=1) == 0
    assert 6.7 < there[0].reads_on_s(1.0) < 6.9
    assert chosen(there, chat("Hello."), now_s=2) == 1
    assert chosen(there, chat("Hello."), now_s=8) == 0
    two = replace(MEASURED, targets=2)
    there = replicas(two)
    chosen(there, chat(STORY * 20), now_s=1)
    assert 3.3 < there[0].reads_on_s(1.0) < 3.5


def test_what_a_replica_has_refused_it_has_not_read() -> None:
    there = replicas(MEASURED)
    (replica,) = there
    assert chosen(there, chat(STORY)) == 0
    read, unread_s = dict(replica.known), replica.unread_s
    request = wanted(chat(STORY, "Once more.", STORY), b"")
    assert choose(there, request, 1.0) is replica
    assert len(replica.known) > len(read)
    assert replica.unread_s > unread_s
    replica.refused(request.blocks, replica.noted)
    assert dict(replica.known) == read
    assert replica.unread_s == pytest.approx(unread_s)


def test_replicas_that_slow_down_otherwise_are_not_taken_for_equal_ones() -> None:
    flat = replace(MEASURED, further_seconds_per_token=0.0001)
    steep = replace(MEASURED, further_seconds_per_token=0.01)
    one, other = replicas(flat, steep)
    assert (one.rate.further_s, other.rate.further_s) == (0.0001, 0.01)


def test_where_requests_wait_for_a_place_further_ones_go_elsewhere_even_if_it_is_slower() -> None:
    flat = replace(MEASURED, further_seconds_per_token=0.0)  # memory is the limit
    full = replace(flat, sessions=4, queued=8, in_flight=12)
    slow = replace(flat, seconds_per_token=0.025)
    there = replicas(full, slow)
    there[0].in_flight = 12
    assert chosen(there, chat("Hello.")) == 1
    there[0].load = replace(full, queued=0, in_flight=4)
    there[0].in_flight = 4
    assert chosen(there, chat("Hello.")) == 0
    for more in range(20):  # unheard of yet, but it is known that there is no place
        there[0].load, there[0].in_flight = replace(full, queued=1, in_flight=5), 5 + more
        if chosen(there, chat("Hello."), now_s=2 + more) == 1:
            break
    assert 0 < more < 6


def test_nobody_is_chosen_who_is_not_ready_or_is_let_go() -> None:
    there = replicas(MEASURED, MEASURED)
    there[0].ready = False
    assert chosen(there, chat("Hello.")) == 1
    there[1].draining = True
    assert chosen(there, chat("Hello.")) is None


def test_a_coordinator_that_began_anew_has_read_nothing() -> None:
    (replica,) = replicas(MEASURED)
    request = wanted(chat(STORY), b"")
    replica.reads(request.blocks)
    replica.told(replace(MEASURED, sessions=2))
    assert replica.has_read(request.blocks) == len(request.blocks) > 0
    replica.told(replace(MEASURED, epoch="2"))
    assert replica.has_read(request.blocks) == 0


def test_what_is_remembered_is_bounded_and_forgotten_from_the_end() -> None:
    (replica,) = replicas(MEASURED)
    long = wanted({"prompt": "x" * (BLOCK * (MOST_BLOCKS + 10))}, b"")
    replica.reads(long.blocks)
    assert len(replica.known) == MOST_BLOCKS
    assert replica.has_read(long.blocks) == MOST_BLOCKS
    other = wanted({"prompt": "y" * (BLOCK * 100)}, b"")
    replica.reads(other.blocks)
    assert replica.has_read(long.blocks) == MOST_BLOCKS - 100


def test_a_request_is_read_as_far_as_the_choice_goes_by_it_whatever_is_wrong_with_it() -> None:
    assert wanted({"prompt": "abcd", "max_tokens": 7, "n": 3}, b"").reply_tokens == 7.0
    assert wanted({"prompt": "abcd", "max_tokens": 7, "n": 3}, b"").samples == 3
    assert wanted({"max_completion_tokens": None, "max_tokens": 7}, b"").reply_tokens == 7.0
    parts = [{"type": "text", "text": STORY}]
    assert wanted({"messages": [{"role": "user", "content": parts}]}, b"") == wanted(
        chat(STORY), b""
    )
    tokens = wanted({"prompt": [17] * 100}, b"")
    assert len(tokens.blocks) == 100 * 3 // BLOCK
    for odd in (None, 3, [], {}, {"messages": 3}, {"messages": [3, {"content": {}}]}, {"n": 1.5}):
        assert wanted(odd, b"").samples == 1


def a_target(name: str, *, rows: float = 1.0, standby: bool = False) -> WorkerState:
    return WorkerState(
        name=name,
        roles=("target",),
        model="m",
        device="cpu",
        threads=1,
        fingerprint="",
        host="h",
        pid=1,
        worker_epoch=1,
        sessions=1,
        busy_share=0.0,
        round_trip_us=500.0,
        clock_offset_us=None,
        clock_bound_us=None,
        rss_mb=1.0,
        stale=0,
        standby=standby,
        t_v=RowsSeconds(rows=(1, 4, 32), seconds=(0.006, 0.009, 0.023)),
        token_s=0.01,
        rows=rows,
        sharing=2.0,
    )


def test_a_coordinator_tells_how_fast_one_session_goes_and_what_each_further_one_adds() -> None:
    state = Reported(
        epoch=7,
        address="ipc:///x",
        pid=1,
        uptime_s=1.0,
        workers=(a_target("other"), a_target("target", rows=4.0), a_target("spare", standby=True)),
        sessions=2,
        finished=0,
        failed=0,
        cancelled=0,
        rounds=9,
        tau=2.0,
        stale=0,
        refused=0,
        degraded=False,
        reasons=(),
        pairs=(),
    )
    told = load_of(state)
    assert (told["epoch"], told["sessions"], told["queued"]) == ("7", 2, 0)
    assert told["targets"] == 2
    pass_s, many_s = {"target": 0.009, "other": 0.006}, {"target": 0.023, "other": 0.011}
    late_s = {"target": 0.011, "other": 0.007}  # of two sessions, in which a token took 10 ms
    factor = {name: 0.01 / late_s[name] for name in late_s}
    alone_s = [factor[name] * pass_s[name] for name in factor]
    further_s = [factor[name] * (many_s[name] - pass_s[name]) / 7 for name in factor]
    assert told["seconds_per_token"] == pytest.approx(sum(alone_s) / 2)
    assert told["further_seconds_per_token"] == pytest.approx(sum(further_s) / 2 / 2)
    assert told["reading_seconds_per_token"] == pytest.approx(0.023 / 32)
    assert ReplicaLoad(**told, in_flight=1).further_seconds_per_token is not None
    read = tuple(one.model_copy(update={"row_s": 0.0004}) for one in state.workers)
    reads = load_of(state.model_copy(update={"workers": read}))
    assert reads["reading_seconds_per_token"] == pytest.approx(0.0004)
    unknown = load_of(state.model_copy(update={"workers": ()}))
    assert unknown["seconds_per_token"] is None
    assert unknown["targets"] == 0
