"""Charts as SVG, drawn by matplotlib, which is optional: `check_charts` checks for it before long
work. Dark mode has other colours."""

import importlib.util
import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.protocol.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH, HEIGHT = 760, 360  # size of a chart in units of the SVG; letters are 12 of them high
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44", "#8a5a9e", "#c77f00", "#4d4d4d")
"""Distinct in print and for the colour-blind."""
INK, PAGE, GRID, AXIS = "#222222", "#ffffff", "#dddddd", "#333333"
NIGHT = ("#63b3ed", "#ff8896", "#7ccf8a", "#c9a0dc", "#f2b84b", "#c4c4c4")  # COLOURS at night
AT_NIGHT = {INK: "#e3e3e3", PAGE: "#16191d", GRID: "#3a3f45", AXIS: "#a3a8ad"}
AT_NIGHT |= dict(zip(COLOURS, NIGHT, strict=True))
"""Colour -> its replacement on a dark page."""
ACROSS = 2  # small charts in a line
PANEL_WIDTH, PANEL_HEIGHT = 400, 270
TITLE, SECOND = 15, 12
"""Sizes of a title; a letter is TITLE_LETTER, or SECOND_LETTER, of its size wide."""
TITLE_LETTER, SECOND_LETTER = 0.62, 0.55
LETTER = 6.9  # approximate width of a letter of 12 units
HEAD, MARGIN = 46, 14  # height of the title, and the space around it
STYLE = {
    "axes.edgecolor": AXIS,
    "axes.labelcolor": INK,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "figure.constrained_layout.w_pad": MARGIN / 72,
    "figure.dpi": 72,
    "font.size": 12,
    "grid.color": GRID,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dovetail",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": AXIS,
    "xtick.labelcolor": INK,
    "ytick.color": GRID,
    "ytick.labelcolor": INK,
    "ytick.major.size": 0,
}


@dataclass(frozen=True)
class Curve:
    """Points of one quantity, left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    band: Sequence[tuple[float, float]] = ()
    """(low, high) of each point, such as a confidence interval; empty: no band."""


@dataclass(frozen=True)
class Panel:
    """A small chart; `across` and `up` name its axes with their units, `level` is a height to
    compare with."""

    title: str
    across: str
    up: str
    curves: Sequence[Curve]
    level: float | None = None


def check_charts(what: str) -> None:
    """Raise `UserError` if matplotlib, which `what` needs, is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{what} needs matplotlib: pip install 'dovetail-llm[plot]'")


def check_chart(path: Path | None) -> None:
    """Raise `UserError` for a file that is not an SVG, or if matplotlib is not installed."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        better = path.with_suffix(".svg")
        raise UserError(f"a plot is an SVG, and {path} does not end in .svg: name {better}")
    check_charts(f"the plot {path}")


def draw(
    title: str, across: str, up: str, curves: Sequence[Curve], *, level: float | None = None
) -> str:
    """Return the SVG of curves over axes from 0; `across` and `up` name them with units, `level` is
    a height to compare with. Text after a line break in the title becomes a smaller second line."""
    return draw_panels(title, [Panel("", across, up, curves, level)])


def draw_panels(title: str, panels: Sequence[Panel]) -> str:
    """Return the SVG of small charts in lines of two, with one legend: a curve of the same name has
    the same colour in all. `title` as in `draw`."""
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    columns, lines = min(ACROSS, len(panels)), math.ceil(len(panels) / ACROSS)
    width, high = PANEL_WIDTH * columns, PANEL_HEIGHT * lines
    if len(panels) == 1:
        width, high = WIDTH, HEIGHT
    beside = max(1, int(width // (50 + LETTER * max(map(len, names), default=1))))
    legend = 12 + 18 * math.ceil(len(names) / beside) if len(names) > 1 or len(panels) == 1 else 0
    with drawing(width, HEAD + high + legend) as (figure, said):
        heading(figure, title)
        grid = list(figure.subplots(lines, columns, squeeze=False).flat)
        shown: dict[str, Any] = {}
        for axes, panel in zip(grid, panels, strict=False):
            for handle in _panel(axes, panel, names):
                shown.setdefault(str(handle.get_label()), handle)
        for axes in grid[len(panels) :]:
            axes.remove()
        if legend:
            handles = [shown[plain(name)] for name in names]
            figure.legend(handles=handles, loc="outside lower left", ncols=beside)
    return said.getvalue()


@contextmanager
def drawing(
    width: float, height: float, *, layout: Any = "constrained"
) -> "Iterator[tuple[Figure, io.StringIO]]":
    """Yield a figure of this size, and the place for its SVG when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    said = io.StringIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a letter missing in this font: the viewer's font has it
        size = (width / 72, height / 72)
        figure = Figure(figsize=size, facecolor=PAGE, layout=layout)
        yield figure, said
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
    said.write(_finished(written.getvalue()))


