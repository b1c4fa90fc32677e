"""`dovetail bench`: methods compared, one method with several tree sizes, or a server under load.
Methods and peers are in `bench/methods.py`, turns in `bench/turns.py`, figures in
`bench/figures.py`, loads over HTTP in `bench/load/`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from dovetail.launch.bench import figures
from dovetail.launch.bench.contenders import Contender, contenders
from dovetail.launch.bench.figures import COLUMNS, CSV_COLUMNS, SWEPT, csv_text, show, show_notes
from dovetail.launch.bench.load import measured as load_table
from dovetail.launch.bench.load.measured import (
    DEFAULT_LEVELS,
    DEFAULT_REQUESTS,
    measure_and_tell,
    plan_of,
)
from dovetail.launch.bench.methods import (
    NONE,
    SERVER,
    Method,
    PromptSet,
    beside_llama_server,
    read_methods,
    read_prompt_set,
)
from dovetail.launch.bench.sweep import (
    VALUES,
    Sweep,
    draw_speedups,
    draw_sweep,
    points_of,
    read_sweep,
    show_sweep,
    swept,
)
from dovetail.launch.bench.turns import Cell, Journal, heading_of, measure, open_journal
from dovetail.launch.console.help import (
    COUNT,
    FILE,
    HelpCommand,
    json_instead_of,
    rare,
    seed_option,
)
from dovetail.launch.console.terminal import explained
from dovetail.launch.files.charts import check_chart
from dovetail.launch.files.outputs import check_output
from dovetail.launch.processes.connection import with_choices
from dovetail.launch.settings.configure import POSITIONAL, Configuration
from dovetail.launch.settings.flags import DECODING_SECTIONS, DEMONSTRATED, settings_flags
from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import writing

COMPARING = {
    "methods": "--method",
    "sweep": "--sweep",
    "values": "--values",
    "table": "--csv",
    "llama_python": "--llama-python",
    "llama_server": "--llama-server",
}
"""The parameters that cannot be combined with --concurrency, and their options."""


@click.command(
    cls=HelpCommand,
    epilog="\n\n".join(
        (
            explained({**COLUMNS, **SWEPT}),
            explained(CSV_COLUMNS, "Columns of --csv:"),
            explained(load_table.COLUMNS, "Columns with --concurrency:"),
        )
    ),
)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=FILE,
    help="File with one set of prompts; can be repeated.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="METHOD[,SETTING=VALUE...]",
    help="What to measure; can be repeated. `none` is always run.  [default: auto]",
)
@click.option(
    "--temperature",
    "temperatures",
    multiple=True,
    type=float,
    help="Can be repeated.  [default: sampling.temperature]",
)
@click.option("--limit", type=COUNT, help="Number of prompts of each set.  [default: all]")
@rare(
    "--repeat",
    type=COUNT,
    default=1,
    help="Number of measurements of every prompt with every method.",
)
@seed_option("Seed of every reply and of the bootstrap.")
@rare(
    "--sweep",
    type=click.Choice(tuple(VALUES)),
    help="Measure every method that drafts for several values of this tree size (for a beam, gamma "
    "follows depth).",
)
@rare(
    "--values",
    metavar="N,N,...",
    help="The values of --sweep.  [default: "
    f"{'; '.join(f'{name}: {values}' for name, values in VALUES.items())}]",
)
@click.option(
    "--concurrency",
    metavar="N,N,...",
    help="Measure a server over HTTP instead, ours or any other (--url), with this many concurrent "
    f"requests: throughput and latencies.  [default with --url: {DEFAULT_LEVELS}]",
)
@rare(
    "--url",
    metavar="URL",
    help="The server for --concurrency, any with the OpenAI API.  [default: one is started here]",
)
@rare(
    "--requests",
    type=COUNT,
    help=f"Requests at each --concurrency and with each method.  [default: {DEFAULT_REQUESTS}]",
)
@rare(
    "--plot",
    type=FILE,
    help="Draw the speed-ups, or the curves of --sweep or --concurrency, into this SVG file.",
)
@rare(
    "--csv",
    "table",
    type=FILE,
    help="Write a line for each method, set and temperature to this file.",
)
@rare(
    "--llama-python",
    type=click.Path(path_type=Path),
    help="A Python with llama-cpp-python and gguf, for --method llama.cpp.  [default: this one]",
)
@rare(
    "--llama-server",
    type=click.Path(path_type=Path),
    help="llama-server, for --method llama-server; without --method a GGUF target is compared with "
    "it.  [default: the one on PATH]",
)
@rare(
    "--out",
    type=FILE,
    help="Save every reply and finally the JSON object in this file; an interrupted run continues "
    "from it.",
)
@json_instead_of("a table")
@settings_flags(
    *(*DECODING_SECTIONS, "http.api_key_file"),
    without=("--temperature",),
    shown=(*DEMONSTRATED, "target.threads"),
    named=True,
)
@click.pass_context
def command(
    context: click.Context,
    configuration: Configuration,
    files: tuple[Path, ...],
    methods: tuple[str, ...],
    temperatures: tuple[float, ...],
    limit: int | None,
    repeat: int,
    seed: int,
    sweep: str | None,
    values: str | None,
    concurrency: str | None,
    url: str | None,
    requests: int | None,
    plot: Path | None,
    table: Path | None,
    llama_python: Path | None,
    llama_server: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure methods on sets of prompts at several temperatures, alternating prompt by prompt.

    MODEL is the target, as for `dovetail serve`. METHOD is none, auto (the draft of the settings),
    a kind of draft, a tree policy (the draft of the settings with this policy), the folder of a
    draft, a settings file (NAME.toml), assisted (transformers' assisted generation with the same
    two models), llama-server (with the target's own GGUF file) or llama.cpp (llama-cpp-python with
    another target, written as GGUF), with settings appended: --method
    small,tree.gamma=6,draft.ahead=false. llama-server also takes draft=FILE.gguf or draft=own (our
    draft's file), and max=N, threads=N, flash=on|off, by default the fastest; llama.cpp also takes
    threads=N, draft=lookup (its prompt lookup), lookup=N and cache=f16|f32. These three are part of
    a checkout, not of an installation.

    Exit code 1 if a method's tokens differ from those of none by more than a near-tie, or if a
    draft failed. llama.cpp and llama-server compute with other number types: their differences are
    printed with their margin and do not count. With --concurrency: exit code 1 if a request failed.
    """
    if values is not None and sweep is None:
        raise UserError("--values needs --sweep gamma or --sweep depth")
    _check_outputs(out, plot, table)
    if url is None and configuration.origins["target.model"] == POSITIONAL:
        configuration = with_choices(configuration)
    if concurrency is not None or url is not None:
        for name, option in COMPARING.items():
            if context.params[name]:
                raise UserError(
                    f"{option} cannot be combined with --concurrency or --url: leave it out"
                )
        plan = plan_of(
            _sets(files, limit),
            _heats(configuration, temperatures),
            DEFAULT_LEVELS if concurrency is None else concurrency,
            requests=requests or DEFAULT_REQUESTS,
            repeat=repeat,
            max_tokens=configuration.settings.sampling.max_tokens,
            seed=seed,
        )
        context.exit(measure_and_tell(configuration, url, plan, out, plot, as_json=as_json))
    if requests is not None:
        raise UserError("--requests belongs to --concurrency: add that, or leave out --requests")
    if llama_server is not None and not methods:
        methods = beside_llama_server(configuration)
    chosen = read_methods(configuration, methods)
    sweeping = read_sweep(sweep, values) if sweep is not None else None
    every = points_of(sweeping, chosen) if sweeping is not None else chosen
    if plot is not None and all(method.name == NONE for method in every):
        raise UserError(
            "--plot draws speed-ups over none: add another method, such as --method small"
        )
    sets = _sets(files, limit)
    heats = _heats(configuration, temperatures)
    with open_journal(out, heading_of(every, sets, heats, repeat, seed)) as journal:
        programs = {"assisted": None, "llama.cpp": llama_python, SERVER: llama_server}
        with _contenders(every, journal, programs) as found:
            measured = list(measure(found, sets, heats, repeat, seed, journal))
            result = _result(measured, found, seed)
        if sweeping is not None:
            points = swept(sweeping, chosen, result)
            told = {"setting": sweeping.setting, "values": sweeping.values, "points": points}
            result = {**result, "sweep": told}
        journal.end(result)
    if table is not None:
        with writing(table, "the table"):
            table.write_text(csv_text(result), encoding="utf-8", newline="")
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(_drawn(result, sweeping, chosen, every), encoding="utf-8")
    _tell(result, sweeping, as_json=as_json)
    context.exit(0 if _right(result) else 1)


