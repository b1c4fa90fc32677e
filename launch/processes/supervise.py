"""Child processes: watched until they are ready, and ended in every case. When the block of a
`Supervisor` is left, its processes have ended and their files are removed; if it is killed, the
kernel (`child.py`) and the warden (`warden.py`) do this. A `Stack` is a coordinator with workers.
"""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, Self

from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes import forked, nursery, warden
from dovetail.launch.processes.child import LET_GO
from dovetail.launch.processes.forked import Process, Talk, new_log, run_module, status_bytes
from dovetail.protocol.errors import DovetailError, UserError, printable
from dovetail.protocol.memory import Kills, count_kills, process_load, why_killed

GRACE_S = 5.0
ORPHANED_S = 8.0
"""Seconds for children of a killed supervisor: 5 s for running requests, 2 s for HTTP clients."""
TAIL_BYTES = 4096
TAIL_LINES = 6
USER_ERROR = 2
LAST_WORDS_S = 0.3  # seconds for a stuck process to dump its stacks
LOG_BYTES = 1 << 20
"""The file of a process's output is truncated after this many bytes have been read."""
SMALLER = (
    "use smaller weights (target.weights, draft.weights), a smaller model or a shorter "
    "context, or give it more memory"
)
WHO_KILLED = (
    "the kernel's log (dmesg, journalctl -k) shows whether memory ran out; if not, another process "
    "sent the signal"
)
NURSERY = "process that forks workers"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ending:
    """The end of a process: its exit code, in words too."""

    code: int
    words: str
    mistake: bool = False  # true for a user error, which a restart cannot fix
    let_go: bool = False  # true if the coordinator dismissed it
    last_line: str = ""  # the last line that it wrote to stderr


@dataclass(eq=False)
class Child:
    """A child process. Its stderr is an unnamed file, opened for appending."""

    name: str
    process: Process
    log: IO[bytes]
    before: Kills = field(default_factory=count_kills)
    """The kernel's count of out-of-memory kills when it was started."""
    _read: int = 0  # bytes of the log read by `listen`
    _rest: bytes = b""  # read but not yet returned from the log

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def heard(self) -> str:
        """Return the next line of its stdout; empty if there is none, or it has ended."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 0.0)
        return self.process.stdout.readline().decode().strip() if ready else ""

    def beats(self) -> bool:
        return bool(self.heard())

    def tell(self, line: str, *, last: bool = False) -> bool:
        """Write a line to its stdin, which is closed after the `last` one. False if it cannot take
        the line: a stuck process reads it later, a lost one is noticed elsewhere."""
        assert self.process.stdin is not None
        try:
            os.write(self.process.stdin.fileno(), f"{line}\n".encode())
        except (BlockingIOError, BrokenPipeError):
            return False
        if last:
            self.process.stdin.close()
        return True

    def listen(self) -> list[str]:
        """Return the complete lines of its stderr since the last call, even after its end; a long
        file is truncated."""
        if not self.log.closed:
            said = os.pread(self.log.fileno(), LOG_BYTES, self._read)
            self._read += len(said)
            if self._read > LOG_BYTES and self._read == os.fstat(self.log.fileno()).st_size:
                os.ftruncate(self.log.fileno(), 0)
                self._read = 0
            self._rest += said
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Close the pipes and the log of a process that has ended; `listen` then returns the unread
        rest."""
        if not self.log.closed:
            self._rest += os.pread(self.log.fileno(), LOG_BYTES, self._read)
            self.log.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def kill_stuck(self) -> None:
        """Make it dump its stacks, if possible, and end it; its end is noticed like any other."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(LAST_WORDS_S)
        self.process.kill()
        self.process.wait()

    def last_words(self) -> list[str]:
        size = os.fstat(self.log.fileno()).st_size
        tail = os.pread(self.log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        return [line for line in tail.decode(errors="replace").splitlines() if line.strip()][
            -TAIL_LINES:
        ]

    def peak_rss_bytes(self) -> int:
        """Return its peak memory by the kernel's count; 0 once it has ended."""
        return 0 if self.ended else status_bytes(self.pid, "VmHWM:")

    def rss_bytes(self) -> int:
        """Return its memory by the kernel's count; 0 once it has ended."""
        return 0 if self.ended else status_bytes(self.pid, "VmRSS:")

    def cpu_s(self) -> float:
        """Return the CPU time that it has used in seconds; 0 once it has ended."""
        return 0.0 if self.ended else process_load(self.pid)[0]

    @property
    def was_mistaken(self) -> bool:
        return self.process.returncode == USER_ERROR and bool(self.last_words())

    def ending(self) -> Ending:
        """Return how it has ended, with its last line unless it was killed by SIGKILL."""
        code = self.process.returncode
        last = [] if code == -signal.SIGKILL else self.last_words()[-1:]
        last_line = printable(last[0].removeprefix("dovetail: ")) if last else ""
        return Ending(code, self.how_it_ended(), self.was_mistaken, code == LET_GO, last_line)

    def how_it_ended(self) -> str:
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        why = self._why_killed()
        return f"was killed by {signal.Signals(-code).name}{f' ({why})' if why else ''}"

    def _why_killed(self) -> str:
        killed = self.process.returncode == -signal.SIGKILL
        return why_killed(self.pid, self.before) if killed else ""

    def failure(self) -> DovetailError:
        """Its error: a `UserError` if it reported a user error."""
        words = self.last_words()
        if self.was_mistaken:
            return UserError(f"the {self.name}: {words[-1].removeprefix('dovetail: ')}")
        advice = []
        if self.process.returncode == -signal.SIGKILL:
            advice = [SMALLER if self._why_killed() else WHO_KILLED]
        ended = f"the {self.name} {self.how_it_ended()}"
        ended += ":" if words else " and left no message"
        return DovetailError("\n  ".join((ended, *words, *advice)))


