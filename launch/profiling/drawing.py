"""Pictures of a profile as SVG: how devices spent their time, and rounds as bars. Narrow, so that
they can be read on a phone; curves are `launch/files/chart.py`'s.

Knows names and seconds. Readable on a light and on a dark page: where a viewer says that it is
dark, other colours are taken.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dovetail.launch.files.chart import escape
from dovetail.launch.profiling.rounds import Bar, Waterfall
from dovetail.launch.profiling.timeline import BESIDE

WIDTH = 400
EDGE = 10
LANE, BAR = 44, 18
"""Height of a lane, its label included, and of its bar."""
HEAD = 28
FOOT = 42
LETTER = 5.9
"""Width of a letter of 11 px, about."""
LEAST_SHOWN = 0.004
"""Share of a picture's width below which a bar is not drawn."""
TICKS = 5


@dataclass(frozen=True)
class Colour:
    """By day and at night."""

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
    "waits draft": "draft",
    "waits target": "target",
    "waits coordinator": "coordinator",
    "waits link": "link",
}
"""Patterns: stripes in the colour of what is waited for, on the ground of what is idle."""
STRIPE = 6
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
    """Bars that add up to 1 each; a row is a list of (what, colour, share)."""
    body: list[str] = []
    for number, (name, parts) in enumerate(rows.items()):
        top = HEAD + LANE * number
        body.append(_text(EDGE, top + 12, name))
        x = float(EDGE)
        for what, colour, share in parts:
            width = share * (WIDTH - 2 * EDGE)
            if share >= LEAST_SHOWN:
                body.append(_rect(x, top + 17, width, BAR, colour, f"{what}: {share:.1%}"))
                words = f"{what} {share:.0%}"
                if width > len(words) * LETTER + 6:
                    body.append(_inside(x + 4, top + 17 + 13, words, colour))
                elif width > len(f"{share:.0%}") * LETTER + 4:
                    body.append(_inside(x + 3, top + 17 + 13, f"{share:.0%}", colour))
            x += width
    keys = list(
        dict.fromkeys(
            (what, colour)
            for parts in rows.values()
            for what, colour, share in parts
            if share >= LEAST_SHOWN
        )
    )
    foot = HEAD + LANE * len(rows) + 8
    legend, height = _legend(keys, foot)
    return _page(title, height, [*body, *legend])


def gantt(fall: Waterfall, lanes: Sequence[str], *, title: str = "") -> str:
    """A round from verdict to verdict: a lane a process, what is a part of something on a line of
    its own, and a lane for what is on its way."""
    rows = list(_rows(fall, lanes))
    foot = HEAD + sum(_height(lines) for _, lines in rows)
    scale = (WIDTH - 2 * EDGE) / (fall.length_s or 1.0)
    body: list[str] = []
    for tick in _ticks(fall.length_s * 1e3):
        x = EDGE + tick / 1e3 * scale
        body.append(
            f'<line class="grid" x1="{x:.1f}" y1="{HEAD}" x2="{x:.1f}" y2="{foot}" '
            'stroke="#dddddd"/>'
        )
        anchor = ' text-anchor="middle"' if x > EDGE + 8 else ""
        body.append(f'<text x="{x:.1f}" y="{foot + 14}" font-size="10"{anchor}>{tick:g}</text>')
    body.append(
        f'<text x="{WIDTH - EDGE}" y="{foot + 27}" font-size="10" text-anchor="end">ms since '
        "the verdict before</text>"
    )
    top = float(HEAD)
    for name, lines in rows:
        body.append(_text(EDGE, top + 12, name))
        for place, bars in enumerate(lines):
            for bar in bars:
                body += _bar(
                    bar,
                    EDGE + bar.start_s * scale,
                    top + 17 + place * (BAR + 3),
                    bar.length_s * scale,
                )
        top += _height(lines)
    names = list(dict.fromkeys(bar.name for _, lines in rows for bars in lines for bar in bars))
    legend, height = _legend([(name, _colour(name)) for name in names], foot + FOOT + 4)
    return _page(title or fall.title, height, [*body, *legend])


def _rows(fall: Waterfall, lanes: Sequence[str]) -> Iterator[tuple[str, list[list[Bar]]]]:
    """A process with the lines of its bars: long ones, and parts."""
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
    return 17 + len(lines) * (BAR + 3) + 6


