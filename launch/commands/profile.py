"""`dovetail profile`: where the time of a run goes, device by device and round by round, beside
what would be possible; and what would make it faster.

It measures through the same messages as serving: a run of its own, or a server that is watched.
What is found goes to the terminal, to a report, to a trace and to JSON. Knows options and files;
the work is in `profiling/`.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from dovetail.launch.cli import installed_version
from dovetail.launch.console.help import HelpCommand, Rare
from dovetail.launch.console.numbers import Number
from dovetail.launch.console.options import COUNT, FILE, json_instead_of, seed_option
from dovetail.launch.console.terminal import counted, explained, in_print, note, print_table
from dovetail.launch.files.charts import check_charts
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.files.prompts import Prompt, is_unicode, read_prompts
from dovetail.launch.profiling import pictures, report, tables
from dovetail.launch.profiling.findings import Findings, find
from dovetail.launch.profiling.stages import attached, own_run
from dovetail.launch.profiling.watching import Watch
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import DEMO_FOLDER
from dovetail.launch.settings.flags import DECODING_SECTIONS, DEMONSTRATED, settings_flags
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal, writing
from dovetail.runtime.telemetry.trace import write_trace

SHIPPED = 4
"""Prompts of the shipped file that are used by default."""
SECONDS = 10.0
RESULT, REPORT, TRACE = "profile.json", "report.html", "trace.json"
WORDS = {
    "busy": "share of the time in which a process worked, by its spans",
    "drafting ahead": "of the time, not of busy: drafting that no round waited for",
    "waits for X": "it had nothing to do until X was done; transport: a message",
    "no work": "no reply was under way",
    "its process": "CPU time by the kernel's count over that of its threads, or",
    "": "as the driver reports it for a GPU; to compare with busy",
    "its cores": "how busy these were, with any process",
    "draft, verify": "of a round: drafting that is waited for; the target's pass",
    "transport": "messages on their way, until the receiver has a core",
    "queue": "waiting for a worker that serves others (elsewhere: waiting)",
    "unaccounted": "of the time between two verdicts, what is in no part",
    "tokens/s": "of the rounds, without reading prompts; of one reply at a time",
    "tau": "tokens that a round adds to its reply",
    "T_V, T_T": "a pass of the target over a tree; a round without any",
    "hit": "the next root was in the tree, and its subtree was kept",
    "bubble": "a stretch of a round in which neither draft nor target works",
    "clock within": "by how much another machine's spans may be misplaced",
}
"""The words of the tables and of the report."""


@click.command("profile", cls=HelpCommand, epilog=explained(WORDS, "Words:"))
@click.option("--prompt", help="Text to decode.")
@click.option(
    "--prompts",
    "file",
    type=FILE,
    help="File of prompts; the first turn of each is decoded.",
)
@click.option(
    "--limit",
    type=COUNT,
    cls=Rare,
    help=f"Prompts taken of the file.  [default: all; {SHIPPED} of the shipped ones]",
)
@click.option(
    "--connect",
    metavar="ADDRESS|URL",
    help="What to watch, or to run prompts on; a URL: of this machine.  [default: processes of "
    "our own]",
)
@click.option(
    "--seconds",
    type=Number(0.5, 3600.0),
    cls=Rare,
    help=f"With --connect: how long to watch where no prompts are given.  [default: {SECONDS:g}]",
)
@seed_option("Seed of the replies.")
@click.option(
    "--out",
    type=OUT_FOLDER,
    required=True,
    help="Folder for report.html, profile.json, trace.json, plots.",
)
@json_instead_of("tables")
@settings_flags(*DECODING_SECTIONS, shown=DEMONSTRATED)
def command(
    configuration: Configuration,
    prompt: str | None,
    file: Path | None,
    limit: int | None,
    connect: str | None,
    seconds: float | None,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Show how long every device was busy, idle, and waiting for what; where the time of the rounds
    went; and which change would help most.

    If it starts processes of its own, the machine's limits are probed first, and after the run some
    short replies with other trees show what larger and smaller ones would bring. A watched server
    is not changed: then the advice follows from what it did, and from the profile file of `dovetail
    calibrate`.
    """
    prompts = _prompts(prompt, file, limit, watching=connect is not None)
    if seconds is not None and (connect is None or prompts):
        raise UserError(
            "--seconds is how long others are watched: name them with --connect, and leave "
            "prompts out, or leave --seconds out"
        )
    check_charts("the report")
    with _made(out):
        with ExitStack() as owned:
            if connect is None:
                evidence, watch = own_run(owned, configuration, prompts, seed)
            else:
                evidence, watch = attached(
                    owned, configuration, connect, prompts, seconds or SECONDS, seed
                )
        told = _write(out, find(evidence), watch)
    if as_json:
        click.echo(json.dumps(told))
    else:
        show(told)
        note(f"the report is {out / REPORT}; ui.perfetto.dev shows {out / TRACE}")


