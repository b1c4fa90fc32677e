"""`dovetail config`: show the settings in force, and print files for other programs."""

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import click

from dovetail.launch.console.help import Commands, HelpCommand, json_option
from dovetail.launch.extras import extra
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.settings.catalog import ALL_SECTIONS, SETTINGS
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import SERVING, settings_flags
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal

GRAFANA = Path(__file__).parent.parent / "files" / "grafana.json"
SERVED = ("target", "draft", "tree", "sampling", "memory", "cache", "coordinator", "http")
"""The sections of `serve`."""


@click.group(cls=Commands)
def command() -> None:
    """Show the effective settings and where each came from, or export files for other programs."""


@command.command("show", cls=HelpCommand)
@click.option("--origin", is_flag=True, help="Show where each setting came from.")
@json_option("One JSON object instead of TOML.")
@settings_flags(*ALL_SECTIONS)
def show(configuration: Configuration, origin: bool, as_json: bool) -> None:
    """Print the settings in force, as a TOML file that --config reads."""
    if as_json:
        settings = configuration.settings.model_dump(mode="json")
        click.echo(
            json.dumps({**settings, **({"origin": dict(configuration.origins)} if origin else {})})
        )
        return
    for table, names in groupby(SETTINGS, lambda name: name.rpartition(".")[0]):
        click.echo(f"[{table}]")
        for name in names:
            line = f"{name.rpartition('.')[2]} = {SETTINGS[name].toml(configuration.value(name))}"
            click.echo(f"{line:<32} # {configuration.origins[name]}" if origin else line)
        click.echo()


@command.command("foreign", cls=HelpCommand, short_help="List options of other servers.")
def foreign() -> None:
    """List options, commands and request fields of llama-server, vLLM and ollama, and ours."""
    from dovetail.launch.console.migration import names
    from dovetail.runtime.http.fields import INSTEAD, RENAMED

    for option in names().options:
        click.echo(f"{', '.join(option.names)} ({option.whose}): {option.here}")
    for theirs, here in (*names().commands.items(), *RENAMED.items(), *INSTEAD.items()):
        click.echo(f"{theirs}: {here}")


@command.group("export", short_help="Print a file for another program.")
def export() -> None:
    """Print a file for another program: a Grafana dashboard, or the files with which systemd,
    compose or Kubernetes run the processes of `serve`."""


@export.command("grafana", cls=HelpCommand)
def grafana() -> None:
    """Print a dashboard over /metrics, which Grafana imports."""
    click.echo(GRAFANA.read_text(encoding="utf-8"), nl=False)


@export.command("systemd", cls=HelpCommand, short_help="Print hardened units for this machine.")
@click.option(
    "--out",
    type=OUT_FOLDER,
    help="Write the units to this folder, such as /etc/systemd/system.  [default: stdout]",
)
@settings_flags(*SERVED, shown=SERVING, named=True)
def systemd(configuration: Configuration, out: Path | None) -> None:
    """Print hardened units for this machine: the coordinator, its workers and the HTTP API, each
    with its cores, its memory and a watchdog."""
    units = extra("launch.files.deployment.systemd").systemd_units(configuration)
    if out is not None:
        _write(out, units)
        return
    for name, text in units.items():
        click.echo(f"# ---- {name}\n{text}")


@export.command("compose", cls=HelpCommand, short_help="Print a compose file for this machine.")
@settings_flags(*SERVED, shown=SERVING, named=True)
def compose(configuration: Configuration) -> None:
    """Print a compose file for this machine: a container for each process; only the HTTP API has an
    external network."""
    text = extra("launch.files.deployment.containers").compose_file(configuration)
    click.echo(text, nl=False)


@export.command("kubernetes", cls=HelpCommand, short_help="Print a LeaderWorkerSet of two pods.")
@settings_flags(*SERVED, shown=SERVING, named=True)
def kubernetes(configuration: Configuration) -> None:
    """Print a LeaderWorkerSet: a pod with coordinator, HTTP API and target, and one with the draft.
    The keys are Secrets; a comment lists the commands that make them."""
    text = extra("launch.files.deployment.containers").kubernetes_manifest(configuration)
    click.echo(text, nl=False)


def _write(folder: Path, files: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
            click.echo(folder / name)
    except OSError as error:
        raise UserError(f"cannot write units to {folder}: {refusal(error)}") from None
