"""`dovetail profile`: where the time of a run goes, device by device and round by round, beside what would be possible; and what would make it faster.

It measures through the same messages as serving: a run of its own, or a server that is watched. What is found goes to the terminal, to a report, to a trace
and to JSON. Knows options and files; the work is in `profiling/`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from dovetail.launch.cli import installed_version
from dovetail.launch.configure import DECODING_SECTIONS, DEMO_FOLDER, Configuration, SettingsCommand, settings_flags
from dovetail.launch.profiling import report
from dovetail.launch.profiling.findings import Findings, find
from dovetail.launch.profiling.stages import attached, own_run
from dovetail.launch.profiling.watching import Watch
from dovetail.launch.prompts import Prompt, is_unicode, read_prompts
from dovetail.launch.terminal import note, print_table
from dovetail.protocol.errors import UserError
from dovetail.runtime.trace import write_trace

SHIPPED = 4
"""Prompts of the shipped file that are taken where none are named."""
SECONDS = 10.0
RESULT, REPORT, TRACE = "profile.json", "report.html", "trace.json"


@click.command("profile", cls=SettingsCommand)
@click.option("--prompt", help="Text to decode.")
@click.option("--prompts", "file", type=click.Path(dir_okay=False, path_type=Path), help="File of prompts; the first turn of each is decoded.")
@click.option("--limit", type=click.IntRange(min=1), help=f"Prompts taken of the file.  [default: all; {SHIPPED} of the shipped ones]")
@click.option("--connect", metavar="ADDRESS|URL", help="What to watch, or to run prompts on; a URL: of this machine.  [default: processes of our own]")
@click.option("--seconds", type=click.FloatRange(0.5, 3600.0), default=SECONDS, show_default=True, help="How long to watch where no prompts are given.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True, help="Of the replies.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for report.html, profile.json, trace.json, plots.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables.")
@settings_flags(*DECODING_SECTIONS)
def command(
    configuration: Configuration,
    prompt: str | None,
    file: Path | None,
    limit: int | None,
    connect: str | None,
    seconds: float,
    seed: int,
    out: Path,
    as_json: bool,
) -> None:
    """Say of every device how long it was busy, idle, and waiting for what; of the rounds where their time went; and which change would help most.

    With processes of our own the machine's limits are probed first, and after the run some short replies with other trees tell what larger and smaller ones
    would bring. A server that is watched is left as it is: then the advice goes by what it did, and by the profile file of `dovetail calibrate`.
    """
    prompts = _prompts(prompt, file, limit, watching=connect is not None)
    _make(out)
    with ExitStack() as owned:
        if connect is None:
            evidence, watch = own_run(owned, configuration, prompts, seed)
        else:
            evidence, watch = attached(owned, configuration, connect, prompts, seconds, seed)
    told = _write(out, find(evidence), watch)
    if as_json:
        click.echo(json.dumps(told))
    else:
        show(told)
        note(f"the report is {out / REPORT}; ui.perfetto.dev shows {out / TRACE}")


def _prompts(text: str | None, file: Path | None, limit: int | None, *, watching: bool) -> list[Prompt]:
    """What is decoded; nothing where others are watched."""
    if text is not None and file is not None:
        raise UserError("--prompt and --prompts name two workloads: leave one of them out")
    if text is not None:
        if not text.strip() or not is_unicode(text):
            raise UserError("--prompt is empty, or no valid UTF-8 text: write some text")
        return [Prompt("prompt", (text,))]
    if file is None and watching:
        return []
    found = read_prompts(file or DEMO_FOLDER / "prompts.jsonl")
    return found[: limit or (None if file is not None else SHIPPED)]


def _make(out: Path) -> None:
    """The folder, before anything is measured; `UserError` if there cannot be one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / RESULT).open("ab").close()
    except OSError as error:
        raise UserError(f"the report cannot be written to {out}: {error.strerror}") from None


def _write(out: Path, findings: Findings, watch: Watch) -> dict[str, Any]:
    """All files; the result, which names them."""
    drawn = report.pictures(findings)
    for name, svg in drawn.items():
        (out / f"{name}.svg").write_text(svg, encoding="utf-8")
    made = f"Made {datetime.now().astimezone().isoformat(timespec='minutes')} by dovetail {installed_version()}"
    (out / REPORT).write_text(report.page(findings, drawn, made), encoding="utf-8")
    write_trace(out / TRACE, watch.spans, {worker.name: worker.clock_bound_ns for worker in watch.workers})
    told = {**findings.told, "files": [REPORT, TRACE, RESULT, *(f"{name}.svg" for name in drawn)]}
    (out / RESULT).write_text(json.dumps(told) + "\n", encoding="utf-8")
    return told


# -- what is shown -----------------------------------------------------------------------------------------------------------------------------


def show(told: Mapping[str, Any]) -> None:
    """The tables of a profile, for people."""
    several = f", {told['sessions_a_pass']:.1f} sessions a pass" if told["sessions"] > 1 and told["sessions_a_pass"] > 1.0 else ""
    click.echo(f"{told['title']}\n{told['workload']}: {told['tokens']} tokens, {told['rounds']} rounds{several}, {told['wall_s']:.2f} s")
    headings = ("device", "busy", "of it ahead", *(f"waits: {name}" for name in report.WAITS[:4]), "no work", "its process", "its cores")
    print_table(headings, [_device(name, device) for name, device in told["devices"].items()])
    if told["parts_ms"]:
        parts = told["parts_ms"]
        cells = [*(f"{parts[name]:.3f}" for name in report.PARTS), f"{told['round_wall_ms']:.3f}", f"{told['unaccounted_share']:.1%}"]
        print_table(("ms a round", *report.PARTS, "wall", "unaccounted"), [("", *cells)])
    print_table(("figure", "this run", "at best", "bound"), report.bound_rows(told))
    if told["verdict"]["advice"]:
        print_table(("predicted", "change", "settings"), [_advice(one) for one in told["verdict"]["advice"] if one["gain"] >= 1.0 or one["name"] == "alone"])
    for words in told["verdict"]["in_words"]:
        click.echo(words)
    for name, value in report.machine_rows(told):
        note(f"{name}: {value}")


def _device(name: str, device: Mapping[str, Any]) -> tuple[object, ...]:
    waits: Sequence[float] = [device["waiting"].get(cause, 0.0) for cause in report.WAITS]
    sampled = device["sampled"]
    process = sampled["gpu"] if sampled["gpu"] is not None else sampled["process"]
    return (name, f"{device['busy']:.0%}", f"{device['ahead']:.0%}", *(f"{wait:.0%}" for wait in waits), report.share(process), report.share(sampled["cores"]))


def _advice(one: Mapping[str, Any]) -> tuple[str, str, str]:
    return f"{'' if one['certain'] else 'up to '}{one['gain']:.2f}x", one["what"], " ".join(one["flags"])
