"""Has our functions tried in another process, since a failing one spoils its device context. One
process makes successive trials, to save torch's start; after a crash the function is refused, and a
new process makes the next trial."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import IO

from dovetail.workers.progress import beat

MODULE = "dovetail.workers.models.backends.device.trial"
LIMIT_S = 120.0  # a trial with compiling and torch's start takes about ten seconds
BEAT_S = 0.5
PART = 4096  # bytes that are read at a time
LINGER_S = 1.0  # seconds without a question until the process ends: it takes device memory


class _Process:
    def __init__(self, command: Sequence[str]) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )

    def ask(self, name: str, limit_s: float) -> bytes | None:
        """Return the answer's line; None: the process has ended. `TimeoutError` after `limit_s`."""
        child, end, line = self._child, time.monotonic() + limit_s, b""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(f"{name}\n".encode())
            child.stdin.flush()
        except BrokenPipeError:
            return None
        while not line.endswith(b"\n"):
            beat()
            if select.select([child.stdout], [], [], BEAT_S)[0]:
                if not (part := os.read(child.stdout.fileno(), PART)):
                    return None
                line += part
            elif time.monotonic() > end:
                raise TimeoutError
        return line

    def end(self) -> tuple[int, str]:
        """End the process, if it has not ended; return its code and its last line on stderr."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdout.close()
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        code = self._child.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        return code, lines[-1] if lines else "it wrote nothing to stderr"

    def kill(self) -> None:
        self._child.kill()
        self.end()


class Trials:
    """The trials of our functions on one device."""

    def __init__(
        self,
        device: str,
        module: str = MODULE,
        *,
        limit_s: float = LIMIT_S,
        linger_s: float = LINGER_S,
    ) -> None:
        """`module`: the program that makes them, as `trial.py`."""
        self._command = [sys.executable, "-P", "-m", module, device, str(linger_s)]
        self._limit_s = limit_s
        self._process: _Process | None = None
        self.started = 0  # processes that have been started so far

    def tried(self, name: str) -> bytes | str:
        """Return the result of a trial of the functions `name`; or how it failed."""
        fresh = self._process is None
        process = self._process = self._process or self._start()
        try:
            answer = process.ask(name, self._limit_s)
        except TimeoutError:
            self._process = None
            process.kill()
            return f"its trial did not end within {self._limit_s:.0f} s"
        except BaseException:
            self._process = None
            process.kill()
            raise
        if answer is None:
            self._process = None
            code, word = process.end()
            if not code and not fresh:  # it was idle for too long
                return self.tried(name)
            return f"its trial ended with code {code}: {word}"
        found = json.loads(answer)
        return str(found["refused"]) if "refused" in found else str(found["measured"]).encode()

    def _start(self) -> _Process:
        self.started += 1
        return _Process(self._command)

    def end(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.end()
            self._process = None


_trials_on = cache(Trials)  # by device


def tried(device: str, name: str) -> bytes | str:
    """Return the result of a trial of the functions `name` on a device; or how it failed."""
    return _trials_on(device).tried(name)
