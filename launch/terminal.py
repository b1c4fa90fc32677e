"""What people see while they wait: a spinner, a progress bar, a table. Only on a terminal; without one there is silence.

All of it goes to stderr, but for tables, which are results. rich obeys NO_COLOR.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import click

from dovetail.protocol.errors import printable

SAY_EVERY_S = 10.0
QUANTISED = "layers quantised"
"""How a line of a worker ends that says how far it has got."""
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
def progress_bar(total: int, unit: str, remaining: Callable[[], float | None] | None = None) -> Iterator[Callable[[str], None]]:
    """A bar over `total` steps; what it yields takes one step and says which comes next. `remaining` says how many seconds are left, where steps differ."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Left(ProgressColumn):
        """What `remaining` says, as often as the bar is drawn."""

        def render(self, task: Task) -> Text:
            return Text(f"{clock_text(remaining() if remaining is not None else None)} left", style="progress.remaining")

    left = TimeRemainingColumn() if remaining is None else Left()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), left, TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


@contextmanager
def counting_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar that is drawn when what it yields is first told how many steps of how many are done; without a terminal a line now and then."""
    bars: list[Callable[[str], None]] = []
    drawn, said_s = 0, 0.0

    def tell(done: int, all_steps: int) -> None:
        nonlocal drawn, said_s
        if sys.stderr.isatty():
            bars[:] = bars or [stack.enter_context(progress_bar(all_steps, unit))]
            for _ in range(drawn, done):
                bars[0]("")
            drawn = done
        elif (now_s := time.monotonic()) - said_s >= SAY_EVERY_S:
            said_s = now_s
            note(f"{done} of {all_steps} {unit}")

    with ExitStack() as stack:
        yield tell


def clock_text(seconds: float | None) -> str:
    """A duration as a clock shows it: 0:07, 1:02:03; dashes for one that is not known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout; numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, heading in enumerate(headings):
        numeric = all(isinstance(row[index], int | float | None) or row[index] in ("", "-") for row in rows)
        widest = max(map(len, heading.split()), default=0)
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold", min_width=widest)
    for row in rows:
        table.add_row(*(format_cell(cell) for cell in row))
    # with a height beside it the width holds for a "dumb" terminal too, which rich takes for 80 columns else
    width, height = (None, None) if sys.stdout.isatty() else (WIDTH_WITHOUT_TERMINAL, HEIGHT_WITHOUT_TERMINAL)
    Console(width=width, height=height).print(table, markup=False)


def explained(columns: Mapping[str, str], heading: str = "Columns:") -> str:
    """What the columns of a table mean, a line each, for the end of a command's help; the first line keeps click from filling them up."""
    width = max(map(len, columns))
    return "\n".join(("\b", heading, *(f"  {name:<{width}}  {meaning}" for name, meaning in columns.items())))


def in_print(value: Any) -> Any:
    """Plain values with nothing in their texts that a terminal takes for commands."""
    if isinstance(value, dict):
        return {name: in_print(inner) for name, inner in value.items()}
    return tuple(map(in_print, value)) if isinstance(value, tuple | list) else printable(value) if isinstance(value, str) else value


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
