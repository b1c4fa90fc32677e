"""Pictures of a profile as SVG: how devices spent their time, and rounds as bars. Narrow, so that
they can be read on a phone; curves are drawn by `launch/files/charts.py` alone.

Knows names and seconds. Readable on a light and on a dark page: where a viewer says that it is
dark, other colours are taken. Every bar says what it is when it is pointed at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.launch.files.charts import drawing, plain, with_night, with_tips
from dovetail.launch.profiling.rounds import Bar, Waterfall
from dovetail.launch.profiling.timeline import BESIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

WIDTH = 400
EDGE = 10
LANE, BAR, NAME = 44, 18, 17
"""Height of a lane, of its bar, and of its name above that."""
HEAD, AXIS_HEIGHT, LINE = 28, 38, 17
"""Height of the title, of the axis with its name, and of a line of the legend."""
LETTER = 6.2
"""Width of a letter of 11 units, about."""
LEAST_SHOWN = 0.004
"""Share of a picture's width below which a bar is not drawn."""


@dataclass(frozen=True)
class Colour:
    """A colour in the light and in the dark scheme."""

    day: str
    night: str


COLOURS = {
    "target": Colour("#0b62a4", "#4a9fe0"),
    "target part": Colour("#5b9bd0", "#86bfee"),
    "target small": Colour("#a9cdea", "#2f6ea3"),
    "draft": Colour("#c43c50", "#f07a8b"),
    "draft part": Colour("#e08a97", "#f8b3bd"),
    "ahead": Colour("#efc3ca", "#8c4a55"),
    "coordinator": Colour("#3a7d44", "#6cc47c"),
    "link": Colour("#c77f00", "#e8ac3f"),
    "queue": Colour("#8a5a9e", "#c39adb"),
    "idle": Colour("#e4e6e9", "#31363c"),
}
HATCHED = {
    "waits draft": ("draft", "////"),
    "waits target": ("target", "\\\\\\\\"),
    "waits coordinator": ("coordinator", "||||"),
    "waits link": ("link", "----"),
}
"""Stripes in the colour of what is waited for, on the ground of what is idle. They lean in a way of
their own each, for those who see no colours."""
INSIDE = {
    (True, True): "#222220",
    (True, False): "#222221",
    (False, True): "#fffffe",
    (False, False): "#fffffd",
}
"""Words upon a bar, by whether its colour is light by day and at night: dark or white by day, each
with a shade of its own, which is replaced at night."""
INSIDE_AT_NIGHT = {
    shade: "#101215" if light_at_night else "#e3e3e3"
    for (_, light_at_night), shade in INSIDE.items()
}
OF_SPAN = {
    "verify": "target",
    "prefill": "target",
    "linears": "target part",
    "attention": "target small",
    "other": "target part",
    "head": "target small",
    "choose": "target part",
    "commit": "target small",
    "draft": "draft",
    "root": "draft part",
    "level": "draft part",
    "move": "ahead",
    "feed": "draft part",
    "grow": "ahead",
    "prepare": "ahead",
    "link": "link",
    "queue": "queue",
    "lost": "queue",
}
"""Span -> colour; all others are the coordinator's, or small."""
OF_WAIT = {
    "draft": "waits draft",
    "target": "waits target",
    "coordinator": "waits coordinator",
    "transport": "waits link",
    "no work": "idle",
}
DETAILS = (
    "linears",
    "attention",
    "other",
    "head",
    "choose",
    "root",
    "level",
    "move",
    "commit",
    "decode",
    "encode",
    "send",
    "receive",
    "plan",
    "detokenise",
)
"""Spans that are drawn on a line of their own, below what they are a part of."""


def stacked(title: str, rows: Mapping[str, Sequence[tuple[str, str, float]]]) -> str:
    """Return the SVG of bars that add up to 1 each; a row is a list of (what, colour, share)."""
    keys = [
        (what, colour)
        for parts in rows.values()
        for what, colour, share in parts
        if share >= LEAST_SHOWN
    ]
    with _page(title, LANE * len(rows) + 8, keys, across=1.0) as (picture, said):
        for number, (name, parts) in enumerate(rows.items()):
            picture.label(LANE * number, name)
            start = 0.0
            for what, colour, share in parts:
                if share >= LEAST_SHOWN:
                    words = (f"{what} {share:.0%}", f"{share:.0%}")
                    top = LANE * number + NAME
                    picture.bar(start, share, top, colour, f"{what}: {share:.1%}", words)
                start += share
    return said()


def gantt(fall: Waterfall, lanes: Sequence[str], *, title: str = "") -> str:
    """Return the SVG of a round from verdict to verdict: a lane a process, what is a part of
    something on a line of its own, and a lane for what is on its way."""
    rows = list(_rows(fall, lanes))
    names = dict.fromkeys(bar.name for _, lines in rows for bars in lines for bar in bars)
    deep = sum(_height(lines) for _, lines in rows)
    keys = [(name, _colour(name)) for name in names]
    length_ms = (fall.length_s or 1.0) * 1e3
    with _page(
        title or fall.title, deep, keys, across=length_ms, axis="ms since the verdict before"
    ) as (picture, said):
        top = 0.0
        for name, lines in rows:
            picture.label(top, name)
            for place, bars in enumerate(lines):
                for bar in bars:
                    length, start = bar.length_s * 1e3, bar.start_s * 1e3
                    told = f"{bar.name}: {length:.3f} ms, from {start:.3f} ms"
                    words = (f"{bar.name} {length:.3g}", bar.name)
                    height = top + NAME + place * (BAR + 3)
                    picture.bar(start, length, height, _colour(bar.name), told, words)
            top += _height(lines)
    return said()


