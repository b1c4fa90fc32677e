"""The duties of a process that a supervisor started: it ends when it is told to, and when its
supervisor ends, and shows where it is when it is asked."""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

PR_SET_PDEATHSIG = 1
COMMAND_LINE = "dovetail-command"
"""The name of a file in memory that a process holds open."""
LET_GO = 3
"""Exit code of a worker that was drained or replaced, and of one under a supervisor that the
coordinator wants no more: it is not to be started again."""


def end_with(parent: int) -> None:
    """Have the kernel end this process when the one that started it ends, even by SIGKILL; asked
    too late, end at once."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(0)


def end_when_told() -> None:
    """SIGTERM lets this process go: it unwinds, closes what it opened, and ends with exit code 0.

    SIGHUP, a closed terminal, is the same as SIGTERM, whoever handles that by then - unless it is
    ignored already, as under nohup.
    """

    def leave(_signal: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(0)

    def hang_up(_signal: int, _frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def show_stacks_when_asked() -> None:
    """SIGUSR1 has this process write to stderr where all its threads are, whatever they are
    about."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def keep_command_line(arguments: Sequence[str]) -> None:
    """Keep the command of this process, which was forked, where others of this user find it: the
    kernel has that of the process that it was forked from."""
    for inherited in [*_kept("self")]:
        os.close(int(inherited.name))
    os.write(os.memfd_create(COMMAND_LINE), os.fsencode("\0".join(arguments)))


def command_line(process: int) -> list[str]:
    """Return the command of a process of this user, whether it was forked or not; `OSError` where
    it cannot be read."""
    file = next(_kept(str(process)), Path(f"/proc/{process}/cmdline"))
    return os.fsdecode(file.read_bytes().rstrip(b"\0")).split("\0")


def _kept(process: str) -> Iterator[Path]:
    """Yield the descriptors of a process that hold its command."""
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has been closed meanwhile
            if descriptor.readlink().name.startswith(f"memfd:{COMMAND_LINE}"):
                yield descriptor


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Have this process end as soon as the block is left by `sys.exit`: what an interpreter that
    has imported torch puts away takes a second, and the system does it too."""
    try:
        yield
    except SystemExit as told:
        sys.stderr.flush()
        os._exit(told.code if isinstance(told.code, int) else 0)


def end_undisturbed() -> None:
    """This process ends by itself from here on: being told so does not break into what it still
    puts away."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def claim_stdout() -> TextIO:
    """stdout for what we say to whoever started us; whatever else prints there from now on
    (ONEDNN_VERBOSE and its like) goes to stderr."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return said
