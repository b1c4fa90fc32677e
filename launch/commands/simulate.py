"""`dovetail simulate`: what rounds would take on machines, and with models of sizes, that are not
at hand.

`record` decodes prompts once with a real pair and keeps what the draft says at every position;
`run` plays that through the real coordinator and the real draft worker with the costs of a machine;
`validate` decodes the same replies for real and plays them with the costs that were measured while
it did. What needs torch is imported when the work begins.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dovetail.launch.bench.sweep import read_sweep
from dovetail.launch.bench.table import share
from dovetail.launch.commands.worker import THREAD_VARIABLES
from dovetail.launch.console.help import HelpCommand, Rare
from dovetail.launch.console.terminal import (
    counted,
    explained,
    note,
    print_table,
    progress_bar,
    spinner,
)
from dovetail.launch.files.chart import Curve, check_chart, draw
from dovetail.launch.files.outputs import OUT_FOLDER, check_output
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.processes.preflight import check_draft, check_target
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.embedded import DEMO_FOLDER, with_draft, with_target
from dovetail.launch.settings.flags import DECODING_SECTIONS, SettingsCommand, settings_flags
from dovetail.launch.simulation.costs import Costs
from dovetail.launch.simulation.figures import Figures, figures
from dovetail.launch.simulation.machines import SIZES, machine_names, read_machine, read_size
from dovetail.launch.simulation.methods import Method, read_methods, vary
from dovetail.launch.simulation.recording import Folder, Library, read_library
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import writing
from dovetail.protocol.settings import MAX_DEPTH, MAX_GAMMA, MAX_WIDTH, TreeSettings

NODES, LEVELS, CHILDREN = 384, 12, 32
"""What is recorded at a position; children as many as a draft keeps of a node when it grows
ahead."""
LEVEL_ROWS = 10
"""Of a draft's level whose price is told."""
RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)
"""T_D over T_V."""
MACHINE = "dovetail-server"
NOTED_SHARE = 0.01
"""Of expanded nodes that were not recorded: more is worth a word."""
TOLERANCE = 0.05
TOLD_ROWS, CONTEXT = (1, 16, 64), 512
"""Of the passes that `machines` tells."""
COLUMNS = {
    "method": "the tree, as --method names it",
    "tokens/s": "of the tokens after the first of each reply",
    "speed-up": "over the target alone, with the same costs",
    "tau": "tokens that a round brings",
    "draft": "share of the time in which drafting is waited for",
    "hit": "share of the drafted rounds whose root was in the tree already",
    "rows": "in a pass of the target: nodes verified, and their root",
    "grown": "nodes a round that are grown while it is waited for them",
    "ahead": "nodes a round that are grown while the target verifies",
    "wasted": "nodes a round neither offered nor kept when the root moved",
    "plain": "share of the rounds that are verified without a tree",
    "predicted": "tokens/s, as the cost model expected it before each round",
}
"""Of the table of `run`: heading -> what it means."""

Row = dict[str, Any]


@click.group()
def command() -> None:
    """Play recorded rounds with the costs of machines and model sizes that are not at hand."""


# -- recording -------------------------------------------------------------------------------------


@command.command("record", cls=SettingsCommand)
@click.option(
    "--prompts",
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File of prompts; the first turn of each is decoded.",
)
@click.option(
    "--out",
    type=OUT_FOLDER,
    required=True,
    help="The folder to write; a run that was interrupted goes on.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Prompts taken.  [default: all]")
