"""Changes of workers under load, as the coordinator reports them."""

import re
from collections.abc import Sequence

from dovetail.launch.console.terminal import counted, note
from dovetail.protocol.errors import DovetailError, RequestError, UserError
from dovetail.protocol.messages import Dismissed, Swapped, WorkerState
from dovetail.runtime.client import Client


def named(workers: Sequence[WorkerState], name: str) -> WorkerState:
    """The worker of this name or pid; `UserError` names the choices if there is none, or are
    several."""
    found = [worker for worker in workers if worker.name == name] or [
        worker for worker in workers if re.fullmatch("[0-9]+", name) and worker.pid == int(name)
    ]
    if len(found) == 1:
        return found[0]
    choices = ", ".join(
        f"{worker.name} (pid {worker.pid} on {worker.host})" for worker in found or workers
    )
    if found:
        raise UserError(f"{len(found)} workers are called {name!r}: choose by pid from {choices}")
    raise UserError(
        f"there is no worker {name!r}: "
        + (f"choose one of {choices}" if workers else "none is registered")
    )


def wait_for(client: Client, request: int) -> Swapped | Dismissed:
    """Wait for the end of a change of workers; a refusal or failure is raised."""
    try:
        return client.changed(request, note)
    except RequestError as error:
        raise DovetailError(str(error)) from None


def figures(done: Swapped | Dismissed) -> dict[str, float]:
    return {"moved": done.moved, "stayed": done.stayed, "longest_pause_s": done.longest_pause_s}


def told(done: Swapped | Dismissed) -> str:
    """Describe what happened to the sessions."""
    if not (done.moved or done.stayed):
        return "no session had to move"
    parts = [f"{counted(done.moved, 'session')} moved", f"{done.stayed} ended where they were"]
    return ", ".join(
        (*parts, f"the longest pause between tokens was {1e3 * done.longest_pause_s:.0f} ms")
    )
