"""Shrinking: from a schedule that fails to the shortest one that fails in the same way.

Steps are left out, many at first and then one by one; what is left is made plainer: a smaller
fleet, shorter requests, earlier and shorter faults. Each attempt is played; what still fails is
gone on from, until nothing plainer fails. Hypothesis' shrinker would play several times as many.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from explore.schedules import Fault, Schedule, Step, Swerve, Wish

MOST_PLAYED = 2000  # attempts, after which the shortest so far has to do
Timed = tuple[int, Step]


def shrink(
    schedule: Schedule, fails: Callable[[Schedule], bool], most: int = MOST_PLAYED
) -> Schedule:
    """Return the shortest schedule that `fails`, in at most `most` attempts."""
    tried = {schedule}
    again = True
    while again:
        again = False
        for plainer in _plainer(schedule):
            if plainer in tried:
                continue
            if len(tried) > most:
                return schedule
            tried.add(plainer)
            if fails(plainer):
                schedule, again = plainer, True
                break
    return schedule


def _plainer(schedule: Schedule) -> Iterator[Schedule]:
    """Return schedules that are a little plainer, those that are much plainer first."""
    steps = schedule.steps
    size = len(steps)
    while size:
        for start in range(0, len(steps) - size + 1, max(1, size // 2)):
            for rest in _without(steps, start, start + size):
                yield replace(schedule, steps=rest)
        size //= 2
    for about in fields(Schedule):
        for value in _smaller(about.name, getattr(schedule, about.name)):
            yield replace(schedule, **{about.name: value})
    for place, (after, step) in enumerate(steps):
        for timed in (
            *((less, step) for less in _fewer(after)),
            *((after, plain) for plain in _plain(step)),
        ):
            yield replace(schedule, steps=(*steps[:place], timed, *steps[place + 1 :]))


def _without(steps: tuple[Timed, ...], start: int, stop: int) -> Iterator[tuple[Timed, ...]]:
    """Return the steps without some of them; those behind happen when they did, or earlier."""
    before, behind = steps[:start], steps[stop:]
    yield (*before, *behind)
    if behind:
        gap = sum(after for after, _ in steps[start:stop])
        (after, step), *rest = behind
        if gap:
            yield (*before, (after + gap, step), *rest)


def _smaller(name: str, value: Any) -> Iterator[Any]:
    """Return plainer values of a setting of the fleet."""
    match name:
        case "targets":
            yield from range(1, value)
        case "drafts":
            yield from range(value)
        case "steps":
            return
        case _:
            plain = next(about.default for about in fields(Schedule) if about.name == name)
            if value != plain:
                yield plain


def _fewer(number: int) -> Iterator[int]:
    """Return smaller numbers, the smallest first."""
    found = {0, number // 2, number - 1, number - 2, number - 5}
    yield from sorted(less for less in found if 0 <= less < number)


def _plain(step: Step) -> Iterator[Step]:
    match step:
        case Swerve():
            yield from (Swerve(place) for place in range(1, step.place))
        case Fault():
            yield from (replace(step, who=who) for who in range(step.who))
            yield from (replace(step, for_ms=ms) for ms in (0, 1, 40, 300) if ms < step.for_ms)
        case Wish():
            for about in fields(Wish):
                value = getattr(step, about.name)
                if about.name == "tokens":
                    yield from (replace(step, tokens=less) for less in _fewer(value) if less)
                elif about.name == "logprobs" and step.scored:
                    continue  # it has to say how many are scored
                elif value != about.default:
                    yield replace(step, **{about.name: about.default})
