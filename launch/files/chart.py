"""Charts of curves as SVG files, written by hand so that nothing has to be installed for it. Knows
numbers and names, not what they mean.

One chart, or several small ones beside each other that share their legend. Readable on a light and
on a dark page: where a viewer says that it is dark, other colours are taken.
"""

import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.protocol.errors import UserError

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 48, 56
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44", "#8a5a9e", "#c77f00", "#4d4d4d")
"""Distinct in print and for those who do not tell red from green."""
AT_NIGHT = ("#63b3ed", "#ff8896", "#7ccf8a", "#c9a0dc", "#f2b84b", "#c4c4c4")
"""The same on a dark page."""
TICKS = 6
ACROSS = 2
"""Small charts in a line."""
PANEL_WIDTH, PANEL_HEIGHT = 400, 270
GAPS = (62, 22, 40, 48)
"""Left of the axes of a small chart, right of them, above and below."""
LETTER = 6.6
"""Width of a letter of the legend, about."""
HEAD, LINE = 44, 20
TITLE, SECOND = 15, 12
"""Sizes of the lines of a title; a bold letter is about TITLE_LETTER of its size wide, and one of
the second line SECOND_LETTER."""
TITLE_LETTER, SECOND_LETTER = 0.62, 0.55
MARK = 5
"""Radius of a point that stands for itself."""
MARGIN = 14
"""Left and right of a title of two lines."""


def escape(text: str, quote: bool = True) -> str:
    """Text as XML may have it: a name is somebody's own, and may hold what no document can."""
    return html.escape(
        "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text),
        quote,
    )


@dataclass(frozen=True)
class Curve:
    """Points of one quantity, left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    band: Sequence[tuple[float, float]] = ()
    """(low, high) of each point, such as an interval of confidence; none: no band."""
    marks: bool = False
    """Whether the points stand for themselves, without a line."""


@dataclass(frozen=True)
class Panel:
    """A small chart; `across` and `up` name its axes with their units, `level` is a height to
    compare with."""

    title: str
    across: str
    up: str
    curves: Sequence[Curve]
    level: float | None = None


def check_chart(path: Path | None) -> None:
    """`UserError` for a file that would be no SVG."""
    if path is not None and path.suffix.lower() != ".svg":
        raise UserError(
            f"a plot is written as SVG, and {path} does not end in .svg: name "
            f"{path.with_suffix('.svg')}, which every browser shows"
        )


def draw(
    title: str, across: str, up: str, curves: Sequence[Curve], *, level: float | None = None
) -> str:
    """The SVG of curves over common axes, both from 0; `across` and `up` name the axes with their
    units, `level` is a height to compare with.

    What stands behind a line break in the title, and what of it is too long for the page, is a
    second, smaller line.
    """
    panel = Panel("", across, up, curves, level)
    names = [curve.name for curve in curves]
    frame = _Frame.of(panel, LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)
    legend = (
        part
        for index, curve in enumerate(curves)
        for part in _key(
            WIDTH - RIGHT + 14, TOP + 12 + LINE * index, names.index(curve.name), curve
        )
    )
    return page(WIDTH, HEIGHT, title, LEFT, [*_panel(frame, panel, names), *legend])


def draw_panels(title: str, panels: Sequence[Panel]) -> str:
    """The SVG of small charts in lines of two. A curve of the same name has the same colour in all
    of them, and stands in the legend below once.

    The title is as `draw` has it.
    """
    curves = {curve.name: curve for panel in reversed(panels) for curve in reversed(panel.curves)}
    names = list(dict.fromkeys(curve.name for panel in panels for curve in panel.curves))
    width = PANEL_WIDTH * min(ACROSS, len(panels))
    foot = HEAD + PANEL_HEIGHT * math.ceil(len(panels) / ACROSS)
    places = _places(names, width) if len(names) > 1 else []
    body: list[str] = []
    for index, panel in enumerate(panels):
        left, top = PANEL_WIDTH * (index % ACROSS), HEAD + PANEL_HEIGHT * (index // ACROSS)
        frame = _Frame.of(
            panel,
            left + GAPS[0],
            top + GAPS[2],
            PANEL_WIDTH - GAPS[0] - GAPS[1],
            PANEL_HEIGHT - GAPS[2] - GAPS[3],
        )
        body += _panel(frame, panel, names)
    for name, (x, line) in zip(names, places, strict=False):
        body += _key(x, foot + 14 + LINE * line, names.index(name), curves[name])
    lines = 1 + places[-1][1] if places else 0
    return page(width, foot + LINE * lines + (12 if lines else 0), title, GAPS[0], body)


def ticks_to(most: float, wanted: int = TICKS) -> list[float]:
    """Round numbers from 0 to the first at or above `most`, about as many as wanted."""
    rough = (most or 1.0) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """Where a number stands on the page: the axes begin at 0 and end at `most_x` and `most_y`."""

    left: float
    top: float
    width: float
    height: float
    most_x: float
    most_y: float

    @classmethod
    def of(cls, panel: Panel, left: float, top: float, width: float, height: float) -> "_Frame":
        heights = [
            y
            for curve in panel.curves
            for y in (*(y for _, y in curve.points), *(high for _, high in curve.band))
        ]
        most_y = ticks_to(max((*heights, panel.level or 0.0), default=0.0))[-1]
        most_x = max((x for curve in panel.curves for x, _ in curve.points), default=0.0)
        return cls(left, top, width, height, most_x or 1.0, most_y or 1.0)

    @property
    def foot(self) -> float:
        return self.top + self.height

    def x(self, value: float) -> float:
        return self.left + self.width * value / self.most_x

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - value / self.most_y)


def page(width: float, height: float, title: str, left: float, body: Sequence[str]) -> str:
    """A whole SVG: what is drawn, on a page with its title, with the rules for a dark one."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
        'font-size="12" fill="#222222">'
    )
    page = f'<rect class="page" width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'
    return "\n".join(
        (
            head,
            f"<style>{_night()}</style>",
            page,
            *_heading(title, left, width - 2 * MARGIN),
            *body,
            "</svg>",
            "",
        )
    )


