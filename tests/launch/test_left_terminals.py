"""The state in which `top` and `chat` leave a terminal when something ends them: its modes, its
screen, its cursor, and nothing that runs."""

import itertools
import os
import signal
import sys
import termios

import psutil
import pytest

from dovetail.launch.processes.stack import Stack
from support.cases import everyday
from support.patience import PATIENCE_S
from support.terminals import Terminal, terminal

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
SHOWN = {"top": "just now", "chat": "you> "}
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


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
        shown.until(SHOWN[name])
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
        shown.until(SHOWN[name])
        shown.process.send_signal(signal.SIGTERM)
        assert shown.end() == 128 + signal.SIGTERM
        assert is_as_before(shown)


@pytest.mark.parametrize("name", ["top", "chat"])
def test_a_terminal_that_goes_away_ends_its_command(
    environment: dict[str, str], stack: Stack, name: str
) -> None:
    with terminal(environment, *DOVETAIL, name, "--connect", stack.address) as shown:
        shown.until(SHOWN[name])
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
        shown.until(SHOWN["chat"])
        children = psutil.Process(shown.process.pid).children()
        assert len(children) >= 3
        os.write(shown.ours, b"Hello.\n")
        shown.until("Hello.\r\n")
        shown.process.send_signal(signal.SIGHUP)
        assert shown.end() == 128 + signal.SIGHUP
        assert is_as_before(shown)
        assert not any(child.is_running() for child in children)
