"""Words and tables for people."""

import contextlib
import os
import pty
import re
import sys

import pytest

from dovetail.launch import cli
from dovetail.launch.bench_csv import COLUMNS as CSV_COLUMNS
from dovetail.launch.bench_table import COLUMNS, SWEPT
from dovetail.launch.terminal import beside_each_other, clock_text, counted, explained, progress_bar


@pytest.mark.parametrize(("number", "words"), [(0, "0 replies"), (1, "1 reply"), (2, "2 replies")])
def test_one_of_something_is_not_several(number: int, words: str) -> None:
    assert counted(number, "reply", "replies") == words


def test_columns_are_explained_a_line_each_as_long_as_a_terminal_is_wide(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained({"a": "one", "long": "two"}) == "\b\nColumns:\n  a     one\n  long  two"
    assert cli.run(["bench", "--help"]) == 0
    parts = re.split(r" *Columns(?: of --csv)?:\n", capsys.readouterr().out)[1:]
    for part, columns in zip(parts, ({**COLUMNS, **SWEPT}, CSV_COLUMNS), strict=True):
        shown = part.strip("\n").splitlines()
        assert [" ".join(line.split()) for line in shown] == [f"{name} {meaning}" for name, meaning in columns.items()]
        assert max(map(len, shown)) <= 80


def everything(reader: int) -> str:
    """All that was written to a terminal that is closed: Linux ends it with EIO."""
    shown = b""
    with os.fdopen(reader, "rb", buffering=0) as screen, contextlib.suppress(OSError):
        while part := screen.read(1 << 16):
            shown += part
    return shown.decode()


def test_a_bar_on_a_terminal_says_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with progress_bar(4, "replies", lambda: 83.4) as step:
            step("a prompt")
    shown = everything(reader)
    assert "1/4" in shown
    assert "1:23 left" in shown
    assert "a prompt" in shown


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(4, "replies", lambda: 83.4) as step:
        step("a prompt")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("seconds", "text"), [(None, "-:--"), (0.4, "0:00"), (67.0, "1:07"), (3723.0, "1:02:03")])
def test_a_duration_is_told_as_a_clock_shows_it(seconds: float | None, text: str) -> None:
    assert clock_text(seconds) == text


@pytest.mark.parametrize(
    ("widths", "most", "expected"),
    [
        ([], 80, []),
        ([10, 10, 10], 36, [[0, 1, 2]]),
        ([10, 10, 10], 35, [[0, 1], [0, 2]]),
        ([10, 40, 5, 5, 40], 60, [[0, 1], [0, 2, 3], [0, 4]]),
        ([30, 30], 20, [[0, 1]]),
    ],
)
def test_columns_that_do_not_fit_follow_below_beside_the_first_again(widths: list[int], most: int, expected: list[list[int]]) -> None:
    assert beside_each_other(widths, most) == expected
    assert sorted({column for columns in expected for column in columns}) == list(range(len(widths)))
