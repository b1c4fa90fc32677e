"""Which schedules are explored: number i of a seed is the same schedule whoever plays it, and in
whatever order.

Of each four, three are drawn at random: some requests, some faults, some deviations from first in,
first out, in a fleet drawn with them. The fourth is the next of a systematic enumeration: in each
of `FLEETS`, each of `FAULTS` behind each of the first `POSITIONS` events, and behind it no
deviation, or one, or two. What is bounded: two deviations at most, each within `WITHIN` events
behind the fault or the deviation before it, each of which lets one of the next `PLACES` things that
are due within `clock.WINDOW_NS` come first. All without a deviation are played first, then all with
one, then those with two; the seed says where in each of these rings it begins.
"""

import random
from dataclasses import dataclass
from typing import Any, get_args

from explore.sabotage import HANDLED, SABOTAGED
from explore.schedules import KEPT, KINDS, Fault, Kind, Schedule, Step, Swerve, Wish

# -- at random -------------------------------------------------------------------------------------

LOSSES: tuple[Kind, ...] = ("kill", "stop", "stick", "cut", "silence", "silence up", "silence down")
"""Drawn twice as often."""
OFTEN = (*KINDS, *LOSSES, "handler", "crash")
COMING: tuple[Kind, ...] = ("kill", "kill", "join", "drain", "swap", "cut", "stop")
"""Targets come and go."""
PAUSES = (0, 0, 1, 2, 3, 5, 8, 12, 18, 25, 40)  # between two steps: other events
FOR_MS = (1, 40, 300, 1400, 1600, 4000, 9000)
"""Durations of a fault in milliseconds, on both sides of what heartbeats bear."""
FORMS: dict[Kind, int] = {"fault": 2 * len(SABOTAGED), "handler": 2 * len(HANDLED), "crash": 64}
"""The number of forms of each fault that does not last."""
PROMPTS = ((5, 6, 7), (5, 6, 7), (9,), tuple(range(3, 25)), tuple(range(3, 40)))
"""Two of them so long, and so much alike, that one goes on from what is kept of the other."""


