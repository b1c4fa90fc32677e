"""Processes forked from one with the necessary imports: from this one, if possible, or from the
nursery (`nursery.py`), which is started early: it imports the modules of workers while the command
imports its own, each on its own core."""

import ctypes
import fcntl
import gc
import importlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from dovetail.launch.console.help import NAMES_OF_HELP
from dovetail.launch.files.directory import announcements
from dovetail.launch.processes import nursery
from dovetail.launch.processes.nursery import MAX_BYTES, READY, count_threads
from dovetail.protocol.errors import DovetailError

PR_SET_CHILD_SUBREAPER = 36
PROGRAMS = ("dovetail", "cli.py")  # the files from which a command is run
OURS = (nursery.COMMAND, nursery.__name__)  # the modules that run in forked processes
LOOK_S = 0.005
"""Interval at which a child is polled until it ends: pidfd_open(2) is newer than Linux 4.18."""


def can_fork() -> bool:
    """True if this process may fork: it is a command with a single thread, since a fork would lack
    others."""
    return Path(sys.argv[0]).name in PROGRAMS and count_threads() == 1


def new_log() -> IO[bytes]:
    """Return an anonymous temporary file for the stderr of a process, opened for appending. It
    disappears once no process has it open."""
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
    fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
    return log


class Forked:
    """A forked child, with the used part of the interface of `subprocess.Popen`. Not
    thread-safe."""

    def __init__(
        self, pid: int, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
    ) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: int | Any = None

    def poll(self) -> int | None:
        """Return its `returncode`; None while it runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; `subprocess.TimeoutExpired` if it does not end in time."""
        end_s = time.monotonic() + (math.inf if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() >= end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked


def run_module(
    module: str,
    arguments: Sequence[str],
    stderr: IO[bytes],
    *,
    stdin: int | None = None,
    reads: bool = False,
) -> Process:
    """Run one of our modules as a program in a new session, forked if possible, since a command has
    imported most of the modules that its processes need. `stdin`: a descriptor, `subprocess.PIPE`,
    or nothing; `reads`: we read its stdout."""
    arguments = [*arguments, f"--parent={os.getpid()}"]
    if module in OURS and can_fork():
        return _fork(module, arguments, stderr, stdin, reads=reads)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=subprocess.PIPE if reads else subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )


def _fork(
    module: str, arguments: Sequence[str], stderr: IO[bytes], stdin: int | None, *, reads: bool
) -> Forked:
    null = os.open(os.devnull, os.O_RDWR)
    asks = stdin == subprocess.PIPE
    their_in, our_in = os.pipe() if asks else (null if stdin is None else stdin, -1)
    our_out, their_out = os.pipe() if reads else (-1, null)
    sys.stdout.flush()
    sys.stderr.flush()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    if not (pid := os.fork()):
        _become(module, arguments, (their_in, their_out, stderr.fileno()), blocked)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for descriptor in {null, *([their_in] if asks else []), their_out}:
        os.close(descriptor)
    return Forked(
        pid,
        os.fdopen(our_in, "wb", buffering=0) if asks else None,
        os.fdopen(our_out, "rb") if reads else None,
    )


def _become(
    module: str, arguments: Sequence[str], streams: Sequence[int], blocked: AbstractSet[int]
) -> NoReturn:
    """Run a module with these standard streams and blocked signals, as in a new process; nothing of
    the parent is unwound."""
    code: object = 1
    try:
        os.setsid()
        for heeded in signal.valid_signals():
            if callable(signal.getsignal(heeded)):
                first = signal.default_int_handler if heeded == signal.SIGINT else signal.SIG_DFL
                signal.signal(heeded, first)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        gc.freeze()
        for number, descriptor in enumerate([os.dup(one) for one in streams]):
            os.dup2(descriptor, number)
        for descriptor in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            if descriptor >= len(streams):
                with suppress(OSError):  # that of the folder itself
                    os.close(descriptor)
        logging.root.handlers.clear()
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - until we end
        sys.argv = [PROGRAMS[0], *arguments]
        importlib.import_module(module).main()
        code = 0
    except SystemExit as told:
        code = told.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):  # its output is not read
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


class Talk:
    """Our end of the nursery's socket."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def begun(self) -> bool:
        """Wait until its imports are done; False if it has ended."""
        self.theirs.close()
        return self._ours.recv(MAX_BYTES) == READY

    def prepare(self, module: str) -> None:
        self._ours.send(module.encode())

    def fork(self, arguments: Sequence[str], stderr: IO[bytes]) -> Forked:
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
    """Within the block, descendants whose parent ends become our children."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


ELSEWHERE = ("--connect", "--engine", *NAMES_OF_HELP)
"""Options with which a command starts no worker."""


@dataclass(frozen=True)
class Begun:
    """A nursery not yet taken over by a supervisor."""

    process: Process
    talk: Talk
    log: IO[bytes]  # the file of its stderr


_begun: list[Begun] = []


def begin_for(arguments: Sequence[str]) -> None:
    """Start a nursery for a command with these arguments, if it would not use a running service and
    this process may use at least two cores. The nursery ends with this process."""
    if not can_fork() or len(os.sched_getaffinity(0)) < 2:
        return
    if any(argument.partition("=")[0] in ELSEWHERE for argument in arguments):
        return
    if not announcements():
        talk, log = Talk(), new_log()
        _begun.append(Begun(run_nursery(talk, nursery.MODULES, log), talk, log))


def run_nursery(talk: Talk, modules: Sequence[str], log: IO[bytes]) -> Process:
    """Start a nursery that imports these modules, with the other end of this socket as stdin."""
    return run_module(nursery.__name__, modules, log, stdin=talk.theirs.fileno())


def expect_proof() -> None:
    """Make the nursery import the modules for proving a model, since this process is about to read
    a model that was never loaded."""
    for begun in _begun:
        begun.talk.prepare(nursery.PROVING)


def begun() -> bool:
    """True if a nursery was started and not taken over yet."""
    return bool(_begun)


def taken_bytes() -> int:
    """Return its memory, which will be part of the workers' memory."""
    return sum(status_bytes(begun.process.pid, "RssAnon:") for begun in _begun)


def status_bytes(pid: int, field: str) -> int:
    """Return a size of a process as the kernel counts it (proc(5), status); 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith(field)]
    return sum(int(kib) * 1024 for kib in found)


def take() -> Begun | None:
    """Take over the nursery that was started; None if there is none."""
    return _begun.pop() if _begun else None


def dismiss() -> None:
    """End the nursery if it was not taken over, and wait until it has ended."""
    while (begun := take()) is not None:
        begun.process.kill()
        begun.process.wait()
        begun.talk.close()