@click.option(
    "--seed",
    type=click.IntRange(0, (1 << 63) - 1),
    default=0,
    show_default=True,
    help="Seed of every reply.",
)
@click.option(
    "--sharpening",
    type=click.FloatRange(0.0, 100.0, min_open=True),
    default=1.0,
    show_default=True,
    cls=Rare,
    help="Of the scores that are recorded.",
)
@click.option(
    "--nodes",
    type=click.IntRange(1, MAX_GAMMA),
    default=NODES,
    show_default=True,
    cls=Rare,
    help="Nodes expanded at each position, at least.",
)
@click.option(
    "--levels",
    type=click.IntRange(1, MAX_DEPTH),
    default=LEVELS,
    show_default=True,
    cls=Rare,
    help="Levels of the recorded trees.",
)
@click.option(
    "--children",
    type=click.IntRange(1, MAX_WIDTH),
    default=CHILDREN,
    show_default=True,
    cls=Rare,
    help="Children recorded of each node.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    cls=Rare,
    help="CPU threads.",
)
@settings_flags("target", "draft", "sampling")
def record(
    configuration: Configuration,
    file: Path | None,
    out: Path,
    limit: int | None,
    seed: int,
    sharpening: float,
    nodes: int,
    levels: int,
    children: int,
    threads: int,
) -> None:
    """Decode prompts once, a token a round, and keep the draft's tree at every position.

    The reply is the same with any tree, so that one recording serves every policy and size of tree.
    Nothing is timed, and an inflation would change nothing.
    """
    settings = configuration.settings
    if settings.draft.kind in ("none", "ngram"):
        raise UserError(
            f"draft.kind = {settings.draft.kind!r}: only a draft with a model can be recorded; "
            "name one with --draft"
        )
    if settings.sampling.rejects:
        raise UserError(
            "sampling.acceptance = 'rejection' draws anew in each round, so that there is "
            "nothing to record: use 'coupled'"
        )
    check_target(settings)
    check_draft(settings)
    prompts = read_prompts(file or DEMO_FOLDER / "prompts.jsonl")[:limit]
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    from dovetail.launch.simulation.survey import Order, Recorder, processors
    from dovetail.workers.draft import open_draft_worker
    from dovetail.workers.target import open_target_worker

    with spinner() as say:
        say("loading the models")
        model = with_target(settings.target)
        target = open_target_worker(model, name="target", threads=threads)
        draft = open_draft_worker(
            with_draft(settings.draft), name="draft", threads=threads, target=model.model
        )
    order = Order(
        processors(settings.sampling),
        seed,
        sharpening,
        nodes,
        levels,
        children,
        settings.sampling.max_tokens,
    )
    recorder = Recorder(target, draft, order)
    with progress_bar(len(prompts), "replies") as step:
        done = recorder.record_all(prompts, Folder(out, recorder.about), step)
    there = len(prompts) - done
    note(
        f"{out}: {counted(done, 'reply', 'replies')} recorded, {there} "
        f"{'was' if there == 1 else 'were'} there"
    )


# -- playing ---------------------------------------------------------------------------------------


