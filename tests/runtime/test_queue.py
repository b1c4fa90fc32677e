"""Requests that wait for room: whose turn it is, how many may wait, and what frees their place."""

import random
import tracemalloc
from itertools import islice
from pathlib import Path

import pytest

from dovetail.protocol.messages import Failed, Finished, Limits, Open, Recall, Recalled, Submit
from dovetail.protocol.messages.status import KeyWaits, Totals
from dovetail.protocol.settings import CoordinatorSettings, Sampling, TreeSettings
from dovetail.runtime.fleet.beginnings import tokens_of
from dovetail.runtime.fleet.queue import AGEING, PASSED_S, FairQueue
from dovetail.runtime.journal.database import Database
from dovetail.runtime.journal.journal import Journal
from explore.clock import MS, S
from explore.schedules import Schedule, Wish
from explore.told import Told
from explore.workers import Costs
from explore.world import World
from support.houses import DYNAMIC, PROMPT, House
from support.scripted import ROOMY, ScriptedTarget, ScriptedWorker, continuation

MIB = 1 << 20


def settings(memory: str) -> CoordinatorSettings:
    return CoordinatorSettings(memory=memory)


def submit(house: House, number: int, **fields: object) -> None:
    about = {"tokens": (5, 6, 7), "max_tokens": 1, "seed": 1, "tree": DYNAMIC, **fields}
    client = house.client
    client._send(Submit(epoch=client.epoch, request=number, sampling=Sampling(), **about))  # type: ignore[arg-type]


def memo(number: int, size: int) -> bytes:
    """Incompressible bytes."""
    return random.Random(number).randbytes(size)


