"""The latest events: rounds and spans in one numbering, asked for again and again; fine spans while
somebody looks."""

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.protocol.codec import REPLY, encode
from dovetail.protocol.keys import PeerKey
from dovetail.protocol.messages import (
    MAX_SEEN_SPANS,
    Drafted,
    Look,
    Observe,
    Probed,
    RoundRecord,
    Seen,
    SeenSpan,
    Submit,
    Verified,
    VerifiedItem,
)
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import NAMES, ClockOffset, Span
from dovetail.runtime.client import Client
from dovetail.runtime.fleet.peers import Worker
from dovetail.runtime.fleet.registry import Registry
from dovetail.runtime.telemetry.event_log import LATEST_NS, LOOKED_NS, MAX_HELD, EventLog
from support.houses import PROMPT, House, pumped
from support.scripted import ScriptedDraft, hello

EPOCH = 7
PARTS = ("handle", "queue", "link", "lost")
"""Spans that the coordinator puts a round's time down to, beside what a worker did in it."""


def record(round: int) -> RoundRecord:
    return RoundRecord(
        round=round,
        prefix=3,
        tokens=(5, 6),
        parents=(-1, 0),
        scores=(-1.0, -2.0),
        verified=2,
        accepted=(0,),
        bonus=7,
    )


def worker(role: str = "target", *, epoch: int = 1, clock: ClockOffset | None = None) -> Worker:
    admitted = Registry(EPOCH).admit(b"peer", hello(role, epoch=epoch), None, 0)
    assert isinstance(admitted, Worker)
    if clock is not None:
        admitted.clock = clock
    return admitted


def look(observing: EventLog, after: int = 0, *, spans: bool = False, **options: Any) -> Seen:
    return observing.look(
        Look(epoch=1, request=1, after=after, spans=spans), EPOCH, [], lambda _: "", **options
    )


def everything(client: Client, *, spans: bool = False) -> tuple[list[Any], list[SeenSpan]]:
    """Rounds and spans that are still there."""
    rounds, found, seen = [], [], client.look(spans=spans)
    while True:
        rounds += seen.rounds
        found += seen.spans
        if not seen.more:
            return rounds, found
        seen = client.look(seen.next, spans=spans)


# -- the ring --------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.just(0), st.integers(1, 3)), max_size=40), st.data())
def test_who_asks_again_with_the_last_number_hears_of_everything_once_and_in_order(
    steps: list[int], data: st.DataObject
) -> None:
    """A step of 0 is a round, one of n a message with n spans."""
    observing, expected, heard, after = EventLog(lambda: 0), list[str](), list[str](), 0
    target = worker()
    for place, step in enumerate(steps, start=1):
        if step == 0:
            observing.round_ended(place, None, target, place, lambda place=place: record(place))  # type: ignore[misc]
            expected.append(f"round {place}")
        else:
            spans: tuple[Span, ...] = tuple(("verify", 10 * place + n, 1) for n in range(step))
            observing.event(
                target,
                Verified(
                    epoch=1,
                    items=(
                        VerifiedItem(session=place, round=1, accepted=(), bonus=1, margins=(1.0,)),
                    ),
                    spans=spans,
                ),
            )
            expected += [f"span {place} {n}" for n in range(step)]
        if data.draw(st.booleans()):
            seen = look(observing, after, spans=True)
            assert (seen.missed, seen.more) == (0, False)
            heard += [f"round {r.session}" for r in seen.rounds] + [
                f"span {s.session} {s.span[1] - 10 * (s.session or 0)}" for s in seen.spans
            ]
            assert len(heard) == seen.next == len(expected)
            after = seen.next
    last = look(observing, after, spans=True)
    heard += [f"round {r.session}" for r in last.rounds] + [
        f"span {s.session} {s.span[1] - 10 * (s.session or 0)}" for s in last.spans
    ]
    assert sorted(heard) == sorted(expected)


def test_what_is_gone_is_counted() -> None:
    observing, target = EventLog(lambda: 0), worker()
    observing.round_ended(1, None, target, 0, lambda: record(1))
    first = look(observing)
    for _ in range(MAX_HELD + 5):
        observing.round_ended(1, None, target, 0, lambda: record(1))
    assert look(observing, first.next).missed == 5
    assert look(observing).missed == 0, "whoever has seen nothing has missed nothing"
    assert look(observing, first.next).more


def test_one_answer_is_bounded_and_says_that_there_is_more() -> None:
    observing, target = EventLog(lambda: 0), worker()
    for n in range(10):
        observing.event(
            target,
            Drafted(
                epoch=1,
                session=1,
                round=n,
                tokens=(),
                parents=(),
                scores=(),
                grown=0,
                hit=False,
                spans=(("draft", n, 1),) * 250,
            ),
        )
    seen, spans = look(observing, spans=True), 0
    while seen.more:
        assert 0 < len(seen.spans) <= MAX_SEEN_SPANS
        spans += len(seen.spans)
        seen = look(observing, seen.next, spans=True)
    assert spans + len(seen.spans) == 2500


