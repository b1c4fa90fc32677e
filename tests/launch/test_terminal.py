"""Words and tables for people."""

import contextlib
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch import cli
from dovetail.launch.bench.figures import COLUMNS, CSV_COLUMNS, SWEPT, show
from dovetail.launch.bench.load import measured as load_table
from dovetail.launch.console import terminal
from dovetail.launch.console.logs import OneLine, cut
from dovetail.launch.console.terminal import (
    beside_each_other,
    counted,
    explained,
    progress_bar,
    spinner,
)
from dovetail.protocol.codec import encode
from dovetail.protocol.links import open_link
from support.patience import PATIENCE_S
from support.scripted import hello


@pytest.mark.parametrize(("number", "words"), [(0, "0 replies"), (1, "1 reply"), (2, "2 replies")])
def test_one_of_something_is_not_several(number: int, words: str) -> None:
    assert counted(number, "reply", "replies") == words


def test_columns_are_explained_a_line_each_as_long_as_a_terminal_is_wide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explained({"a": "one", "long": "two"}) == "\b\nColumns:\n  a     one\n  long  two"
    assert cli.run(["bench", "--help-all"]) == 0
    heading = r" *Columns(?: of --csv| with --concurrency)?:\n"
    parts = re.split(heading, capsys.readouterr().out)[1:]
    tables = ({**COLUMNS, **SWEPT}, CSV_COLUMNS, load_table.COLUMNS)
    for part, columns in zip(parts, tables, strict=True):
        shown = part.strip("\n").splitlines()
        assert [" ".join(line.split()) for line in shown] == [
            f"{name} {meaning}" for name, meaning in columns.items()
        ]
        assert max(map(len, shown)) <= 80


def everything(reader: int) -> str:
    """All that was written to a terminal that is closed: Linux ends it with EIO."""
    shown = b""
    with os.fdopen(reader, "rb", buffering=0) as screen, contextlib.suppress(OSError):
        while part := screen.read(1 << 16):
            shown += part
    return shown.decode()


def test_where_nothing_is_to_be_done_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        with progress_bar(0, "replies") as step:
            step("")
    assert everything(reader) == ""


def test_without_a_terminal_a_spinner_prints_each_phase_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with spinner(lines=True) as say:
        for text in ("starting a", "loading a\n  1 %", "loading a\n  2 %", "starting a"):
            say(text)
    assert capsys.readouterr().err == "starting a\nloading a\n"


def test_a_bar_says_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        monkeypatch.setenv("TERM", "xterm")
        with progress_bar(4, "replies") as step:
            step("a prompt")
    shown = everything(reader)
    assert "1/4" in shown
    assert "a prompt" in shown
    assert re.search(r"-:--:--|\d:\d\d:\d\d", shown)


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(4, "replies") as step:
        step("a prompt")
    assert capsys.readouterr() == ("", "")


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
def test_columns_that_do_not_fit_follow_below_beside_the_first_again(
    widths: list[int], most: int, expected: list[list[int]]
) -> None:
    assert beside_each_other(widths, most) == expected
    assert sorted({column for columns in expected for column in columns}) == list(
        range(len(widths))
    )


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_of_a_bench_has_a_line_a_row_what_matters_most_first_and_no_column_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setattr(terminal, "WIDTH_WITHOUT_TERMINAL", width)
    row: dict[str, object] = {
        "prompts": "prompts",
        "temperature": 0.0,
        "tokens_per_s": 124.04,
        "tau": 5.0771,
    }
    row |= {
        "speedup": 2.18,
        "speedup_low": 1.85,
        "speedup_high": 2.55,
        "verified_tokens": 157,
        "calls": 10,
        "draft_share": 0.06,
        "verify_share": 0.76,
    }
    row |= {
        "hit_rate": 0.88,
        "plain_share": 0.01,
        "peak_rss_mb": 1396.0,
        "predicted_tokens_per_s": 123.2,
        "draft_failures": 0,
    }
    rows = [{**row, "method": "none"}, {**row, "method": "small"}]
    show(
        {
            "rows": rows,
            "passes": [{"ratio": 1.93}] * 2,
            "differences": [],
            "prompts": [],
            "medians": [],
            "peers": [],
            "against": [],
        }
    )
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= width
    tables = [line.split() for line in shown if line.strip().startswith("method")]
    assert [
        name for table in tables for name in table if name not in ("method", "prompts", "T")
    ] == [*COLUMNS][3:]
    assert all(table[:3] == ["method", "prompts", "T"] for table in tables)
    assert "differ" in tables[0]
    lines = [line for line in shown if line.strip().startswith("small")]
    assert len(lines) == len(tables)
    assert "2.18 (1.85-2.55)" in lines[0]
    assert " 5.08 " in lines[0]