def _rows(fall: Waterfall, lanes: Sequence[str]) -> Iterator[tuple[str, list[list[Bar]]]]:
    """Yield a process with the lines of its bars: long ones, and parts."""
    for lane in lanes:
        bars = [bar for bar in fall.bars if bar.process == lane and bar.name not in BESIDE]
        lines = [
            [bar for bar in bars if (bar.name in DETAILS) is detail] for detail in (False, True)
        ]
        if any(lines):
            yield lane, [line for line in lines if line]
    if travelling := [bar for bar in fall.bars if bar.name in BESIDE]:
        yield "on its way, or waiting for a worker that serves others", [travelling]


def _height(lines: Sequence[Sequence[Bar]]) -> float:
    return NAME + len(lines) * (BAR + 3) + 6


def _colour(span: str) -> str:
    return OF_SPAN.get(span, "coordinator")


@dataclass
class _Picture:
    """Axes on which a unit of height is one of the SVG; `scale` is that for the width."""

    axes: "Axes"
    scale: float
    tips: dict[str, str] = field(default_factory=dict)

    def label(self, top: float, words: str) -> None:
        self.axes.text(0, top + 12, plain(words), fontweight="bold")

    def bar(
        self, start: float, length: float, top: float, colour: str, told: str, words: Sequence[str]
    ) -> None:
        """Draw a bar that says `told` when it is pointed at, and inside the first of `words` that
        fit."""
        width = length * self.scale
        place = ((start, top), max(length, 0.6 / self.scale), BAR)
        gid = f"tip{len(self.tips)}"
        self.tips[gid] = told
        self.axes.add_patch(_patch(*place, colour, gid=gid))
        fitting = (text for text in words if width > len(text) * LETTER + 6)
        if (text := next(fitting, None)) is not None:
            look: dict[str, Any] = {"color": _inside(colour)}
            if colour in HATCHED:
                look["bbox"] = {"facecolor": COLOURS["idle"].day, "edgecolor": "none", "pad": 1}
            self.axes.text(start + 4 / self.scale, top + BAR / 2, plain(text), va="center", **look)


@contextmanager
def _page(
    title: str,
    deep: float,
    keys: Sequence[tuple[str, str]],
    *,
    across: float,
    axis: str = "",
) -> Iterator[tuple[_Picture, Callable[[], str]]]:
    """A picture of this depth with a title above it, an axis if it has one, and a legend of (name,
    colour) below; and what returns its SVG after the block."""
    from matplotlib.ticker import MaxNLocator

    legend = list(_legend(keys))
    foot = AXIS_HEIGHT if axis else 0
    height = HEAD + deep + foot + LINE * (1 + max((line for _, line, *_ in legend), default=0)) + 6
    found: list[str] = []
    with drawing(WIDTH, height, layout=None) as (figure, said):
        figure.text(EDGE / WIDTH, 1 - 17 / height, plain(title), fontsize=12.5, fontweight="bold")
        inner = WIDTH - 2 * EDGE
        axes = figure.add_axes(
            (EDGE / WIDTH, 1 - (HEAD + deep) / height, inner / WIDTH, deep / height)
        )
        axes.set(xlim=(0, across), ylim=(deep, 0), yticks=[])
        axes.spines[:].set_visible(False)
        axes.tick_params(labelsize=10, length=0)
        if axis:
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
            axes.grid(axis="x")
            axes.set_axisbelow(True)
            axes.set_xlabel(axis, loc="right", fontsize=10)
        else:
            axes.set_xticks([])
        picture = _Picture(axes, inner / across)
        yield picture, lambda: found[0]
        for x, line, words, colour in legend:
            y = deep + foot + LINE * line + 4
            at = (x - EDGE) / picture.scale
            square = _patch((at, y), 11 / picture.scale, 11, colour, clip_on=False)
            axes.add_patch(square)
            axes.text(at + 15 / picture.scale, y + 5.5, plain(words), va="center")
    nights = {colour.day: colour.night for colour in COLOURS.values()} | INSIDE_AT_NIGHT
    found.append(with_night(with_tips(said.getvalue(), picture.tips), nights))


def _patch(
    place: tuple[float, float], width: float, height: float, colour: str, **look: Any
) -> "Rectangle":
    """Return a rectangle in a colour, or in stripes on the ground of what is idle."""
    from matplotlib.patches import Rectangle

    if colour not in HATCHED:
        return Rectangle(place, width, height, facecolor=COLOURS[colour].day, linewidth=0, **look)
    of, stripes = HATCHED[colour]
    return Rectangle(
        place,
        width,
        height,
        facecolor=COLOURS["idle"].day,
        edgecolor=COLOURS[of].day,
        linewidth=0,
        hatch=stripes,
        **look,
    )


def _inside(colour: str) -> str:
    """Return the colour of words upon a bar: one of those that `INSIDE_AT_NIGHT` replaces."""
    shade = COLOURS["idle" if colour in HATCHED else colour]
    return INSIDE[_is_light(shade.day), _is_light(shade.night)]


def _is_light(colour: str) -> bool:
    """Judge a colour by its relative luminance, about."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _legend(keys: Sequence[tuple[str, str]]) -> Iterator[tuple[float, int, str, str]]:
    """Yield (x, line, words, colour) of each entry. Names of one colour stand beside each other."""
    x, line = float(EDGE), 0
    by_colour: dict[str, list[str]] = {}
    for name, colour in dict.fromkeys(keys):
        by_colour.setdefault(colour, []).append(name)
    for colour, names in by_colour.items():
        words = ", ".join(names)
        width = 18 + len(words) * LETTER + 10
        if x > EDGE and x + width > WIDTH - EDGE:
            x, line = float(EDGE), line + 1
        yield x, line, words, colour
        x += width
