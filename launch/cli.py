"""The command line: which commands there are, and how every one of them ends.

A command's module is imported when the command is chosen, so that help needs neither pydantic nor torch. Exit codes: 0 done, 1 failed, 2 the user's
mistake (one line, never a traceback), 130 interrupted. Knows nothing of what the commands do.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from dovetail.protocol.errors import DovetailError, UserError

COMMANDS = {
    "generate": ("dovetail.launch.generate", "Decode one prompt, or a file of prompts."),
    "coordinator": ("dovetail.launch.coordinator", "Run a coordinator by hand."),
    "worker": ("dovetail.launch.worker", "Run one draft or target worker by hand, on any machine."),
    "status": ("dovetail.launch.status", "Show the coordinator, its workers and its sessions."),
    "selftest": ("dovetail.launch.selftest", "Prove on this machine that speculation changes no token."),
    "bench": ("dovetail.launch.bench", "Measure methods side by side, or the transport."),
    "train": ("dovetail.launch.train", "Train models."),
    "keygen": ("dovetail.launch.keygen", "Make, rotate and revoke the keys that tcp needs."),
    "config": ("dovetail.launch.configure", "Show the settings in force."),
}
"""Name -> (module with the click command `command`, what `dovetail --help` says of it)."""

INTERRUPTED = 130


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used; its help comes from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"dovetail {_version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version and exit.")
def group() -> None:
    """Lossless, fast decoding of large language models on machines whose GPU is too small for them."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. What a user did wrong is one line on stderr; that nobody reads our output any more, click hears."""
    try:
        return group.main(list(arguments), prog_name="dovetail", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _complain(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except UserError as error:
        return _complain(str(error), 2)
    except DovetailError as error:
        return _complain(str(error), 1)


def main() -> NoReturn:
    """The console entry point."""
    sys.exit(run(sys.argv[1:]))


def _complain(text: str, code: int) -> int:
    click.echo(f"dovetail: {text}", err=True)
    return code


def _version() -> str:
    """The version of the installed distribution; a bare checkout has none."""
    try:
        return importlib.metadata.version("dovetail")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
