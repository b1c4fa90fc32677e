"""Bar charts with intervals as SVG, one group below the other, so that long names and many groups
stay readable. Knows numbers and names, not what they mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from dovetail.launch.files.charts import (
    AXIS,
    COLOURS,
    HEAD,
    LETTER,
    MARGIN,
    PAGE,
    WIDTH,
    drawing,
    heading,
    plain,
    round_top,
)

BAR, GAP, GROUP = 15, 4, 16
"""Height of a bar, the distance to the next, and the additional space above a group."""
LABEL, VALUE, FOOT = 230, 120, 44
"""Most space for the names left of bars, for figures to the right of the longest, and for the axis
below the last."""


@dataclass(frozen=True)
class Bar:
    """A height, and the ends of its interval if it has one; `name` determines its colour."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars that belong together."""

    name: str
    bars: Sequence[Bar]


def draw_bars(
    title: str, along: str, groups: Sequence[Group], *, level: float | None = None
) -> str:
    """Return the SVG of groups of bars, one below the other, over a common axis from 0 with the
    label `along`; `level` is a value to compare with. The title is as for `draw`."""
    names = list(dict.fromkeys(bar.name for group in groups for bar in group.bars))
    left = MARGIN + min(LABEL, LETTER * max(map(len, names), default=0)) + 8
    deep = sum(GROUP * 1.5 + GAP + (BAR + GAP) * len(group.bars) for group in groups)
    height = HEAD + deep + FOOT
    longest = max(
        [level or 0.0, *(max(bar.value, bar.high or 0.0) for group in groups for bar in group.bars)]
    )
    with drawing(WIDTH, height, layout=None) as (figure, said):
        heading(figure, title)
        size = (left / WIDTH, FOOT / height, (WIDTH - left - VALUE) / WIDTH, deep / height)
        axes = figure.add_axes(size)
        axes.set(xlim=(0, round_top(longest)), ylim=(deep, 0), yticks=[], xlabel=plain(along))
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.axvline(0, color=AXIS, linewidth=1)
        if level is not None:
            axes.axvline(level, color=AXIS, linewidth=1, dashes=(3, 3), gid="level")
        top = 0.0
        for group in groups:
            beside = (MARGIN - left) / (WIDTH - left - VALUE)
            _label(axes, beside, top + 12, group.name, weight="bold")
            top += GROUP + GAP
            for bar in group.bars:
                _bar(axes, bar, COLOURS[names.index(bar.name) % len(COLOURS)], top + BAR / 2, left)
                top += BAR + GAP
            top += GROUP / 2
    return said.getvalue()


def shortened(name: str, width: float) -> str:
    """Return the name, or as much of its beginning and end as fits into this many units of the
    page: names of methods differ at both ends."""
    most = int(width / LETTER)
    if len(name) <= most:
        return name
    tail = most // 2
    return f"{name[: most - tail - 1]}…{name[len(name) - tail :]}"


def _bar(axes: "Axes", bar: Bar, colour: str, middle: float, left: float) -> None:
    axes.barh(middle, bar.value, BAR, color=colour, gid="bar")
    _label(axes, -0.012, middle, shortened(bar.name, left - MARGIN - 6), ha="right", va="center")
    told, beyond = f"{bar.value:.2f}", bar.value
    if bar.low is not None and bar.high is not None and bar.low != bar.high:
        for colour, width in ((PAGE, 3.5), (AXIS, 1.5)):  # a rim, then the line
            axes.plot((bar.low, bar.high), (middle, middle), color=colour, linewidth=width)
            axes.vlines((bar.low, bar.high), middle - 4, middle + 4, color=colour, linewidth=width)
        told, beyond = f"{told} ({bar.low:.2f}-{bar.high:.2f})", max(bar.high, bar.value)
    place: dict[str, Any] = {"textcoords": "offset points", "va": "center"}
    box = {"facecolor": PAGE, "edgecolor": "none", "pad": 1}
    axes.annotate(told, (beyond, middle), (6, 0), bbox=box, **place)


def _label(axes: "Axes", x: float, y: float, text: str, **look: Any) -> None:
    axes.text(x, y, plain(text), transform=axes.get_yaxis_transform(), **look)