class Unwinding:
    """A block in which ending signals unwind the stack, so that all its contexts are left; while it
    is busy they are deferred. Ignored signals, as under nohup, stay ignored."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._busy = False
        self._pending: signal.Signals | None = None

    def __enter__(self) -> Self:
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        if not self._busy:
            unwind(signal.Signals(number))
        self._pending = signal.Signals(number)

    def _unblock(self) -> None:
        """End a busy section, and handle a signal that arrived meanwhile."""
        self._busy = False
        if self._pending is not None:
            unwind(self._pending)


class Supervisor(Unwinding):
    """Owns processes; use it as a context, in the main thread."""

    def __init__(self, *, apart: bool = False) -> None:
        """`apart`: the warden is not our child."""
        super().__init__()
        self._apart = [warden.APART] if apart else []
        self.children: list[Child] = []
        self._folders: list[tuple[Path, Child | None]] = []
        """Folders of sockets, and the child with which each is removed; None: the last one."""
        self._talks = contextlib.ExitStack()
        self._warden: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        """End everything. Nothing interrupts this: it takes `GRACE_S` at most."""
        self._busy = True
        try:
            self._end(self.children, GRACE_S)
            self._remove(folder for folder, _ in self._folders)
            self._talks.close()
            self._dismiss_warden()
        finally:
            super().__exit__()

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        module: str = "dovetail.launch.cli",
        reads: bool = False,
        asks: bool = False,
    ) -> Child:
        """Start a command in its own session, so that Ctrl-C reaches only the supervisor; call this
        from the main thread, since the kernel ends a child with its thread. `reads`: we read its
        stdout, `asks`: we write to its stdin."""
        return self._own(
            name,
            lambda log: run_module(
                module, arguments, log, reads=reads, stdin=subprocess.PIPE if asks else None
            ),
        )

    def start_command(
        self, name: str, command: Sequence[str], *, reads: bool = False, asks: bool = False
    ) -> Child:
        """Start any command that takes `--parent`, as `start` does; `asks`: we write to its
        stdin."""
        return self._own(
            name,
            lambda log: subprocess.Popen(
                [*command, f"--parent={os.getpid()}"],
                stdin=subprocess.PIPE if asks else subprocess.DEVNULL,
                stdout=subprocess.PIPE if reads else subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            ),
        )

    def start_nursery(self, modules: Sequence[str] = nursery.MODULES) -> tuple[Child, Talk]:
        """Start a nursery, or take over the one that this command started early."""
        begun = forked.take() if modules == nursery.MODULES else None
        talk = self._talks.enter_context(contextlib.closing(begun.talk if begun else Talk()))
        if begun:
            return self._own(NURSERY, lambda _: begun.process, begun.log), talk
        return self._own(NURSERY, partial(forked.run_nursery, talk, modules)), talk

    def start_forked(
        self, nursery: tuple[Child, Talk], commands: Mapping[str, Sequence[str]]
    ) -> dict[str, Child]:
        """Start commands, by name, as forks of a nursery that ends afterwards; we write to their
        stdin."""
        parent, talk = nursery
        if not talk.begun():
            parent.process.wait()
            raise parent.failure()
        forked = {
            name: self._own(name, partial(talk.fork, arguments))
            for name, arguments in commands.items()
        }
        talk.close()
        self.end([parent])
        return forked

    def _own(
        self, name: str, begin: Callable[[IO[bytes]], Process], log: IO[bytes] | None = None
    ) -> Child:
        """Start a process and own it; `begin` gets the file for its stderr."""
        self._busy = True
        log = log or new_log()
        process = begin(log)
        child = Child(name, process, log)
        self.children.append(child)
        self._have_minded(warden.CHILD, str(process.pid))
        self._unblock()
        return child

    def begin_coordinator(
        self, cores: Sequence[int], name: str, *, flags: Sequence[str] = ()
    ) -> Child:
        where = ["--listen=ipc", f"--cores={format_numbers(cores)}"]
        return self.start(name, ["coordinator", *flags, *where], reads=True)

    def await_address(self, child: Child) -> str:
        """Wait until a process prints its address on stdout."""
        assert child.process.stdout is not None
        address = child.process.stdout.readline().decode().strip()
        if not address:
            child.process.wait()
            raise child.failure()
        self.owns_folder(Path(address.removeprefix("ipc://")).parent, child)
        return address

    def owns_folder(self, folder: Path, child: Child | None = None) -> None:
        """A folder with sockets, which is removed with this child, or with the last child."""
        self._folders.append((folder, child))
        self._have_minded(warden.FOLDER, str(folder))

    def check(self) -> None:
        """Raise the error of the first process that has ended."""
        for child in self.children:
            if child.ended:
                raise child.failure()

    def end(self, children: Sequence[Child], grace_s: float = GRACE_S) -> None:
        """End these, and remove them. If a signal interrupts this, they end with the block."""
        self._end(children, grace_s)
        self._remove(folder for folder, child in self._folders if child in children)
        self.children = [child for child in self.children if child not in children]

    def kill(self) -> None:
        for child in self.children:
            if not child.ended:
                child.process.kill()

    def mind(self) -> None:
        """Restart the warden if it was killed."""
        if self._warden is None or self._warden.poll() is None:
            return
        self._warden = None
        for child in self.children:
            self._have_minded(warden.CHILD, str(child.process.pid))
        for folder, _ in self._folders:
            self._have_minded(warden.FOLDER, str(folder))

    def _have_minded(self, kind: bytes, value: str) -> None:
        if self._warden is None:
            command = [sys.executable, "-I", "-S", warden.__file__, str(ORPHANED_S), *self._apart]
            self._warden = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        assert self._warden.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed: see `mind`
            os.write(self._warden.stdin.fileno(), b"%b %b\n" % (kind, os.fsencode(value)))

    def _dismiss_warden(self) -> None:
        if self._warden is not None:
            assert self._warden.stdin is not None
            self._warden.stdin.close()
            try:
                self._warden.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self._warden.kill()
                self._warden.wait()

    def _end(self, children: Sequence[Child], grace_s: float) -> None:
        for child in children:
            if not child.ended:
                child.process.terminate()
        deadline = time.monotonic() + grace_s
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.close()

    def _remove(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def unwind(number: signal.Signals) -> NoReturn:
    """Raise the exception that unwinds the stack after a terminating signal."""
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
