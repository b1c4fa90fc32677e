"""Playing many schedules, in several processes, until one fails."""

import gc
import multiprocessing
import signal
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from explore.drawing import draw
from explore.invariants import Broken
from explore.sabotage import Panic, Sabotage
from explore.schedules import Schedule
from explore.shrinking import shrink
from explore.world import play

BLOCK = 64  # schedules that a process plays at a time
HANGS_S = 30.0  # seconds of a core after which a schedule counts as one that never ends


class Hung(SystemExit):
    """A schedule does not end. The coordinator lets it pass, as it does what ends its process."""


@dataclass(frozen=True)
class Failure:
    """A schedule that failed, in which way, and the story of it."""

    number: int
    schedule: Schedule
    way: str
    story: str


@dataclass
class Played:
    """The outcome of many schedules."""

    schedules: int = 0
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Kinds of faults with what sessions were doing, deviations, exceptions with their places."""
    events: int = 0
    trace: int = 0  # a checksum of what happened in all of them, in any order
    failure: Failure | None = None

    def add(self, other: "Played") -> None:
        self.schedules += other.schedules
        self.events += other.events
        self.seen += other.seen
        self.trace ^= other.trace
        self.failure = self.failure or other.failure


def explore(seed: int, numbers: range) -> Played:
    """Play the schedules of a seed with these numbers, up to the first that fails."""
    found = Played()
    signal.signal(signal.SIGVTALRM, _hung)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in numbers:
            schedule = draw(seed, number)
            found.failure = attempt(schedule, number, found)
            if found.failure is not None:
                break
            if number % 16 == 0:
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def attempt(schedule: Schedule, number: int = 0, found: Played | None = None) -> Failure | None:
    """Play one schedule; how it failed, if it did."""
    signal.setitimer(signal.ITIMER_VIRTUAL, HANGS_S)
    try:
        world = play(schedule)
    except (Exception, Panic, Hung) as error:
        story = "".join(traceback.format_exception(error))
        return Failure(number, schedule, _way(error), story)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if found is not None:
        found.schedules += 1
        found.seen += world.seen
        found.events += world.time.steps
        told = [at_s for at_s, _ in world.history]
        happened = (schedule, world.time.steps, world.time.now_ns, told)
        found.trace ^= zlib.crc32(repr(happened).encode())
    return None


def shortest(failure: Failure) -> Failure:
    """Return the shortest schedule that fails in the same way."""

    def fails(schedule: Schedule) -> bool:
        again = attempt(schedule)
        return again is not None and again.way == failure.way

    signal.signal(signal.SIGVTALRM, _hung)
    found = attempt(shrink(failure.schedule, fails), failure.number)
    assert found is not None
    return found


def in_parallel(
    seed: int, schedules: int, jobs: int, goes_on: Callable[[], bool] = lambda: True
) -> Iterator[Played]:
    """Explore in several processes; what each block of schedules brought, in their order, until one
    fails or it `goes_on` no more."""
    blocks = (
        (seed, range(first, min(first + BLOCK, schedules))) for first in range(0, schedules, BLOCK)
    )
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for found in pool.map(_explore, blocks):
            yield found
            if found.failure is not None or not goes_on():
                break
        pool.shutdown(cancel_futures=True)


def _explore(block: tuple[int, range]) -> Played:
    return explore(*block)


def _way(error: BaseException) -> str:
    """Return in which way a schedule failed: the promise that was not kept, or where the exception
    came from."""
    if isinstance(error, Broken):
        return error.promise
    if isinstance(error, Sabotage | Panic):
        return f"what was raised in {error} was not contained"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(last.filename).name}, {last.name}"


def _hung(*_: object) -> None:
    raise Hung("the schedule does not end")
