"""Tables and curves of what was simulated, for people."""

from collections.abc import Sequence

import click

from dovetail.launch.bench.figures import share
from dovetail.launch.console.terminal import note, print_table
from dovetail.launch.files.charts import Curve, draw
from simulation.runs import COLUMNS, Row

NOTED_SHARE = 0.01  # the share of expanded nodes that were not recorded above which a note says so


def show_rows(rows: Sequence[Row]) -> None:
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


def show_ratios(rows: Sequence[Row]) -> None:
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


def chart_of(title: str, sweep: str | None, rows: Sequence[Row]) -> str:
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


def show_beside(rows: Sequence[Row]) -> None:
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
