"""The command `pictures`: what `dovetail bench` draws, measured on this machine, as the
documentation shows it.

The sweep over gamma is Figure 3 of the Dovetail paper (a pass of the target, the acceptance length
and the speed-up over the nodes verified), that over depth Figure 6 of SubSpec. Each picture is one
command of its own, which is printed first.
"""

import shlex
import subprocess
import sys
from pathlib import Path

import click

from benchmarks.options import Command, option, options
from dovetail.launch.console.terminal import note
from dovetail.protocol.errors import UserError
from support.inflated import as_flags, inflated, kept_pair

FOLDER = Path(__file__).resolve().parent.parent.parent / "launch" / "pictures"
PICTURES = {
    "bench": "--method small --method heads/dovetail --method heads/dovetail,tree.policy=goodput "
    "--method ngram --temperature 0 --temperature 1",
    "sweep-gamma": "--method small --method heads/dovetail --sweep gamma",
    "sweep-depth": "--policy beam --tree.width 6 --method small --method heads/dovetail "
    "--sweep depth",
}
"""Name of the file -> options of bench, which runs in the folder of the models."""


@click.command(cls=Command)
@click.argument("names", nargs=-1, type=click.Choice(list(PICTURES)))
@option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the pictures.  [default: launch/pictures]",
)
@option("--inflate", default="256MiB", help="Size of the target's linears.")
@option(
    "--prompts",
    "files",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="Files of prompts; can be repeated.  [default: the shipped]",
)
@option("--limit", type=click.IntRange(min=1), default=3, help="Prompts taken of each file.")
@option("--max-tokens", type=click.IntRange(min=2), default=64, help="Tokens of a reply.")
@options("llama_python")
@option("--values", help="Values of the sweeps, instead of their own.")
def pictures(
    names: tuple[str, ...],
    out: Path | None,
    inflate: str,
    files: tuple[Path, ...],
    limit: int,
    max_tokens: int,
    llama_python: Path | None,
    values: str | None,
) -> None:
    """Make the pictures of these NAMES, or all: bench (speed-ups), sweep-gamma, sweep-depth.

    The tables go to stdout. With --llama-python, llama.cpp is among the speed-ups.
    """
    out = (out or FOLDER).resolve()
    out.mkdir(parents=True, exist_ok=True)
    size = (
        *as_flags(inflated(inflate)),
        "--limit",
        str(limit),
        "--max-tokens",
        str(max_tokens),
        *(f"--prompts={file.resolve()}" for file in files),
    )
    for name in names or PICTURES:
        swept = "--sweep" in PICTURES[name]
        values_of = ("--values", values) if values and swept else ()
        peer = (
            ("--method", "llama.cpp", "--llama-python", str(llama_python))
            if llama_python and not swept
            else ()
        )
        arguments = (
            "bench",
            *shlex.split(PICTURES[name]),
            *values_of,
            *peer,
            *size,
            "--plot",
            str(out / f"{name}.svg"),
        )
        note(f"dovetail {shlex.join(arguments)}")
        command = [sys.executable, "-P", "-m", "dovetail.launch.cli", *arguments]
        if subprocess.run(command, check=False, cwd=kept_pair(inflate)).returncode:
            raise UserError(f"{name}.svg was not made: see above")