def test_finished_replies_are_kept_within_the_limit_the_newest_longest(tmp_path: Path) -> None:
    journal = Journal(Database(tmp_path), most=4 * MIB)
    house = House(journal=journal, settings=settings("4MiB"))
    tracemalloc.start()
    for number in range(1, 33):
        submit(house, number, ticket=f"{number}/0", memo=memo(number, MIB // 4))
        house.run()
        assert isinstance(house.replies()[-1], Finished)
        house.coordinator.tick()
        assert journal.size <= 4 * MIB
    assert tracemalloc.get_traced_memory()[0] < 8 * MIB
    tracemalloc.stop()
    for number in (1, 32):
        client = house.client
        client._send(Recall(epoch=client.epoch, request=100 + number, ticket=f"{number}/0"))
        (reply,) = house.replies()
        assert isinstance(reply, Recalled if number == 32 else Failed)
    journal.close()
    assert 2 * MIB < journal.state().bytes <= 6 * MIB
    for _ in range(2):  # a restart reads no more
        again = Journal(Database(tmp_path), most=4 * MIB)
        assert again.size < MIB
        assert 8 < again.state().replies < 16
        again.close()


def test_running_requests_are_kept_and_a_request_beyond_the_limit_is_refused(
    tmp_path: Path,
) -> None:
    journal = Journal(Database(tmp_path), most=2 * MIB)
    house = House(journal=journal, settings=settings("2MiB"))
    for number in (1, 2, 3):
        submit(house, number, ticket=f"{number}/0", memo=memo(number, 7 * MIB // 8), max_tokens=9)
    house.coordinator.pump()
    replies = house.replies()
    (refused,) = (reply for reply in replies if isinstance(reply, Failed))
    assert (refused.session, refused.code) == (3, "capacity")
    assert "exceeds coordinator.memory" in refused.text
    assert sum(isinstance(reply, Finished) for reply in replies) == 2
    submit(house, 4, ticket="4/0", memo=memo(4, 7 * MIB // 8))
    house.run()
    assert isinstance(house.replies()[-1], Finished)


@pytest.mark.parametrize("target", [True, False])
def test_requests_that_wait_count_without_a_journal(target: bool) -> None:
    """In the queue behind a request that fills the cache, or for a target that is not there yet."""
    limits = ROOMY.model_copy(update={"room": 40_000, "context": 60_000})
    house = House(settings=settings("4MiB"), limits=limits, target=target)
    for number in range(1, 9):
        prompt = (number, *(3 for _ in range(30_000)))
        submit(house, number, tokens=prompt, max_tokens=9, again=not target)
    house.coordinator.pump()
    codes = [reply.code for reply in house.replies() if isinstance(reply, Failed)]
    assert len(codes) >= 4
    assert set(codes) == {"capacity"}
    assert house.coordinator._intake.relieve() <= 0


FLOOD, TOKENS = 30, 200


def prompt(number: int, tokens: int = TOKENS) -> tuple[int, ...]:
    """A prompt that shares no prefix with another."""
    return (2 + number % 7, 2 + number // 7, *(3 for _ in range(tokens - 2)))


def settled(**about: int) -> World:
    world = World(Schedule(kept=0, **about), None)
    world.run_until(world.ready, 30 * S, "not everybody came")
    return world


def first_token_ms(world: World, told: Told) -> float:
    """Run until the first token; return the milliseconds from now."""
    began_ns = world.time.now_ns
    world.run_until(lambda: bool(told.heard_ns), 60 * S, "no token came")
    return (told.heard_ns[0] - began_ns) / MS


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("part", [0, 64])
def test_a_prompt_behind_a_flood_of_another_key_waits_for_one_of_its_prompts(
    part: int, streams: int
) -> None:
    world = settled(part=part)
    for number in range(streams):
        stream = Wish((9, 2 + number), tokens=600, speculate=False, owner="c")
        first_token_ms(world, world.reader.submit(stream))
    flood = [
        world.reader.submit(Wish(prompt(number), tokens=40, speculate=False, owner="a"))
        for number in range(FLOOD)
    ]
    world.run_until(lambda: bool(flood[2].heard_ns), 60 * S, "the flood is not read")
    alone_ms = Costs().reading(TOKENS) / MS
    waited_ms = first_token_ms(world, world.reader.submit(Wish(prompt(60, 3), owner="b")))
    assert sum(bool(one.heard_ns) for one in flood) < FLOOD / 2
    assert waited_ms < 3 * alone_ms


def test_a_key_that_was_just_served_comes_after_a_later_one() -> None:
    world = settled()
    wishes = [
        Wish(prompt(number), tokens=1, speculate=False, owner=owner)
        for number, owner in enumerate("aaaabbbbcd")
    ]
    told = [world.reader.submit(wish) for wish in wishes]
    world.run_until(lambda: all(one.heard_ns for one in told), 60 * S, "no token came")
    order = sorted(range(len(told)), key=lambda place: told[place].heard_ns[0])
    owners = "".join(wishes[place].owner for place in order)
    assert sorted(owners[:4]) == sorted("abcd"), owners
    assert sorted(owners[4:6]) == sorted(owners[6:8]) == ["a", "b"], owners


def test_a_draft_reads_the_prompts_of_each_key_in_turn() -> None:
    world, read = settled(), list[str]()
    draft = next(one for one in world.processes if one.role == "draft")
    owners = {}
    worker = draft.worker
    assert worker is not None
    handle = worker.handle

    def noted(command: object) -> object:
        if isinstance(command, Open):
            read.append(owners[command.prompt])
        return handle(command)  # type: ignore[arg-type]

    worker.handle = noted  # type: ignore[method-assign,assignment]
    for number, owner in enumerate("aaaaaaaab"):
        wish = Wish(prompt(number), tokens=30, owner=owner)
        owners[wish.prompt] = owner
        world.reader.submit(wish)
    world.run_until(lambda: len(read) == 9, 60 * S, "the draft does not read")
    assert "b" in read[:3], read


TWO = Limits(context=512, sessions=2)
ROOM_FOR_TWO = Limits(context=512, room=300)
"""The limits of a target with room for two requests of 100 tokens."""


def queue(*keys: str, most: int = 9, most_of_key: int = 9) -> FairQueue[str]:
    """One request of each key, a nanosecond apart."""
    made = FairQueue[str](most, most_of_key)
    for place, key in enumerate(keys):
        made.add(key, f"{key}{place}", place)
    return made


def lacks(house: House) -> list[str]:
    """Return, for each key, the thing that its first request waits for."""
    return [own.lacks for own in house.coordinator.report().totals.queue]


def test_the_key_that_holds_least_is_next_and_of_equals_who_came_first() -> None:
    waiting = queue("a", "a", "b", "c")
    order = [waiting.take(lambda _: True, {"a": 90, "b": 10, "c": 10}, 4) for _ in range(5)]
    assert order == ["b2", "c3", "a0", "a1", None]


def test_a_key_that_was_given_much_of_late_comes_behind_one_that_was_not() -> None:
    waiting = queue("a", "b", "a", "b")
    for turn in range(4):
        what = waiting.take(lambda _: True, {}, 4)
        assert what is not None
        assert what[0] == "ab"[turn % 2]
        waiting.given(what[0], 20, 4)
    again = queue("a", "b")
    again.given("a", 1000, 0)
    assert again.take(lambda _: True, {}, 1) == "b1"
    again.add("b", "b", 600 * S)
    assert again.take(lambda _: True, {}, 600 * S) == "a0", "that is long ago"


def test_no_request_waits_for_ever() -> None:
    waiting = queue("a")
    waiting.add("b", "b", 10 * S)
    held = {"a": round(AGEING * 9)}
    assert waiting.take(lambda _: True, held, 10 * S) == "a0"


def test_what_waits_behind_many_of_its_own_key_does_not_age_before_those_of_another() -> None:
    waiting = queue("a", "a", "a", "a")
    for at_s in (0, 8, 16):
        assert waiting.take(lambda _: True, {}, at_s * S) == f"a{at_s // 8}"
        waiting.given("a", 600, at_s * S)
    waiting.add("b", "b", 20 * S)
    assert waiting.take(lambda _: True, {"a": 600}, 24 * S) == "b"
    assert waiting.take(lambda _: True, {"a": 600}, 24 * S) == "a3"


def test_one_without_room_is_passed_but_not_for_long() -> None:
    waiting = queue("big", "small", "small")
    assert waiting.take(lambda what: what != "big0", {}, S) == "small1"
    assert waiting.take(lambda what: what != "big0", {}, round(S * (PASSED_S + 1))) is None
    assert len(waiting) == 2


def test_one_that_waits_for_something_else_than_room_is_passed_by_those_behind_it() -> None:
    waiting = queue("a", "a", "b")
    order = [waiting.take(lambda what: None if what == "a0" else True, {}, 3) for _ in range(3)]
    assert order == ["a1", "b2", None]
    assert waiting.take(lambda _: True, {}, 3) == "a0"


def test_a_queue_and_a_key_have_their_limits() -> None:
    waiting = queue("a", "b", "b", most=4, most_of_key=2)
    assert waiting.full("a") == ""
    assert "coordinator.key_queue" in waiting.full("b")
    waiting.add("c", "c", 3)
    assert "coordinator.queue" in waiting.full("a")
    assert waiting.remove(lambda what: what.startswith("b")) == ["b1", "b2"]
    assert waiting.full("b") == ""


def test_what_waits_is_told_by_key() -> None:
    told = queue("a", "b", "b").keys(2 * S)
    assert [(own.key, own.length, round(own.longest_s)) for own in told] == [
        ("a", 1, 2),
        ("b", 2, 2),
    ]


# -- in the coordinator ----------------------------------------------------------------------------


def begun(house: House) -> list[int]:
    """The sessions that the target was asked to open, in order, by the tokens of their prompts."""
    assert house.target is not None
    return [command.prompt[0] for command in house.target.seen if isinstance(command, Open)]


def ask(house: House, first: int, owner: str = "", tokens: int = 20) -> int:
    return house.client.submit(
        tokens=(first, 6, 7), max_tokens=tokens, seed=1, tree=DYNAMIC, owner=owner
    )


def test_one_key_with_many_requests_does_not_starve_another() -> None:
    house = House(limits=TWO)
    many = [ask(house, 10 + place, "many") for place in range(30)]
    one = ask(house, 50, "one")
    house.run()
    ends = [reply for reply in house.replies() if isinstance(reply, Finished)]
    assert {end.request for end in ends} == {*many, one}
    assert begun(house).index(50) == 2, "as the first of those that had to wait"
    for end in ends:
        first = 50 if end.request == one else 10 + many.index(end.request)
        assert list(end.result.token_ids) == continuation((first, 6, 7), 20)


def test_beyond_the_queue_requests_are_refused_and_told_why() -> None:
    house = House(limits=TWO, settings=CoordinatorSettings(queue=1))
    requests = [ask(house, 10 + place) for place in range(4)]
    house.run()
    replies = house.replies()
    (refused,) = (reply for reply in replies if isinstance(reply, Failed))
    assert (refused.session, refused.code) == (requests[3], "capacity")
    assert "coordinator.queue" in refused.text
    assert sum(isinstance(reply, Finished) for reply in replies) == 3


def test_a_key_decodes_no_more_at_a_time_than_it_may() -> None:
    house = House(settings=CoordinatorSettings(key_sessions=1))
    for first, owner in ((10, "a"), (11, "a"), (12, "b")):
        ask(house, first, owner)
    house.run()
    assert begun(house) == [10, 12, 11]
    assert sum(isinstance(reply, Finished) for reply in house.replies()) == 3


@pytest.mark.parametrize("queue", [1, 9])
def test_whoever_waits_for_the_limit_of_a_key_holds_up_no_other_key(queue: int) -> None:
    house = House(settings=CoordinatorSettings(key_sessions=1, queue=queue))
    for first in (10, 11):
        ask(house, first, "a", tokens=100)
    house.coordinator.pump()
    house.later_ns += round(S * (PASSED_S + 1))
    ask(house, 12, "b")
    house.coordinator.pump()
    assert [one.session.request.prompt[0] for one in house.coordinator.requests] == [10, 12]
    assert lacks(house) == ["key"]


def test_memory_is_the_bound_and_idle_prefixes_go_before_anybody_waits() -> None:
    house = House(draft=False, limits=Limits(context=512, kept=1 << 10, room=300))
    assert house.target is not None
    house.complete(prompt=tuple(range(3, 60)), speculate=False)
    assert len(house.target.kept) == 1
    for first in (70, 71):
        ask(house, first, tokens=100)
    house.coordinator.pump()
    assert [one.session.request.prompt[0] for one in house.coordinator.requests] == [70, 71]
    house.target.step()
    assert not house.target.kept, "they went for those that came"
    ask(house, 72, tokens=100)
    house.coordinator.pump()
    assert house.coordinator.report().totals.queued == 1
    assert "queued requests: 1" in house.coordinator.report().totals.queue_words
    assert lacks(house) == ["room"]
    assert house.coordinator.report().reasons == (), "nothing is missing"
    house.run()
    assert begun(house)[1:] == [70, 71, 72]


def test_the_keys_whose_requests_wait_are_named_but_for_those_behind_the_fourth() -> None:
    def words(*waits: KeyWaits) -> str:
        return Totals(queue=waits, queued=sum(own.length for own in waits)).queue_words

    keyed = [KeyWaits(key=f"{n:08x}", length=n, longest_s=6.0 - n) for n in (1, 2, 3, 4, 5)]
    assert not words()
    assert words(KeyWaits(key="", length=2, longest_s=1.0)) == (
        "queued requests: 2, the first has waited 1.0 s for room on a target"
    )
    assert words(*keyed[:2]) == (
        "queued requests: 3, the first has waited 5.0 s for room on a target; by key: 00000001 1, "
        "00000002 2"
    )
    assert words(*keyed).endswith("00000004 4, ...")


def test_a_request_that_is_larger_than_the_memory_is_left_to_the_target() -> None:
    house = House(limits=Limits(context=512, room=10))
    assert list(house.complete().result.token_ids) == continuation(PROMPT, 60)


@pytest.mark.parametrize("how", ["cancel", "leave"])
def test_whoever_goes_frees_its_place_in_the_queue(how: str) -> None:
    house = House(limits=Limits(context=512, sessions=1))
    ask(house, 10)
    waiting = ask(house, 11)
    house.coordinator.pump()
    assert house.coordinator.report().totals.queued == 1
    if how == "cancel":
        house.client.cancel(waiting)
        house.run()
        (told,) = [reply for reply in house.replies() if isinstance(reply, Failed)]
        assert (told.session, told.code) == (waiting, "cancelled")
    else:
        house.client.close()
        house.run()
    report = house.coordinator.report()
    assert (report.totals.queued, report.totals.refused_requests) == (0, 0)
    assert report.cancelled == (1 if how == "cancel" else 2)  # who leaves cancels what runs, too
    assert begun(house) == [10]


def test_a_service_that_ends_says_so_to_those_who_wait() -> None:
    house = House(limits=Limits(context=512, sessions=1))
    ask(house, 10)
    waiting = ask(house, 11)
    house.coordinator.pump()
    house.coordinator.end()
    refused = [reply for reply in house.replies() if isinstance(reply, Failed)]
    assert [(reply.session, reply.code) for reply in refused] == [(waiting, "ending")]
    assert house.coordinator.report().totals.queued == 0


def test_the_room_of_a_request_is_its_longest_log_and_its_tree() -> None:
    house = House()
    ask(house, 10, tokens=20)
    house.coordinator.pump()
    (running,) = house.coordinator.requests
    assert tokens_of(running.session.request) == 3 + 20 + TreeSettings().most_nodes


# -- after a loss ----------------------------------------------------------------------------------


def two_targets(limits: Limits) -> tuple[House, ScriptedWorker, ScriptedWorker]:
    """A house with two targets alike, and no draft."""
    house = House(draft=False, limits=limits)
    assert house.target is not None
    other = house.add(ScriptedTarget, "target", name="other", limits=limits)
    return house, house.target, other


def step(house: House) -> None:
    house.coordinator.look_around()
    house.coordinator.pump()
    for worker in house.workers:
        worker.step()


def run_beside(house: House, target: ScriptedWorker, most: int) -> dict[int, Finished]:
    """Run to the end, while the target never has more than `most` sessions."""
    for _ in range(10_000):
        step(house)
        assert len(target.logs) <= most
        if house.coordinator.idle:
            return {one.request: one for one in house.replies() if isinstance(one, Finished)}
    raise AssertionError("it does not end")


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("limits", [ROOM_FOR_TWO, TWO, Limits(context=512, kept=1 << 10, room=300)])
def test_sessions_whose_target_was_lost_wait_for_room_on_another_and_go_before_what_is_queued(
    limits: Limits, lost: int
) -> None:
    house, *targets = two_targets(limits)
    for first in (3, 4):  # what is kept of them goes for those that come
        house.complete(prompt=(*range(first, 60), 1), max_tokens=2, speculate=False)
    requests = {first: ask(house, first, tokens=100) for first in range(70, 77)}
    for _ in range(8):
        step(house)
    running = [one.session.request.prompt[0] for one in house.coordinator.requests]
    assert (len(running), house.coordinator.report().totals.queued) == (4, 3)
    moved = [
        one.session.request.prompt[0]
        for one in house.coordinator.requests
        if one.session.number in targets[lost].logs
    ]
    house.lose(targets[lost])
    left = targets[1 - lost]
    seen = len(left.seen)
    house.coordinator.look_around()
    assert house.coordinator.report().totals.queued == 3, "none goes ahead of its turn"
    ends = run_beside(house, left, 2)
    for first, request in requests.items():
        assert list(ends[request].result.token_ids) == continuation((first, 6, 7), 100)
    opened = [command.prompt[0] for command in left.seen[seen:] if isinstance(command, Open)]
    assert opened == [*moved, *(first for first in requests if first not in running)]


def test_a_request_that_waits_is_not_begun_on_a_target_that_has_gone_while_others_are_full() -> (
    None
):
    house, first, second = two_targets(Limits(context=512, sessions=1))
    for number in range(10, 16):
        ask(house, number)
    house.coordinator.pump()
    (read_for,) = {waiting.target.name for waiting in house.coordinator._shared.queue}
    house.lose(second if read_for == "other" else first)
    house.coordinator.look_around()
    assert house.coordinator.report().totals.queued == 4
    assert len(house.coordinator.requests) == 2
    house.run()
    assert sum(isinstance(reply, Finished) for reply in house.replies()) == 6


def test_what_sessions_begin_with_is_read_once_when_their_target_was_lost() -> None:
    limits = Limits(context=512, kept=1 << 12, shares=True, prompt_rows=64)
    house = House(draft=False, limits=limits)
    assert house.target is not None
    beginning = *range(5, 90), *range(30, 85), *range(2, 70)
    lasting = (n for n in range(2, 90) if len(continuation((*beginning, n), 60)) == 60)
    prompts = {house.submit((*beginning, n), max_tokens=60): n for n in islice(lasting, 5)}
    house.coordinator.pump()
    assert lacks(house) == ["beginning"]
    for _ in range(24):
        step(house)
    assert len(house.target.logs) == len(prompts)
    house.lose(house.target)
    house.run()
    other = house.add(ScriptedTarget, "target", limits=limits)
    ends = {one.request: one for one in house.replies() if isinstance(one, Finished)}
    for request, last in prompts.items():
        assert list(ends[request].result.token_ids) == continuation((*beginning, last), 60)
    opened = [command for command in other.seen if isinstance(command, Open)]
    assert len(opened) == len(prompts)
    assert sum(not command.kept for command in opened) == 1
