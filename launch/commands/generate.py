"""`dovetail generate`: one prompt, streamed; or a file of prompts, several at a time."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dovetail.launch.chat.answering import FLAG, template_option
from dovetail.launch.console.help import FILE, SEED, HelpCommand, connect_option, json_option, rare
from dovetail.launch.console.terminal import failure_told, note
from dovetail.launch.decoding.single import (
    RequestSettings,
    check_stops,
    decode_file,
    decode_one,
    decode_over_http,
    missing_draft,
    other_targets,
    read_prompt,
    summary,
    tell_full_context,
    tell_what_travels,
    without_speculation,
)
from dovetail.launch.files.outputs import check_output, open_records
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.processes.connection import (
    Connection,
    check_no_url,
    connected_by_target,
    speaks_http,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import DEMONSTRATED, HERE, settings_flags
from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Result
from dovetail.protocol.noise import random_seed


@click.command(cls=HelpCommand)
@click.argument("prompt", required=False)
@connect_option(
    "The coordinator or server to use.  [default: the only coordinator of this user, else one "
    "is started]",
    "ADDRESS|URL",
)
@click.option("--prompts", type=FILE, help='File of prompts, one {"id", "turns"} per line.')
@click.option(
    "--out",
    type=FILE,
    help='File for the replies, one {"id", "results"} per line; prompts that it already '
    "answers are skipped.",
)
@rare(
    "--parallel",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of prompts of a file decoded at a time.",
)
@rare("--raw", is_flag=True, help="Continue the plain text, without the chat template.")
@click.option("--seed", type=SEED, help="Sampling seed.  [default: a random one, reported]")
@rare(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="The reply ends before this text; can be repeated.",
)
@rare("--trace", type=FILE, help="Write a timeline of all processes, for ui.perfetto.dev.")
@rare("--record", type=FILE, help="File for a line per round: offered, verified, accepted, times.")
@template_option
@json_option("The result as one JSON object on stdout.")
@settings_flags(*HERE, shown=(*DEMONSTRATED, "coordinator.keys"))
def command(
    configuration: Configuration,
    prompt: str | None,
    connect: str | None,
    prompts: Path | None,
    out: Path | None,
    parallel: int,
    raw: bool,
    seed: int | None,
    stop: tuple[str, ...],
    trace: Path | None,
    record: Path | None,
    template: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Decode PROMPT, or standard input, and stream the reply; or a file of prompts.

    The text is printed to stdout, a summary to stderr, with a warning if the draft failed, which
    changes no token. The API key for a server is the first in the file --http.api_key_file, else
    $DOVETAIL_API_KEY.
    """
    check_stops(stop)
    if raw and template:
        raise UserError(
            f"--raw disables the chat template, and {FLAG} is for the template: leave out one of "
            "them"
        )
    wish = RequestSettings(
        configuration, raw=raw, seed=seed, stop=stop, trace=trace is not None, values=template
    )
    if prompts is not None:
        _check_file_mode(prompt, connect, as_json=as_json, trace=trace)
        _decode_prompts(wish, connect, prompts, out, record, parallel)
        return
    if out is not None:
        raise UserError("--out goes with --prompts FILE; a single reply goes to stdout")
    text = read_prompt(prompt)
    wish = replace(wish, seed=random_seed() if seed is None else seed)
    if connect is not None and speaks_http(connect):
        if trace is not None or record is not None:
            check_no_url(connect, "--trace" if record is None else "--record")
        decode_over_http(wish, connect, text, as_json=as_json)
        return
    check_output(trace, "the trace")
    with (
        open_records(record) if record is not None else nullcontext() as records,
        connected_by_target(configuration, connect) as (connection, configuration),
    ):
        tell_what_travels(connection)
        wish = replace(wish.to(connection, configuration), records=records)
        finished, last = decode_one(wish, connection, text, as_json=as_json)
        _tell_about(wish, connection, finished.result, last)
        if trace is not None:
            from dovetail.runtime.telemetry.trace import write_trace  # sessions are sorted in here

            workers = connection.client.look().workers
            clocks = {worker.name: worker.clock_bound_ns for worker in workers}
            write_trace(trace, finished.spans, clocks)
    if as_json:
        click.echo(json.dumps(finished.result.model_dump(), ensure_ascii=False))


def _tell_about(wish: RequestSettings, connection: Connection, result: Result, last: int) -> None:
    for loss in connection.stack.losses() if connection.stack else []:
        note(f"the target continued alone: {loss}")
    note(summary(result, connection.models(draft=wish.speculates)))
    if result.fingerprints:
        note(other_targets(result))
    if result.draft_failure is not None:
        note(failure_told(result.draft_failure))
    settings = wish.configuration.settings
    tell_full_context(result, settings.sampling.max_tokens)
    if wish.speculates and result.plain_rounds:
        state = connection.client.status()
        # elsewhere they may be about sessions of other clients
        decisions = state.decisions if connection.stack is not None else ()
        failed = "its draft failed" if result.draft_failure is not None else ""
        unwanted = "" if settings.tree.gamma else "tree.gamma is 0"
        missing = missing_draft(connection.state, state) or failed or unwanted
        insists = settings.tree.insist
        note(without_speculation(result, decisions, insists=insists, last=last, missing=missing))


def _decode_prompts(
    wish: RequestSettings,
    connect: str | None,
    file: Path,
    out: Path | None,
    record: Path | None,
    parallel: int,
) -> None:
    if out is None:
        raise UserError("--prompts FILE needs --out FILE for the replies")
    if out.exists() and file.exists() and out.samefile(file):
        raise UserError(f"--out {out} is the file of --prompts: choose another one")
    if record is not None and record.resolve() == out.resolve():
        raise UserError(f"--out and --record both name {out}: choose a file for each")
    asked = read_prompts(file)
    with open_records(record, go_on=True) if record is not None else nullcontext() as records:
        decode_file(replace(wish, records=records), connect, asked, out, parallel)


def _check_file_mode(
    prompt: str | None, connect: str | None, *, as_json: bool, trace: Path | None
) -> None:
    check_no_url(connect, "--prompts")
    if prompt is not None:
        raise UserError("a prompt and --prompts FILE cannot be combined: leave out one of them")
    if as_json or trace is not None:
        raise UserError("--json and --trace are for a single prompt: leave them out")
