"""The command line: schedules, what they covered, and the shortest that fails."""

import json
import math
import os
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

import click

from dovetail.launch.console.terminal import counted, print_table, progress_bar
from explore.drawing import reached
from explore.sabotage import HANDLED, SABOTAGED
from explore.schedules import KINDS, as_code
from explore.search import BLOCK, Failure, Played, in_parallel, shortest

STATES = ("idle", "waiting", "opening", "ready", "drafting", "verifying", "between")
"""The states that a session may be in when a fault happens; idle: there is none."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    default=300_000,
    show_default=True,
    help="Schedules to play.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the schedules.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=os.cpu_count() or 1,
    show_default=True,
    help="Processes that play them: the schedules are the same with any number.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.0, min_open=True),
    help="Stop after so many, however many schedules have been played.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables."
)
def main(schedules: int, seed: int, jobs: int, minutes: float | None, as_json: bool) -> None:
    """Play schedules of requests and faults against the real coordinator in virtual time, and hold
    each against every promise.

    Exit code 1 if one is broken: the shortest schedule that breaks it is printed as a value.
    """
    began_s = time.monotonic()
    ends_s = began_s + (math.inf if minutes is None else 60.0 * minutes)
    found = Played()
    with progress_bar(math.ceil(schedules / BLOCK), "blocks") as step:
        for played in in_parallel(seed, schedules, jobs, lambda: time.monotonic() < ends_s):
            found.add(played)
            rate = found.schedules / (time.monotonic() - began_s)
            step(f"{found.schedules} schedules, {rate:.0f} a second")
    seconds = time.monotonic() - began_s
    failure = None if found.failure is None else shortest(found.failure)
    if as_json:
        click.echo(json.dumps(as_value(found, failure, seed, jobs, seconds)))
    else:
        show(found, seed, jobs, seconds)
        if failure is not None:
            show_failure(failure)
    raise SystemExit(1 if failure is not None else 0)


def as_value(
    found: Played, failure: Failure | None, seed: int, jobs: int, seconds: float
) -> dict[str, Any]:
    """Return all that was found as a JSON value."""
    return {
        "seed": seed,
        "jobs": jobs,
        "schedules": found.schedules,
        "seconds": seconds,
        "trace": f"{found.trace:08x}",
        "systematic": [asdict(ring) for ring in reached(found.schedules)],
        "faults": {
            kind: {state: found.seen[kind, state] for state in STATES if found.seen[kind, state]}
            for kind in KINDS
        },
        "deviations": _of(found, "swerve"),
        "exceptions": _of(found, "exception"),
        "taken_over": found.seen["taken over", "requests"],
        "failure": None
        if failure is None
        else {
            "number": failure.number,
            "way": failure.way,
            "schedule": as_code(failure.schedule),
            "story": failure.story,
        },
    }


def show(found: Played, seed: int, jobs: int, seconds: float) -> None:
    """Print what was played, and what it covered."""
    rows = [(kind, *(found.seen[kind, state] for state in STATES)) for kind in KINDS]
    print_table(("fault, while a session was", *STATES), rows)
    print_table(("what came before what was due first", "times"), [*_of(found, "swerve").items()])
    print_table(
        ("systematic: schedules with so many deviations", "played", "of"),
        [(ring.deviations, ring.played, ring.of) for ring in reached(found.schedules)],
    )
    places = len(_of(found, "exception"))
    click.echo(
        f"exceptions were raised in {places} of {len(HANDLED) + len(SABOTAGED)} places of the "
        "coordinator"
    )
    taken = found.seen["taken over", "requests"]
    click.echo(f"requests outlived their coordinator {counted(taken, 'time')}")
    click.echo(
        f"seed {seed}: {counted(found.schedules, 'schedule')}, {found.events} events, in "
        f"{seconds:.0f} s with {counted(jobs, 'process', 'processes')}: "
        f"{found.schedules / seconds:.0f} a second; trace {found.trace:08x}"
    )


def show_failure(failure: Failure) -> None:
    """Print the shortest schedule that fails, as a value, and its story."""
    click.echo(f"\nschedule {failure.number} fails: {failure.way}. The shortest that does:\n")
    click.echo(f"{as_code(failure.schedule)}\n")
    click.echo(failure.story)


def _of(found: Played, what: str) -> Counter[str]:
    """Return how often each of what was seen of one kind, the most frequent first."""
    seen = Counter({about: times for (kind, about), times in found.seen.items() if kind == what})
    return Counter(dict(seen.most_common()))
