"""The commands: what rounds would take on machines, and with models of sizes, that are not at hand.

`record` decodes prompts once with a real pair and keeps what the draft says at every position;
`run` plays that through the real coordinator and the real draft worker with the costs of a machine;
`validate` decodes the same replies for real and plays them with the costs that were measured while
it did. What needs torch is imported when the work begins.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from dovetail.launch.cli import run as run_command
from dovetail.launch.console.help import (
    COUNT,
    FILE,
    NAMES_OF_HELP,
    HelpCommand,
    Number,
    Rare,
    json_instead_of,
    json_option,
)
from dovetail.launch.console.terminal import counted, explained, print_table
from dovetail.launch.files.charts import check_chart
from dovetail.launch.files.outputs import check_output
from dovetail.launch.planning.acceptance import read_library
from dovetail.launch.planning.machines import SIZES, machine_names, read_machine
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import DECODING_SECTIONS, DEMONSTRATED, settings_flags
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import writing
from simulation.figures import figures
from simulation.fleet.command import fleet
from simulation.measured import measured_costs
from simulation.methods import read_methods
from simulation.prices import placed_costs, read_size
from simulation.record import record
from simulation.runs import (
    COLUMNS,
    Row,
    beside_row,
    costs_of,
    figures_of,
    in_turns,
    machine_costs,
    play_methods,
    play_ratios,
    points_of,
    ratios_of,
)
from simulation.tables import chart_of, show_beside, show_ratios, show_rows

LEVEL_ROWS = 10  # rows of the draft's level whose price is shown
MACHINE = "dovetail-server"
TOLERANCE = 0.05
TOLD_ROWS, CONTEXT = (1, 16, 64), 512  # rows and context of the passes that `machines` shows


@click.group(context_settings={"help_option_names": NAMES_OF_HELP})
def command() -> None:
    """Play recorded rounds with the costs of machines and model sizes that are not at hand."""


command.add_command(record)
command.add_command(fleet)


def execute(arguments: Sequence[str]) -> int:
    """Run one command line; exit codes and errors are those of `dovetail`."""
    return run_command(arguments, command, "python tests/simulation")


def main() -> NoReturn:
    sys.exit(execute(sys.argv[1:]))


# -- playing ---------------------------------------------------------------------------------------


@command.command(
    "run",
    cls=HelpCommand,
    short_help="Play recorded replies with the costs of a machine.",
    epilog=explained(COLUMNS),
)
@click.option(
    "--rounds",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder that `record` made.",
)
@click.option("--limit", type=COUNT, help="Replies played.  [default: all]")
@click.option(
    "--machine",
    metavar="NAME|FILE",
    default=MACHINE,
    show_default=True,
    help="A machine of `machines`, or a file like theirs (.toml).",
)
@click.option(
    "--target-size",
    type=click.Choice(list(SIZES)),
    default="7B",
    show_default=True,
    help="Size of the target whose passes are paid for.",
)
@click.option(
    "--weights",
    type=click.Choice(["fp32", "half", "int8"]),
    cls=Rare,
    help="Weights of the target.  [default: the machine's]",
)
@click.option(
    "--blocks",
    type=click.IntRange(1, 64),
    cls=Rare,
    help="Blocks of the draft head.  [default: the machine's]",
)
@click.option(
    "--costs",
    type=FILE,
    cls=Rare,
    help="Take the costs of the rounds that `generate --record` wrote to this file instead.",
)
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="POLICY[,SETTING=VALUE...]",
    help="A tree, such as goodput or dynamic,gamma=59,ahead=false; can be repeated.",
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
    help="Values of the sweep.  [default: as `bench --sweep`; ratios from 0.02 to 2]",
)
@click.option("--plot", type=FILE, help="Draw the sweep, or the methods, into this SVG file.")
@click.option("--out", type=FILE, help="Write the JSON object to this file too.")
@json_instead_of("a table")
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
        chosen = [in_turns(method, machine) for method in chosen]
    price = (
        costs_of(costs)
        if costs is not None
        else machine_costs(machine, target_size, weights, blocks)
    )
    title = str(price.origin)
    if sweep == "ratio":
        if costs is None and read_machine(machine).shared:
            raise UserError(
                "--sweep ratio compares drafting ahead with not, and target and draft of "
                f"{machine} share a device: choose another --machine"
            )
        rows = play_ratios(library, price, chosen, ratios_of(values))
    else:
        points = points_of(chosen, sweep, values)
        rows = play_methods(library, price, points)
    told = {
        "title": title,
        "recording": library.about.model_dump(mode="json"),
        "replies": len(library.recordings),
        "sweep": sweep,
        "rows": rows,
    }
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(chart_of(title, sweep, rows), encoding="utf-8")
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
    (show_ratios if sweep == "ratio" else show_rows)(rows)


# -- beside what is real ---------------------------------------------------------------------------


@command.command(
    "validate", cls=HelpCommand, short_help="Decode recorded replies and play them, to compare."
)
@click.option(
    "--rounds",
    type=click.Path(path_type=Path),
    required=True,
    help="The folder that `record` made, with the same pair.",
)
@click.option("--limit", type=COUNT, help="Replies decoded.  [default: all]")
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="POLICY[,SETTING=VALUE...]",
    help="A tree, such as goodput or dynamic,gamma=59,ahead=false; can be repeated.",
)
@click.option(
    "--tolerance",
    type=Number(0.0, 1.0),
    default=TOLERANCE,
    show_default=True,
    help="How far tokens/s may be off.",
)
@json_instead_of("a table")
@settings_flags(*DECODING_SECTIONS, shown=DEMONSTRATED)
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

    The pair must write what the recorded one writes: that one, or an inflated one (`python
    tests/benchmarks inflate`), whose target has the cost of a larger one.
    """
    from simulation.validation import decode_all

    library = read_library(rounds, limit)
    chosen = read_methods(configuration, methods, library.about)
    rows = []
    for method, replies in decode_all(configuration, library, chosen):
        measured = figures([reply.result for reply in replies])
        costs = measured_costs([record for reply in replies for record in reply.rounds])
        simulated, missing_share = figures_of(library, costs, method, lambda _: None)
        rows.append(beside_row(method, measured, simulated, missing_share))
    if as_json:
        click.echo(json.dumps({"rows": rows}))
    else:
        show_beside(rows)
    context.exit(0 if all(abs(row["deviation"]) <= tolerance for row in rows) else 1)


# -- machines --------------------------------------------------------------------------------------


@command.command("machines", cls=HelpCommand, short_help="List the machines and what passes take.")
@click.option(
    "--target-size",
    type=click.Choice(list(SIZES)),
    default="7B",
    show_default=True,
    help="Size of the target whose pass times are shown.",
)
@json_option("One JSON object on stdout instead of a table; seconds.")
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
    costs = placed_costs(machine, read_size(target_size), machine.weights)
    t_v = {str(rows): costs.verify_s(rows, CONTEXT) for rows in TOLD_ROWS}
    return {
        "machine": name,
        "title": machine.title,
        "weights": machine.weights,
        "shared": machine.shared,
        "t_v": t_v,
        "t_d": costs.t_d.at(LEVEL_ROWS),
    }
