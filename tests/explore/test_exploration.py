"""Exploration itself: a seed says what is played, whoever plays it; planted bugs are found, and
what is found is shrunk."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from explore.drawing import RINGS, draw, enumerated, reached
from explore.mutants import MOST, MUTANTS, Mutant
from explore.schedules import Fault, Schedule, Swerve, Wish, as_code
from explore.search import attempt, explore, shortest

MOST_STEPS = 6  # requests and faults of what it is shrunk to
SEED = 0


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(Path(__file__).parent), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_one_seed_plays_the_same_with_any_number_of_processes() -> None:
    found = [run("--schedules", "24", "--seed", "5", "--jobs", jobs, "--json") for jobs in "12"]
    assert [done.returncode for done in found] == [0, 0], found[0].stdout + found[0].stderr
    one, two = (json.loads(done.stdout) for done in found)
    assert one["trace"] == two["trace"]
    assert one["faults"] == two["faults"]
    assert one["schedules"] == 24


def test_two_seeds_play_different_schedules() -> None:
    assert [draw(0, number) for number in range(64)] == [draw(0, number) for number in range(64)]
    assert not {draw(0, number) for number in range(64)} & {draw(1, number) for number in range(64)}


def test_an_enumeration_has_each_schedule_once() -> None:
    first = {enumerated(3, number) for number in range(RINGS[0])}
    assert len(first) == RINGS[0]
    assert reached(4 * RINGS[0] + 4)[1].played == 1


def test_a_schedule_is_a_value_that_makes_itself() -> None:
    names = {"Fault": Fault, "Schedule": Schedule, "Swerve": Swerve, "Wish": Wish}
    for number in range(64):
        assert eval(as_code(draw(0, number)), names) == draw(0, number)  # noqa: S307


def test_a_planted_bug_is_found_and_shrunk_to_the_fault_that_shows_it() -> None:
    bug = next(one for one in MUTANTS if one.words.startswith("what a full queue"))
    busy = (0, Fault("deaf", who=3, for_ms=40))
    more = ((40, Fault("kill")), (3, Wish(tokens=9)), (8, Swerve()))
    long = Schedule(targets=2, steps=((0, Wish()), busy, *more))
    with bug.planted():
        failure = attempt(long)
        assert failure is not None
        found = shortest(failure)
    assert [type(step) for _, step in found.schedule.steps] == [Wish, Fault]
    assert attempt(found.schedule) is None


@pytest.mark.slow
@pytest.mark.parametrize("bug", MUTANTS, ids=lambda bug: bug.words.replace(" ", "-"))
def test_exploration_finds_each_planted_bug(bug: Mutant) -> None:
    with bug.planted():
        failure = explore(SEED, range(MOST)).failure
        assert failure is not None, f"not found in {MOST} schedules: {bug.words}"
        found = shortest(failure)
    assert len(found.schedule.steps) <= MOST_STEPS
    assert attempt(found.schedule) is None, "it fails without the bug"
    print(f"{bug.words}: schedule {failure.number}, {found.way}: {as_code(found.schedule)}")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_without_them_the_same_schedules_find_nothing(part: int) -> None:
    found = explore(SEED, range(part * MOST // 12, (part + 1) * MOST // 12))
    assert found.failure is None, found.failure.story
