"""A chart of curves as an SVG file, written by hand so that nothing has to be installed for it. Knows numbers and names, not what they mean."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from dovetail.protocol.errors import UserError

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 48, 56
COLOURS = ("#0b62a4", "#d1495b", "#3a7d44", "#8a5a9e", "#c77f00", "#4d4d4d")
"""Distinct in print and for those who do not tell red from green."""
TICKS = 6


@dataclass(frozen=True)
class Curve:
    """Points of one quantity, left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def check_chart(path: Path | None) -> None:
    """`UserError` for a file that would be no SVG."""
    if path is not None and path.suffix.lower() != ".svg":
        raise UserError(f"a plot is written as SVG, and {path} does not end in .svg: name {path.with_suffix('.svg')}, which every browser shows")


def draw(title: str, across: str, up: str, curves: Sequence[Curve]) -> str:
    """The SVG of curves over common axes, both from 0; `across` and `up` name the axes with their units."""
    right = max(x for curve in curves for x, _ in curve.points)
    ticks = ticks_to(max(y for curve in curves for _, y in curve.points))
    frame = _Frame(right, ticks[-1])
    body = [
        *(_horizontal(frame, tick) for tick in ticks),
        *(_vertical(frame, tick) for tick in ticks_to(right, TICKS + 2) if tick <= right),
        *(part for index, curve in enumerate(curves) for part in _curve(frame, curve, COLOURS[index % len(COLOURS)])),
        *_legend(curves),
    ]
    middle, centre = LEFT + frame.width / 2, TOP + frame.height / 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">'
    labels = (
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{middle:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="translate(18 {centre:.0f}) rotate(-90)" text-anchor="middle">{escape(up)}</text>',
    )
    return "\n".join((head, '<rect width="100%" height="100%" fill="#ffffff"/>', *labels, *body, "</svg>", ""))


def ticks_to(most: float, wanted: int = TICKS) -> list[float]:
    """Round numbers from 0 to the first at or above `most`, about as many as wanted."""
    rough = (most or 1.0) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


@dataclass(frozen=True)
class _Frame:
    """Where a number stands on the page."""

    right: float
    top: float
    width: int = WIDTH - LEFT - RIGHT
    height: int = HEIGHT - TOP - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + self.width * value / self.right

    def y(self, value: float) -> float:
        return TOP + self.height * (1 - value / self.top)


def _horizontal(frame: _Frame, tick: float) -> str:
    y = frame.y(tick)
    line = f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + frame.width}" y2="{y:.1f}" stroke="{"#333333" if tick == 0 else "#dddddd"}"/>'
    return f'{line}<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'


def _vertical(frame: _Frame, tick: float) -> str:
    x, foot = frame.x(tick), TOP + frame.height
    return (
        f'<line x1="{x:.1f}" y1="{foot}" x2="{x:.1f}" y2="{foot + 5}" stroke="#333333"/><text x="{x:.1f}" y="{foot + 19}" text-anchor="middle">{tick:g}</text>'
    )


def _curve(frame: _Frame, curve: Curve, colour: str) -> Iterator[str]:
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in curve.points)
    dash = ' stroke-dasharray="6 4"' if curve.dashed else ""
    yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    if not curve.dashed:
        yield from (f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.2" fill="{colour}"/>' for x, y in curve.points)


def _legend(curves: Sequence[Curve]) -> Iterator[str]:
    left = WIDTH - RIGHT + 14
    for index, curve in enumerate(curves):
        y, dash = TOP + 12 + 20 * index, ' stroke-dasharray="6 4"' if curve.dashed else ""
        yield f'<line x1="{left}" y1="{y}" x2="{left + 22}" y2="{y}" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"{dash}/>'
        yield f'<text x="{left + 28}" y="{y + 4}">{escape(curve.name)}</text>'