@command.command("run", cls=SettingsCommand, epilog=explained(COLUMNS))
@click.option(
    "--rounds",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder that `simulate record` made.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Replies played.  [default: all]")
@click.option(
    "--machine",
    metavar="NAME|FILE",
    default=MACHINE,
    show_default=True,
    help="A machine of `simulate machines`, or a file like theirs (.toml).",
)
@click.option(
    "--target-size",
    type=click.Choice(list(SIZES)),
    default="7B",
    show_default=True,
    help="Whose passes are paid for.",
)
@click.option(
    "--weights",
    type=click.Choice(["fp32", "half", "int8"]),
    cls=Rare,
    help="The target's.  [default: the machine's]",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, 64),
    cls=Rare,
    help="Blocks of the draft head.  [default: the machine's]",
)
@click.option(
    "--costs",
    type=click.Path(dir_okay=False, path_type=Path),
    cls=Rare,
    help="Instead: what the rounds cost that `generate --record` wrote to this file.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="POLICY[,SETTING=VALUE...]",
    help="A tree, such as goodput or dynamic,gamma=59,ahead=false; repeat.",
)
@click.option(
    "--sweep",
    type=click.Choice(["gamma", "depth", "ratio"]),
    help="Vary a size of the tree, or T_D / T_V with and without drafting ahead.",
)
@click.option(
    "--values",
    metavar="A,B,...",
    cls=Rare,
    help="Of the sweep.  [default: as `bench --sweep`; ratios from 0.02 to 2]",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the sweep, or the methods, into this SVG file.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the JSON object to this file too.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table."
)
@settings_flags("tree", "draft")
def run(
    configuration: Configuration,
    rounds: Path,
    limit: int | None,
    machine: str,
    target_size: str,
    weights: str | None,
    blocks: int | None,
    costs: Path | None,
    methods: tuple[str, ...],
    sweep: str | None,
    values: str | None,
    plot: Path | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Play recorded replies with the costs of a machine: tokens/s, tau and the rest, for every
    method."""
    check_chart(plot)
    check_output(plot, "the plot")
    check_output(out, "the result")
    library = read_library(rounds, limit)
    chosen = read_methods(configuration, methods, library.about)
    if costs is None and read_machine(machine).shared:
        chosen = [_in_turns(method, machine) for method in chosen]
    price, title = (
        _costs(costs)
        if costs is not None
        else _machine_costs(machine, target_size, weights, blocks)
    )
    if sweep == "ratio":
        if costs is None and read_machine(machine).shared:
            raise UserError(
                "--sweep ratio compares drafting ahead with not, and target and draft of "
                f"{machine} share a device: choose another --machine"
            )
        rows = _play_ratios(library, price, chosen, _ratios(values))
    else:
        points = _points(chosen, sweep, values)
        rows = _play(library, price, points)
    told = {
        "title": title,
        "recording": library.about.model_dump(mode="json"),
        "replies": len(library.recordings),
        "sweep": sweep,
        "rows": rows,
    }
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(_chart(title, sweep, rows), encoding="utf-8")
    if out is not None:
        with writing(out, "the result"):
            out.write_text(json.dumps(told) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{title}; {counted(len(library.recordings), 'reply', 'replies')} of "
        f"{Path(library.about.target_model).name}"
    )
    (_show_ratios if sweep == "ratio" else _show)(rows)


def _costs(path: Path) -> tuple[Costs, str]:
    """Those of measured rounds, and in words whose."""
    from dovetail.launch.files.records import read_records
    from dovetail.launch.simulation.measured import measured_costs

    return measured_costs(
        [record for reply in read_records(path) for record in reply.rounds]
    ), f"costs of the rounds in {path}"


def _machine_costs(
    machine: str, target_size: str, weights: Any, blocks: int | None
) -> tuple[Costs, str]:
    found = read_machine(machine)
    weights = weights or found.weights
    return found.costs(
        read_size(target_size), weights, blocks
    ), f"{found.title}; target {target_size} in {weights}"


def _in_turns(method: Method, machine: str) -> Method:
    """The method where target and draft share a device."""
    if method.ahead:
        raise UserError(
            f"--method {method.name}: target and draft of {machine} share a device, where what "
            "is done ahead costs the other: leave ahead out"
        )
    return method.with_ahead(False)


def _points(
    methods: Sequence[Method], sweep: str | None, values: str | None
) -> list[tuple[Method, int | None]]:
    """What is played, with the value of the sweep."""
    if sweep is None:
        if values is not None:
            raise UserError(
                "--values says nothing without --sweep: add --sweep gamma, depth or ratio"
            )
        return [(method, None) for method in methods]
    return [
        (vary(method, sweep, value), value)
        for method in methods
        for value in read_sweep(sweep, values).values
    ]


def _ratios(values: str | None) -> tuple[float, ...]:
    try:
        found = (
            tuple(sorted({float(value) for value in values.split(",")}))
            if values is not None
            else RATIOS
        )
    except ValueError:
        found = ()
    if not found or not all(0.0 < value <= 1e3 for value in found):
        raise UserError(
            f"--values {values!r} is no list of ratios above 0: write such as 0.02,0.5,2"
        )
    return found


def _play(library: Library, costs: Costs, points: Sequence[tuple[Method, int | None]]) -> list[Row]:
    """A row for each point, and its speed-up over the target alone."""
    with progress_bar(1 + len(points), "methods") as step:
        alone = _alone(library, costs, step)
        return [
            _row(point, value, *_figures_of(library, costs, point, step), alone)
            for point, value in points
        ]


def _row(
    method: Method, value: int | None, found: Figures, missing_share: float, alone: Figures
) -> Row:
    return {
        "method": method.name,
        **({"value": value} if value is not None else {}),
        **{name: getattr(method.tree, name) for name in ("policy", "gamma", "depth", "width")},
        "speedup": found.tokens_per_s / alone.tokens_per_s,
        "missing_share": missing_share,
        **found.as_json(),
    }


def _play_ratios(
    library: Library, costs: Costs, methods: Sequence[Method], ratios: Sequence[float]
) -> list[Row]:
    """For each ratio and method, drafting ahead over not. T_D and T_V are those of the policy
    `dynamic` with the same tree, not ahead."""
    rows: list[Row] = []
    with progress_bar(len(methods) * (2 + 2 * len(ratios)), "methods") as step:
        for method in methods:
            yardstick, _ = _figures_of(
                library, costs, method.named(method.name, policy="dynamic").with_ahead(False), step
            )
            for ratio in ratios:
                slower = costs.with_slower_draft(ratio * yardstick.verify_s / yardstick.draft_s)
                waiting, _ = _figures_of(library, slower, method.with_ahead(False), step)
                ahead, missing_share = _figures_of(library, slower, method.with_ahead(True), step)
                rows.append(_ratio_row(method, ratio, waiting, ahead, missing_share))
            step(method.name)
    return rows


def _ratio_row(
    method: Method, ratio: float, waiting: Figures, ahead: Figures, missing_share: float
) -> Row:
    return {
        "method": method.name,
        "value": ratio,
        "gain": ahead.tokens_per_s / waiting.tokens_per_s,
        "tau_quotient": ahead.tau / waiting.tau,
        "exposed_quotient": ahead.draft_s / waiting.draft_s if waiting.draft_s else None,
        "missing_share": missing_share,
        "waiting": waiting.as_json(),
        "ahead": ahead.as_json(),
    }


def _alone(library: Library, costs: Costs, step: Callable[[str], None]) -> Figures:
    from dovetail.launch.simulation.play import play_all

    plays, _ = play_all(library, costs, TreeSettings(), speculate=False)
    step("the target alone")
    return figures([play.result for play in plays])


def _figures_of(
    library: Library, costs: Costs, method: Method, step: Callable[[str], None]
) -> tuple[Figures, float]:
    """What a method comes to, and the share of what it expanded that was not recorded."""
    from dovetail.launch.simulation.play import play_all

    plays, coverage = play_all(library, costs, method.tree, ahead=method.ahead)
    step(method.name)
    return figures([play.result for play in plays]), coverage.missing_share


def _show(rows: Sequence[Row]) -> None:
    print_table(tuple(COLUMNS), [_line(row) for row in rows])
    _note_missing(rows)


def _line(row: Row) -> tuple[object, ...]:
    rates = (row["tokens_per_s"], row["speedup"], row["tau"])
    counts = (row[name] for name in ("rows", "grown", "ahead", "wasted"))
    shares = (share(row["draft_share"]), share(row["hit_rate"]))
    return (
        row["method"],
        *rates,
        *shares,
        *counts,
        share(row["plain_share"]),
        row["predicted_tokens_per_s"],
    )


def _show_ratios(rows: Sequence[Row]) -> None:
    headings = (
        "method",
        "T_D / T_V",
        "tokens/s, not ahead",
        "ahead",
        "quotient",
        "of tau",
        "of exposed drafting",
        "hit",
    )
    lines = [
        (
            row["method"],
            row["value"],
            row["waiting"]["tokens_per_s"],
            row["ahead"]["tokens_per_s"],
            row["gain"],
            row["tau_quotient"],
            row["exposed_quotient"],
            share(row["ahead"]["hit_rate"]),
        )
        for row in rows
    ]
    print_table(headings, lines)
    click.echo(
        f"least quotient {min(row['gain'] for row in rows):.3f}, largest "
        f"{max(row['gain'] for row in rows):.3f}"
    )
    _note_missing(rows)


def _note_missing(rows: Sequence[Row]) -> None:
    if (most := max(row["missing_share"] for row in rows)) > NOTED_SHARE:
        note(
            f"up to {most:.0%} of what was expanded was not recorded and had no children here: "
            "record with more --nodes or --levels to be sure"
        )


def _chart(title: str, sweep: str | None, rows: Sequence[Row]) -> str:
    """Speed-up over what is swept, a curve for each method; without a sweep over the rows of a
    pass."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name = row["method"] if sweep in (None, "ratio") else row["method"].rsplit(",", 1)[0]
        curves.setdefault(name, []).append(
            (
                row["rows"] if sweep is None else row["value"],
                row["gain"] if sweep == "ratio" else row["speedup"],
            )
        )
    across = {
        "gamma": "gamma",
        "depth": "levels",
        "ratio": "T_D / T_V, drafting ahead not counted",
        None: "rows of a pass",
    }[sweep]
    up = "tokens/s, ahead over not" if sweep == "ratio" else "speed-up over the target alone"
    return draw(
        title, across, up, [Curve(name, points) for name, points in curves.items()], level=1.0
    )


# -- beside what is real ---------------------------------------------------------------------------


@command.command("validate", cls=SettingsCommand)
@click.option(
    "--rounds",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder that `simulate record` made, with the same pair.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Replies decoded.  [default: all]")
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="POLICY[,SETTING=VALUE...]",
    help="A tree, such as goodput or dynamic,gamma=59,ahead=false; repeat.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0, 1.0),
    default=TOLERANCE,
    show_default=True,
    help="How far tokens/s may be off.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table."
)
@settings_flags(*DECODING_SECTIONS)
@click.pass_context
def validate(
    context: click.Context,
    configuration: Configuration,
    rounds: Path,
    limit: int | None,
    methods: tuple[str, ...],
    tolerance: float,
    as_json: bool,
) -> None:
    """Decode recorded replies for real, and play them with the costs that were measured meanwhile;
    exit code 1 if a rate is off by more than the tolerance.

    The pair must be the recorded one; --inflate gives its target the cost of a larger one.
    """
    from dovetail.launch.simulation.beside import decode_all
    from dovetail.launch.simulation.measured import measured_costs

    library = read_library(rounds, limit)
    chosen = read_methods(configuration, methods, library.about)
    rows = []
    for method, replies in decode_all(configuration, library, chosen):
        measured = figures([reply.result for reply in replies])
        costs = measured_costs([record for reply in replies for record in reply.rounds])
        simulated, missing_share = _figures_of(library, costs, method, lambda _: None)
        rows.append(_beside_row(method, measured, simulated, missing_share))
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        _show_beside(rows)
    context.exit(0 if all(abs(row["deviation"]) <= tolerance for row in rows) else 1)


def _beside_row(method: Method, measured: Figures, simulated: Figures, missing_share: float) -> Row:
    return {
        "method": method.name,
        "deviation": simulated.tokens_per_s / measured.tokens_per_s - 1.0,
        "tau_deviation": simulated.tau / measured.tau - 1.0,
        "missing_share": missing_share,
        "measured": measured.as_json(),
        "simulated": simulated.as_json(),
    }


def _show_beside(rows: Sequence[Row]) -> None:
    headings = (
        "method",
        "tokens/s, measured",
        "simulated",
        "off %",
        "tau, measured",
        "simulated",
        "off %",
        "draft %, measured",
        "simulated",
    )
    lines = []
    for row in rows:
        pairs = [
            (row["measured"][name], row["simulated"][name])
            for name in ("tokens_per_s", "tau", "draft_share")
        ]
        rates, taus, shares = pairs
        lines.append(
            (
                row["method"],
                *rates,
                100 * row["deviation"],
                *taus,
                100 * row["tau_deviation"],
                *(100 * share for share in shares),
            )
        )
    print_table(headings, lines)
    _note_missing(rows)


# -- machines --------------------------------------------------------------------------------------


@command.command("machines", cls=HelpCommand)
@click.option(
    "--target-size",
    type=click.Choice(list(SIZES)),
    default="7B",
    show_default=True,
    help="Size of the target whose pass times are shown.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout instead of a table; seconds."
)
def machines(target_size: str, as_json: bool) -> None:
    """List the machines that come with the program, and what passes take there, behind a cache of
    512 rows."""
    told = [_machine_row(name, target_size) for name in machine_names()]
    if as_json:
        click.echo(json.dumps({"target_size": target_size, "machines": told}))
        return
    lines = [
        (
            row["machine"],
            row["title"],
            row["weights"],
            *(1e3 * taken for taken in row["t_v"].values()),
            1e3 * row["t_d"],
        )
        for row in told
    ]
    print_table(
        (
            "machine",
            "",
            "weights",
            *(f"T_V({rows}) ms" for rows in TOLD_ROWS),
            "a draft's level ms",
        ),
        lines,
    )


def _machine_row(name: str, target_size: str) -> Row:
    machine = read_machine(name)
    costs = machine.costs(read_size(target_size), machine.weights)
    t_v = {str(rows): costs.verify_s(rows, CONTEXT) for rows in TOLD_ROWS}
    return {
        "machine": name,
        "title": machine.title,
        "weights": machine.weights,
        "shared": machine.shared,
        "t_v": t_v,
        "t_d": costs.draft_s(LEVEL_ROWS),
    }
