"""A command in a terminal of its own."""

import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from support.patience import PATIENCE_S

ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|[()][A-Z0-9])")


class Terminal:
    """A command in a terminal of 80 x 24, and what it has shown."""

    def __init__(self, environment: dict[str, str], command: Sequence[str]) -> None:
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
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )
        os.close(theirs)

    def until(self, pattern: str) -> None:
        """Read until this is shown, since the last keys."""
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(pattern, shown := ESCAPE.sub("", self.said.decode(errors="replace"))):
            assert time.monotonic() < deadline, shown[-2000:]
            assert self.read(), shown[-2000:]

    def press(self, keys: str) -> None:
        self.said = b""
        os.write(self.ours, keys.encode())

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
