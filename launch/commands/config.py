"""`dovetail config`: show the settings in force, and print files for other programs."""

import json
from itertools import groupby
from pathlib import Path

import click

from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.options import json_option
from dovetail.launch.settings.catalog import ALL_SECTIONS, SETTINGS
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags

EXPORTS = {"grafana": Path(__file__).parent.parent / "files" / "grafana.json"}
"""The files that `config export` prints."""


@click.group()
def command() -> None:
    """The settings in force, and where each of them came from."""


@command.command("show", cls=HelpCommand)
@click.option("--origin", is_flag=True, help="Say for each setting where it came from.")
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


@command.command("export", cls=HelpCommand)
@click.argument("what", type=click.Choice([*EXPORTS]))
def export(what: str) -> None:
    """Print a file for another program: grafana, a dashboard over /metrics, which Grafana
    imports."""
    click.echo(EXPORTS[what].read_text(encoding="utf-8"), nl=False)
