"""Names that peers give themselves reach logs and terminals as words, never as lines or
commands."""

import contextlib
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dovetail.launch.console.logs import OneLine, cut
from dovetail.protocol.codec import encode
from dovetail.protocol.links import open_link
from support.patience import PATIENCE_S
from support.scripted import hello

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
