"""Bars with intervals as SVG files, in the manner of `chart.py`.

Groups stand one below the other with a bar for each name, so that long names and many groups stay
readable. Knows numbers and names, not what they mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dovetail.launch.files.chart import COLOURS, HEAD, LETTER, MARGIN, page, ticks_to

WIDTH = 760
BAR, GAP = 15, 4
"""Height of a bar, and the distance to the next."""
GROUP = 16
"""Above a group, beside the distance of bars."""
LABEL = 230
"""Most that the names beside the bars may take, about."""
VALUE = 120
"""Right of the longest bar, for its figures."""
FOOT = 44
HALO = 'stroke="#ffffff" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
"""The page around figures that a line may cross, and around a line upon a bar; its colour on a dark
page is in the rules of `chart.page`."""


@dataclass(frozen=True)
class Bar:
    """A height, and the ends of its interval if it has one; `name` tells its colour."""

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
    """The SVG of groups of bars over a common axis from 0, which `along` names with its unit;
    `level` is a value to compare with.

    The title is as `chart.draw` has it.
    """
    names = list(dict.fromkeys(bar.name for group in groups for bar in group.bars))
    left = MARGIN + min(LABEL, LETTER * max(map(len, names), default=0)) + 8
    longest = max(
        [level or 0.0, *(max(bar.value, bar.high or 0.0) for group in groups for bar in group.bars)]
    )
    most = ticks_to(longest if longest > 0.0 else 1.0)[-1]
    scale = (WIDTH - left - VALUE) / most
    top = float(HEAD + 6)
    body: list[str] = []
    for group in groups:
        body.append(
            f'<text class="halo" x="{MARGIN}" y="{top + 12:.0f}" font-weight="bold" '
            f"{HALO}>{escape(group.name)}</text>"
        )
        top += GROUP + GAP
        for bar in group.bars:
            body += _bar(bar, names.index(bar.name) % len(COLOURS), left, top, scale)
            top += BAR + GAP
        top += GROUP / 2
    across = [
        *_axis(left, HEAD + 6, top, scale, most, along),
        *_level(level, left, HEAD + 6, top, scale),
    ]
    return page(WIDTH, top + FOOT, title, MARGIN, [*across, *body])


def _axis(
    left: float, top: float, foot: float, scale: float, most: float, along: str
) -> Iterator[str]:
    for tick in ticks_to(most):
        x = left + scale * tick
        look = 'class="axis" stroke="#333333"' if tick == 0 else 'class="grid" stroke="#dddddd"'
        yield f'<line {look} x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{foot:.1f}"/>'
        yield f'<text x="{x:.1f}" y="{foot + 16:.1f}" text-anchor="middle">{tick:g}</text>'
    yield (
        f'<text x="{left + scale * most / 2:.1f}" y="{foot + 34:.1f}" '
        f'text-anchor="middle">{escape(along)}</text>'
    )


def _level(
    level: float | None, left: float, top: float, foot: float, scale: float
) -> Iterator[str]:
    if level is not None:
        x = left + scale * level
        yield (
            f'<line class="axis" x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{foot:.1f}" '
            'stroke="#333333" stroke-dasharray="3 3"/>'
        )


def _bar(bar: Bar, colour: int, left: float, top: float, scale: float) -> Iterator[str]:
    """Its name, the bar, its interval as a line with ends, and the figures."""
    middle, end = top + BAR / 2, left + scale * bar.value
    yield (
        f'<text x="{left - 6:.1f}" y="{middle + 4:.1f}" '
        f'text-anchor="end">{escape(shortened(bar.name, left - MARGIN - 6))}</text>'
    )
    yield (
        f'<rect class="area{colour}" x="{left:.1f}" y="{top:.1f}" width="{end - left:.1f}" '
        f'height="{BAR}" fill="{COLOURS[colour]}"/>'
    )
    told, beyond = f"{bar.value:.2f}", end
    if bar.low is not None and bar.high is not None and bar.low != bar.high:
        low, high = left + scale * bar.low, left + scale * bar.high
        ends = (f"M{x:.1f} {middle - 4:.1f}V{middle + 4:.1f}" for x in (low, high))
        line = f'd="M{low:.1f} {middle:.1f}H{high:.1f}{"".join(ends)}" fill="none"'
        yield f'<path class="halo" {line} stroke="#ffffff" stroke-width="3.5"/>'
        yield f'<path class="axis" {line} stroke="#333333" stroke-width="1.5"/>'
        told, beyond = f"{told} ({bar.low:.2f}-{bar.high:.2f})", max(high, end)
    yield f'<text class="halo" x="{beyond + 6:.1f}" y="{middle + 4:.1f}" {HALO}>{told}</text>'


def shortened(name: str, width: float) -> str:
    """The name, or as much of its beginning and its end as fits into so many units of the page:
    names of methods differ at both."""
    most = int(width / LETTER)
    if len(name) <= most:
        return name
    tail = most // 2
    return f"{name[: most - tail - 1]}…{name[len(name) - tail :]}"
