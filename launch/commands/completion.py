"""`dovetail completion`: completion of command lines in bash, zsh and fish."""

import click

from dovetail.launch import cli
from dovetail.launch.console.completion import SCRIPTS, complete, table_of
from dovetail.launch.console.help import HelpCommand
from dovetail.protocol.errors import UserError


@click.command(cls=HelpCommand)
@click.option("--words", is_flag=True, hidden=True, help="Print the completions of a command line.")
@click.argument("shell", nargs=-1, type=click.UNPROCESSED, metavar=f"[{'|'.join(SCRIPTS)}]")
def command(shell: tuple[str, ...], words: bool) -> None:
    """Print the script with which a shell completes commands, options, settings, kinds of drafts,
    and the models of this machine.

    \b
    dovetail completion bash > ~/.local/share/bash-completion/completions/dovetail
    dovetail completion zsh > "${fpath[1]}/_dovetail"
    dovetail completion fish > ~/.config/fish/completions/dovetail.fish
    """
    table = table_of(cli.group)
    if words:
        click.echo("\n".join(complete(shell, table)))
    elif len(shell) == 1 and shell[0] in SCRIPTS:
        click.echo(SCRIPTS[shell[0]], nl=False)
    else:
        given = f", not {' '.join(shell)!r}" if shell else ""
        raise UserError(f"name a shell, one of {', '.join(SCRIPTS)}{given}")
