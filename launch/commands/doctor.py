"""`dovetail doctor`: checks this machine and lists what to change; exit code 1 if there is anything
to change."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import click

from dovetail.launch.console.help import HelpCommand, json_option
from dovetail.launch.console.terminal import spinner
from dovetail.launch.machine.examination import Check, examine, gather


@click.command(cls=HelpCommand)
@json_option()
@click.pass_context
def command(context: click.Context, as_json: bool) -> None:
    """Check this machine: instruction sets, kernels, torch and GPUs, memory nodes, limits; list
    what to change. Exit code 1 if anything should change."""
    with spinner() as say:
        say("checking this machine")
        checks = list(examine(gather()))
    fine = all(check.ok for check in checks)
    if as_json:
        click.echo(json.dumps({"checks": [asdict(check) for check in checks], "ok": fine}))
    else:
        _show(checks)
    context.exit(0 if fine else 1)


def _show(checks: Sequence[Check]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{'ok  ' if check.ok else 'LOOK'}  {check.name:<{width}}  {check.found}")
        if check.advice:
            click.echo(f"{'':<{width + 6}}  -> {check.advice}")
    wrong = [check.name for check in checks if not check.ok]
    click.echo(
        f"{len(checks)} checks, nothing to change"
        if not wrong
        else f"to change: {', '.join(wrong)}"
    )
