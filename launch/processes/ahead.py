"""The nursery, the process that workers are forked from, started ahead of its use: it imports the
modules of workers while the command imports its own, each on its own core."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dovetail.launch.console.help import NAMES_OF_HELP
from dovetail.launch.files.directory import announcements
from dovetail.launch.processes import nursery
from dovetail.launch.processes.forked import Process, Talk, can_fork, new_log, run_module

ELSEWHERE = ("--connect", "--engine", *NAMES_OF_HELP)
"""Options with which a command starts no worker."""


@dataclass(frozen=True)
class Begun:
    """A nursery that no supervisor has taken over yet."""

    process: Process
    talk: Talk
    log: IO[bytes]  # the file that its stderr goes to


_begun: list[Begun] = []


def begin_for(arguments: Sequence[str]) -> None:
    """Start a nursery for a command with these arguments, if it would not use a running service and
    this process may use at least two cores. The nursery ends with this process."""
    if not can_fork() or len(os.sched_getaffinity(0)) < 2:
        return
    if any(argument.partition("=")[0] in ELSEWHERE for argument in arguments):
        return
    if not announcements():
        talk, log = Talk(), new_log()
        _begun.append(Begun(run_nursery(talk, nursery.MODULES, log), talk, log))


def run_nursery(talk: Talk, modules: Sequence[str], log: IO[bytes]) -> Process:
    """Start a nursery that imports these modules and has the other end of this socket as stdin."""
    return run_module(nursery.__name__, modules, log, stdin=talk.theirs.fileno())


def expect_proof() -> None:
    """Have the nursery import what the proof of a model takes, since this process is about to read
    a model that was never loaded."""
    for begun in _begun:
        begun.talk.prepare(nursery.PROVING)


def begun() -> bool:
    """True if a nursery was started and not taken over yet."""
    return bool(_begun)


def taken_bytes() -> int:
    """Return its memory, which will be part of the workers'."""
    return sum(_anonymous_bytes(begun.process.pid) for begun in _begun)


def _anonymous_bytes(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:  # it has ended
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")]
    return sum(int(kib) * 1024 for kib in found)


def take() -> Begun | None:
    """Take over the nursery that was started; None if there is none."""
    return _begun.pop() if _begun else None


def dismiss() -> None:
    """End the nursery if it was not taken over, and wait until it has ended."""
    while (begun := take()) is not None:
        begun.process.kill()
        begun.process.wait()
        begun.talk.close()
