"""The state in which `top` and `chat` leave a terminal when something ends them: its modes, its
screen, its cursor, and nothing that runs."""

import fcntl
import itertools
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from dovetail.launch.processes.stack import Stack
from support.cases import everyday
from support.patience import PATIENCE_S

DOVETAIL = (sys.executable, "-P", "-m", "dovetail.launch.cli")
BROKEN = (
    sys.executable,
    "-P",
    "-c",
    """
import sys
from dovetail.launch import cli
from dovetail.launch.commands import top
from dovetail.launch.console import screen
def page(*_):
    raise RuntimeError("no page")
top.page = page
sys.argv = ["dovetail", *sys.argv[1:]]
cli.main()
""",
)
ELSEWHERE = (
    sys.executable,
    "-P",
    "-c",
    """
import signal, sys, threading
from dovetail.launch import cli
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
sys.argv = ["dovetail", *sys.argv[1:]]
cli.main()
""",
)
"""Its signals arrive on a thread of their own, so that they interrupt nothing the main thread waits
for."""
SHOWN = {"top": b"just now", "chat": b"you> "}
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, environment: dict[str, str], command: tuple[str, ...]) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(self.ours, (24, 80))
        self.before = termios.tcgetattr(self.ours)
        self.said = b""
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environment, "TERM": "xterm"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def wait_for(self, words: bytes) -> None:
        """Read until this is shown."""
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.said:
            assert time.monotonic() < deadline, self.said
            assert self.read(), self.said

    def read(self) -> bool:
        """Read what there is; whether there may be more."""
        if select.select([self.ours], [], [], 0.1)[0]:
            try:
                self.said += os.read(self.ours, 1 << 16)
            except OSError:  # nobody holds the other end any more
                return False
        return True

    def end(self) -> int:
        """The exit code, when all has been read."""
        deadline = time.monotonic() + PATIENCE_S
        while self.read():
            assert time.monotonic() < deadline, self.said
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """Make the terminal go away."""
        os.close(self.ours)
        self.ours = -1


@contextmanager
def terminal(environment: dict[str, str], *command: str) -> Iterator[Terminal]:
    shown = Terminal(environment, command)
    try:
        yield shown
    finally:
        shown.process.kill()
        shown.process.wait()
        if shown.ours >= 0:
            shown.close()


def is_as_before(shown: Terminal) -> bool:
    """Return whether the modes are as they were, and neither another screen nor a hidden cursor is
    left."""
    pairs = ((ENTER_SCREEN, LEAVE_SCREEN), (HIDE_CURSOR, SHOW_CURSOR))
    left = all(shown.said.rfind(begin) <= shown.said.rfind(end) for begin, end in pairs)
    return left and termios.tcgetattr(shown.ours) == shown.before


@pytest.mark.parametrize(
    ("name", "number"),
    everyday(
        itertools.product(["top", "chat"], [signal.SIGTERM, signal.SIGHUP]),
        *(("top", signal.SIGHUP), ("chat", signal.SIGTERM)),
    ),
)
def test_a_signal_leaves_the_terminal_as_it_was(
    environment: dict[str, str], stack: Stack, name: str, number: signal.Signals
) -> None:
    with terminal(environment, *DOVETAIL, name, "--connect", stack.address) as shown:
        shown.wait_for(SHOWN[name])
        assert termios.tcgetattr(shown.ours) != shown.before or name == "chat"
        shown.process.send_signal(number)
        assert shown.end() == 128 + number
        assert is_as_before(shown)
        assert b"Traceback" not in shown.said


@pytest.mark.parametrize("name", ["top", "chat"])
def test_a_signal_that_interrupts_no_wait_is_heeded(
    environment: dict[str, str], stack: Stack, name: str
) -> None:
    with terminal(environment, *ELSEWHERE, name, "--connect", stack.address) as shown:
        shown.wait_for(SHOWN[name])
        shown.process.send_signal(signal.SIGTERM)
        assert shown.end() == 128 + signal.SIGTERM
        assert is_as_before(shown)


@pytest.mark.parametrize("name", ["top", "chat"])
def test_a_terminal_that_goes_away_ends_its_command(
    environment: dict[str, str], stack: Stack, name: str
) -> None:
    with terminal(environment, *DOVETAIL, name, "--connect", stack.address) as shown:
        shown.wait_for(SHOWN[name])
        shown.close()
        assert shown.process.wait(PATIENCE_S) == 128 + signal.SIGHUP


def test_an_error_of_our_own_leaves_the_terminal_as_it_was_and_is_told(
    environment: dict[str, str], stack: Stack
) -> None:
    with terminal(environment, *BROKEN, "top", "--connect", stack.address) as shown:
        assert shown.end() == 1
        assert is_as_before(shown)
        assert shown.said.rfind(b"no page") > shown.said.rfind(LEAVE_SCREEN)


@pytest.mark.slow
def test_a_reply_that_a_signal_breaks_off_leaves_no_process_of_the_conversation(
    environment: dict[str, str],
) -> None:
    with terminal(
        environment, *DOVETAIL, "chat", "--draft", "ngram", "--temperature", "50"
    ) as shown:
        shown.wait_for(SHOWN["chat"])
        children = psutil.Process(shown.process.pid).children()
        assert len(children) >= 3
        os.write(shown.ours, b"Hello.\n")
        shown.wait_for(b"Hello.\r\n")
        shown.process.send_signal(signal.SIGHUP)
        assert shown.end() == 128 + signal.SIGHUP
        assert is_as_before(shown)
        assert not any(child.is_running() for child in children)
