"""`dovetail profile`: where the time of a run goes, by device and by round, and what would make it
faster. The work is in `profiling/`."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import (
    COUNT,
    FILE,
    HelpCommand,
    Number,
    connect_option,
    json_instead_of,
    rare,
    seed_option,
)
from dovetail.launch.console.terminal import (
    counted,
    explained,
    in_print,
    note,
    print_table,
    spinner,
)
from dovetail.launch.files.charts import check_charts
from dovetail.launch.files.outputs import OUT_FOLDER
from dovetail.launch.files.prompts import Prompt, is_unicode, read_prompts
from dovetail.launch.planning.subject import Subject, subject_here
from dovetail.launch.profiling.figure import WAITS, draw
from dovetail.launch.profiling.findings import find
from dovetail.launch.profiling.samplers import NO_CARD
from dovetail.launch.profiling.stages import RunWatch, attached, own_run
from dovetail.launch.profiling.timeline import PARTS
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import DECODING_SECTIONS, DEMONSTRATED, settings_flags
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import refusal, writing
from dovetail.runtime.telemetry.trace import write_trace

SHIPPED = 4  # prompts of the shipped file that are used by default
SECONDS = 10.0
RESULT, FIGURE, TRACE = "profile.json", "profile.svg", "trace.json"
NOT_AVAILABLE = "not available"
LEAST = 5e-4  # a share that is not 0.0 %
WORDS = {
    "busy": "share of the time in which a process worked, by its spans",
    "drafting ahead": "share of the time, not of busy: drafting that no round waited for",
    "waits for X": "idle until X was done; transport: until a message arrived",
    "no work": "no reply was being decoded",
    "its process": "CPU time by the kernel over that of its threads, or",
    "": "the driver's figure for a GPU; compare with busy",
    "its cores": "how busy these cores were, with any process",
    "draft, verify": "parts of a round: drafting that it waits for; the target's pass",
    "transport": "messages in transit, until the receiver has a core",
    "queue": "waiting for a worker that serves others (elsewhere: waiting)",
    "unaccounted": "time between two verdicts that is in none of these parts",
    "tokens/s": "rate of the rounds, without reading prompts, for a single reply",
    "tau": "tokens that a round adds to its reply",
    "T_V, T_T": "a target pass over a tree; a round without a tree",
    "hit": "the next root was in the tree, and its subtree was kept",
}
"""Terms used in the tables."""


@click.command("profile", cls=HelpCommand, epilog=explained(WORDS, "Words:"))
@click.option("--prompt", help="Text to decode.")
@click.option(
    "--prompts", "file", type=FILE, help="File of prompts; the first turn of each is decoded."
)
@rare(
    "--limit",
    type=COUNT,
    help=f"Number of prompts of the file.  [default: all; {SHIPPED} of the shipped ones]",
)
@connect_option(
    "The coordinator or server (on this machine) to watch, or to run prompts on.  [default: "
    "separate processes]",
    "ADDRESS|URL",
)
@rare(
    "--seconds",
    type=Number(0.5, 3600.0),
    help=f"With --connect: how long to watch where no prompts are given.  [default: {SECONDS:g}]",
)
@seed_option("Seed of the replies.")
@click.option(
    "--out", type=OUT_FOLDER, required=True, help=f"Folder for {RESULT}, {FIGURE}, {TRACE}."
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
    """Show how long every device was busy or idle and what it waited for, where the time of the
    rounds went, and which change would help most. If it starts processes, some short replies with
    other trees follow the run, to show the effect of larger and smaller ones; then this machine's
    limits are measured unless `dovetail calibrate` has stored them. A watched server is not
    changed, and the advice is based on its activity.
    """
    prompts = _prompts(prompt, file, limit, watching=connect is not None)
    if seconds is not None and (connect is None or prompts):
        raise UserError("--seconds is for watching a server: it needs --connect, and no prompts")
    check_charts("the figure")
    with _made(out):
        with ExitStack() as owned:
            if connect is None:
                evidence, watch = own_run(owned, configuration, prompts, seed)
            else:
                evidence, watch = attached(
                    owned, configuration, connect, prompts, seconds or SECONDS, seed
                )
        with spinner() as say:
            subject = _subject(configuration, say) if connect is None else None
            found = find(evidence, subject, say)
        _write(out, found, watch)
    if as_json:
        click.echo(json.dumps(found))
    else:
        show(found)
        note(f"the figure is {out / FIGURE}; open {out / TRACE} in ui.perfetto.dev")


def _subject(configuration: Configuration, say: Callable[[str], None]) -> Subject | None:
    try:
        return subject_here(configuration, say)
    except UserError as error:
        note(f"this machine's potential is not judged: {error}")
        return None


def _prompts(
    text: str | None, file: Path | None, limit: int | None, *, watching: bool
) -> list[Prompt]:
    if text is not None and file is not None:
        raise UserError("--prompt and --prompts cannot be combined: leave out one of them")
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
        raise UserError(f"cannot write the profile to {out}: {refusal(error)}") from None
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
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return


def _write(out: Path, found: dict[str, Any], watch: RunWatch) -> None:
    found["files"] = [RESULT, FIGURE, TRACE]
    for name, text in ((FIGURE, draw(found)), (RESULT, json.dumps(found) + "\n")):
        with writing(out / name, "the profile"):
            (out / name).write_text(text, encoding="utf-8")
    clocks = {worker.name: worker.clock_bound_ns for worker in watch.workers}
    write_trace(out / TRACE, watch.spans, clocks)


def show(found: Mapping[str, Any]) -> None:
    found = in_print(found)
    click.echo(f"{found['title']}\n{found['workload']}")
    click.echo(" · ".join(_first(found)))
    click.echo(
        f"{found['tokens']} tokens in {found['wall_s']:.2f} s, "
        f"{found['tokens'] / found['wall_s']:.1f} a second, including prompts and the time between "
        "replies"
    )
    print_table(("of the time", *found["devices"]), list(_devices(found["devices"])))
    if wall_ms := found["round_wall_ms"]:
        rows = [
            (n, f"{found['parts_ms'][n]:.3f}", _percent(found["parts_ms"][n] / wall_ms))
            for n in PARTS
        ]
        rest = ("unaccounted", "", _percent(found["unaccounted_share"]))
        print_table(("of a round", "ms", "share"), [*rows, rest, ("all", f"{wall_ms:.3f}", "")])
    if found["bounds"]:
        print_table(("figure", "this run", "at best", "bound"), [*_bounds(found["bounds"])])
    if found["advice"]:
        rows = [
            (f"{one['gain']:.2f}x", one["what"], " ".join(one["flags"])) for one in found["advice"]
        ]
        print_table(("predicted", "change", "settings"), rows)
    for words in found["in_words"]:
        click.echo(words)
    for name, value in _machine(found):
        note(f"{name}: {value}")


def _first(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{_number(found['tokens_per_s'], 1)} tokens/s"
    yield f"tau {found['tau']:.2f}"
    if found["bounds"].get("drafted"):
        yield f"{found['bounds']['speedup']:.2f} times the target alone"
    yield f"{counted(found['rounds'], 'round')} of {_number(found['round_wall_ms'], 2)} ms"
    if found["sessions"] > 1 and found["sessions_a_pass"] > 1.0:
        yield f"{found['sessions_a_pass']:.1f} sessions a pass"


def _devices(devices: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    every = devices.values()
    yield "busy", *(f"{device['busy']:.0%}" for device in every)
    yield "drafting ahead", *(f"{device['ahead']:.0%}" for device in every)
    for cause in WAITS:
        name = cause if cause == "no work" else f"waits for {cause}"
        yield name, *(f"{device['waiting'].get(cause, 0.0):.0%}" for device in every)
    sampled = [device["sampled"] for device in every]
    own = [one["process"] if one["gpu"] is None else one["gpu"] for one in sampled]
    yield "its process", *map(_share, own)
    yield "its cores", *(_share(one["cores"]) for one in sampled)


def _bounds(bounds: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(figure, this run, at best, the bound's name)."""
    if bounds["drafted"]:
        speedup, most = bounds["speedup"], bounds["most_speedup"]
        yield "speed-up over the target alone", f"{speedup:.2f}", f"{most:.2f}", "tau T_T / T_V"
        t_v_s, in_turn_s = bounds["t_v_s"], bounds["in_turn_s"]
        gain = (in_turn_s + t_v_s) / (bounds["exposed_s"] + t_v_s)
        most = 1.0 + min(in_turn_s, t_v_s) / max(in_turn_s, t_v_s)
        phases = "1 + min / max of the two phases"
        yield "gain of drafting ahead", f"{gain:.2f}", f"{most:.2f}", phases
    if (one := bounds["pass"]) is None:
        why = "known only for its own runs on the CPU"
        yield "bandwidth and arithmetic", NOT_AVAILABLE, NOT_AVAILABLE, why
        return
    of = f"({one['limits_from']}{'' if bounds['judged'] else '; not judged: other programs ran'})"
    longer_ms = 1e3 * max(one["t_p_s"], one["t_c_s"])
    read, best = f"{one['gb_s']:.1f}", f"{one['bandwidth_gb_s']:.1f}"
    yield "weights read, GB/s", read, best, f"bandwidth {of}"
    done, best = f"{one['gflop_s']:.0f}", f"{one['peak_gflop_s']:.0f}"
    yield "operations, 10^9/s", done, best, f"arithmetic {of}"
    yield "a pass, ms", f"{1e3 * bounds['t_v_s']:.2f}", f"{longer_ms:.2f}", "the longer of the two"


def _machine(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, gpu in found["gpus"].items():
        used = None if gpu["most_used_bytes"] is None else gpu["most_used_bytes"] / 1e9
        figures = f"{_number(used, 1)} GB in use, bus {_number(gpu['link_gb_s'], 1)} GB/s"
        yield f"{name} {gpu['name']}", f"{_share(gpu['busy'])} busy by its driver, {figures}"
    if without := [name for name, why in found["absent"].items() if why == NO_CARD]:
        yield "GPUs", f"none here ({' and '.join(without)} were not queried)"
    for name, why in found["absent"].items():
        if why != NO_CARD:
            yield name, f"{NOT_AVAILABLE}: {why}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float) -> str:
    return f"{value:.1%}" if abs(value) >= LEAST else "0.0%"


def _share(value: float | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:.0%}"
