"""Prompts of several API keys in virtual time: one of each key is read before a second of any."""

import pytest

from dovetail.protocol.messages import Open
from explore.clock import MS, S
from explore.schedules import Schedule, Wish
from explore.told import Told
from explore.workers import Costs
from explore.world import World

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