def test_columns_that_say_whose_a_row_is_stand_in_every_table() -> None:
    assert beside_each_other([6, 6, 10, 10, 10], 40, keys=2) == [[0, 1, 2, 3], [0, 1, 4]]
    assert beside_each_other([6, 6], 5, keys=2) == [[0, 1]]


NAME = "gpu\n2026-01-01 00:00:00,000 INFO forged\r\x1b[2J\x1b]0;owned\x07\u202egnorw"
Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("words", ["a\nb", "a\rb", "\x1b[31mred", "\x00", "\u2028", "\u202e"])
def test_a_record_is_one_printable_line(words: str) -> None:
    line = OneLine("%(levelname)s %(message)s").format(
        logging.LogRecord("x", logging.INFO, "", 0, "worker %s", (words,), None)
    )
    assert line.isprintable()
    assert line.startswith("INFO worker ")


BESIDE_A_BAR = """
import logging
from dovetail.launch.console.logs import log_to_stderr
from dovetail.launch.console.terminal import counting_bar, note, progress_bar, spinner
log_to_stderr(logging.INFO)
with spinner() as say:
    say("a bar")
    logging.info("line")
with progress_bar(2, "a bar"):
    logging.info("line")
    note("INFO line")
with counting_bar("a bar") as tell:
    tell(1, 2)
    logging.info("line")
"""


def test_a_line_of_the_log_does_not_run_into_a_bar() -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", BESIDE_A_BAR],
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    ):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 1 << 16):
                shown += piece
    os.close(ours)
    lines = re.split(r"\n|\x1b\[2K", shown.decode())
    assert sum("INFO line" in line for line in lines) == 4
    assert not any("INFO line" in line and "a bar" in line for line in lines)


def test_a_process_that_ends_as_it_should_removes_its_own_log_and_no_device(tmp_path: Path) -> None:
    code = "from dovetail.launch.console.logs import remove_stderr; remove_stderr()"
    for file in (tmp_path / "log", Path(os.devnull)):
        with file.open("ab") as log:
            subprocess.run([sys.executable, "-P", "-c", code], stderr=log, check=True)
    assert [*tmp_path.iterdir()] == []
    assert Path(os.devnull).exists()


def test_a_file_that_has_become_long_keeps_its_last_lines_and_takes_more(tmp_path: Path) -> None:
    lines = [f"line {number}\n".encode() for number in range(100)]
    with (tmp_path / "log").open("a+b", buffering=0) as log:
        log.writelines(lines)
        before = (tmp_path / "log").read_bytes()
        cut(log.fileno(), len(before))
        assert (tmp_path / "log").read_bytes() == before
        cut(log.fileno(), 200)
        log.write(b"more\n")
    kept = (tmp_path / "log").read_bytes()
    assert 80 < len(kept) <= 105
    assert kept.splitlines(keepends=True) == [*lines, b"more\n"][-len(kept.splitlines()) :]


def test_a_name_forges_no_line_in_the_log_and_clears_no_screen(start: Start, run: Run) -> None:
    process = start("coordinator")
    assert process.stdout is not None
    assert process.stderr is not None
    address = process.stdout.readline().strip()
    with contextlib.closing(open_link(address, role="draft")) as link:
        link.send(
            encode(
                hello("draft", epoch=7, name=NAME, host=NAME, model=NAME, device=NAME, binding=NAME)
            )
        )
        assert link.receive(PATIENCE_S) is not None
        shown = run("status", "--connect", address)
    process.terminate()
    _, log = process.communicate()
    assert shown.returncode == 0, shown.stderr
    for text in (shown.stdout, log):
        assert "forged" in text
        assert all(line.isprintable() for line in text.splitlines())
        assert not any(line.startswith("2026-01-01") for line in text.splitlines())
