"""Coordinator and workers in virtual time, and all that may happen to them: no schedule of requests
and faults breaks a promise (`tests/explore`, which plays a million of them by one command)."""

from collections.abc import Callable, Sequence

import pytest

from dovetail.protocol.codec import encode
from dovetail.protocol.messages import (
    Close,
    Closed,
    Command,
    Draft,
    DraftFailure,
    Event,
    Failed,
    Feed,
    Finished,
    Open,
)
from explore.clock import S
from explore.drawing import draw
from explore.found import FOUND
from explore.processes import Process
from explore.sabotage import hushed
from explore.schedules import Fault, Kind, Schedule, Wish
from explore.told import Told
from explore.workers import CarefulTarget, Costs
from explore.world import CAREFUL, READY_NS, World, play, undisturbed
from support.cases import everyday
from support.houses import DYNAMIC, PROMPT, House
from support.scripted import READS, VOCABULARY, ScriptedDraft, continuation

PASS_MS = 100.0
FACTOR = 1.3
SLOW = [1.1, 2.0, 5.0, 25.0]  # passes of the target that a proposal takes


def costs(proposal: float) -> Costs:
    return Costs(pass_ms=PASS_MS, row_ms=1.0, draft_ms=proposal * PASS_MS)


def house(proposal: float) -> World:
    world = World(Schedule(kept=0), None)
    for process in world.processes:
        process.costs = costs(proposal)
    world.run_until(world.ready, 30 * S, "not everybody came")
    return world


def drafts(world: World) -> list[Process]:
    return [one for one in world.processes if one.role == "draft"]


def wish(number: int = 0, **about: object) -> Wish:
    return Wish(**{"prompt": (2 + number, 3), "tokens": 14, "policy": "goodput", **about})  # type: ignore[arg-type]


def seconds(
    world: World, wishes: Sequence[Wish], then: Callable[[list[Told]], object] = lambda _: None
) -> tuple[float, list[tuple[int, ...]]]:
    """Decode all at once; return the seconds and the tokens. `then` is called while they run."""
    told = [world.reader.submit(one) for one in wishes]
    world.run_until(lambda: all(one.heard_ns for one in told), 60 * S, "no token came")
    began_ns = min(one.heard_ns[0] for one in told)
    then(told)
    world.run_until(lambda: not any(one.open for one in told), 600 * S, "a request did not end")
    assert all(isinstance(one.end, Finished) for one in told)
    return (world.time.now_ns - began_ns) / S, [tuple(one.tokens) for one in told]


def alone(wishes: Sequence[Wish]) -> tuple[float, list[tuple[int, ...]]]:
    return seconds(house(1.0), [wish_without(one) for one in wishes])


def wish_without(one: Wish) -> Wish:
    return Wish(one.prompt, one.tokens, one.policy, speculate=False, temperature=one.temperature)


