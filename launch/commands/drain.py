"""`dovetail drain`: lets a worker go while requests run; its sessions go on elsewhere, or end there
first."""

import json
import re
from collections.abc import Sequence

import click

from dovetail.launch.console.terminal import counted, note
from dovetail.launch.processes.connection import find_coordinator
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import SettingsCommand, settings_flags
from dovetail.protocol.errors import DovetailError, RequestError, UserError
from dovetail.protocol.messages import Dismissed, Swapped, WorkerState
from dovetail.runtime.client import Client


@click.command(cls=SettingsCommand)
@click.argument("worker")
@click.option(
    "--connect",
    metavar="ADDRESS",
    help="The coordinator of the worker.  [default: the only one of this user]",
)
@click.option(
    "--last",
    is_flag=True,
    help="Also where no other target is left: then requests are refused until there is one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@settings_flags("coordinator.keys")
def command(
    configuration: Configuration, worker: str, connect: str | None, last: bool, as_json: bool
) -> None:
    """Let WORKER, by its name or pid in `dovetail status`, go: it gets no more sessions, and ends
    when it has none.

    It stays away: `dovetail serve` does not start it again, and `dovetail status` says so until
    another worker has its role.

    Sessions of a draft go on with another one, or with the target alone, from their next round on.
    Those of a target go on on another one that computes the same (where the coordinator has move =
    any: on any of their vocabulary), and end where they are if there is none.
    """
    with find_coordinator(configuration, connect, role="operator") as client:
        leaver = named(client.status().workers, worker)
        done = wait_for(client, client.dismiss(leaver.worker_epoch, last=last))
        empty = [role for role in client.status().drained if role in leaver.roles]
    if as_json:
        click.echo(json.dumps({"worker": leaver.name, "pid": leaver.pid, **figures(done)}))
    else:
        note(f"{leaver.name} (pid {leaver.pid} on {leaver.host}) was let go: {told(done)}")
        for role in empty:
            note(
                f"no other {role} worker is there, and none is started until you do, such as with "
                f"`dovetail swap --role {role}`"
            )


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
        raise UserError(
            f"{len(found)} workers are called {name!r}, {choices}: name the one that you mean "
            "by its pid"
        )
    raise UserError(
        f"there is no worker {name!r}: "
        + (f"choose one of {choices}" if workers else "none is registered")
    )


def wait_for(client: Client, request: int) -> Swapped | Dismissed:
    """The end of a change of workers; what it was refused or failed for is raised."""
    try:
        return client.changed(request, note)
    except RequestError as error:
        raise DovetailError(str(error)) from None


def figures(done: Swapped | Dismissed) -> dict[str, float]:
    return {"moved": done.moved, "stayed": done.stayed, "longest_pause_s": done.longest_pause_s}


def told(done: Swapped | Dismissed) -> str:
    """What became of the sessions."""
    if not (done.moved or done.stayed):
        return "it had no session"
    parts = [f"{counted(done.moved, 'session')} went over", f"{done.stayed} ended where they were"]
    return ", ".join(
        (*parts, f"the longest pause between tokens was {1e3 * done.longest_pause_s:.0f} ms")
    )