def draw(seed: int, number: int) -> Schedule:
    """Return a schedule of a seed by its number."""
    if number % 4 == 3:
        return enumerated(seed, number // 4)
    chance = random.Random(f"{seed} {number}")
    return _crowd(chance) if number % 32 == 0 else _mixed(chance)


def _mixed(chance: random.Random) -> Schedule:
    """Return a schedule of a few requests and all kinds of faults."""
    pick = chance.choice
    steps: list[tuple[int, Step]] = [(0, _wish(chance))]
    for _ in range(pick((1, 2, 3, 3, 4, 5, 6, 8))):
        kind = chance.random()
        step: Step = (
            _fault(chance, pick(OFTEN))
            if kind < 0.55
            else _wish(chance)
            if kind < 0.8
            else Swerve(pick((1, 1, 2, 3)))
        )
        steps.append((pick(PAUSES), step))
    return Schedule(
        **_machines(chance),
        room=pick((None, None, None, 300)),
        shares=pick((False, True)),
        journal=pick((False, True)),
        steps=tuple(steps),
    )


def _machines(chance: random.Random) -> dict[str, Any]:
    """Return how many workers a schedule has, and what they have room for."""
    pick = chance.choice
    return {
        "targets": pick((1, 2, 2, 3)),
        "drafts": pick((1, 1, 0, 2)),
        "reads": pick((False, True)),
        "part": pick((0, 3)),
        "sessions": pick((64, 64, 64, 1, 2)),
        "kept": pick((KEPT, KEPT, KEPT, 0, 60)),
    }


def _wish(chance: random.Random) -> Wish:
    pick = chance.choice
    prompt, policy = pick(PROMPTS), pick(("dynamic", "goodput"))
    if chance.random() < 0.1:
        return Wish(prompt, pick((0, 9)), policy, logprobs=2, scored=True)
    return Wish(
        prompt,
        tokens=pick((24, 24, 9, 9, 40, 2, 1)),
        policy=policy,
        speculate=pick((True, True, True, False)),
        stop=pick(((), (), (), ("w7",))),
        logprobs=pick((None, None, None, 2)),
    )


def _fault(chance: random.Random, kind: Kind) -> Fault:
    forms = FORMS.get(kind)
    for_ms = chance.choice(FOR_MS) if forms is None else chance.randrange(forms)
    return Fault(kind, chance.randrange(4), for_ms)


def _crowd(chance: random.Random) -> Schedule:
    """Return a schedule in which several long requests run while targets come and go, so that
    sessions move to those that are emptier."""
    pick = chance.choice

    def long() -> Wish:
        return Wish(
            pick(PROMPTS),
            pick((120, 200)),
            pick(("dynamic", "goodput")),
            pick((True, False)),
            logprobs=pick((None, None, 2)),
        )

    steps: list[tuple[int, Step]] = [(0, long()) for _ in range(pick((3, 4, 5)))]
    for _ in range(chance.randint(2, 6)):
        kind = chance.random()
        step: Step = (
            Fault(pick(COMING), pick((0, 2, 4, 1)), pick((40, 300, 1400)))
            if kind < 0.5
            else _fault(chance, pick(KINDS))
            if kind < 0.8
            else long()
        )
        steps.append((pick((40, 90, 200, 20)), step))
    return Schedule(
        targets=pick((1, 2, 3)),
        drafts=pick((0, 1, 2)),
        reads=pick((False, True)),
        part=pick((0, 3)),
        row_ms=pick((4.0, 12.0)),
        kept=pick((KEPT, KEPT, 0, 150)),
        room=pick((None, None, 700)),
        shares=pick((False, True)),
        steps=tuple(steps),
    )


# -- one after the other ---------------------------------------------------------------------------

LONG_PROMPT = tuple(range(3, 25))
FLEETS = (
    Schedule(drafts=1, journal=True, steps=((0, Wish()),)),
    Schedule(targets=2, drafts=1, reads=True, part=3, steps=((0, Wish()), (0, Wish(LONG_PROMPT)))),
    Schedule(
        targets=2,
        drafts=2,
        shares=True,
        journal=True,
        steps=((0, Wish()), (3, Wish(LONG_PROMPT, 9))),
    ),
    Schedule(targets=1, drafts=1, sessions=1, part=3, steps=((0, Wish((9,), 9)), (2, Wish()))),
)
POSITIONS, WITHIN, PLACES = 40, 8, 2


def _faults() -> tuple[Fault, ...]:
    """Every kind of fault, with everybody and in every form."""
    of_processes = (
        *("kill", "stop", "stick", "cut", "silence", "silence up", "silence down", "slow"),
        *("twice", "asked twice", "late", "babble", "refuse", "forget", "drop", "drain"),
    )
    found = [Fault(kind, who, 1600) for kind in of_processes for who in range(3)]
    found += [Fault(kind, who, 300) for kind in ("kill", "silence") for who in range(3)]
    found += [Fault(kind, who) for kind in ("join", "swap", "cancel") for who in range(2)]
    found += [Fault("leave"), Fault("deaf"), Fault("sever"), Fault("crash", 2)]
    found += [Fault("crash", leaves, others) for leaves in range(2) for others in range(8)]
    found += [Fault("crash", 3, form) for form in range(12)]  # at every record, there or not
    found += [Fault("fault", 0, form) for form in range(len(SABOTAGED))]
    found += [Fault("handler", 0, form) for form in range(len(HANDLED))]
    return tuple(found)


FAULTS = _faults()
assert {fault.kind for fault in FAULTS} == {*get_args(Kind)}
CASES = tuple((fleet, fault) for fleet in FLEETS for fault in FAULTS)
BARE = len(CASES) * POSITIONS
"""Schedules without a deviation; with each there are `ONE` times as many."""
ONE = WITHIN * PLACES
RINGS = BARE, BARE * ONE, BARE * ONE * ONE  # schedules with no deviation, with one, with two
STRIDE = 1_000_003
"""A prime that divides no ring: with steps of it a ring is visited evenly, and all of it."""
assert all(ring % STRIDE for ring in RINGS)


@dataclass(frozen=True)
class Reached:
    """The progress of an enumeration: schedules played with so many deviations, and of how many."""

    deviations: int
    played: int
    of: int


def enumerated(seed: int, number: int) -> Schedule:
    """Return a schedule of the enumeration by its number."""
    number %= sum(RINGS)
    for ring, size in enumerate(RINGS):
        if number < size:
            return _decoded(ring, (number * STRIDE + seed * 7919) % size)
        number -= size
    raise AssertionError("the rings have all numbers")


def reached(schedules: int) -> list[Reached]:
    """Return how much of the enumeration so many schedules play."""
    left, found = min(schedules // 4, sum(RINGS)), list[Reached]()
    for ring, size in enumerate(RINGS):
        found.append(Reached(ring, min(left, size), size))
        left = max(0, left - size)
    return found


def _decoded(deviations: int, number: int) -> Schedule:
    number, case = divmod(number, len(CASES))
    number, position = divmod(number, POSITIONS)
    found, fault = CASES[case]
    steps: list[tuple[int, Step]] = [(position, fault)]
    for _ in range(deviations):
        number, after = divmod(number, WITHIN)
        number, place = divmod(number, PLACES)
        steps.append((after, Swerve(1 + place)))
    return Schedule(**{**found.__dict__, "steps": (*found.steps, *steps)})
