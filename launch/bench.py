"""`dovetail bench`: methods side by side, prompt by prompt, in one run; or one method over the sizes of its tree; or the transport alone.

What is measured is in `bench_methods.py`, how the turns are taken in `bench_turns.py`, what the figures mean in `bench_figures.py`.

- Of a prompt of several turns, the first is used.
- A method may be a peer, another engine with the same models on the same cores (`peers.py`). What it can be measured with, it is measured with in turn; its
  best is its row. At temperature 0 its tokens are compared as those of any method; above, it draws by itself.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from dovetail.launch import bench_figures as figures
from dovetail.launch.bench_methods import Contender, contenders, read_methods, read_prompt_set
from dovetail.launch.bench_table import COLUMNS, SWEPT, show, show_notes, show_overhead
from dovetail.launch.bench_turns import Cell, measure
from dovetail.launch.chart import check_chart
from dovetail.launch.configure import DECODING_SECTIONS, DEMO_FOLDER, Configuration, SettingsCommand, settings_flags
from dovetail.launch.outputs import check_output
from dovetail.launch.sweep import VALUES, Sweep, draw_sweep, points_of, read_sweep, show_sweep, swept
from dovetail.launch.terminal import explained, spinner
from dovetail.launch.transport import measure_overhead
from dovetail.protocol.errors import UserError

TRANSPORT_ROUNDS = 4000


@click.command(cls=SettingsCommand, epilog=explained({**COLUMNS, **SWEPT}))
@click.option("--prompts", "files", multiple=True, type=click.Path(dir_okay=False, path_type=Path), help="File of prompts, a set of its own; can be repeated.")
@click.option("--method", "methods", multiple=True, metavar="METHOD[,SETTING=VALUE...]", help="What to measure; can be repeated. `none` is always run.")
@click.option("--temperature", "temperatures", multiple=True, type=float, help="Can be repeated.  [default: sampling.temperature]")
@click.option("--limit", type=click.IntRange(min=1), help="Prompts taken of each set.  [default: all]")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Times that every prompt is measured with every method.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True, help="Seed of every reply and of the bootstrap.")
@click.option("--sweep", type=click.Choice(tuple(VALUES)), help="Measure every method that drafts over this size of its tree (of a beam, gamma follows depth).")
@click.option("--values", metavar="N,N,...", help=f"The values of --sweep.  [default: {'; '.join(f'{name}: {values}' for name, values in VALUES.items())}]")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves of --sweep into this SVG file.")
@click.option("--transport", is_flag=True, help="Measure coordinator and links alone, with workers that answer at once.")
@click.option("--rounds", type=click.IntRange(min=40), default=TRANSPORT_ROUNDS, show_default=True, help="Rounds that --transport measures.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the JSON object to this file too.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table.")
@settings_flags(*DECODING_SECTIONS, without=("--temperature",))
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
    plot: Path | None,
    transport: bool,
    rounds: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure methods on sets of prompts at several temperatures, alternating prompt by prompt.

    METHOD is none, a kind of draft, a tree policy (the draft of the settings with this policy), the folder of a draft, a settings file (NAME.toml), or
    assisted (transformers' assisted generation with the same two models), with settings appended: --method small,tree.gamma=6,draft.ahead=false. Exit code
    1 if a method's tokens differ from those of none by more than a near-tie.
    """
    _check_options(sweep, values, plot, transport=transport)
    check_output(out, "the result")
    check_output(plot, "the plot")
    if transport:
        with spinner() as say:
            say("measuring the transport")
            overhead = measure_overhead(rounds)
        _report(overhead.as_json(), out, as_json, lambda: show_overhead(overhead))
        return
    chosen = read_methods(configuration, methods)
    sweeping = read_sweep(sweep, values) if sweep is not None else None
    every = points_of(sweeping, chosen) if sweeping is not None else chosen
    sets = [read_prompt_set(path, limit) for path in files or (DEMO_FOLDER / "prompts.jsonl",)]
    heats = _heats(configuration, temperatures)
    with contenders(every) as found:
        measured = list(measure(found, sets, heats, repeat, seed))
        result, differs = _result(measured, found, seed)
    if sweeping is None:
        _report(result, out, as_json, lambda: show(result))
    else:
        points = swept(sweeping, chosen, result)
        if plot is not None:
            plot.write_text(draw_sweep(sweeping, chosen, points), encoding="utf-8")
        told = {**result, "sweep": {"setting": sweeping.setting, "values": sweeping.values, "points": points}}
        _report(told, out, as_json, lambda: _show_swept(sweeping, told))
    context.exit(1 if differs else 0)


def _check_options(sweep: str | None, values: str | None, plot: Path | None, *, transport: bool) -> None:
    check_chart(plot)
    given = next((name for name, value in (("--values", values), ("--plot", plot)) if value is not None), None)
    if given is not None and sweep is None:
        raise UserError(f"{given} belongs to a sweep: add --sweep gamma or --sweep depth, or leave it out")
    if sweep is not None and transport:
        raise UserError("--transport has no tree to sweep: leave --sweep or --transport out")


def _heats(configuration: Configuration, temperatures: Sequence[float]) -> list[float]:
    """The temperatures, each looked at as the setting that it is."""
    settings = [configuration.over("--temperature", {"sampling.temperature": t}).settings for t in dict.fromkeys(temperatures)] or [configuration.settings]
    return [one.sampling.temperature for one in settings]


def _result(measured: Sequence[Cell], found: Mapping[str, Contender], seed: int) -> tuple[dict[str, Any], bool]:
    """All that a run found, and whether any tokens differ by more than a near-tie."""
    cells = figures.best_of_peers(measured)
    rows = [figures.row(cell, figures.baseline(cells, cell), found[cell.method.label], seed) for cell in cells]
    result = {
        "rows": rows,
        "against": figures.against_peers(cells, seed),
        "peers": figures.peers_told(measured, cells),
        "passes": [figures.pass_told(cell, figures.baseline(cells, cell)) for cell in cells],
        "medians": figures.medians(rows),
        "end_to_end": [figures.end_to_end(cell) for cell in cells],
        "prompts": figures.tasks_told(cells),
        "differences": figures.differences_told(cells),
    }
    return result, not all(difference.near_tie for cell in cells for difference in cell.differences.values())


def _show_swept(sweep: Sweep, result: Mapping[str, Any]) -> None:
    show_sweep(sweep, result["sweep"]["points"])
    show_notes(result)


def _report(result: Mapping[str, Any], out: Path | None, as_json: bool, show: Callable[[], None]) -> None:
    text = json.dumps(result)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        click.echo(text)
    else:
        show()
