"""The command `fleet`: many servers of several kinds under a load."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from dovetail.launch.console.help import (
    COUNT,
    FILE,
    HelpCommand,
    Number,
    Rare,
    json_instead_of,
    seed_option,
)
from dovetail.launch.console.terminal import explained, note, print_table, progress_bar
from dovetail.launch.files.charts import Curve, Panel, check_chart, draw_panels
from dovetail.launch.files.outputs import check_output
from dovetail.launch.files.prompts import read_prompts
from dovetail.launch.planning.acceptance import read_library
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.flags import settings_flags
from dovetail.protocol.errors import UserError
from dovetail.protocol.files import writing
from simulation.fleet.arrivals import Mix, Requests, draw_requests, read_trace, token_lengths
from simulation.fleet.description import fleet_names, kinds_of, read_fleet
from simulation.fleet.layout import Kind, Plan
from simulation.fleet.results import COLUMNS, PAIRS, capacity, line, play_load
from simulation.methods import read_methods

LOADS = "0.2,0.4,0.6,0.8,0.9,1.0"
REQUEST_S, CHUNK_S = 1 / 4490, 1 / 56700
"""Seconds of a router for a request and for a chunk of a stream, as measured by `python
tests/benchmarks router`."""
WARM = 0.2  # share of the time whose requests do not count
POSITIVE = Number(0.0, 1e9, min_open=True)


class Loads(click.ParamType):  # type: ignore[type-arg]
    """0.2,0.5: shares of what the servers could answer."""

    name = "X,Y,..."

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in value.split(","))
        except ValueError:
            found = ()
        if not found or not all(0.0 < load <= 10.0 for load in found):
            self.fail(
                f"{value!r} is no list of loads above 0, up to 10, such as {LOADS}", param, ctx
            )
        return found


@click.command(
    "fleet", cls=HelpCommand, short_help="Play a load on many servers.", epilog=explained(COLUMNS)
)
@click.option(
    "--fleet",
    "name",
    metavar="NAME|FILE",
    default="legacy",
    show_default=True,
    help=f"Kinds of servers: {', '.join(fleet_names())}, or a file like theirs (.toml).",
)
@click.option("--servers", type=COUNT, default=1000, show_default=True, help="Servers in all.")
@click.option(
    "--rounds",
    type=click.Path(path_type=Path),
    help="Servers draft, with what `record` stored.  [default: targets alone]",
)
@click.option(
    "--load",
    "loads",
    type=Loads(),
    default=LOADS,
    show_default=True,
    help="Requests a second over the most that the servers could answer.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "diurnal", "bursts"]),
    default="poisson",
    show_default=True,
    help="Process by which requests arrive.",
)
@click.option(
    "--trace",
    type=FILE,
    help="Play the requests of this file instead: JSON lines with at_s, prompt_tokens, "
    "reply_tokens and, if there are several, key.",
)
@click.option(
    "--seconds",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    help="Time in which requests arrive.",
)
@click.option(
    "--prompt-tokens",
    type=POSITIVE,
    default=400.0,
    show_default=True,
    help="Mean length of a prompt.",
)
@click.option(
    "--prompts",
    "file",
    type=FILE,
    cls=Rare,
    help="Prompts are as long as those of this file instead.",
)
@click.option(
    "--reply-tokens",
    type=POSITIVE,
    default=200.0,
    show_default=True,
    help="Mean length of a reply.",
)
@click.option(
    "--sigma",
    type=Number(0.0, 3.0),
    default=0.8,
    show_default=True,
    cls=Rare,
    help="Standard deviation of the logarithm of lengths; 0: all are the mean.",
)
@click.option(
    "--targets",
    type=COUNT,
    default=16,
    show_default=True,
    cls=Rare,
    help="Servers of a coordinator.",
)
@click.option(
    "--per-router",
    type=COUNT,
    default=32,
    show_default=True,
    cls=Rare,
    help="Coordinators behind a router.",
)
@click.option("--keys", type=COUNT, default=8, show_default=True, cls=Rare, help="API keys.")
@click.option(
    "--coordinator-h",
    type=Number(0.0),
    default=1000.0,
    show_default=True,
    cls=Rare,
    help="Hours between losses of a coordinator; 0: never.",
)
@click.option(
    "--sample",
    type=COUNT,
    default=1024,
    show_default=True,
    cls=Rare,
    help="Servers played at most; the others of a larger fleet are taken to be alike.",
)
@seed_option("Seed of all that is random.")
@click.option("--plot", type=FILE, help="Draw throughput, latencies and saturation over the load.")
@json_instead_of("a table")
@settings_flags("tree", "coordinator.queue", "coordinator.key_queue")
def fleet(
    configuration: Configuration,
    name: str,
    servers: int,
    rounds: Path | None,
    loads: tuple[float, ...],
    arrivals: str,
    trace: Path | None,
    seconds: float,
    prompt_tokens: float,
    file: Path | None,
    reply_tokens: float,
    sigma: float,
    targets: int,
    per_router: int,
    keys: int,
    coordinator_h: float,
    sample: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Play a load on many servers: throughput, latencies and joules a token, and how busy routers
    and coordinators are.

    Passes cost what the described machines' do, rounds bring what was recorded, and prompts are
    read beside running sessions as a coordinator has it.
    """
    check_chart(plot)
    check_output(plot, "the plot")
    prompts = () if file is None else token_lengths([p.turns[0] for p in read_prompts(file)])
    mix = Mix(prompt_tokens, reply_tokens, sigma, prompts)
    means = mix.means
    library = None if rounds is None else read_library(rounds, None)
    method = None if library is None else read_methods(configuration, (), library.about)[0]
    played = _played(servers, sample, targets)
    kinds = kinds_of(read_fleet(name), played, means[0] + means[1] / 2, library, method)
    scale, most = servers / played, capacity(kinds, *means)
    settings = configuration.settings.coordinator
    plan = Plan(
        per_coordinator=targets,
        per_router=per_router,
        queue=settings.queue,
        key_queue=settings.key_queue,
        request_s=REQUEST_S,
        chunk_s=CHUNK_S,
        tokens=means,
        coordinator_h=coordinator_h,
        seed=seed,
    )
    if trace is not None:
        rows = [_traced(trace, kinds, plan, most)]
    else:

        def drawn(load: float) -> Requests:
            return draw_requests(arrivals, load * most, seconds, mix, keys, seed)  # type: ignore[arg-type]

        rows = _drawn(loads, drawn, kinds, plan, seconds, scale)
    told = {
        "fleet": name,
        "servers": servers,
        "played": played,
        "most_requests_per_s": scale * most,
        "kinds": {kind.name: kind.count for kind in kinds},
        "rows": rows,
    }
    if plot is not None:
        with writing(plot, "the plot"):
            plot.write_text(_chart(f"{servers:,} servers ({name})", rows), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(told))
    else:
        _show(told)