def _heading(title: str, left: float, width: float) -> Iterator[str]:
    """The title within so much of the page: in one line from `left` on, or in two, the second as
    small as it has to be."""
    first, _, second = title.partition("\n")
    if not second and len(first) * TITLE * TITLE_LETTER <= width + MARGIN - left:
        yield (
            f'<text x="{left:.0f}" y="26" font-size="{TITLE}" '
            f'font-weight="bold">{escape(first)}</text>'
        )
        return
    first, *more = textwrap.wrap(first, int(width / (TITLE * TITLE_LETTER)))
    second = " ".join((*more, second)).strip()
    size = min(float(SECOND), width / (SECOND_LETTER * max(1, len(second))))
    yield f'<text x="{MARGIN}" y="19" font-size="{TITLE}" font-weight="bold">{escape(first)}</text>'
    yield f'<text x="{MARGIN}" y="36" font-size="{size:.1f}">{escape(second)}</text>'


def _night() -> str:
    """The rules for a dark page; on a light one the colours stand in the elements themselves, for
    viewers that know no rules."""
    plain = ".page{fill:#16191d}text{fill:#e3e3e3}.halo{stroke:#16191d}.grid{stroke:#3a3f45}.axis{stroke:#a3a8ad}"  # noqa: E501
    coloured = "".join(
        f".line{index}{{stroke:{colour}}}.area{index}{{fill:{colour}}}"
        for index, colour in enumerate(AT_NIGHT)
    )
    return f"@media (prefers-color-scheme:dark){{{plain}{coloured}}}"


