"""Processes of ours that were forked from one that has imported what they need, as their supervisor
sees them: `nursery.py` is that one."""

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from dovetail.launch.processes.nursery import MAX_BYTES, READY
from dovetail.protocol.errors import DovetailError

PR_SET_CHILD_SUBREAPER = 36


class Forked:
    """A child of ours that another process has forked for us, with what is used of
    `subprocess.Popen`. One thread uses it."""

    stdout: IO[bytes] | None = None

    def __init__(self, pid: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self.returncode: int | Any = None
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return how it ended, as `returncode` has it; None: it has not."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
                os.close(self._end)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; `subprocess.TimeoutExpired` where it has not in time."""
        if self.poll() is None:
            select.select([self._end], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Talk:
    """Our end of the socket of a process that forks others for us."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def begun(self) -> bool:
        """Wait until it has imported what it was told; False: it has ended."""
        self.theirs.close()
        return self._ours.recv(MAX_BYTES) == READY

    def fork(self, arguments: Sequence[str], stderr: IO[bytes]) -> Forked:
        """Have it fork a command of ours, whose stdin is ours to write to."""
        read, write = os.pipe()
        with os.fdopen(read, "rb") as stdin, _adopting():
            packet = json.dumps(arguments).encode()
            socket.send_fds(self._ours, [packet], [stdin.fileno(), stderr.fileno()])
            if not (answer := self._ours.recv(MAX_BYTES)):
                os.close(write)
                raise DovetailError("the process that starts workers has ended")
            return Forked(int(answer), os.fdopen(write, "wb", buffering=0))

    def close(self) -> None:
        """Close both ends; a second call does nothing."""
        self._ours.close()
        self.theirs.close()


@contextmanager
def _adopting() -> Iterator[None]:
    """Whose parent ends within the block, and descends from us, is our child from then on."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
