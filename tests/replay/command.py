"""The options of `python tests/replay`, and its output."""

import sys
from pathlib import Path
from typing import NoReturn

import click

from dovetail.launch.cli import run as run_command
from dovetail.launch.commands.replay import report
from dovetail.launch.console.help import FILE, HelpCommand, json_option
from dovetail.launch.console.terminal import counted, spinner
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.runtime.record.recording import read_recording
from replay.exchanges import Role, parts_of
from replay.worker import Outcome, replay_to_worker


@click.command(cls=HelpCommand)
@click.argument("file", type=FILE)
@click.option(
    "--worker",
    "role",
    type=click.Choice(["target", "draft"]),
    required=True,
    help="The role of the worker, which is started here with these settings.",
)
@json_option()
@settings_flags("target", "draft")
@click.pass_context
def command(
    context: click.Context, configuration: Configuration, file: Path, role: Role, as_json: bool
) -> None:
    """Send the commands of a recorded session to a worker; exit code 1 if its answers differ.

    Tokens are always compared; margins and features only if the fingerprint is the recorded one. A
    draft may propose something else where its proposals depended on its speed or on what it had
    learned: under the policy goodput, drafting ahead, or with tree.sharpening = auto.
    """
    recording = read_recording(file)
    parts_of(recording, role)  # check the recording before a model is loaded
    with spinner() as say:
        say(f"playing to a {role} worker")
        outcome = replay_to_worker(recording, role, configuration)
    fields = {name: value for name, value in vars(outcome).items() if name != "difference"}
    found = {"played": role, **fields}
    report(context, recording, outcome.difference, found, words(role, outcome), as_json=as_json)


def words(role: Role, outcome: Outcome) -> str:
    answers = counted(outcome.answers, "answer")
    if role == "target":
        compared = "tokens, margins and features" if outcome.same_fingerprint else "tokens only"
        return f"{answers}, {counted(outcome.tokens, 'token')}; compared: {compared}"
    same = f"{outcome.same_proposals} of {counted(outcome.proposals, 'proposal')} the same"
    more = f"; they depend on {', '.join(outcome.hangs_on)}" if outcome.hangs_on else ""
    return f"{answers}, {same}{more}"


def main() -> NoReturn:
    sys.exit(run_command(sys.argv[1:], command))