def _drawn(
    result: dict[str, Any],
    sweeping: Sweep | None,
    chosen: Sequence[Method],
    every: Sequence[Method],
) -> str:
    if sweeping is None:
        return draw_speedups(every, result)
    return draw_sweep(sweeping, chosen, result["sweep"]["points"])


def _tell(result: dict[str, Any], sweeping: Sweep | None, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result))
    elif sweeping is not None:
        show_sweep(sweeping, result["sweep"]["points"])
        show_notes(result)
    else:
        show(result)


@contextmanager
def _contenders(
    methods: Sequence[Method], journal: Journal, programs: Mapping[str, Path | None]
) -> Iterator[Mapping[str, Contender]]:
    """Return the decoder of each method; nothing is started if everything is already measured."""
    if journal.whole:
        yield journal.remembered(methods)
        return
    with contenders(methods, programs) as found:
        yield journal.agree(found)


def _sets(files: Sequence[Path], limit: int | None) -> list[PromptSet]:
    sets = [read_prompt_set(path, limit) for path in files or (DEMO_FOLDER / "prompts.jsonl",)]
    names = [prompts.name for prompts in sets]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two files of prompts are called {twice}: rename one of them")
    return sets


def _heats(configuration: Configuration, temperatures: Sequence[float]) -> list[float]:
    settings = [
        configuration.over("--temperature", {"sampling.temperature": t}).settings
        for t in dict.fromkeys(temperatures)
    ] or [configuration.settings]
    return [one.sampling.temperature for one in settings]


