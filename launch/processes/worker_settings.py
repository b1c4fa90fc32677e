"""Finds out what a worker of this machine was started with: its settings, by its command line and
the environment that the kernel keeps of its process.

Nothing of that comes over a link: a worker says of itself what it likes, and a path among it would
be opened here. Knows how a worker is started, and nothing of who takes its place.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from dovetail.launch.commands import worker as started
from dovetail.launch.processes.child import command_line
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import configure
from dovetail.launch.settings.flags import take_settings
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import WorkerState

COMMAND = "worker"
MODELS = ("target.model", "draft.model")


def settings_of(worker: WorkerState) -> Mapping[str, Any] | None:
    """Dotted name -> value of what was said to this worker when it was started; None if it runs
    elsewhere, or belongs to somebody else."""
    if worker.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(worker.pid)
        if process.uids().real != os.getuid():
            return None
        line = command_line(worker.pid)
        return read_command(line, process.environ(), Path(process.cwd()))
    except (psutil.Error, OSError):
        return None


def read_command(
    line: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Mapping[str, Any] | None:
    """Return the settings of a command line, its environment and the folder that it was typed
    in; None if it is no worker's, or what it named is not there any more."""
    if COMMAND not in line:
        return None
    try:
        parameters = started.command.make_context(
            COMMAND, [*line[line.index(COMMAND) + 1 :]]
        ).params
        given = take_settings(parameters)
        file = parameters["config"]
        found = configure(
            flags=given,
            file=folder / file if file is not None else None,
            environment=environment,
            demo=False,
            stratified=False,
        )
    except (click.ClickException, UserError):
        return None
    values = {name: found.value(name) for name in SETTINGS if found.given(name)}
    return {
        name: _seen_from(folder, value) if name in MODELS else value
        for name, value in values.items()
    }


def _seen_from(folder: Path, model: str) -> str:
    """A model as it is called anywhere else: a folder by its whole path, what is none, such as the
    id of a hub, as it is."""
    return str(folder / model) if model and (folder / model).exists() else model