def test_tokens_that_are_kept_from_whoever_looks_are_said_to_be() -> None:
    observing, target = EventLog(lambda: 0), worker()
    for session in (1, 2):
        observing.round_ended(session, None, target, 0, lambda: record(1))
    own, other = observing.look(Look(epoch=1, request=1), 1, [], lambda _: "", own={1}).rounds
    assert (own.readable, own.record) == (True, record(1))
    assert (other.readable, other.record) == (
        False,
        record(1).model_copy(update={"tokens": (0, 0), "bonus": 0}),
    )


def test_a_number_from_before_a_restart_gets_what_comes_from_now_on() -> None:
    observing, target = EventLog(lambda: 0), worker()
    observing.round_ended(1, None, target, 0, lambda: record(1))
    seen = look(observing, 1000)
    assert (seen.rounds, seen.next, seen.missed) == ((), 1, 0)


def test_a_pass_for_several_sessions_is_there_once_and_says_which() -> None:
    observing, target = EventLog(lambda: 0), worker()
    items = tuple(
        VerifiedItem(session=n, round=4, accepted=(), bonus=1, margins=(1.0,)) for n in (3, 5)
    )
    observing.event(target, Verified(epoch=1, items=items, spans=(("verify", 10, 20),)))
    (seen,) = look(observing, spans=True).spans
    assert (seen.process, seen.session, seen.round, seen.shared, seen.span) == (
        "target",
        None,
        None,
        ((3, 4), (5, 4)),
        ("verify", 10, 20),
    )


def test_what_a_worker_did_beside_its_commands_is_what_it_was_about() -> None:
    observing, draft = EventLog(lambda: 0), worker("draft")
    beside = ((3, 7, ("grow", 40, 5)), (None, None, ("send", 50, 1)))
    observing.event(
        draft,
        Drafted(
            epoch=1,
            session=9,
            round=2,
            tokens=(),
            parents=(),
            scores=(),
            grown=0,
            hit=False,
            spans=(("draft", 60, 5),),
            beside=beside,
        ),
    )
    assert [(s.session, s.round, s.span[0]) for s in look(observing, spans=True).spans] == [
        (9, 2, "draft"),
        (3, 7, "grow"),
        (None, None, "send"),
    ]


