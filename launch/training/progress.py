"""Shows the progress and the result of a training: a bar on a terminal, plain lines elsewhere."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dovetail.workers.training.run import Progress

PLAIN_LINE_EVERY_S = 15.0


def tell(result: Mapping[str, Any], line: str, *, as_json: bool) -> None:
    click.echo(json.dumps(result) if as_json else line)


@contextlib.contextmanager
def show_progress() -> "Iterator[Callable[[Progress], None]]":
    """A bar on a terminal; elsewhere a plain line now and then."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console) as bars:
        tasks: dict[str, Any] = {}

        def show(at: "Progress") -> None:
            if at.stage not in tasks:
                tasks[at.stage] = bars.add_task(at.stage, total=1.0, note="")
            bars.update(tasks[at.stage], completed=at.done, note=_note(at))

        yield show


def _plain_lines() -> "Callable[[Progress], None]":
    last = -PLAIN_LINE_EVERY_S

    def show(at: "Progress") -> None:
        nonlocal last
        if at.done >= 1 or time.monotonic() - last >= PLAIN_LINE_EVERY_S:
            last = time.monotonic()
            click.echo(f"{at.stage} {at.done:.0%}: {_note(at)}", err=True)

    return show


def _note(at: "Progress") -> str:
    loss = "" if at.loss != at.loss else f", loss {at.loss:.3f}"
    speed = f", {at.tokens / at.spent_s:,.0f}/s" if at.spent_s else ""
    return f"{at.tokens:,} tokens{speed}{loss}{', ' if at.note else ''}{at.note}"
