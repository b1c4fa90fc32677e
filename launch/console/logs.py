"""The log of a process: a line on stderr for each record, without control characters from peers."""

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from dovetail.protocol.errors import printable

LONGEST_BYTES = 1 << 20
LOOK_EVERY_S = 10.0
STDERR = 2


class OneLine(logging.Formatter):
    """The message in one line without control characters, followed by a traceback, which contains
    only our text."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


class ToStderr(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which puts lines above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def log_to_stderr(level: int, form: str = "%(asctime)s %(levelname)s %(message)s") -> None:
    handler = ToStderr()
    handler.setFormatter(OneLine(form))
    logging.basicConfig(handlers=[handler], level=level)


def keep_stderr_short() -> None:
    """Truncate the file of stderr whenever it has become long. No other process may write to it."""

    def look() -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            cut(STDERR, LONGEST_BYTES)

    threading.Thread(target=look, name="log", daemon=True).start()


def remove_stderr() -> None:
    """Remove the file of stderr after a normal end."""
    file = Path(f"/proc/self/fd/{STDERR}")
    with suppress(OSError):
        if file.is_file():
            file.readlink().unlink()


def cut(descriptor: int, longest_bytes: int) -> None:
    """Shorten a longer file to the last lines that make up half of this size."""
    size, half = os.fstat(descriptor).st_size, longest_bytes // 2
    if size <= longest_bytes:
        return
    last = os.pread(descriptor, half, size - half)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, last[last.find(b"\n") + 1 :])