def _show(told: dict[str, Any]) -> None:
    """Print what was found as a table."""
    servers, played = told["servers"], told["played"]
    click.echo(
        f"{servers:,} servers, at most {told['most_requests_per_s']:,.4g} requests/s; played: "
        + ", ".join(f"{kind} ({count})" for kind, count in told["kinds"].items())
    )
    print_table(tuple(COLUMNS), [line(row) for row in told["rows"]])
    click.echo(PAIRS)
    if played < servers:
        note(f"{played} servers were played, and the others of {servers:,} taken to be alike")


def _traced(trace: Path, kinds: Sequence[Kind], plan: Plan, most: float) -> dict[str, Any]:
    """Play the requests of a file; return its row. `most`: requests a second of these servers."""
    requests = read_trace(trace)
    seconds = float(requests.at_s[-1])
    if not seconds:
        raise UserError(f"the trace {trace} has no duration: all its requests come at once")
    load = len(requests) / seconds / most
    return play_load(kinds, plan, requests, load=load, seconds=seconds).row(kinds)


def _drawn(
    loads: Sequence[float],
    drawn: Callable[[float], Requests],
    kinds: Sequence[Kind],
    plan: Plan,
    seconds: float,
    scale: float,
) -> list[dict[str, Any]]:
    """Play the requests that are drawn for each load; return a row for each. `scale`: servers over
    those that are played."""
    rows = []
    with progress_bar(len(loads), "loads") as step:
        for load in loads:
            if not len(requests := drawn(load)):
                raise UserError(
                    f"no request comes in {seconds:g} s at load {load:g}: raise --seconds"
                )
            found = play_load(
                *(kinds, plan, requests), load=load, seconds=seconds, scale=scale, warm=WARM
            )
            rows.append(found.row(kinds))
            step(f"load {load:g}")
    return rows


def _played(servers: int, sample: int, targets: int) -> int:
    """Return how many servers are played: all, or whole coordinators of them."""
    return servers if servers <= sample else max(1, math.ceil(sample / targets)) * targets


def _chart(title: str, rows: list[dict[str, object]]) -> str:
    """Return the panels: what is written, how long it takes, who is busy."""

    def curve(name: str, *path: str, times: float = 1.0) -> Curve:
        points = []
        for row in rows:
            value: object = row
            for key in path:
                value = value[key]  # type: ignore[index]
            height = float("nan") if value is None else times * float(value)  # type: ignore[arg-type]
            points.append((float(row["load"]), height))  # type: ignore[arg-type]
        return Curve(name, points)

    across = "load"
    return draw_panels(
        title,
        [
            Panel("Written", across, "tokens/s", [curve("tokens/s", "tokens_per_s")]),
            Panel(
                "To the first token",
                across,
                "s",
                [curve(p, "ttft_s", p) for p in ("p50", "p90", "p99")],
            ),
            Panel("Energy", across, "J/token", [curve("J/token", "joules_per_token")]),
            Panel(
                "At work",
                across,
                "% of the time",
                [
                    curve("servers", "busy_share", times=100),
                    curve("coordinator", "coordinator_busy", times=100),
                    curve("router", "router_busy", times=100),
                ],
            ),
        ],
    )
