"""Methods played on the costs of a machine: one by one, over a size, over ratios of T_D to T_V."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.launch.bench.sweep import read_sweep
from dovetail.launch.console.terminal import progress_bar
from dovetail.launch.planning.acceptance import Library
from dovetail.launch.planning.machines import read_machine
from dovetail.protocol.calibration import RowsSeconds
from dovetail.protocol.errors import UserError
from dovetail.protocol.settings import TreeSettings
from dovetail.runtime.costs.rounds import Origin
from simulation.figures import Figures, figures
from simulation.measured import measured_costs
from simulation.methods import Method, vary
from simulation.prices import PlacedCosts, placed_costs, read_size
from support.records import read_records

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0)  # T_D over T_V
COLUMNS = {
    "method": "the tree, as --method names it",
    "tokens/s": "of the tokens after the first of each reply",
    "speed-up": "over the target alone, with the same costs",
    "tau": "tokens committed per round",
    "draft": "share of the time spent waiting for drafting",
    "hit": "share of the drafted rounds whose root was in the tree already",
    "rows": "in a pass of the target: nodes verified, and their root",
    "grown": "nodes a round that are grown while the round waits for them",
    "ahead": "nodes a round that are grown while the target verifies",
    "wasted": "nodes a round neither offered nor kept when the root moved",
    "plain": "share of the rounds that are verified without a tree",
    "predicted": "tokens/s, as the cost model expected it before each round",
}
"""Heading of the table of `run` -> its meaning."""

Row = dict[str, Any]


def costs_of(path: Path) -> PlacedCosts:
    """Return the costs of measured rounds."""
    return measured_costs(
        [record for reply in read_records(path) for record in reply.rounds],
        f"costs of the rounds in {path}",
    )


def with_slower_draft(costs: PlacedCosts, factor: float) -> PlacedCosts:
    """Return costs with a draft whose passes and proposals take `factor` times as long."""
    slower = tuple(factor * seconds for seconds in costs.t_d.seconds)
    t_d = RowsSeconds(rows=costs.t_d.rows, seconds=slower)
    return replace(costs, t_d=t_d, proposal_s=costs.proposal_s * factor)


def machine_costs(machine: str, target_size: str, weights: Any, blocks: int | None) -> PlacedCosts:
    found = read_machine(machine)
    weights = weights or found.weights
    costs = placed_costs(found, read_size(target_size), weights, blocks)
    title = f"{found.title}; target {target_size} in {weights}"
    return replace(costs, origin=Origin(title, estimated=True))


def in_turns(method: Method, machine: str) -> Method:
    """The method where target and draft share a device."""
    if method.ahead:
        raise UserError(
            f"--method {method.name}: target and draft of {machine} share a device, where what "
            "is done ahead costs the other: leave ahead out"
        )
    return method.with_ahead(False)


def points_of(
    methods: Sequence[Method], sweep: str | None, values: str | None
) -> list[tuple[Method, int | None]]:
    """Return what is played, with the value of the sweep."""
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


def ratios_of(values: str | None) -> tuple[float, ...]:
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
            f"--values {values!r} is not a list of ratios above 0: write one such as 0.02,0.5,2"
        )
    return found


def play_methods(
    library: Library, costs: PlacedCosts, points: Sequence[tuple[Method, int | None]]
) -> list[Row]:
    """A row for each point, and its speed-up over the target alone."""
    with progress_bar(1 + len(points), "methods") as step:
        alone = _alone(library, costs, step)
        return [
            _row(point, value, *figures_of(library, costs, point, step), alone)
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


def play_ratios(
    library: Library, costs: PlacedCosts, methods: Sequence[Method], ratios: Sequence[float]
) -> list[Row]:
    """Return for each ratio and method the gain of drafting ahead. T_D and T_V are those of the
    policy `dynamic` with the same tree, not ahead."""
    rows: list[Row] = []
    with progress_bar(len(methods) * (2 + 2 * len(ratios)), "methods") as step:
        for method in methods:
            yardstick, _ = figures_of(
                library, costs, method.named(method.name, policy="dynamic").with_ahead(False), step
            )
            for ratio in ratios:
                slower = with_slower_draft(costs, ratio * yardstick.verify_s / yardstick.draft_s)
                waiting, _ = figures_of(library, slower, method.with_ahead(False), step)
                ahead, missing_share = figures_of(library, slower, method.with_ahead(True), step)
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


def _alone(library: Library, costs: PlacedCosts, step: Callable[[str], None]) -> Figures:
    from simulation.play import play_all

    plays, _ = play_all(library, costs, TreeSettings(), speculate=False)
    step("the target alone")
    return figures([play.result for play in plays])


def figures_of(
    library: Library, costs: PlacedCosts, method: Method, step: Callable[[str], None]
) -> tuple[Figures, float]:
    """Return what a method comes to, and the share of what it expanded that was not recorded."""
    from simulation.play import play_all

    plays, coverage = play_all(library, costs, method.tree, ahead=method.ahead)
    step(method.name)
    return figures([play.result for play in plays]), coverage.missing_share


def beside_row(method: Method, measured: Figures, simulated: Figures, missing_share: float) -> Row:
    return {
        "method": method.name,
        "deviation": simulated.tokens_per_s / measured.tokens_per_s - 1.0,
        "tau_deviation": simulated.tau / measured.tau - 1.0,
        "missing_share": missing_share,
        "measured": measured.as_json(),
        "simulated": simulated.as_json(),
    }