def _bar(bar: Bar, x: float, y: float, width: float) -> Iterator[str]:
    colour = _colour(bar.name)
    yield _rect(
        x,
        y,
        max(0.6, width),
        BAR,
        colour,
        f"{bar.name}: {bar.length_s * 1e3:.3f} ms, from {bar.start_s * 1e3:.3f} ms",
    )
    for words in (f"{bar.name} {bar.length_s * 1e3:.3g}", bar.name):
        if width > len(words) * LETTER + 4:
            yield _inside(x + 3, y + 13, words, colour)
            return


def _colour(span: str) -> str:
    return OF_SPAN.get(span, "coordinator")


def _ticks(length: float) -> list[float]:
    """Round numbers from 0 up to a length."""
    step = next(
        step
        for power in range(-4, 8)
        for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)
        if step * TICKS >= length * 0.999
    )
    return [step * index for index in range(int(length / step) + 1)]


def _rect(x: float, y: float, width: float, height: float, colour: str, words: str) -> str:
    place = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height}"'
    return f"<rect {_fill(colour)} {place}><title>{escape(words)}</title></rect>"


def _fill(colour: str) -> str:
    if colour in HATCHED:
        return f'fill="url(#{_class(colour)})"'
    return f'class="{_class(colour)}" fill="{COLOURS[colour].day}"'


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-weight="bold">{escape(words)}</text>'


def _inside(x: float, y: float, words: str, colour: str) -> str:
    if colour in HATCHED:
        return (
            f'<text class="rim" x="{x:.1f}" y="{y:.1f}" stroke="{COLOURS["idle"].day}" '
            f'stroke-width="4" paint-order="stroke">{escape(words)}</text>'
        )
    by_day, at_night = (_is_light(shade) for shade in (COLOURS[colour].day, COLOURS[colour].night))
    return (
        f'<text class="{"paper" if at_night else "ink"}" x="{x:.1f}" y="{y:.1f}" '
        f'fill="{"#222222" if by_day else "#ffffff"}">{escape(words)}</text>'
    )


def _is_light(colour: str) -> bool:
    """By its relative luminance, about."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _legend(keys: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Squares with names, and the height of the page below them. Names of one colour stand beside
    each other."""
    body, x, y = [], float(EDGE), top
    by_colour: dict[str, list[str]] = {}
    for name, colour in keys:
        by_colour.setdefault(colour, []).append(name)
    for colour, names in by_colour.items():
        words = ", ".join(names)
        width = 18 + len(words) * LETTER + 10
        if x > EDGE and x + width > WIDTH - EDGE:
            x, y = float(EDGE), y + 17
        body.append(f'<rect {_fill(colour)} x="{x:.1f}" y="{y - 9:.1f}" width="11" height="11"/>')
        body.append(f'<text x="{x + 15:.1f}" y="{y:.1f}">{escape(words)}</text>')
        x += width
    return body, y + 12


def _class(colour: str) -> str:
    return "of-" + colour.replace(" ", "-")


def _page(title: str, height: float, body: Sequence[str]) -> str:
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
        'font-size="11" fill="#222222" role="img">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
    name = f"<title>{escape(title)}</title>"
    heading = f'<text x="{EDGE}" y="17" font-size="12.5" font-weight="bold">{escape(title)}</text>'
    used = "".join(
        _stripes(name, of)
        for name, of in HATCHED.items()
        if any(f"#{_class(name)})" in part for part in body)
    )
    return "\n".join(
        (
            head,
            name,
            f"<style>{_night()}</style>",
            *([f"<defs>{used}</defs>"] if used else []),
            page,
            heading,
            *body,
            "</svg>",
            "",
        )
    )


def _stripes(name: str, of: str) -> str:
    """A pattern, by which those are told apart too who see no colours: the stripes of each lean in
    a way of their own."""
    turn = {"draft": 45, "target": -45, "coordinator": 0, "link": 90}[of]
    place = (
        f'width="{STRIPE}" height="{STRIPE}" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({turn})"'
    )
    ground = f'<rect width="{STRIPE}" height="{STRIPE}" {_fill("idle")}/>'
    return (
        f'<pattern id="{_class(name)}" {place}>{ground}<rect width="1.6" height="{STRIPE}" '
        f"{_fill(of)}/></pattern>"
    )


def _night() -> str:
    plain = ".page{fill:#16191d}text{fill:#e3e3e3}.grid{stroke:#3a3f45}"
    coloured = "".join(
        f".{_class(name)}{{fill:{colour.night}}}" for name, colour in COLOURS.items()
    )
    inside = f".ink{{fill:#e3e3e3}}.paper{{fill:#101215}}.rim{{stroke:{COLOURS['idle'].night}}}"
    return f"@media (prefers-color-scheme:dark){{{plain}{coloured}{inside}}}"
