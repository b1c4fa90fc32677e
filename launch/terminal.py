"""What people see while they wait: a spinner, a progress bar, a table. Only on a terminal; without one there is silence.

All of it goes to stderr, but for tables, which are results. rich obeys NO_COLOR.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import click

WIDTH_WITHOUT_TERMINAL, HEIGHT_WITHOUT_TERMINAL = 200, 50


def note(text: str) -> None:
    """A line for the person in front of it, beside the result."""
    click.echo(text, err=True)


@contextmanager
def spinner() -> Iterator[Callable[[str], None]]:
    """Shows that something is under way; what it yields says what."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(text)


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[str], None]]:
    """A bar over `total` steps; what it yields takes one step and says which comes next."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, heading in enumerate(headings):
        numeric = all(isinstance(row[index], int | float | None) or row[index] in ("", "-") for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(format_cell(cell) for cell in row))
    # with a height beside it the width holds for a "dumb" terminal too, which rich takes for 80 columns else
    width, height = (None, None) if sys.stdout.isatty() else (WIDTH_WITHOUT_TERMINAL, HEIGHT_WITHOUT_TERMINAL)
    Console(width=width, height=height).print(table, markup=False)


def explained(columns: Mapping[str, str]) -> str:
    """What the columns of a table mean, a line each, for the end of a command's help; the first line keeps click from filling them up."""
    width = max(map(len, columns))
    return "\n".join(("\b", "Columns:", *(f"  {name:<{width}}  {meaning}" for name, meaning in columns.items())))


def counted(number: int, one: str, many: str = "") -> str:
    """So many of something, in words; `many` where an s does not do."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_cell(cell: object) -> str:
    """A number with the digits that mean something; nothing for None."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
