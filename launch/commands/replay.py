"""`dovetail replay`: runs the session logic on a recorded session again, and compares."""

import json
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import FILE, HelpCommand, json_option
from dovetail.launch.console.terminal import counted
from dovetail.runtime.record.recording import Recording, read_recording
from dovetail.runtime.record.replay import Replay, ReplayDifference


@click.command(cls=HelpCommand)
@click.argument("file", type=FILE)
@json_option()
@click.pass_context
def command(context: click.Context, file: Path, as_json: bool) -> None:
    """Replay a session that a coordinator recorded (coordinator.record); exit code 1 if its logic
    now takes a different action.

    In a checkout, `python tests/replay` sends the recorded commands to a real worker.
    """
    recording = read_recording(file)
    replayed = Replay(recording)
    difference = replayed.play()
    found: dict[str, Any] = {
        "played": "session",
        "steps": len(replayed.taken),
        "commands": replayed.commands,
        "tokens": len(replayed.session.tokens),
    }
    words = ", ".join(counted(found[f"{name}s"], name) for name in ("step", "command", "token"))
    report(context, recording, difference, found, words, as_json=as_json)


def report(
    context: click.Context,
    recording: Recording,
    difference: ReplayDifference | None,
    found: dict[str, Any],
    words: str,
    *,
    as_json: bool,
) -> None:
    """Print the result of a replay, and exit."""
    begin, same = recording.begin, difference is None
    if as_json:
        about = {
            "file": str(recording.path),
            "session": begin.session,
            "began": begin.began,
            "entries": 1 + len(recording.entries),
            "whole": recording.whole,
        }
        outcome = {"same": same, "difference": difference and vars(difference)}
        click.echo(json.dumps({**about, **found, **outcome}))
    else:
        click.echo(f"session {begin.session} of {begin.began}: {words}")
        if not recording.whole:
            click.echo(f"the recording is incomplete: {recording.words}")
        click.echo("the same throughout" if same else f"the first difference: {difference}")
    context.exit(0 if same else 1)
