"""`dovetail replay`: runs a recorded session again, by the session logic or with a real worker, and
compares the results."""

import json
from pathlib import Path
from typing import Any

import click

from dovetail.launch.checks.exchanges import Role, parts_of
from dovetail.launch.checks.worker_replay import Outcome, replay_to_worker
from dovetail.launch.console.help import HelpCommand
from dovetail.launch.console.options import FILE, json_option
from dovetail.launch.console.terminal import counted, spinner
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.runtime.record.recording import Recording, read_recording
from dovetail.runtime.record.replay import Difference, Replay


@click.command(cls=HelpCommand)
@click.argument("file", type=FILE)
@click.option(
    "--worker",
    "role",
    type=click.Choice(["target", "draft"]),
    help="Play it to a worker of this role, started here with these settings.",
)
@json_option()
@settings_flags("target", "draft")
@click.pass_context
def command(
    context: click.Context,
    configuration: Configuration,
    file: Path,
    role: Role | None,
    as_json: bool,
) -> None:
    """Play a session that a coordinator recorded (coordinator.record); exit code 1 if it goes
    differently.

    Without --worker the session logic gets the recorded events again, and must take the same
    actions. With --worker a worker is asked what was asked then, and must answer the same: the
    tokens in any case, margins and features if its fingerprint is the recorded one. A draft may
    propose something else where its proposals depended on its speed or on what it had learned:
    under the policy goodput, drafting ahead, or with tree.sharpening = auto.
    """
    recording = read_recording(file)
    if role is None:
        replayed = Replay(recording)
        _tell(context, recording, replayed.play(), _of_logic(replayed), as_json=as_json)
        return
    parts_of(recording, role)  # check the recording before a model is loaded
    with spinner() as say:
        say(f"playing to a {role} worker")
        outcome = replay_to_worker(recording, role, configuration)
    _tell(context, recording, outcome.difference, _of_worker(role, outcome), as_json=as_json)


def _of_logic(replayed: Replay) -> dict[str, Any]:
    tokens = len(replayed.session.tokens)
    words = (
        f"{counted(len(replayed.taken), 'step')}, {counted(replayed.commands, 'command')}, "
        f"{counted(tokens, 'token')}"
    )
    return {
        "played": "session",
        "steps": len(replayed.taken),
        "commands": replayed.commands,
        "tokens": tokens,
        "words": words,
    }


def _of_worker(role: Role, outcome: Outcome) -> dict[str, Any]:
    fields = {name: value for name, value in vars(outcome).items() if name != "difference"}
    if role == "draft":
        words = (
            f"{counted(outcome.answers, 'answer')}, {outcome.same_proposals} of "
            f"{counted(outcome.proposals, 'proposal')} the same"
        )
        words += (
            f"; they depended on more than the text: {', '.join(outcome.hangs_on)}"
            if outcome.hangs_on
            else ""
        )
    else:
        compared = (
            "tokens, margins and features"
            if outcome.same_fingerprint
            else "tokens alone, since the fingerprint is another"
        )
        words = (
            f"{counted(outcome.answers, 'answer')}, {counted(outcome.tokens, 'token')}; "
            f"compared: {compared}"
        )
    return {"played": role, **fields, "words": words}


def _tell(
    context: click.Context,
    recording: Recording,
    difference: Difference | None,
    found: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    begin, words = recording.begin, found.pop("words")
    if as_json:
        about = {
            "file": str(recording.path),
            "session": begin.session,
            "began": begin.began,
            "entries": 1 + len(recording.entries),
            "whole": recording.whole,
        }
        click.echo(
            json.dumps(
                {
                    **about,
                    **found,
                    "same": difference is None,
                    "difference": difference and vars(difference),
                }
            )
        )
    else:
        click.echo(f"session {begin.session} of {begin.began}: {words}")
        if not recording.whole:
            click.echo(f"the recording is not whole: {recording.words}")
        click.echo(
            "the same, from the first to the last"
            if difference is None
            else f"the first difference: {difference}"
        )
    context.exit(0 if difference is None else 1)
