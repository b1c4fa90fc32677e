"""Spinners, progress bars and tables. Progress is shown only on a terminal, on stderr; tables are
results. rich obeys NO_COLOR. Before a session begins over the network, a notice lists the data that
will be sent: token ids and, for heads, hidden states; never weights."""

import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

from dovetail.protocol.errors import printable
from dovetail.protocol.messages import (
    DraftFailure,
    Hello,
    LoadingState,
    Reported,
    Result,
    WorkerState,
)

SAY_EVERY_S = 10.0
BAR_CELLS = 24
QUANTISED = "layers quantised"  # the end of a worker's line of progress
WIDTH_WITHOUT_TERMINAL, HEIGHT_WITHOUT_TERMINAL = 200, 50
GAP, MOST_WORD = 2, 24
"""Spaces between two columns of a table, and the longest word that is not broken."""
FIGURE = re.compile(r"[+-]?\d[\d.,]*( ?%|x| \([\d.-]+\))?")
"""Matches a cell with a number: 3, 1.70, 84%, 1.17x, 2.38 (1.87-2.65)."""


def note(text: str) -> None:
    """Print a line for the user on stderr, above any progress bar."""
    print(text, file=sys.stderr, flush=True)


class Intervals:
    """Progress of loading models without a terminal: a line every `SAY_EVERY_S`."""

    def __init__(
        self, say: Callable[[str], None] = note, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock_s = say, clock_s
        self._said_s: float | None = None

    def tell(self, loading: Sequence[LoadingState]) -> None:
        """Print the progress of each of these, if it is due."""
        now_s = self._clock_s()
        if not loading or self._said_s is None:
            self._said_s = now_s if loading else None
        elif now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            for state in loading:
                self._say(printable(state.words))


def loading_text(loading: Sequence[LoadingState]) -> str:
    """Return the progress of loading models, for a terminal: a bar, bytes, rate and time left of
    each; empty if none is loading."""
    return "".join(
        f"\n  {_bar(state.done / state.total)} {printable(state.words)}"
        if state.total
        else f"\n  {printable(state.words)}"
        for state in loading
    )


def _bar(share: float) -> str:
    full = int(BAR_CELLS * min(1.0, share))
    return "━" * full + "╌" * (BAR_CELLS - full)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the end of this block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def unwound_by_signals() -> Iterator[None]:
    """On SIGTERM and SIGHUP, unwind this block, which restores the terminal, and exit with 128 plus
    the signal. Ignored signals (nohup) stay ignored, as do errors of a closed terminal."""

    def unwind(number: int, _frame: FrameType | None) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
        sys.exit(128 + number)

    before = {
        number: handler
        for number in (signal.SIGTERM, signal.SIGHUP)
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, unwind)
    try:
        yield
    except (OSError, EOFError) as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, SystemExit):
            behind = behind.__context__
        raise behind or error from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def spinner(*, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner; call the yielded function with the text to show. `lines`: without a terminal, the
    first line of each text is printed once."""
    if not sys.stderr.isatty():
        said = set[str]()

        def print_once(text: str) -> None:
            if lines and (line := text.partition("\n")[0]) not in said:
                said.add(line)
                note(line)

        yield print_once
        return
    from rich.console import Console
    from rich.markup import escape

    status = Console(stderr=True).status("")

    def say(text: str) -> None:
        status.update(escape(text))
        status.start()

    try:
        yield say
    finally:
        status.stop()


@contextmanager
def progress_bar(total: int, unit: str) -> Iterator[Callable[[str], None]]:
    """A bar over `total` steps; after each step call the yielded function with the name of the
    next. Without steps there is no bar."""
    if not total or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress as bars
    from rich.console import Console

    names = bars.TextColumn(unit), bars.TimeRemainingColumn(), bars.TextColumn("{task.description}")
    columns = bars.BarColumn(), bars.MofNCompleteColumn(), *names
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


@contextmanager
def counting_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar; call the yielded function with the steps done and their total. Without a terminal it
    prints a line from time to time."""
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


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, keys: int = 1, whole: bool = False
) -> None:
    """Print a table on stdout, numbers right-aligned. Columns that do not fit follow in a second
    table, which repeats the first `keys` columns. `whole`: no cell is wrapped."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    # with a height, the width also applies to a "dumb" terminal, for which rich assumes 80 columns
    # else
    width, height = (
        (None, None) if sys.stdout.isatty() else (WIDTH_WITHOUT_TERMINAL, HEIGHT_WITHOUT_TERMINAL)
    )
    console = Console(width=width, height=height)
    columns = [[row[index] for row in rows] for index in range(len(headings))]
    pairs = zip(headings, columns, strict=True)
    widths = [_least_width(heading, cells, whole=whole) for heading, cells in pairs]
    for shown in beside_each_other(widths, console.width - GAP, keys):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for index in shown:
            side: Any = "right" if all(map(_is_number, columns[index])) else "left"
            width = widths[index]
            table.add_column(headings[index], justify=side, overflow="fold", min_width=width)
        for row in rows:
            table.add_row(*(format_cell(row[index]) for index in shown))
        console.print(table, markup=False)


def beside_each_other(widths: Sequence[int], most: int, keys: int = 1) -> list[list[int]]:
    """Split columns of these widths into tables of at most `most` characters; the first `keys`
    columns are in each."""
    first = [*range(min(keys, len(widths)))]
    found = [first] if widths else []
    for column in range(len(first), len(widths)):
        beside = [*found[-1], column]
        if len(found[-1]) > len(first) and sum(widths[one] + GAP for one in beside) > most:
            beside = [*first, column]
            found.append(beside)
        found[-1] = beside
    return found


def _least_width(heading: str, cells: Sequence[object], *, whole: bool) -> int:
    """Return the least width of a column that wraps between words, or not at all if `whole`; words
    longer than MOST_WORD may be broken in any case."""
    parts = [
        *heading.split(),
        *(part for text in map(format_cell, cells) for part in ([text] if whole else text.split())),
    ]
    return min(MOST_WORD, max(map(len, parts), default=0))


def _is_number(cell: object) -> bool:
    """True if a cell is aligned to the right: a figure, with or without a unit, or a missing
    one."""
    return (
        isinstance(cell, int | float | None)
        or cell in ("", "-")
        or FIGURE.fullmatch(str(cell)) is not None
    )


def explained(columns: Mapping[str, str], heading: str = "Columns:") -> str:
    """Return the meaning of a table's columns, one a line, for the end of a command's help; the
    first line keeps click from rewrapping them."""
    width = max(map(len, columns))
    return "\n".join(
        ("\b", heading, *(f"  {name:<{width}}  {meaning}" for name, meaning in columns.items()))
    )


def in_print(value: Any) -> Any:
    """Plain values without control characters in their texts."""
    if isinstance(value, dict):
        return {name: in_print(inner) for name, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(map(in_print, value))
    if isinstance(value, str):
        return printable(value)
    return value


def counted(number: int, one: str, many: str = "") -> str:
    """A count with its noun, such as "2 rounds"; `many`: an irregular plural."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_cell(cell: object) -> str:
    """A number with its significant digits; empty for None."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def failure_told(failure: DraftFailure) -> str:
    """Return a warning of one line."""
    when = f"in round {failure.round}, {failure.after_s:.2f} s after the request arrived"
    return (
        f"warning: the draft worker {printable(failure.draft)} failed {when}: "
        f"{printable(failure.error)}; the tokens are unaffected"
    )


def first_failure(results: Iterable[Result]) -> tuple[int, DraftFailure | None]:
    """Return the number of replies whose draft failed, and the first failure."""
    found = [result.draft_failure for result in results if result.draft_failure is not None]
    return len(found), next(iter(found), None)


NEVER = "no weights, no files"


def leaves_the_machine(address: str) -> bool:
    """True if messages to this address may go over a network."""
    return address.startswith("tcp://")


def of_worker(hello: Hello, address: str) -> str:
    """Describe the data that a worker with this Hello receives and sends."""
    reads, tokenizer = hello.reads, hello.tokenizer
    gets, sends = ["token ids of prompts and replies", "the settings of requests"], ["token ids"]
    if "target" in hello.roles:
        gets.append("proposed token ids")
        sends.append("their margins (log-probabilities if requested)")
        if hello.states is not None:
            size = f"2 x {hello.states.width} bytes a token and layer"
            sends.append(f"for a draft that reads them, hidden states of {size}")
    else:
        sends.append("their scores")
    if reads is not None:
        gets.append(f"hidden states of {reads.row_bytes} bytes a token")
    if tokenizer is not None:
        sends.append(f"its tokenizer of {counted(len(tokenizer.data), 'byte')} (once)")
    return (
        f"over {address}: it is sent {_listed(gets)}; it sends {_listed(sends)}; {NEVER}, no text"
    )


def of_request(address: str, state: Reported) -> str:
    """Describe what a client's request sends."""
    hops = [
        f"to the {'+'.join(worker.roles)} worker {worker.name} on {worker.host} "
        f"{_to_worker(worker)}"
        for worker in state.workers
        if not (worker.standby or worker.leaving)
    ]
    text = f"over {address}: the prompt is sent as text, text and token ids are returned"
    return "; ".join((text, *hops, NEVER))


def _to_worker(worker: WorkerState) -> str:
    states = f" and hidden states of {worker.feature_bytes} bytes a token"
    return f"go token ids{states if worker.feature_bytes else ''}"


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else parts[0]