def heading(figure: "Figure", title: str) -> None:
    """Write the title within the width of the page: in one line, or in two, the second as small as
    necessary. The figure's layout stays below it."""
    width, height = figure.get_size_inches() * 72
    first, second, size = heading_lines(title, width - 2 * MARGIN)
    figure.text(MARGIN / width, 1 - 20 / height, plain(first), fontsize=TITLE, fontweight="bold")
    if second:
        figure.text(MARGIN / width, 1 - 37 / height, plain(second), fontsize=size)
    engine: Any = figure.get_layout_engine()
    if engine is not None:
        engine.set(rect=(0, 0, 1, 1 - (HEAD if second else HEAD - 14) / height))


def heading_lines(title: str, room: float) -> tuple[str, str, float]:
    """Return the lines of a title for this width, and the size of the second one."""
    first, _, second = title.partition("\n")
    first, *more = textwrap.wrap(first, int(room / (TITLE * TITLE_LETTER))) or [""]
    second = " ".join((*more, second)).strip()
    return first, second, min(float(SECOND), room / (SECOND_LETTER * max(1, len(second))))


def plain(text: str) -> str:
    """Return the text without characters that XML forbids, which a user's name may contain."""
    other = "\N{REPLACEMENT CHARACTER}"
    return "".join(letter if letter.isprintable() else other for letter in text)


def with_night(svg: str, colours: Mapping[str, str]) -> str:
    """Return the SVG with rules that replace these colours where the page is dark."""
    rules = "".join(
        f"{where}{{{kind}:{night}!important}}"
        for day, night in colours.items()
        for kind in ("fill", "stroke")
        for said, where in (
            (f"{kind}: {day}", f'[style*="{kind}: {day}"]'),
            (f'{kind}="{day}"', f'[{kind}="{day}"]'),  # the ground of a hatch
        )
        if said in svg
    )
    style = f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style>"
    return re.sub(r"(<svg[^>]*>)", lambda found: found.group(1) + style, svg, count=1)


def _finished(svg: str) -> str:
    """Return matplotlib's SVG for embedding in a page: without the head of a file, sizes in units
    of the page, classes in place of ids, and with colours for dark mode."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', svg, count=2)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="(curve|band|bar|level)">', r'<g class="\1">', svg)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # they would repeat in a page with several charts
    return with_night(svg, AT_NIGHT)


def _panel(axes: "Axes", panel: Panel, names: Sequence[str]) -> list[Any]:
    """Draw axes and curves; a name's index in `names` is its colour. Returns the entries of a
    legend."""
    from matplotlib.ticker import MaxNLocator

    heights = [y for curve in panel.curves for _, y in (*curve.points, *curve.band)]
    most_x = max((x for curve in panel.curves for x, _ in curve.points), default=0.0) or 1.0
    axes.set(
        xlim=(0, most_x),
        ylim=(0, round_top(max((*heights, panel.level or 0.0), default=0.0))),
        xlabel=plain(panel.across),
        ylabel=plain(panel.up),
        title=plain(panel.title),
    )
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if panel.level is not None:
        axes.axhline(panel.level, color=AXIS, linewidth=1, dashes=(3, 3), gid="level")
    return [_curve(axes, curve, colour_of(curve.name, names)) for curve in panel.curves]


def colour_of(name: str, names: Sequence[str]) -> str:
    return COLOURS[names.index(name) % len(COLOURS)]


def _curve(axes: "Axes", curve: Curve, colour: str) -> Any:
    xs, ys = [x for x, _ in curve.points], [y for _, y in curve.points]
    if curve.band:
        low, high = zip(*curve.band, strict=True)
        axes.fill_between(xs, low, high, color=colour, alpha=0.18, linewidth=0, gid="band")
    look: dict[str, Any] = {"color": colour, "label": plain(curve.name), "clip_on": False}
    look |= {"dashes": (3, 2)} if curve.dashed else {"marker": "o", "markersize": 4.4}
    (line,) = axes.plot(xs, ys, linewidth=2, gid="curve", **look)
    return line


def round_top(most: float) -> float:
    """Return the first round number at or above `most`."""
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]).tick_values(0, most or 1.0)
    return float(next(tick for tick in ticks if tick >= (most or 1.0) * (1 - 1e-9)))


BAR, GAP, GROUP = 15, 4, 16
"""Height of a bar, the distance to the next, and the additional space above a group."""
LABEL, VALUE, FOOT = 230, 120, 44
"""The most space for names left of bars, for figures right of the longest, and for the axis
below."""


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
    """Return the SVG of groups of bars over a common axis from 0, named `along` with its unit;
    `level` is a value to compare with. `title` as in `draw`."""
    every = [bar for group in groups for bar in group.bars]
    names = list(dict.fromkeys(bar.name for bar in every))
    left = MARGIN + min(LABEL, LETTER * max(map(len, names), default=0)) + 8
    deep = sum(GROUP * 1.5 + GAP + (BAR + GAP) * len(group.bars) for group in groups)
    height = HEAD + deep + FOOT
    longest = max([level or 0.0, *(max(bar.value, bar.high or 0.0) for bar in every)])
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
                _bar(axes, bar, colour_of(bar.name, names), top + BAR / 2, left)
                top += BAR + GAP
            top += GROUP / 2
    return said.getvalue()


def shortened(name: str, width: float) -> str:
    """Return the name, or as much of its beginning and end as fits into this width: names of
    methods differ at both ends."""
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
