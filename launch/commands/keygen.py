"""`dovetail keygen`: the CURVE keys that every tcp address requires."""

from pathlib import Path

import click

from dovetail.launch.console.help import HelpCommand, option
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.keys import COORDINATOR, ROLES, generate_keys, generate_peer, revoke, rotate


@click.command(cls=HelpCommand)
@option("--out", type=OUT_FOLDER, default=Path("keys"), help="Folder of the deployment's keys.")
@click.option("--name", help="Add a peer of this name.")
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(ROLES),
    help="A role that the added peer may take; can be repeated.",
)
@click.option("--rotate", "rotated", metavar="NAME", help="Replace the key of this name.")
@click.option(
    "--revoke", "revoked", metavar="NAME", help="Refuse the key of this name from now on."
)
def command(
    out: Path, name: str | None, roles: tuple[str, ...], rotated: str | None, revoked: str | None
) -> None:
    """Make the keys of a deployment: one for the coordinator and one for each role; or add, replace
    or revoke one.

    The machine of the coordinator needs coordinator.key and the .pub of every peer; any other
    machine its own NAME.key and coordinator.pub.
    """
    if sum(option is not None for option in (name, rotated, revoked)) > 1:
        raise UserError("--name, --rotate and --revoke cannot be combined: give one of them")
    if roles and name is None:
        raise UserError("--role belongs to an added key: give its name with --name")
    if rotated is not None:
        rotate(out, rotated)
        click.echo(f"{out}/{rotated}.key and {rotated}.pub are new: {_where_to(rotated)}")
    elif revoked is not None:
        revoke(out, revoked)
        click.echo(f"{revoked} is refused from now on")
    elif name is not None:
        generate_peer(out, name, roles)
        click.echo(
            f"made {out}/{name}.key: copy it, with coordinator.pub, to the machine of {name}"
        )
    else:
        generate_keys(out)
        click.echo(
            f"{out} holds coordinator.key and one key for each of {', '.join(ROLES)}: copy "
            "NAME.key and coordinator.pub to the machine of NAME"
        )


def _where_to(rotated: str) -> str:
    if rotated == COORDINATOR:
        return (
            "restart the coordinator, which uses the old key until then, and copy coordinator.pub "
            "to the machine of every peer"
        )
    kept = (
        f"{rotated}.pub stays with the coordinator, which need not be restarted and refuses "
        "the old key from now on"
    )
    return f"{kept}; copy {rotated}.key to the machine of {rotated} and restart its process"
