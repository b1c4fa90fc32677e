"""Slow drafts in virtual time: a round waits for a proposal little longer than a round without a
draft takes. The oracle is the same request without a draft."""

from collections.abc import Callable, Sequence

import pytest

from dovetail.protocol.messages import Finished
from explore.clock import S
from explore.processes import Process
from explore.schedules import Schedule, Wish
from explore.told import Told
from explore.workers import Costs
from explore.world import World

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


def test_a_draft_that_becomes_fast_drafts_again() -> None:
    world = house(25.0)
    seconds(world, [wish()])
    (draft,) = drafts(world)
    draft.costs = costs(0.1)
    took_s, _ = seconds(world, [wish(tokens=400)])
    without_s, _ = alone([wish(tokens=400)])
    assert took_s < 0.8 * without_s
