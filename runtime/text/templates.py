"""Renders chat templates, which are programs, in separate processes (`rendering.py`)."""

import atexit
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from dovetail.protocol.errors import RequestError
from dovetail.protocol.messages import MAX_TEXT

CPU_S = 1.0  # CPU seconds of a rendering; templates of current models take about a millisecond
WALL_S = 30.0  # seconds of a rendering on a busy machine
LOOK_S = 1.0  # seconds between checks of a process that has not answered
MEMORY = 256 << 20  # bytes of memory of a rendering
RENDERERS = 4  # most processes; another is started only when all are busy
LARGEST = 96 << 20
"""Resident bytes beyond which a process is replaced after a rendering; it starts with 20 MB."""
OUT_OF_MEMORY = 3
ENDED = "x"
INSTEAD = "use /v1/completions, or `dovetail generate --raw`, for plain text"

log = logging.getLogger("dovetail.templates")


class _Lost(Exception):
    """The process was killed or stopped from outside."""


class Renderer:
    """A thread-safe pool of rendering processes, started on demand."""

    def __init__(self, cpu_s: float = CPU_S) -> None:
        self._cpu_s = cpu_s
        self.forget()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """Start with an empty pool after a fork, since the parent owns the processes."""
        self._idle: list[_Process] = []
        self._places = BoundedSemaphore(RENDERERS)

    def close(self) -> None:
        """End all idle processes; `render` starts new ones."""
        with suppress(IndexError):
            while True:
                self._idle.pop().end()

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """Render a template over messages of strings or parts; `RequestError` if it fails."""
        try:
            job = json.dumps([template, MAX_TEXT, values], ensure_ascii=False)
        except RecursionError:
            raise RequestError("settings", "chat_template_kwargs are nested too deeply") from None
        with self._places:
            for last in (False, True):
                process = self._take()
                try:
                    kind, text = process.ask(job.encode("utf-8", "surrogatepass"))
                except _Lost as lost:
                    log.warning("a process that renders chat templates %s", lost)
                    if last:
                        raise RequestError(
                            "internal", f"the process that renders the chat template {lost}"
                        ) from None
                else:
                    break
            if kind != ENDED and process.resident < LARGEST:
                self._idle.append(process)
            else:
                process.end()
        if kind == "t":
            return text
        why = {"c": f"cannot be used ({text}): {INSTEAD}", "f": f"fails on these messages: {text}"}
        raise RequestError("settings", f"the chat template of the target {why.get(kind, text)}")

    def _take(self) -> "_Process":
        """Return an idle process or a new one."""
        with suppress(IndexError):
            while True:
                if (process := self._idle.pop()).well:
                    return process
                process.end()
        try:
            return _Process(self._cpu_s)
        except OSError as error:
            raise RequestError(
                "internal", f"the process that renders chat templates cannot be started: {error}"
            ) from None


class _Process:
    """A rendering process; it ends with the thread that started it."""

    def __init__(self, cpu_s: float) -> None:
        self._limits = {
            -signal.SIGPROF: f"takes more than {cpu_s:g} s of CPU time",
            OUT_OF_MEMORY: f"takes more than {MEMORY >> 20} MiB of memory",
        }
        script = Path(__file__).with_name("rendering.py")
        arguments = [str(os.getpid()), str(MEMORY), str(cpu_s)]
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script), *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
            )
        self.pid = self._process.pid

    def ask(self, job: bytes) -> tuple[str, str]:
        """Return the kind and text of the answer (`rendering.py`); `_Lost` without one."""
        self._until_s = time.monotonic() + WALL_S
        try:
            self._channel.settimeout(WALL_S)
            self._channel.sendall(len(job).to_bytes(8) + job)
            answer = self._read(int.from_bytes(self._read(8)))
            return chr(answer[0]), answer[1:].decode("utf-8", "surrogatepass")
        except TimeoutError:
            stopped = not self.well
            self.end()
            if stopped:
                raise _Lost("was stopped") from None
            return ENDED, f"takes more than {WALL_S:g} s"
        except (OSError, EOFError):
            code = self.end(grace_s=1.0)
            if code in self._limits:
                return ENDED, self._limits[code]
            raise _Lost(f"ended ({'signal' if code < 0 else 'exit code'} {abs(code)})") from None

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            self._channel.settimeout(LOOK_S)
            try:
                part = self._channel.recv(min(size, 1 << 20))
            except TimeoutError:
                if self.well and time.monotonic() < self._until_s:
                    continue
                raise
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    @property
    def well(self) -> bool:
        """Return whether the process is alive and not stopped."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][:1]
        return state not in "TtXZ"

    @property
    def resident(self) -> int:
        """Return the resident memory in bytes."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * resource.getpagesize()

    def end(self, grace_s: float = 0.0) -> int:
        """Return the exit code; the process is killed if it does not exit within `grace_s`."""
        self._channel.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(grace_s)
        self._process.kill()
        return self._process.wait()


RENDERER = Renderer()  # the pool of this process
