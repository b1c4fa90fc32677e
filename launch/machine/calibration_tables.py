"""The result of `dovetail calibrate` as tables and a chart."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from dovetail.launch.console.terminal import counted, print_table
from dovetail.launch.files.charts import Curve, draw
from dovetail.launch.machine.topology import format_numbers
from dovetail.protocol.calibration import Calibration, ContextCurve, DeviceCosts, ReadingCosts
from dovetail.protocol.experts import Routing

ReadT = TypeVar("ReadT", Calibration, ContextCurve, DeviceCosts, ReadingCosts)
TABLE_ROWS = (1, 2, 4, 8, 16, 32, 64)


def read_found(kind: type[ReadT], told: object) -> ReadT:
    """Parse the measurements of a process from JSON."""
    return kind.model_validate_json(json.dumps(told))


def _active(found: Mapping[str, Any]) -> str:
    active = found["active_parameters"]
    return "" if active == found["parameters"] else f" ({active / 1e6:.0f} M of them active)"


def show_found(found: dict[str, Any]) -> None:
    backends, layers = found["backends"], found["layers"]
    what = (
        f"{found['parameters'] / 1e6:.0f} M weights in linears{_active(found)}, "
        f"{found['weights']}, {_threads(found)}"
    )
    click.echo(f"target      {found['model']} ({what})")
    if found["layers_measured"] < layers:
        click.echo(
            f"            {found['layers_measured']} of {layers} layers were measured, which "
            "memory holds; times are scaled by weights"
        )
    click.echo(
        f"back end    {backends['backend']} "
        f"({backends['kernels']}{', ' + backends['isa'] if 'isa' in backends else ''}): "
        f"{backends['why']}"
    )
    peaks = ", ".join(f"{name} {peak:.0f}" for name, peak in found["peaks_gflop_s"].items())
    click.echo(
        f"machine     reads {found['bandwidth_gb_s']:.1f} GB/s; 10^9 operations a second: "
        f"{peaks} (probe: {found['probe']})"
    )
    for length in found["skipped_contexts"]:
        click.echo(
            f"skipped     a cache of {length} rows: filling it would take too long; a larger "
            "--seconds measures it"
        )
    others = [length for length in found["t_v_by_context"] if int(length) != found["context"]]
    rows = [_pass(found, str(m), others) for m in TABLE_ROWS]
    own = ("M", f"T_V ms, cache {found['context']}", "limit ms", "achieved", "T_V(M)/T_V(1)")
    print_table((*own, *(f"ms, cache {length}" for length in others)), rows)
    if (experts := found["experts"]) is not None:
        click.echo(_experts(experts))
    if len(found["t_v_measured"]) < len(found["t_v"]):
        click.echo(
            f"measured at M = {format_numbers(found['t_v_measured'])}; between them T_V is "
            "interpolated linearly (--json has all of it)"
        )
    if linears := backends.get("linears"):
        seconds = "seconds of a product of each candidate"
        headings = ("linear", "up to rows", "chosen", seconds, "not used")
        print_table(headings, [_linear(choice) for choice in linears])
    _show_parts(found)


def _show_parts(found: dict[str, Any]) -> None:
    if (read := found["reading"]) is not None:
        curves = zip(
            read["local"]["rows"],
            read["local"]["seconds"],
            read["streamed"]["seconds"],
            strict=True,
        )
        times = ", ".join(
            f"{rows} rows {_ms(own):.3g} and {_ms(other):.3g} ms" for rows, own, other in curves
        )
        click.echo(f"prompts, read by the CPU and by {read['device']}: {times}")
    if (parts := found["device"]) is not None:
        click.echo(
            f"{parts['device']}: its link carries {parts['link_gb_s']:.1f} GB/s; a layer takes "
            f"(CPU; resident; streamed) {_parts(parts)}"
        )
    if found["t_d"]:
        click.echo(
            "t_D, a level of the draft: "
            + ", ".join(f"{rows} rows {_ms(taken):.3g} ms" for rows, taken in found["t_d"].items())
        )


def _pass(found: dict[str, Any], m: str, others: Sequence[str]) -> tuple[object, ...]:
    taken, share = found["t_v"][m], f"{found['achieved'][m]:.0%}"
    elsewhere = (_ms(found["t_v_by_context"][length][m]) for length in others)
    limit = _ms(found["t_v_limit"][m])
    return (int(m), _ms(taken), limit, share, taken / found["t_v"]["1"], *elsewhere)


def _experts(experts: Mapping[str, Any]) -> str:
    routing = Routing(row=experts["row"], most=experts["most"])
    shown = [m for m in TABLE_ROWS if str(m) in experts["passes"]]
    through = ", ".join(
        f"{experts['passes'][str(m)]} at M = {m} ({routing.unique(m):.0f} if rows chose "
        "independently)"
        for m in shown[1:4]
    )
    return (
        f"experts     {routing.row} of {routing.most} a row, over all layers; {through}; each "
        f"further one takes {experts['expert_s'] * 1e6:.3g} us"
    )


def _parts(parts: dict[str, Any]) -> str:
    costs = read_found(DeviceCosts, parts)
    curves = (costs.host_layer, costs.layer, costs.streamed)
    return ", ".join(
        f"{rows} rows {'; '.join(f'{_ms(curve.at(rows)):.3g}' for curve in curves)} ms"
        for rows in costs.layer.rows
    )


def _linear(choice: dict[str, Any]) -> tuple[object, ...]:
    rows = choice["rows"] if choice["rows"] < 1 << 20 else "any"
    times = ", ".join(f"{name} {taken:.2e}" for name, taken in choice["seconds"].items())
    refused = "; ".join(f"{name}: {why}" for name, why in choice["refused"].items())
    return (f"{choice['n']} x {choice['k']}", rows, choice["chosen"], times, refused)


def _threads(found: dict[str, Any]) -> str:
    return counted(found["threads"], "thread")


def _ms(seconds: float) -> float:
    return seconds * 1e3


def chart_of(found: dict[str, Any]) -> str:
    """T_V at each length of the cache, and the limit."""
    curves = [
        Curve(f"cache of {length} rows", [(int(m), _ms(s)) for m, s in curve.items()])
        for length, curve in found["t_v_by_context"].items()
    ]
    limit = Curve(
        "limit of the hardware",
        [(int(m), _ms(s)) for m, s in found["t_v_limit"].items()],
        dashed=True,
    )
    name = Path(found["model"].removesuffix(" (random weights)")).name
    title = f"T_V(M): {name}, {found['weights']}, {found['backends']['backend']}, {_threads(found)}"
    return draw(title, "rows of a pass, M", "milliseconds", [*curves, limit])