@given(st.integers(-(10**12), 10**12), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_spans_of_another_machine_stand_where_they_were_within_the_bound(
    ahead: int, there_ns: int, back_ns: int
) -> None:
    now = 10**13
    clock = ClockOffset()
    clock.add(now, now + there_ns + ahead, now + there_ns + back_ns)
    shown = now + ahead - clock.ahead_ns
    assert abs(shown - now) <= 2 * clock.bound_ns + 2
    if abs(ahead) > 2 * clock.bound_ns + 2:
        assert abs(shown - now) <= clock.bound_ns + 1


@pytest.mark.parametrize("jumped_ns", [0, LATEST_NS])
def test_a_clock_that_jumps_keeps_nobody_from_being_seen(jumped_ns: int) -> None:
    now_ns, observing, target = 10**15, EventLog(lambda: 10**15), worker()
    target.clock.add(now_ns, LATEST_NS - jumped_ns, now_ns)
    target.probed = Probed(
        epoch=1,
        sent_ns=now_ns,
        clock_ns=jumped_ns,
        busy_ns=LATEST_NS,
        stale=0,
        sessions=0,
        rss_bytes=1,
    )
    spans = (("draft", jumped_ns, LATEST_NS),)
    observing.event(
        target,
        Drafted(
            epoch=1,
            session=1,
            round=1,
            tokens=(),
            parents=(),
            scores=(),
            grown=0,
            hit=False,
            spans=spans,
        ),
    )
    seen = observing.look(Look(epoch=1, request=1, spans=True), EPOCH, [target], lambda _: "")
    assert REPLY.decode(encode(seen)) == seen


def test_processes_that_may_have_one_clock_have_one() -> None:
    clock = ClockOffset()
    clock.add(0, 70_000, 100_000)
    assert clock.offset_ns == 20_000
    assert clock.ahead_ns == 0


# -- a coordinator ---------------------------------------------------------------------------------


def test_rounds_are_seen_with_what_was_offered_and_what_came_of_it() -> None:
    house = House()
    finished = house.complete(record=True)
    rounds, _ = everything(house.client)
    assert [r.record.round for r in rounds] == list(range(1, finished.result.rounds + 1))
    tokens = [finished.result.token_ids[0]]
    for seen in rounds:
        tokens += [*(seen.record.tokens[node] for node in seen.record.accepted), seen.record.bonus]
        assert (seen.draft, seen.target) == ("draft", "target")
    assert tokens[: finished.result.completion_tokens] == list(finished.result.token_ids)
    assert [r.at_ns for r in rounds] == sorted(r.at_ns for r in rounds)


def test_a_round_seen_is_the_round_recorded() -> None:
    house = House()
    request = house.submit(record=True)
    recorded = []
    while (reply := house.client.receive(0)) is not None:
        if getattr(reply, "type", "") == "recorded":
            recorded.append(reply.record)  # type: ignore[union-attr]
    assert request
    assert recorded
    assert [seen.record for seen in everything(house.client)[0]] == recorded


def test_a_rounds_spans_add_up_to_its_time() -> None:
    """In one session, handling, the way to a worker, its work and the way back follow each other
    without a gap."""
    house = House()
    house.client.look(spans=True)
    house.complete()
    rounds, spans = everything(house.client, spans=True)
    assert len(rounds) > 5
    for before, this in itertools.pairwise(rounds):
        coordinator = [
            s.span
            for s in spans
            if s.round == this.record.round and s.process == "coordinator" and s.span[0] in PARTS
        ]
        work = this.record.draft_ns + this.record.verify_ns
        assert sum(duration for _, _, duration in coordinator) + work == this.at_ns - before.at_ns


def test_every_name_of_a_span_is_one_of_the_list() -> None:
    house = House()
    house.client.look(spans=True)
    house.complete()
    names = {seen.span[0] for seen in everything(house.client, spans=True)[1]}
    assert names <= set(NAMES)
    assert names >= {"receive", "handle", "plan", "detokenise", "encode", "send", "link", "verify"}


def test_workers_record_fine_spans_while_somebody_looks_for_them() -> None:
    house = House()
    house.complete()
    house.client.look()
    house.run()
    assert not any(w.fine for w in house.workers)
    house.client.look(spans=True)
    house.run()
    assert all(w.fine for w in house.workers)
    late = house.add(ScriptedDraft, "draft")
    house.coordinator.tick()
    house.run()
    assert late.fine
    house.later_ns += LOOKED_NS + 1
    house.coordinator.tick()
    house.run()
    assert not any(w.fine for w in house.workers)
    assert sum(isinstance(command, Observe) for w in house.workers for command in w.seen) == 6


def test_a_request_that_is_traced_has_fine_spans_and_all_its_spans_are_its_own() -> None:
    house = House()
    other = house.submit((9, 8, 7))
    finished = house.complete(trace=True)
    assert other != finished.request
    assert {seen.span[0] for seen in finished.spans} >= {
        "handle",
        "link",
        "receive",
        "detokenise",
        "verify",
    }
    assert len({seen.session for seen in finished.spans}) == 1
    assert {seen.round for seen in finished.spans} >= set(range(1, finished.result.rounds))
    house.coordinator.tick()
    house.run()
    assert not any(w.fine for w in house.workers)


def test_a_worker_is_seen_with_what_it_waits_for() -> None:
    house = House()
    house.run()
    assert {seen.name: seen.waiting for seen in house.client.look().workers} == {
        "draft": "no work",
        "target": "no work",
    }
    silent = house.connect()
    for w in house.workers:  # from now on nobody answers
        w.step = lambda: 0  # type: ignore[method-assign]
    house.submit()
    assert {seen.name: seen.waiting for seen in silent.look().workers} == {
        "draft": "",
        "target": "",
    }


def test_a_client_on_another_machine_reads_the_tokens_of_its_own_requests_alone() -> None:
    house = House()
    house.complete()
    key = PeerKey(name="elsewhere", roles=("client",), public="")
    guest = Client(pumped(house, house.hub.connect(key)))
    strange = everything(guest)[0]
    known = everything(house.client)[0]
    assert [len(seen.record.tokens) for seen in strange] == [
        len(seen.record.tokens) for seen in known
    ]
    assert {token for seen in strange for token in (*seen.record.tokens, seen.record.bonus)} == {0}
    assert {token for seen in known for token in seen.record.tokens} != {0}


def test_trials_are_in_no_round() -> None:
    house = House()
    house.complete()
    before = len(everything(house.client)[0])
    assert before
    target = next(w for w in house.coordinator.registry.workers.values() if w.plays("target"))
    heard: list[object] = []
    submit = Submit(
        epoch=1, request=1, tokens=PROMPT, sampling=Sampling(), max_tokens=5, tree=TreeSettings()
    )
    trial = house.coordinator._changes.trial(submit, target, None, heard.append)
    house.coordinator._sessions.start(trial)
    house.run()
    assert heard
    assert len(everything(house.client)[0]) == before


def test_looking_takes_the_coordinator_little() -> None:
    """An answer is made when it is asked for, in some microseconds a span."""
    observing, target = EventLog(time.monotonic_ns), worker()
    item = VerifiedItem(session=1, round=1, accepted=(), bonus=1, margins=(1.0,))
    event = Verified(epoch=1, items=(item,), spans=(("verify", 10, 20), ("commit", 30, 2)))
    began = time.thread_time_ns()
    for _ in range(2000):
        observing.event(target, event)
    assert (time.thread_time_ns() - began) / 2000 < 50_000
    assert look(observing, spans=True).more


@pytest.mark.parametrize("count", [1, 3])
def test_the_answer_names_the_request_that_it_answers(count: int) -> None:
    house = House()
    assert [house.client.look().request for _ in range(count)] == list(range(1, count + 1))
