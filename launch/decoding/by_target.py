"""A connection whose requests use the sampling defaults of the target's generation_config.json."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.launch.console.terminal import note
from dovetail.launch.processes.connection import Connection, connected, ends_of, names_models
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.generation import by_folder, with_generation_config
from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.messages import WorkerState


@contextmanager
def connected_by_target(
    configuration: Configuration, address: str | None
) -> Iterator[tuple[Connection, Configuration]]:
    """A connection as `connected` makes it, and the settings with the sampling defaults of its
    target; what is taken over is noted. A target elsewhere brings none: its folder is not here."""
    if names_models(configuration):  # a damaged file is reported before a model is loaded
        with suppress(CheckpointError):  # a model that is not there, by who looks for it
            with_generation_config(configuration)
    with connected(configuration, address) as connection:
        if connection.stack is not None:
            configuration, taken = with_generation_config(configuration)
            note(ends_of(connection.state))
        else:
            configuration, taken = by_folder(configuration, _folder(connection.state.workers))
        if taken:
            note(taken)
        yield connection, configuration


def _folder(workers: tuple[WorkerState, ...]) -> Path | None:
    """The folder of the target that serves; None where it is on another machine, or not found."""
    for worker in workers:
        if "target" not in worker.roles or worker.standby or worker.leaving:
            continue
        if worker.host != socket.gethostname():
            return None
        with suppress(OSError):
            if (folder := Path(f"/proc/{worker.pid}/cwd", worker.model)).is_dir():
                return folder
        from dovetail.workers.models.checkpoints.hub import local_folder

        with suppress(CheckpointError):
            return local_folder(worker.model)
    return None