@pytest.mark.parametrize("sessions", [1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposal", SLOW)
def test_a_slow_draft_costs_little_from_the_first_reply_on(
    proposal: float, temperature: float, sessions: int
) -> None:
    wishes = [wish(number, temperature=temperature) for number in range(sessions)]
    without_s, tokens = alone(wishes)
    world = house(proposal)
    for _ in range(2):
        took_s, heard = seconds(world, wishes)
        assert heard == tokens
        assert took_s <= FACTOR * without_s


@pytest.mark.parametrize("proposal", SLOW)
def test_a_draft_that_becomes_slow_in_the_midst_of_a_reply_costs_little(proposal: float) -> None:
    wishes = [wish(tokens=60)]
    without_s, tokens = alone(wishes)
    world = house(0.1)
    fast_s, _ = seconds(world, wishes)
    assert fast_s < without_s / 1.5, "a good draft drafts"
    (draft,) = drafts(world)

    def slow_down(told: list[Told]) -> None:
        world.run_until(lambda: len(told[0].tokens) >= 20, 60 * S, "no tokens came")
        draft.costs = costs(proposal)

    took_s, heard = seconds(world, wishes, slow_down)
    assert heard == tokens
    assert took_s <= 20 / 60 * fast_s + FACTOR * 40 / 60 * without_s
    if proposal < 25.0:  # else it was requested too seldom
        assert any("too late" in words for words in world.coordinator.report().decisions)


def test_a_slow_draft_that_takes_the_place_of_another_costs_little() -> None:
    wishes = [wish(tokens=60)]
    without_s, tokens = alone(wishes)
    world = house(0.1)
    seconds(world, wishes)
    (old,) = drafts(world)
    new = world.add("draft", standby=True)
    new.costs = costs(25.0)
    world.run_until(lambda: new.registered, 30 * S, "the newcomer did not come")
    assert new.worker is not None
    assert old.worker is not None
    world.reader.swap(new.worker.epoch, old.worker.epoch)
    took_s, heard = seconds(world, wishes)
    assert heard == tokens
    assert took_s <= FACTOR * without_s


def test_the_late_first_proposal_of_a_cold_draft_does_not_end_drafting() -> None:
    wishes = [wish(tokens=60)]
    without_s, tokens = alone(wishes)
    world = house(2.0)
    (draft,) = drafts(world)

    def warm_up(told: list[Told]) -> None:
        world.run_until(lambda: len(told[0].tokens) >= 7, 60 * S, "no tokens came")
        draft.costs = costs(0.1)

    took_s, heard = seconds(world, wishes, warm_up)
    assert heard == tokens
    assert took_s < 0.6 * without_s
    assert not any("stopped" in words for words in world.coordinator.report().decisions)


def test_a_draft_that_becomes_fast_drafts_again() -> None:
    world = house(25.0)
    seconds(world, [wish()])
    (draft,) = drafts(world)
    draft.costs = costs(0.1)
    took_s, _ = seconds(world, [wish(tokens=400)])
    without_s, _ = alone([wish(tokens=400)])
    assert took_s < 0.8 * without_s


WORDS = "IndexError: the index is on another device than the states"


class FailingDraft(ScriptedDraft):
    """Fails where it is told to."""

    fails: Callable[[Command], bool]

    def work(self, command: Command) -> list[Event]:
        if self.fails(command) and isinstance(command, Open | Feed | Draft):
            return [
                Failed(
                    epoch=self.epoch,
                    session=command.session,
                    round=command.round,
                    code="internal",
                    text=WORDS,
                )
            ]
        return super().work(command)


def house_of(fails: Callable[[Command], bool], *, head: bool = False) -> House:
    house = House(draft=False)
    FailingDraft.fails = staticmethod(fails)  # type: ignore[assignment]
    house.draft = house.add(
        FailingDraft, "draft", **({"reads": READS, "vocabulary": None} if head else {})
    )
    return house


def finished_of(house: House) -> Finished:
    return next(reply for reply in house.replies() if isinstance(reply, Finished))


WAYS: dict[str, tuple[bool, Callable[[Command], bool]]] = {
    "opening": (False, lambda command: isinstance(command, Open)),
    "feeding": (True, lambda command: isinstance(command, Feed)),
    "the first order": (False, lambda command: isinstance(command, Draft)),
    "a later order": (False, lambda command: isinstance(command, Draft) and command.round >= 4),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_failure_is_in_the_result_the_report_and_the_counters(way: str) -> None:
    head, fails = WAYS[way]
    house = house_of(fails, head=head)
    result = house.complete(tree=DYNAMIC).result
    assert list(result.token_ids) == continuation(PROMPT, 60)
    failure = result.draft_failure
    assert failure is not None
    assert (failure.draft, failure.error) == ("draft", WORDS)
    assert 0.0 <= failure.after_s <= result.wall_s
    assert (failure.round >= 4) == (way == "a later order")
    state = house.report()
    (fault,) = state.faults
    assert (fault.part, state.degraded, state.totals.draft_failures) == ("draft worker", True, 1)
    assert fault.why == f"{WORDS}, in round {failure.round} of session 1"
    assert any(WORDS in reason for reason in state.reasons)


def test_failures_are_counted_and_the_first_one_is_told_with_how_long_ago_it_was() -> None:
    house = house_of(lambda command: isinstance(command, Draft))
    house.complete(tree=DYNAMIC)
    house.later_ns += 90_000_000_000
    house.complete(tree=DYNAMIC)
    (fault,) = house.report().faults
    assert fault.since_s >= 90.0
    assert fault.why.endswith("of session 1 (2 failures so far)")
    assert house.report().totals.draft_failures == 2


def test_a_fault_stands_until_a_request_that_began_after_it_was_drafted_for_to_its_end() -> None:
    house = house_of(lambda command: isinstance(command, Draft) and command.session == 1)
    house.submit(tree=DYNAMIC)
    house.complete(tree=DYNAMIC, speculate=False)
    assert house.report().faults
    assert house.complete(tree=DYNAMIC).result.draft_failure is None
    state = house.report()
    assert (state.faults, state.degraded, state.totals.draft_failures) == ((), False, 1)


def test_work_ahead_of_orders_that_fails_is_said_and_drafting_goes_on() -> None:
    house = House()
    assert house.draft is not None
    house.submit(tree=DYNAMIC)
    house.run(12)
    house.draft.link.send(encode(Failed(epoch=house.draft.epoch, code="internal", text=WORDS)))
    finished = finished_of(house)
    failure = finished.result.draft_failure
    assert isinstance(failure, DraftFailure)
    assert failure.error == WORDS
    assert finished.result.accepted_tokens > 0
    (fault,) = house.report().faults
    assert fault.why == f"{WORDS}, while drafting ahead"


def test_a_draft_that_is_lost_is_in_the_result_of_its_request() -> None:
    house = House()
    assert house.draft is not None
    house.submit(tree=DYNAMIC)
    house.run(12)
    house.lose(house.draft)
    house.coordinator.look_around()
    failure = finished_of(house).result.draft_failure
    assert failure is not None
    assert failure.error == "it disconnected"


EVERYDAY = range(120)
LONG = Wish(tokens=40)  # schedules that broke a promise once


def test_no_schedule_of_faults_changes_a_text_loses_a_request_or_leaves_something_behind() -> None:
    for number in EVERYDAY:
        play(draw(0, number))


@pytest.mark.parametrize("schedule", FOUND.values(), ids=FOUND)
def test_what_was_found_stays_mended(schedule: Schedule) -> None:
    play(schedule)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(
    "fault", [Fault("kill", who=0), Fault("kill", who=1), Fault("cancel", who=1), Fault("drop")]
)
def test_a_prompt_in_the_midst_of_which_something_happens_is_read_again_beside_the_stream(
    fault: Fault, reads: bool
) -> None:
    long = Wish(prompt=tuple(range(3, 40)), tokens=12)
    for after in (6, 10, 14):
        steps = ((0, LONG), (30, long), (after, fault))
        world = play(Schedule(targets=2, reads=reads, part=3, steps=steps))
        assert any(told.wish == long for told in world.reader.told.values())


def rebalanced(world: World) -> int:
    return world.coordinator.report().totals.rebalanced


CROWD = tuple((0, Wish(prompt=(number, 6, 7), tokens=200)) for number in range(3, 9))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("kept", [1 << 16, 0])
def test_sessions_go_back_to_a_target_that_was_killed_and_is_there_again(
    reads: bool, kept: int
) -> None:
    steps = (*CROWD, (60, Fault("kill", who=0, for_ms=300)))
    world = play(Schedule(targets=2, reads=reads, part=3, row_ms=12.0, kept=kept, steps=steps))
    assert rebalanced(world) >= 2


@pytest.mark.parametrize(
    "kind", everyday(["kill", "stop", "forget", "cut", "stick", "drop"], "kill", "cut", "stick")
)
@pytest.mark.parametrize("side", ["new", "old"])
def test_a_target_that_fails_in_the_midst_of_a_move_costs_no_session_anything(
    side: str, kind: Kind
) -> None:
    for after in range(0, 40, 4):
        world = World(Schedule(targets=2, part=3, row_ms=12.0, steps=CROWD), undisturbed)
        with hushed(world.loud):
            world.run_until(world.ready, READY_NS, "not everybody registered")
            for _, wish in CROWD:
                world.do(wish)
            world.run(60)
            world.do(Fault("kill", who=0, for_ms=300))
            moves = world.coordinator._rebalancing
            world.run_until(lambda moves=moves: moves.under_way, READY_NS, "nothing moves")
            assert moves._under is not None
            peer = getattr(moves._under, side).peer
            (who,) = [
                place
                for place, process in enumerate(world.processes)
                if process.wire is not None and process.wire.peer == peer
            ]
            world.run(after)
            world.do(Fault(kind, who=who, for_ms=300))
            world.settle()


class Full(CarefulTarget):
    """Has no memory for a session that was begun elsewhere, once it has been started again."""

    def work(self, command: Command) -> list[Event]:
        if isinstance(command, Open) and command.replied and self.epoch % 10_000 > 1:
            text = "there is no memory for its cache"
            about = {"epoch": self.epoch, "session": command.session, "round": command.round}
            return [Failed(**about, code="capacity", text=text)]
        return super().work(command)


@pytest.mark.parametrize("kept", [1 << 16, 0])
def test_a_session_that_finds_no_memory_where_it_moves_goes_on_where_it_was(kept: int) -> None:
    """Nobody else is moved there for some time either."""
    steps = (*CROWD, (60, Fault("kill", who=0, for_ms=300)))
    schedule = Schedule(targets=2, part=3, row_ms=12.0, kept=kept, steps=steps)
    assert rebalanced(play(schedule, {**CAREFUL, "target": Full})) == 1


# -- what a fault costs ----------------------------------------------------------------------------


def pause_ms(world: World) -> float:
    """The longest silence in the first reply."""
    return world.reader.told[1].longest_pause_ms


@pytest.mark.parametrize("reads", [False, True])
def test_a_stream_whose_target_dies_pauses_while_another_one_reads_its_log(reads: bool) -> None:
    undisturbed = pause_ms(play(Schedule(targets=2, reads=reads, steps=((0, LONG),))))
    world = play(Schedule(targets=2, reads=reads, steps=((0, LONG), (40, Fault("kill", who=0)))))
    costs = world.processes[1].costs
    prefill_ms = costs.open_ms + costs.token_ms * (len(LONG.prompt) + LONG.tokens)
    assert moves(world) == 1
    assert (
        pause_ms(world) <= undisturbed + prefill_ms + costs.pass_ms + 2.0
    )  # until the death is seen, and three hops


@pytest.mark.parametrize("reads", [False, True])
def test_a_stream_whose_draft_dies_pauses_for_no_longer_than_a_round(reads: bool) -> None:
    undisturbed = pause_ms(play(Schedule(reads=reads, steps=((0, LONG),))))
    world = play(Schedule(reads=reads, steps=((0, LONG), (40, Fault("kill", who=1)))))
    assert pause_ms(world) <= undisturbed + world.processes[0].costs.pass_ms + 2.0


def test_a_stream_whose_only_target_dies_goes_on_when_it_is_back() -> None:
    world = play(Schedule(steps=((0, LONG), (40, Fault("kill", who=0, for_ms=4000)))))
    assert moves(world) == 1
    assert 4000 < pause_ms(world) < 4700


def moves(world: World) -> int:
    """Return how often the first request has moved."""
    end = world.reader.told[1].end
    assert end is not None
    assert end.type == "finished"
    return end.result.moves


# -- that a broken promise is seen -----------------------------------------------------------------


class Wandering(CarefulTarget):
    """Goes on with something else where a session was begun elsewhere."""

    def open(self, command: Open) -> list[Event]:
        *parts, opened = super().open(command)
        if not command.replied or opened.type != "opened":
            return [*parts, opened]
        log = self.logs[command.session]
        log[-1] = 1 + log[-1] % (VOCABULARY - 1)
        return [*parts, opened.model_copy(update={"bonus": log[-1]})]


class Hoarding(CarefulTarget):
    """Never lets go of a session."""

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Close):
            return [Closed(epoch=self.epoch, session=command.session)]
        return super().handle(command)


class Reading(CarefulTarget):
    """Reads prompts and says nothing more, and nobody looks after it."""

    def work(self, command: Command) -> list[Event]:
        return super().work(command) if isinstance(command, Open) else []


class Silent(CarefulTarget):
    """Says nothing to whatever it is asked."""

    def work(self, command: Command) -> list[Event]:
        return []


KILLED = Schedule(targets=2, drafts=0, steps=((0, LONG), (40, Fault("kill", who=0))))


@pytest.mark.parametrize(
    ("kind", "words"),
    everyday(
        [(Wandering, "undisturbed"), (Hoarding, "something is left"), (Silent, "worker_lost")],
        *((Hoarding, "something is left"), (Silent, "worker_lost")),
    ),
    ids=["wandering", "hoarding", "silent"],
)
def test_a_broken_promise_is_told(kind: type[CarefulTarget], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        play(KILLED, {**CAREFUL, "target": kind})


def test_a_target_that_says_nothing_more_when_it_has_read_is_lost_and_recovered_from_again_and_again() -> (  # noqa: E501
    None
):
    world = play(KILLED, {**CAREFUL, "target": Reading})
    assert moves(world) > 20  # each brings the token behind the log


def test_a_schedule_may_have_faults_of_the_coordinator_about_one_session() -> None:
    steps = (
        (0, LONG),
        (0, Wish(prompt=(9,), tokens=40)),
        *((12, Fault("fault", who=who, for_ms=7 * who + 1)) for who in range(3)),
    )
    assert play(Schedule(steps=steps)).loud.contained


def test_the_oracle_is_the_scripted_language() -> None:
    told = play(Schedule(steps=((0, LONG),))).reader.told[1]
    assert told.tokens == continuation(LONG.prompt, LONG.tokens)