def _prompts(
    text: str | None, file: Path | None, limit: int | None, *, watching: bool
) -> list[Prompt]:
    """Return the prompts; none if a server is watched."""
    if text is not None and file is not None:
        raise UserError("--prompt and --prompts name two workloads: leave one of them out")
    if text is not None:
        if not text.strip() or not is_unicode(text):
            raise UserError("--prompt is empty, or not valid UTF-8 text: write some text")
        return [Prompt("prompt", (text,))]
    if file is None and watching:
        return []
    found = read_prompts(file or DEMO_FOLDER / "prompts.jsonl")
    return found[: limit or (None if file is not None else SHIPPED)]


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """Make the folder before anything is measured; `UserError` if that fails. It is removed if
    nothing is written to it."""
    result, new = out / RESULT, [place for place in (out, *out.parents) if not place.exists()]
    there = result.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        result.open("ab").close()
    except OSError as error:
        _clear(new)
        raise UserError(f"cannot write the report to {out}: {refusal(error)}") from None
    try:
        yield
    except BaseException as error:
        if not there:
            result.unlink(missing_ok=True)
        _clear(new)
        if isinstance(error, KeyboardInterrupt):
            note(f"interrupted: nothing was written to {out}")
        raise


def _clear(folders: list[Path]) -> None:
    """Remove these folders, the innermost first, up to one that is not empty."""
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _write(out: Path, findings: Findings, watch: Watch) -> dict[str, Any]:
    """Write all files, and return the result with their names."""
    drawn = pictures.pictures(findings)
    made = (
        f"Made {datetime.now().astimezone().isoformat(timespec='minutes')} by dovetail "
        f"{installed_version()}"
    )
    texts = {
        **{f"{name}.svg": svg for name, svg in drawn.items()},
        REPORT: report.page(findings, drawn, made),
    }
    for name, text in texts.items():
        _write_text(out / name, text)
    write_trace(
        out / TRACE, watch.spans, {worker.name: worker.clock_bound_ns for worker in watch.workers}
    )
    told = {**findings.told, "files": [REPORT, TRACE, RESULT, *(f"{name}.svg" for name in drawn)]}
    _write_text(out / RESULT, json.dumps(told) + "\n")
    return told


def _write_text(file: Path, text: str) -> None:
    with writing(file, "the report"):
        file.write_text(text, encoding="utf-8")


# -- what is shown ---------------------------------------------------------------------------------


def show(told: Mapping[str, Any]) -> None:
    """The tables of a profile, for people: what matters most first."""
    told = in_print(told)
    click.echo(f"{told['title']}\n{told['workload']}")
    click.echo(" · ".join(_first(told)))
    whole = (
        f"{told['tokens']} tokens in {told['wall_s']:.2f} s, "
        f"{told['tokens'] / told['wall_s']:.1f} a second"
    )
    click.echo(f"{whole}: with prefill and the time between replies")
    print_table(("of the time", *told["devices"]), list(_devices(told["devices"])))
    if told["parts_ms"]:
        parts, wall_ms = told["parts_ms"], told["round_wall_ms"]
        rows = [
            (name, f"{parts[name]:.3f}", tables.percent(parts[name] / wall_ms))
            for name in pictures.PARTS
        ]
        print_table(
            ("of a round", "ms", "share"),
            [
                *rows,
                ("unaccounted", "", tables.percent(told["unaccounted_share"])),
                ("all", f"{wall_ms:.3f}", ""),
            ],
        )
    if told["bounds"]:
        print_table(("figure", "this run", "at best", "bound"), tables.bound_rows(told))
    if advice := [_advice(one) for one in told["verdict"]["advice"]]:
        print_table(("predicted", "change", "settings"), advice)
    for words in told["verdict"]["in_words"]:
        click.echo(words)
    for name, value in tables.machine_rows(told):
        note(f"{name}: {value}")


def _first(told: Mapping[str, Any]) -> Iterator[str]:
    """The main figures."""
    yield f"{tables.number(told['tokens_per_s'], 1)} tokens/s"
    yield f"tau {tables.number(told['tau'], 2)}"
    if told["bounds"].get("drafted"):
        yield f"{told['bounds']['speedup']:.2f} times the target alone"
    yield f"{counted(told['rounds'], 'round')} of {tables.number(told['round_wall_ms'], 2)} ms"
    if told["sessions"] > 1 and told["sessions_a_pass"] > 1.0:
        yield f"{told['sessions_a_pass']:.1f} sessions a pass"


def _devices(devices: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A line a figure, a column a device."""
    every = devices.values()
    yield "busy", *(f"{device['busy']:.0%}" for device in every)
    yield "drafting ahead", *(f"{device['ahead']:.0%}" for device in every)
    for cause in pictures.WAITS:
        name = cause if cause == "no work" else f"waits for {cause}"
        yield name, *(f"{device['waiting'].get(cause, 0.0):.0%}" for device in every)
    yield "its process", *(tables.share(_process(device["sampled"])) for device in every)
    yield "its cores", *(tables.share(device["sampled"]["cores"]) for device in every)


def _process(sampled: Mapping[str, float | None]) -> float | None:
    return sampled["gpu"] if sampled["gpu"] is not None else sampled["process"]


def _advice(one: Mapping[str, Any]) -> tuple[str, str, str]:
    return (
        f"{'' if one['certain'] else 'up to '}{one['gain']:.2f}x",
        one["what"],
        " ".join(one["flags"]),
    )
