"""The pictures of a report: of devices, rounds, and curves over rows, sizes and depth."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dovetail.launch.files.charts import Curve, Panel, draw_panels
from dovetail.launch.profiling import drawing
from dovetail.launch.profiling.devices import STRETCHES
from dovetail.launch.profiling.findings import Findings
from dovetail.launch.profiling.tables import LEAST
from dovetail.launch.profiling.timeline import COORDINATOR

SAMPLER = "sampler: its process"
WAITS = ("draft", "target", "coordinator", "transport", "no work")
PARTS = {
    "draft": "draft",
    "verify": "target",
    "transport": "link",
    "queue": "queue",
    "coordinator": "coordinator",
}
"""Part of a round -> its colour."""


def pictures(findings: Findings) -> dict[str, str]:
    """Name -> SVG: all that there is something to draw for."""
    told = findings.told
    found = {
        "devices": drawing.stacked(
            "What every device did",
            {name: list(_device(device)) for name, device in told["devices"].items()},
        )
    }
    if told["parts_ms"]:
        found["parts"] = drawing.stacked(
            "Where a round's time goes",
            {f"a round, {told['round_wall_ms']:.2f} ms": list(_parts(told))},
        )
    names = [*told["devices"]]
    for number, fall in enumerate(findings.waterfalls):
        found[f"round-{number}"] = drawing.gantt(
            fall, names, title=f"{fall.title[0].upper()}{fall.title[1:]}"
        )
    found.update(
        {
            f"over-time-{_plain(panel.title, place)}": draw_panels(
                f"{panel.title}: busy share over time", [replace(panel, title="")]
            )
            for place, panel in enumerate(_over_time(findings))
        }
    )
    found.update(_curves(told))
    return found


def _device(device: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    colour = device["roles"][0] if device["roles"][0] in drawing.COLOURS else "target"
    yield f"{device['roles'][0]} busy", colour, device["busy"] - device["ahead"]
    yield "ahead", "ahead", device["ahead"]
    for name in WAITS:
        yield (
            ("no work" if name == "no work" else f"waits: {name}"),
            drawing.OF_WAIT[name],
            device["waiting"].get(name, 0.0),
        )


def _parts(told: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    for name, colour in PARTS.items():
        yield name, colour, told["parts_ms"][name] / told["round_wall_ms"]
    if told["unaccounted_share"] >= LEAST:
        yield "unaccounted", "idle", told["unaccounted_share"]


def _plain(name: str, place: int) -> str:
    """A worker's name, if a file can have it; else its place."""
    return name if re.fullmatch(r"\w[\w.-]{0,63}", name, re.ASCII) else str(place)


def _over_time(findings: Findings) -> list[Panel]:
    """For each worker what its spans say, and what the sampler says of its process."""
    width = findings.told["wall_s"] / STRETCHES
    panels = []
    for name, shares in findings.busy.items():
        if name == COORDINATOR:
            continue
        curves = [
            Curve("spans", [((place + 0.5) * width, share) for place, share in enumerate(shares)])
        ]
        if len(findings.sampled.get(name, ())) > 1:
            curves.append(Curve(SAMPLER, findings.sampled[name], dashed=True))
        panels.append(Panel(name, "seconds", "busy share", curves, level=1.0))
    return panels


def _curves(told: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    curves, bounds = told["curves"], told["bounds"]
    if curves["t_v"]:
        measured = [(int(rows), seconds * 1e3) for rows, seconds in curves["t_v"].items()]
        lines = [Curve("T_V as measured", measured)]
        if curves["t_v_limit"]:
            lines.append(
                Curve(
                    "limit of the hardware",
                    [(int(rows), seconds * 1e3) for rows, seconds in curves["t_v_limit"].items()],
                    dashed=True,
                )
            )
        if bounds.get("pass"):
            rows, at = bounds["pass"]["rows"], bounds["pass"]["t_v_s"] * 1e3
            lines.append(Curve("this run", [(rows, at)], marks=True))
        yield (
            "passes",
            draw_panels("A pass of the target", [Panel("", "rows, M", "milliseconds", lines)]),
        )
    if len(curves["speedup_by_gamma"]) > 1:
        gains = [(int(gamma), gain) for gamma, gain in curves["speedup_by_gamma"].items()]
        taus = [(int(gamma), tau) for gamma, tau in curves["tau_by_gamma"].items()]
        lines = [Curve("predicted speed-up", gains), Curve("predicted tau", taus, dashed=True)]
        if run := curves["run"]:
            lines.append(
                Curve(
                    "this run",
                    [(run["gamma"], run["speedup"]), (run["gamma"], run["tau"])],
                    marks=True,
                )
            )
        yield (
            "gamma",
            draw_panels(
                "Larger and smaller trees, predicted",
                [
                    Panel(
                        "",
                        "gamma, nodes verified",
                        "over the target alone; tokens",
                        lines,
                        level=1.0,
                    )
                ],
            ),
        )
    if len(told["accepted_per_position"]) > 1:
        points = [(place + 1, share) for place, share in enumerate(told["accepted_per_position"])]
        yield (
            "positions",
            draw_panels(
                "Accepted at each depth",
                [
                    Panel(
                        "",
                        "depth in the tree",
                        "share of the drafted rounds",
                        [Curve("accepted", points)],
                    )
                ],
            ),
        )
