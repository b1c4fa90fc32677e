"""The settings of this machine's workers, from their notes in the runtime directory, which outlive
them. Paths never come over a link, where a worker could name any."""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dovetail.launch.files.directory import WorkerNote, worker_notes
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import Configuration, parse_setting
from dovetail.protocol.messages import WorkerState
from dovetail.workers.models.checkpoints.gguf.view import resolved

SECTIONS = ("target", "draft", "memory")
MODELS = ("target.model", "draft.model")
STUCK = "coordinator.stuck_s"
PLACE = ("--cores=", "--memory-nodes=")


def values_of(note: WorkerNote) -> dict[str, Any]:
    parts = (flag.removeprefix("--").partition("=") for flag in note.flags)
    known = {name: text for name, _, text in parts if name in SETTINGS}
    found = {name: parse_setting(name, text, f"--{name}") for name, text in known.items()}
    return {n: resolved(value) if n in MODELS else value for n, value in found.items()}


def place_of(note: WorkerNote) -> list[str]:
    return [flag for flag in note.flags if flag.startswith(PLACE)]


def flags_of(configuration: Configuration, cores: str | None, memory_nodes: str) -> list[str]:
    """Return the settings and binding of a worker as flags that are valid in any folder."""
    place = [
        f"{name}{value}" for name, value in zip(PLACE, (cores, memory_nodes), strict=True) if value
    ]
    typed = (flag.partition("=") for flag in configuration.typed(*SECTIONS))
    settings = [
        f"{name}={_absolute(value) if name.removeprefix('--') in MODELS else value}"
        for name, _, value in typed
    ]
    return [*settings, f"--{STUCK}={configuration.value(STUCK)}", *place]


def before_of(worker: WorkerState) -> WorkerNote | None:
    """Return the note of a registered worker; None if it runs elsewhere or as another user."""
    if worker.host != socket.gethostname():
        return None
    found = [note for note in worker_notes() if note.pid == worker.pid]
    return found[-1] if found else None


def last_before(addresses: Collection[str], role: str) -> WorkerNote | None:
    """Return the note of the last worker of a role on this machine that was registered with a
    coordinator of these addresses; None if there was none."""
    found = [note for note in worker_notes() if role in note.roles and note.address in addresses]
    return found[-1] if found else None


def _absolute(model: str) -> str:
    path = Path(model).expanduser()
    return str(path.absolute()) if model and path.exists() else model
