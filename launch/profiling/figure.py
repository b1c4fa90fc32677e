"""The figure of a profile: how every device spent the run, and the parts of a round, as bars of one
SVG. Stripes mark waiting, in the colour of the process that works meanwhile."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.launch.files.charts import (
    COLOURS,
    GRID,
    HEAD,
    INK,
    LETTER,
    MARGIN,
    WIDTH,
    drawing,
    heading,
    plain,
)
from dovetail.launch.profiling.timeline import PARTS

BAR, ROW, KEY = 20, 46, 18
"""Height of a bar, of a bar with its name above it, and of a line of the legend."""
LEAST_SHOWN, LEAST_NAMED = 0.004, 0.05
"""Shares below which a part of a bar is not drawn, or has no number."""
TARGET, DRAFT, COORDINATOR, QUEUE, LINK, IDLE = (*COLOURS[:5], GRID)
LOOKS: Mapping[str, tuple[str, str]] = {
    "target works": (TARGET, ""),
    "draft works": (DRAFT, ""),
    "draft works ahead": (DRAFT, "xx"),
    "coordinator works": (COORDINATOR, ""),
    "messages": (LINK, ""),
    "queue": (QUEUE, ""),
    "waits for the draft": (DRAFT, "////"),
    "waits for the target": (TARGET, "\\\\\\\\"),
    "waits for the coordinator": (COORDINATOR, "||||"),
    "waits for a message": (LINK, "----"),
    "no work": (IDLE, ""),
    "unaccounted": (IDLE, "++"),
}
"""Meaning of a part of a bar -> colour and hatch."""
WAITS = {
    "draft": "waits for the draft",
    "target": "waits for the target",
    "coordinator": "waits for the coordinator",
    "transport": "waits for a message",
    "no work": "no work",
}
LOOKS_OF_PARTS = ("draft works", "target works", "messages", "queue", "coordinator works")
OF_A_ROUND = dict(zip(PARTS, LOOKS_OF_PARTS, strict=True))

Bar = tuple[str, Sequence[tuple[str, float]]]  # a name, and (look, share) from left to right


def draw(found: Mapping[str, Any]) -> str:
    bars = [*_bars(found)]
    shown = dict.fromkeys(look for _, parts in bars for look, part in parts if part >= LEAST_SHOWN)
    across = max(1, int((WIDTH - 2 * MARGIN) // (26 + LETTER * max(map(len, shown)))))
    legend = KEY * -(-len(shown) // across)
    deep = ROW * len(bars) + 12
    with drawing(WIDTH, HEAD + deep + legend + MARGIN, layout=None) as (figure, written):
        heading(figure, f"Where the time went\n{found['title']}")
        height = figure.get_size_inches()[1] * 72
        size = (MARGIN / WIDTH, (legend + MARGIN) / height, 1 - 2 * MARGIN / WIDTH, deep / height)
        axes = figure.add_axes(size)
        axes.set(xlim=(0, 1), ylim=(deep, 0), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        for number, (name, parts) in enumerate(bars):
            top, left = ROW * number, 0.0
            axes.text(0, top + 14, plain(name), fontweight="bold")
            for look, part in parts:
                if part >= LEAST_SHOWN:
                    middle = top + 20 + BAR / 2
                    axes.barh(middle, part, BAR, left, gid="bar", **_look(look))
                    if part >= LEAST_NAMED:
                        _share(axes, left + part / 2, middle, part)
                left += part
        handles = [_patch(look) for look in shown]
        place = (MARGIN / WIDTH, MARGIN / 2 / height)
        at: Any = {"loc": "lower left", "bbox_to_anchor": place, "borderpad": 0}
        figure.legend(handles=handles, ncols=across, **at)
    return written.getvalue()


def _bars(found: Mapping[str, Any]) -> Iterator[Bar]:
    for name, device in found["devices"].items():
        role = device["roles"][0]
        works = f"{role} works" if f"{role} works" in LOOKS else "target works"
        waits = [(look, device["waiting"].get(cause, 0.0)) for cause, look in WAITS.items()]
        busy = [(works, device["busy"] - device["ahead"]), ("draft works ahead", device["ahead"])]
        where = f", {device['device']}{' ' + device['cores'] if device['cores'] else ''}"
        where = where if role != "coordinator" else ""
        yield f"{name}{where}: {device['busy']:.0%} busy", [*busy, *waits]
    if wall_ms := found["round_wall_ms"]:
        parts = [(look, found["parts_ms"][part] / wall_ms) for part, look in OF_A_ROUND.items()]
        rest = max(0.0, found["unaccounted_share"])
        yield f"a round: {wall_ms:.2f} ms", [*parts, ("unaccounted", rest)]


def _look(name: str) -> dict[str, Any]:
    colour, hatch = LOOKS[name]
    if not hatch:
        return {"color": colour, "linewidth": 0}
    return {"facecolor": GRID, "edgecolor": colour, "hatch": hatch, "linewidth": 0}


def _patch(name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(label=name, **_look(name))


def _share(axes: Any, x: float, y: float, share: float) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85}
    axes.text(x, y, f"{share:.0%}", ha="center", va="center", fontsize=11, color=INK, bbox=box)
