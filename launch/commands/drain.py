"""`dovetail drain`: drains a worker while requests run; its sessions continue elsewhere, or finish
there first."""

import json

import click

from dovetail.launch.console.help import HelpCommand, connect_option, json_option
from dovetail.launch.console.terminal import note
from dovetail.launch.processes.connection import find_coordinator
from dovetail.launch.processes.replacement import figures, named, told, wait_for
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.errors import DovetailError, LinkError


@click.command(cls=HelpCommand)
@click.argument("worker")
@connect_option("The worker's coordinator.  [default: the only one of this user]")
@click.option(
    "--last",
    is_flag=True,
    help="Drain it even if it is the last target; requests are then refused until there is "
    "another.",
)
@json_option()
@settings_flags("coordinator.keys", "coordinator.answer_s", shown=("coordinator.keys",))
def command(
    configuration: Configuration, worker: str, connect: str | None, last: bool, as_json: bool
) -> None:
    """Drain WORKER, by its name or pid in `dovetail status`: it gets no new sessions and ends when
    none are left. `dovetail serve` does not restart it, and `dovetail status` reports this until
    another worker has its role. Sessions of a draft continue with another draft, or with the target
    alone, from their next round on. Sessions of a target continue on another one of equal
    fingerprint (with move = any at the coordinator: on any with the same vocabulary); if there is
    none, they finish where they are.
    """
    with find_coordinator(configuration, connect, role="operator") as client:
        leaver = named(client.status().workers, worker)
        try:
            done = wait_for(client, client.dismiss(leaver.worker_epoch, last=last))
        except LinkError as error:
            raise DovetailError(
                f"{error} during the drain: if `dovetail status` still shows {leaver.name}, drain "
                "it again"
            ) from None
        empty = [role for role in client.status().drained if role in leaver.roles]
    if as_json:
        click.echo(json.dumps({"worker": leaver.name, "pid": leaver.pid, **figures(done)}))
    else:
        note(f"{leaver.name} (pid {leaver.pid} on {leaver.host}) was drained: {told(done)}")
        for role in empty:
            note(
                f"there is no other {role} worker: start one, such as with `dovetail swap --role "
                f"{role}`"
            )
