"""The process that workers are forked from, begun before their command has imported what it needs
itself: both import at the same time, each on a core of its own."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from dovetail.launch.console.help import NAMES_OF_HELP
from dovetail.launch.files.directory import announcements
from dovetail.launch.processes import nursery
from dovetail.launch.processes.forked import Process, Talk, can_fork, new_log, run_module

COMMANDS = {"generate", "chat", "serve"}
"""The commands that start workers at once, unless they are told of others or find them."""
ELSEWHERE = ("--connect", *NAMES_OF_HELP)
"""Options with which a command starts no worker."""


@dataclass(frozen=True)
class Begun:
    """A process that workers are forked from, which is nobody's yet."""

    process: Process
    talk: Talk
    log: IO[bytes]
    """The file that gets its stderr."""


_begun: list[Begun] = []


def begin_for(command: Sequence[str]) -> None:
    """Begin it for a command, given with its arguments, that is going to fork workers from it, as
    far as these tell; it ends with this process. Nothing where one core would do both."""
    if command[0] not in COMMANDS or not can_fork() or len(os.sched_getaffinity(0)) < 2:
        return
    if any(argument.partition("=")[0] in ELSEWHERE for argument in command[1:]):
        return
    if command[0] == "serve" or not announcements():
        talk, log = Talk(), new_log()
        _begun.append(Begun(run_nursery(talk, nursery.MODULES, log), talk, log))


def run_nursery(talk: Talk, modules: Sequence[str], log: IO[bytes]) -> Process:
    """Run a process that imports these modules, with the other end of this socket."""
    return run_module(nursery.__name__, modules, log, stdin=talk.theirs.fileno())


def begun() -> bool:
    """Return whether it has begun, and nobody has taken it yet."""
    return bool(_begun)


def take() -> Begun | None:
    """Take it, where it has begun."""
    return _begun.pop() if _begun else None