def _panel(frame: _Frame, panel: Panel, names: Sequence[str]) -> Iterator[str]:
    """Title, axes and curves; a name's place in `names` is its colour."""
    if panel.title:
        yield (
            f'<text x="{frame.left:.0f}" y="{frame.top - 12:.0f}" '
            f'font-weight="bold">{escape(panel.title)}</text>'
        )
    middle, centre = frame.left + frame.width / 2, frame.top + frame.height / 2
    yield (
        f'<text x="{middle:.0f}" y="{frame.foot + 40:.0f}" '
        f'text-anchor="middle">{escape(panel.across)}</text>'
    )
    yield (
        f'<text transform="translate({frame.left - 50:.0f} {centre:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(panel.up)}</text>'
    )
    yield from (_horizontal(frame, tick) for tick in ticks_to(frame.most_y))
    yield from (
        _vertical(frame, tick) for tick in ticks_to(frame.most_x, TICKS + 2) if tick <= frame.most_x
    )
    if panel.level is not None:
        y, right = frame.y(panel.level), frame.left + frame.width
        yield (
            f'<line class="axis" x1="{frame.left:.1f}" y1="{y:.1f}" x2="{right:.1f}" '
            f'y2="{y:.1f}" stroke="#333333" stroke-dasharray="3 3"/>'
        )
    for curve in panel.curves:
        yield from _curve(frame, curve, names.index(curve.name) % len(COLOURS))


def _horizontal(frame: _Frame, tick: float) -> str:
    y, right = frame.y(tick), frame.left + frame.width
    look = 'class="axis" stroke="#333333"' if tick == 0 else 'class="grid" stroke="#dddddd"'
    line = f'<line {look} x1="{frame.left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"/>'
    return f'{line}<text x="{frame.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'


def _vertical(frame: _Frame, tick: float) -> str:
    x, foot = frame.x(tick), frame.foot
    line = (
        f'<line class="axis" x1="{x:.1f}" y1="{foot:.1f}" x2="{x:.1f}" y2="{foot + 5:.1f}" '
        'stroke="#333333"/>'
    )
    return f'{line}<text x="{x:.1f}" y="{foot + 19:.1f}" text-anchor="middle">{tick:g}</text>'


def _curve(frame: _Frame, curve: Curve, colour: int) -> Iterator[str]:
    if curve.band:
        xs = [x for x, _ in curve.points]
        edge = [
            *zip(xs, (high for _, high in curve.band), strict=True),
            *reversed([*zip(xs, (low for low, _ in curve.band), strict=True)]),
        ]
        yield (
            f'<polygon class="area{colour}" points="{_places_of(frame, edge)}" '
            f'fill="{COLOURS[colour]}" fill-opacity="0.18"/>'
        )
    if curve.marks:
        look = f'class="line{colour}" fill="none" stroke="{COLOURS[colour]}" stroke-width="2"'
        yield from (
            f'<circle {look} cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="{MARK}"/>'
            for x, y in curve.points
        )
        return
    yield f'<polyline points="{_places_of(frame, curve.points)}" {_stroke(curve, colour)}/>'
    if not curve.dashed:
        dots = (
            f'<circle class="area{colour}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.2"'
            for x, y in curve.points
        )
        yield from (f'{dot} fill="{COLOURS[colour]}"/>' for dot in dots)


def _places_of(frame: _Frame, points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _stroke(curve: Curve, colour: int) -> str:
    dash = ' stroke-dasharray="6 4"' if curve.dashed else ""
    return f'class="line{colour}" fill="none" stroke="{COLOURS[colour]}" stroke-width="2"{dash}'


def _key(x: float, y: float, index: int, curve: Curve) -> Iterator[str]:
    """A line of the legend."""
    if curve.marks:
        colour = index % len(COLOURS)
        yield (
            f'<circle class="line{colour}" fill="none" stroke="{COLOURS[colour]}" '
            f'stroke-width="2" cx="{x + 11:.0f}" cy="{y:.0f}" r="{MARK}"/>'
        )
    else:
        yield (
            f'<line x1="{x:.0f}" y1="{y:.0f}" x2="{x + 22:.0f}" y2="{y:.0f}" '
            f"{_stroke(curve, index % len(COLOURS))}/>"
        )
    yield f'<text x="{x + 28:.0f}" y="{y + 4:.0f}">{escape(curve.name)}</text>'


def _places(names: Sequence[str], width: float) -> list[tuple[float, int]]:
    """(x, line) of each name of a legend in lines of this width."""
    column = 50 + LETTER * max(map(len, names))
    columns = max(1, int((width - GAPS[0]) // column))
    return [(GAPS[0] + column * (index % columns), index // columns) for index in range(len(names))]
