"""The commands and their exit codes: 0 done, 1 failed, 2 user error (one line, no traceback), 130
interrupted. A command's module is imported only to run it: help needs neither pydantic nor
torch."""

import contextlib
import gc
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from dovetail.launch.console import migration
from dovetail.launch.console.help import NAMES_OF_HELP, Commands
from dovetail.launch.extras import installed
from dovetail.launch.processes.child import ending_at_once, let_threads_start, pace
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.files import refusal

GROUPS = {
    "Decode": {
        "generate": "Decode one prompt, or a file of prompts.",
        "chat": "Chat with the model in the terminal.",
        "serve": "Serve the OpenAI API over HTTP.",
    },
    "Models on this machine": {
        "pull": "Download a model from the Hugging Face hub.",
        "list": "List the models on this machine, and the drafts that fit.",
        "rm": "Remove a downloaded model.",
    },
    "Operate a server": {
        "status": "Show the coordinator, its workers and its sessions.",
        "top": "Show the activity of a coordinator, live.",
        "swap": "Replace a worker while requests run.",
        "drain": "Remove a worker while requests run.",
        "cache": "Show or clear the prompts cached on disk.",
    },
    "Start the processes by hand, on one machine or several": {
        "coordinator": "Run a coordinator by hand.",
        "worker": "Run one draft or target worker by hand, on any machine.",
        "http": "Serve the HTTP API of a coordinator.",
        "router": "Spread requests over several services.",
        "keygen": "Make, rotate and revoke the keys that tcp needs.",
    },
    "Check a machine, and plan": {
        "doctor": "Check this machine and list what to change.",
        "selftest": (
            "Check that the target computes its checkpoint and that speculation changes no token."
        ),
        "calibrate": "Measure the time of a target pass on this machine, and the hardware's limit.",
        "plan": "Recommend a placement, draft and tree for a model on this hardware.",
        "config": "Show the effective settings, or export deployment files.",
        "completion": "Print a script that completes command lines in a shell.",
    },
    "Measure": {
        "bench": "Measure methods side by side.",
        "profile": "Show where the time of a run goes, and what would make it faster.",
        "replay": "Replay a recorded session and compare the results.",
    },
    "Train": {
        "features": "Store the hidden states that draft heads are trained on.",
        "train": "Train draft heads and small draft models.",
        "stratify": "Find thresholds for the heterospec policy.",
    },
}
"""Heading -> name -> line in `dovetail --help`; a command is `dovetail.launch.commands.NAME`."""
COMMANDS = {
    name: entry
    for group in GROUPS.values()
    for name, entry in group.items()
    if installed(f"launch.commands.{name}")
}
"""Commands that are installed: those of an extra may be missing."""

STARTERS = ("generate", "chat", "serve")
"""Commands that fork their processes, unless they use a running service."""
FEW_FILES = ("cache", "completion", "config", "doctor", "keygen")  # commands that open no sockets
INTERRUPTED = 130


CALL = re.compile(r"with .* as (\w+):|(?:([\w.]+)\.)?_*(\w+)\(")
"""Matches the end of a block that writes a file, or a call: the object or module, the function."""


class LazyGroup(Commands):
    """A group whose commands are imported when they are used; its help comes from the table."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        gc.disable()  # modules are kept: garbage collection would take a tenth of the time
        try:
            module = importlib.import_module(f"dovetail.launch.commands.{cmd_name}")
        finally:
            gc.enable()
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and args[0] in migration.names().commands:
            hint = migration.names().commands[args[0]]
            raise click.UsageError(f"there is no command {args[0]!r}; in dovetail: {hint}", ctx)
        self.check(ctx, args[0])
        if args[0] not in FEW_FILES and not {*args} & {*NAMES_OF_HELP}:
            from dovetail.launch.processes.child import check_files  # not needed for help

            check_files()
            if "--standby" in args or (args[0] == "swap" and "--print" not in args):
                from dovetail.launch.machine.topology import ControlGroups

                pace(ControlGroups().quota())  # streams run meanwhile
        if args[0] in STARTERS:
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # a fork would lack its threads
            from dovetail.launch.processes import forked  # only they need it

            forked.begin_for(args[1:])
            ctx.call_on_close(forked.dismiss)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, commands in GROUPS.items():
            if present := [(name, line) for name, line in commands.items() if name in COMMANDS]:
                with formatter.section(heading):
                    formatter.write_dl(present)


def _show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"dovetail {installed_version()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": NAMES_OF_HELP})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def group() -> None:
    """Lossless, fast decoding of large language models on machines whose GPU is too small for
    them."""


def run(arguments: Sequence[str], entry: click.Command = group, program: str = "dovetail") -> int:
    """Run one command line, for `entry`, and return its exit code. A user error is one line on
    stderr; click handles a closed stdout."""
    try:
        let_threads_start()
        return entry.main(list(arguments), prog_name=program, standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        return _complain(" ".join(error.format_message().split()), 2)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except UserError as error:
        return _complain(str(error), 2)
    except DovetailError as error:
        return _complain(str(error), 1)
    except OSError as error:  # a full disk or a full stdout
        refused, why = _refused(error), refusal(error, writes=False)
        return _complain(f"the system refused {refused}: {why}" if refused else why, 1)


def _refused(error: OSError) -> str:
    """Return the failed system call and its object, such as "mkdir /x" or "write <stdout>", as far
    as they can be found in the error and its traceback."""
    import linecache  # only needed for a failure
    import traceback

    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    start = traceback.extract_tb(error.__traceback__)[-1].colno
    found = CALL.match(linecache.getline(frame.f_code.co_filename, line)[start:])
    file, owner, call = found.groups() if found else ("", "", "")
    thing = error.filename or getattr(frame.f_locals.get(file or owner), "name", "")
    return f"{'write' if file else call} {'' if isinstance(thing, int) else thing}".strip()


def main() -> NoReturn:
    if sys.flags.optimize > 1:
        _restart_with_docstrings(sys.orig_argv[1:])
    _open_closed_streams()
    with ending_at_once():
        try:
            code = run(sys.argv[1:])
        finally:
            _drop_unwritten()
        sys.exit(code)


def _restart_with_docstrings(words: list[str]) -> None:
    """Restart this process without -OO or PYTHONOPTIMIZE=2: transformers needs docstrings."""
    if os.environ.pop("PYTHONOPTIMIZE", None) is None:
        if "-OO" not in words:
            sys.exit(_complain("transformers needs docstrings: start Python without -OO", 2))
        words.remove("-OO")  # Python's own options come first
    os.execv(sys.executable, [sys.executable, *words])


def _open_closed_streams() -> None:
    """Open /dev/null for a standard stream that the shell closed (`<&-`), so that the next file
    does not get its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - stays open until this process ends


def _drop_unwritten() -> None:
    """Drop output that could not be written, after reporting it: Python would retry at exit and
    report it again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _complain(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nothing can be printed: the exit code must do
        click.echo(f"dovetail: {text}", err=True)
    return code


DISTRIBUTION = "dovetail-llm"  # its name in package indexes, where `dovetail` is another project
NOT_INSTALLED = "(not installed)"


def installed_version(distribution: str = DISTRIBUTION) -> str:
    """The version of an installed distribution; a bare checkout has none."""
    from importlib import metadata  # slow to import, and rarely needed

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


if __name__ == "__main__":
    main()
