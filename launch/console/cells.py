"""Cells, bars and tables as lines of a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

Picture = dict[str, Any]
BLOCKS = " ▁▂▃▄▅▆▇█"
BAR = 8
TREND, WIDE_TREND = 14, 48  # characters of a curve; each is a sample, about a second


def as_bar(share: float) -> str:
    filled = round(BAR * min(1.0, share))
    return "█" * filled + "░" * (BAR - filled)


def as_trend(values: Sequence[float | None], top: float, width: int = TREND) -> str:
    """A curve in blocks, the last value at its right end."""
    letters = "".join(
        " "
        if value is None or not top
        else BLOCKS[round((len(BLOCKS) - 1) * max(0.0, min(1.0, value / top)))]
        for value in values
    )
    return letters.rjust(width)


# -- words -----------------------------------------------------------------------------------------


def as_lines(title: str, lines: Sequence[str]) -> Iterator[RenderableType]:
    if lines:
        yield Text(title, "bold")
        yield from (Text(f"  {line}") for line in reversed(lines))


def as_table(*columns: tuple[str, str]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), show_edge=False
    )
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold")
    return table


def as_pieces(words: Iterable[str]) -> Text:
    """ "name [b]value" each, the value in bold."""
    parts = [
        part
        for word in words
        for part in (word.partition("[b]")[0], (word.partition("[b]")[2], "bold"), "  ")
    ]
    return Text.assemble(*parts)


def as_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def as_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def as_span(seconds: float) -> str:
    whole = round(seconds)
    return (
        f"{whole} s"
        if whole < 120
        else f"{whole // 60} min"
        if whole < 7200
        else f"{whole // 3600} h {whole % 3600 // 60} min"
    )
