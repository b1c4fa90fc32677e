"""What the workers of this machine were started with, as each of them has noted it in the runtime
directory once it was loaded.

Nothing of that comes over a link: a worker reports of itself what it likes, and a path among it
would be opened here. A note outlives its worker, so that one that was lost or drained is known,
too. Knows how a worker is started, and nothing of who takes its place.
"""

import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dovetail.launch.files.directory import WorkerNote, worker_notes
from dovetail.launch.settings.catalog import SETTINGS
from dovetail.launch.settings.configure import Configuration, parse_setting
from dovetail.protocol.links.ways import split_addresses
from dovetail.protocol.messages import WorkerState
from dovetail.workers.models.checkpoints.gguf.view import resolved

SECTIONS = ("target", "draft", "memory")
MODELS = ("target.model", "draft.model")
STUCK = "coordinator.stuck_s"
PLACE = ("--cores=", "--memory-nodes=")


def values_of(note: WorkerNote) -> dict[str, Any]:
    """Return dotted name -> value of what a worker was given."""
    parts = (flag.removeprefix("--").partition("=") for flag in note.flags)
    known = {name: text for name, _, text in parts if name in SETTINGS}
    found = {name: parse_setting(name, text, f"--{name}") for name, text in known.items()}
    return {n: resolved(value) if n in MODELS else value for n, value in found.items()}


def place_of(note: WorkerNote) -> list[str]:
    """Return the flags that bind a worker."""
    return [flag for flag in note.flags if flag.startswith(PLACE)]


def flags_of(configuration: Configuration, cores: str | None, memory_nodes: str) -> list[str]:
    """Return the settings and the place of a worker as flags that hold in any folder."""
    place = [
        f"{name}{value}" for name, value in zip(PLACE, (cores, memory_nodes), strict=True) if value
    ]
    typed = (flag.partition("=") for flag in configuration.typed(*SECTIONS))
    settings = [
        f"{name}={_whole(value) if name.removeprefix('--') in MODELS else value}"
        for name, _, value in typed
    ]
    return [*settings, f"--{STUCK}={configuration.value(STUCK)}", *place]


def before_of(worker: WorkerState) -> WorkerNote | None:
    """Return what a registered worker was started with; None if it runs elsewhere, or belongs to
    somebody else."""
    if worker.host != socket.gethostname():
        return None
    found = [note for note in worker_notes() if note.pid == worker.pid]
    return found[-1] if found else None


def last_before(addresses: Collection[str], role: str) -> WorkerNote | None:
    """Return what the last worker of a role on this machine was started with that was registered at
    a coordinator, at any of its addresses; None if there was none."""
    found = [
        note
        for note in worker_notes()
        if role in note.roles and not {*split_addresses(note.address)}.isdisjoint(addresses)
    ]
    return found[-1] if found else None


def _whole(model: str) -> str:
    """A model as it is called anywhere else: a folder by its whole path, what is none, such as the
    id of a hub, as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if model and path.exists() else model
