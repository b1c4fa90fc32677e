"""Processes of our own: started as commands, watched until they are ready, and ended in every case.

A `Supervisor` owns what it starts: when its block is left - normally, by an exception, by Ctrl-C,
SIGTERM or SIGHUP - every process has ended and what it left in the file system is gone; when the
supervisor itself is killed, the kernel (`child.py`) and a process beside it (`warden.py`) see to
it. A `Stack` is a coordinator with the workers that the settings ask for. Knows commands and exit
codes, nothing of tokens.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn, Self

from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes import ahead, nursery, warden
from dovetail.launch.processes.forked import Process, Talk, new_log, run_module
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.memory import Kills, count_kills, process_load, why_killed

GRACE_S = 5.0
ORPHANED_S = 8.0
"""Children of a supervisor that was killed have so long to end: a coordinator lets running requests
end for five seconds, and an HTTP server tells those who still wait for two more."""
TAIL_BYTES = 4096
TAIL_LINES = 6
USER_ERROR = 2
SMALLER = (
    "take smaller weights (target.weights, draft.weights), a smaller model or a shorter "
    "context, or give it more memory"
)
WHO_KILLED = (
    "the kernel's log (dmesg, journalctl -k) says so if memory ran out; if it does "
    "not, somebody sent the signal"
)
NURSERY = "process that workers are forked from"
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Child:
    """A process of ours. Its stderr goes to a file without a name, so that nothing is left of it;
    each write to it goes to its end."""

    name: str
    process: Process
    log: IO[bytes]
    before: Kills = field(default_factory=count_kills)
    """The kernel's count of processes killed for want of memory when it was started."""

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def heard(self) -> str:
        """Return the next line of its stdout; empty if there is none, or it has ended."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 0.0)
        return self.process.stdout.readline().decode().strip() if ready else ""

    def last_words(self) -> list[str]:
        """The last lines of its stderr."""
        size = os.fstat(self.log.fileno()).st_size
        tail = os.pread(self.log.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES))
        return [line for line in tail.decode(errors="replace").splitlines() if line.strip()][
            -TAIL_LINES:
        ]

    def peak_rss_bytes(self) -> int:
        """The most memory that it ever held, by the kernel's account; 0 once it has ended."""
        return self._status_bytes("VmHWM:")

    def rss_bytes(self) -> int:
        """Return the memory that it holds, by the kernel's account; 0 once it has ended."""
        return self._status_bytes("VmRSS:")

    def cpu_s(self) -> float:
        """Return the CPU time that it has used in seconds; 0 once it has ended."""
        return 0.0 if self.ended else process_load(self.process.pid)[0]

    def _status_bytes(self, field: str) -> int:
        if self.ended:
            return 0
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return next(
            (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field)),
            0,
        )

    @property
    def was_mistaken(self) -> bool:
        """Return whether it ended because of a mistake of the user's, and said which."""
        return self.process.returncode == USER_ERROR and bool(self.last_words())

    def how_it_ended(self) -> str:
        """Say by which signal or with which exit code it ended."""
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        why = f" ({self._why_killed()})" if self._why_killed() else ""
        return f"was killed by {signal.Signals(-code).name}{why}"

    def _why_killed(self) -> str:
        return (
            why_killed(self.process.pid, self.before)
            if self.process.returncode == -signal.SIGKILL
            else ""
        )

    def failure(self) -> DovetailError:
        """Why it ended, in its own words: a `UserError` if it said that it was the user's
        mistake."""
        words = self.last_words()
        if self.was_mistaken:
            return UserError(f"the {self.name}: {words[-1].removeprefix('dovetail: ')}")
        advice = []
        if self.process.returncode == -signal.SIGKILL:
            advice = [SMALLER if self._why_killed() else WHO_KILLED]
        return DovetailError(
            "\n  ".join(
                (
                    f"the {self.name} {self.how_it_ended()}"
                    + (":" if words else " and left no message"),
                    *words,
                    *advice,
                )
            )
        )


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
        """`apart`: who sees to our processes when we are killed is no child of ours."""
        super().__init__()
        self._apart = [warden.APART] if apart else []
        self.children: list[Child] = []
        self._sockets: list[tuple[Child, Path]] = []
        self._folders: list[Path] = []
        self._talks = contextlib.ExitStack()
        self._warden: subprocess.Popen[bytes] | None = None

    def __exit__(self, *_: object) -> None:
        """End everything. Nothing interrupts this: it takes `GRACE_S` at most."""
        self._busy = True
        try:
            self._end(self.children, GRACE_S)
            self._clean(self.children)
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
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
        """Start a command of ours; `reads`: its stdout is for us, `asks`: its stdin is ours to
        write to.

        It is a session of its own, so that Ctrl-C on the terminal reaches the supervisor alone,
        which then ends everything in order. The kernel ends a child with the thread that started
        it, so this must be the main thread.
        """
        return self._own(
            name,
            lambda log: run_module(
                module, arguments, log, reads=reads, stdin=subprocess.PIPE if asks else None
            ),
        )

    def start_command(
        self, name: str, command: Sequence[str], *, reads: bool = False, asks: bool = False
    ) -> Child:
        """Start any command that takes `--parent`, as `start` does; `asks`: its stdin is ours to
        write to."""
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
        """Start a process that imports modules and that workers are then forked from, or take over
        the one that this command started ahead."""
        begun = ahead.take() if modules == nursery.MODULES else None
        talk = self._talks.enter_context(contextlib.closing(begun.talk if begun else Talk()))
        if begun:
            return self._own(NURSERY, lambda _: begun.process, begun.log), talk
        return self._own(NURSERY, partial(ahead.run_nursery, talk, modules)), talk

    def start_forked(
        self, nursery: tuple[Child, Talk], commands: Mapping[str, Sequence[str]]
    ) -> dict[str, Child]:
        """Start commands of ours, by name, as forks of a process that ends then; their stdin is
        ours to write to."""
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
        """Begin a process as one of ours; `begin` is given the file for its stderr."""
        self._busy = True
        log = log or new_log()
        process = begin(log)
        child = Child(name, process, log)
        self.children.append(child)
        self._have_minded(warden.CHILD, str(process.pid))
        self._unblock()
        return child

    def tell(self, child: Child, line: str) -> None:
        """Tell a process of ours, which was started with `asks`, its only line on stdin; one that
        has ended is noticed elsewhere."""
        assert child.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.write(f"{line}\n".encode())
            child.process.stdin.close()

    def start_coordinator(
        self, cores: Sequence[int], name: str = "coordinator", *, flags: Sequence[str] = ()
    ) -> str:
        """Start a coordinator of our own on a private ipc address, and return the address. `flags`:
        settings of its section but for the address and keys."""
        return self.await_address(self.begin_coordinator(cores, name, flags=flags))

    def begin_coordinator(
        self, cores: Sequence[int], name: str, *, flags: Sequence[str] = ()
    ) -> Child:
        """Begin to start a coordinator, as `start_coordinator` does."""
        where = ["--listen=ipc", f"--cores={format_numbers(cores)}"]
        return self.start(name, ["coordinator", *flags, *where], reads=True)

    def start_hub(
        self, name: str, arguments: Sequence[str], *, module: str = "dovetail.launch.cli"
    ) -> str:
        """Start a process that listens at a private ipc address and says on stdout at which, once
        it does."""
        return self.await_address(self.start(name, arguments, module=module, reads=True))

    def await_address(self, child: Child) -> str:
        """Wait until a process says on stdout where it listens."""
        assert child.process.stdout is not None
        address = child.process.stdout.readline().decode().strip()
        if not address:
            child.process.wait()
            raise child.failure()
        self.owns_socket(child, address)
        return address

    def owns_socket(self, child: Child, address: str) -> None:
        """A process of ours listens at this ipc address, in a folder that it has made for it, and
        that goes with it."""
        path = Path(address.removeprefix("ipc://"))
        self._sockets.append((child, path))
        self._have_minded(warden.FOLDER, str(path.parent))

    def owns_folder(self, folder: Path) -> None:
        """Processes of ours, one after the other, have their sockets in this folder, which goes
        with the last of them."""
        self._folders.append(folder)
        self._have_minded(warden.FOLDER, str(folder))

    def check(self) -> None:
        """Raise what the first process that has ended has to say."""
        for child in self.children:
            if child.ended:
                raise child.failure()

    def end(self, children: Sequence[Child], grace_s: float = GRACE_S) -> None:
        """End these, and forget them. A signal interrupts it, and they are left to the end of the
        block."""
        self._end(children, grace_s)
        self._clean(children)
        self.children = [child for child in self.children if child not in children]

    def kill(self) -> None:
        """End everything at once, whatever it is about to do."""
        for child in self.children:
            if not child.ended:
                child.process.kill()

    def mind(self) -> None:
        """Start the process anew that sees to what is ours when we are killed, if somebody has
        killed it."""
        if self._warden is None or self._warden.poll() is None:
            return
        self._warden = None
        for child in self.children:
            self._have_minded(warden.CHILD, str(child.process.pid))
        for folder in [*(path.parent for _, path in self._sockets), *self._folders]:
            self._have_minded(warden.FOLDER, str(folder))

    def _have_minded(self, kind: bytes, value: str) -> None:
        """Have a process or a folder of ours go when we are killed."""
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
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it: see `mind`
            os.write(self._warden.stdin.fileno(), b"%b %b\n" % (kind, os.fsencode(value)))

    def _dismiss_warden(self) -> None:
        """End the warden, whose work is done."""
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
            child.log.close()
            if child.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.process.stdin.close()
            if child.process.stdout is not None:
                child.process.stdout.close()

    def _clean(self, children: Sequence[Child]) -> None:
        """Remove what a coordinator that was killed could not: the folder that it made for its
        socket."""
        for child, path in self._sockets:
            if child in children:
                shutil.rmtree(path.parent, ignore_errors=True)


def unwind(number: signal.Signals) -> NoReturn:
    """Raise what unwinds the stack for a signal that ends us."""
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