def _result(measured: Sequence[Cell], found: Mapping[str, Contender], seed: int) -> dict[str, Any]:
    cells = figures.best_of_peers(measured)
    rows = [
        figures.row(cell, figures.baseline(cells, cell), found[cell.method.label], seed)
        for cell in cells
    ]
    return {
        "rows": rows,
        "against": figures.against_peers(cells, seed),
        "peers": figures.peers_told(measured, cells),
        "passes": [figures.pass_told(cell, figures.baseline(cells, cell)) for cell in cells],
        "medians": figures.medians(rows),
        "end_to_end": [figures.end_to_end(cell) for cell in cells],
        "prompts": figures.tasks_told(cells),
        "differences": figures.differences_told(cells),
        "replies": [len(cell.runs) for cell in cells],
        "models": {label: contender.identity() for label, contender in found.items()},
    }


def _right(result: Mapping[str, Any]) -> bool:
    return not any(row["draft_failures"] for row in result["rows"]) and all(
        difference["near_tie"] or not difference["exact"] for difference in result["differences"]
    )


def _check_outputs(out: Path | None, plot: Path | None, table: Path | None) -> None:
    check_chart(plot)
    paths = (out, plot, table)
    given = [path.expanduser().resolve() for path in paths if path is not None]
    if twice := next((path for path in given if given.count(path) > 1), None):
        raise UserError(f"two of --out, --plot and --csv name {twice}: choose different files")
    check_output(plot, "the plot")
    check_output(table, "the table")
