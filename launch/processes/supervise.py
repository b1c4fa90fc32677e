"""Processes of our own: started as commands, watched until they are ready, and ended in every case.

A `Supervisor` owns what it starts: when its block is left - normally, by an exception, by Ctrl-C,
SIGTERM or SIGHUP - every process has ended and what it left in the file system is gone; when the
supervisor itself is killed, the kernel (`child.py`) and a process beside it (`warden.py`) see to
it. A `Stack` is a coordinator with the workers that the settings ask for. Knows commands and exit
codes, nothing of tokens.
"""

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Literal, NoReturn

from dovetail.launch.console.terminal import QUANTISED, Intervals, loading_text
from dovetail.launch.machine.cores import CoreLayout, lay_out_here
from dovetail.launch.machine.fit import check_memory, only_node
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes import warden
from dovetail.launch.processes.preflight import (
    check_draft,
    check_files,
    check_target,
    check_whole,
    draft_bytes,
    estimated_bytes,
)
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError, SettingsError, UserError
from dovetail.protocol.links import open_link
from dovetail.protocol.memory import Kills, count_kills, why_killed
from dovetail.protocol.messages import Reported, Role
from dovetail.protocol.settings import MODELLESS_KINDS, Settings
from dovetail.runtime.client import Client

GRACE_S = 5.0
ORPHANED_S = 8.0
"""Children of a supervisor that was killed have so long to end: a coordinator lets running requests
end for five seconds, and an HTTP server tells those who still wait for two more."""
POLL_S = 0.05
LEAST_FILES = 64
"""Open files that a worker or the HTTP API needs, with room to spare."""
TAIL_BYTES = 4096
TAIL_LINES = 6
USER_ERROR = 2
Played = Literal["target", "draft", "unified"]
ROLES: tuple[Played, ...] = ("target", "draft")
SECTIONS: dict[str, tuple[str, ...]] = {
    "target": ("target", "memory"),
    "draft": ("draft",),
    "unified": ("target", "memory", "draft"),
}
"""Of the settings that a worker has."""
SMALLER = (
    "take smaller weights (target.weights, draft.weights), a smaller model or a shorter "
    "context, or give it more memory"
)
WHO_KILLED = (
    "the kernel's log (dmesg, journalctl -k) says so if memory ran out; if it does "
    "not, somebody sent the signal"
)
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Child:
    """A process of ours. Its stderr goes to a file without a name, so that nothing is left of it;
    each write to it goes to its end."""

    name: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    before: Kills = field(default_factory=count_kills)
    """What the kernel had killed for want of memory when it was started."""

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def heard(self) -> str:
        """The line that it has said on stdout, which is for us; empty if it has not yet, or has
        ended."""
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
        """Whether it ended because of a mistake of the user's, and said which."""
        return self.process.returncode == USER_ERROR and bool(self.last_words())

    def how_it_ended(self) -> str:
        """By a signal or with an exit code."""
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


class Supervisor:
    """Owns processes; use it as a context, in the main thread."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._sockets: list[tuple[Child, Path]] = []
        self._folders: list[Path] = []
        self._warden: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, object] = {}
        self._busy = False
        self._pending: signal.Signals | None = None

    def __enter__(self) -> "Supervisor":
        """What is ignored, as under nohup, stays ignored."""
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._signalled)
        return self

    def __exit__(self, *_: object) -> None:
        """End everything. Nothing interrupts this: it takes `GRACE_S` at most."""
        self._busy = True
        try:
            self._end(self.children, GRACE_S)
            self._clean(self.children)
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)
            self._dismiss_warden()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        """A signal that ends us unwinds the stack, so that every block that owns something is left
        - but not between a process's start and its entry here."""
        if self._busy:
            self._pending = signal.Signals(number)
        else:
            _unwind(signal.Signals(number))

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
        return self.start_command(
            name, [sys.executable, "-P", "-m", module, *arguments], reads=reads, asks=asks
        )

    def start_command(
        self, name: str, command: Sequence[str], *, reads: bool = False, asks: bool = False
    ) -> Child:
        """Start any command that takes `--parent`, as `start` does; `asks`: its stdin is ours to
        write to."""
        self._busy = True
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        fcntl.fcntl(log, fcntl.F_SETFL, os.O_APPEND)
        process = subprocess.Popen(
            [*command, f"--parent={os.getpid()}"],
            stdin=subprocess.PIPE if asks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if reads else subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
        child = Child(name, process, log)
        self.children.append(child)
        self._have_minded(warden.CHILD, str(process.pid))
        self._busy = False
        if self._pending is not None:
            _unwind(self._pending)
        return child

    def start_coordinator(
        self, cores: Sequence[int], name: str = "coordinator", *, flags: Sequence[str] = ()
    ) -> str:
        """Start a coordinator of our own on a private ipc address, and return the address. `flags`:
        settings of its section but for the address and keys."""
        return self.start_hub(
            name, ["coordinator", *flags, "--listen=ipc", f"--cores={format_numbers(cores)}"]
        )

    def start_hub(
        self, name: str, arguments: Sequence[str], *, module: str = "dovetail.launch.cli"
    ) -> str:
        """Start a process that listens at a private ipc address and says on stdout at which, once
        it does."""
        child = self.start(name, arguments, module=module, reads=True)
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
            command = [sys.executable, "-I", "-S", warden.__file__, str(ORPHANED_S)]
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
        """All is done that it is there for."""
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
        """What a coordinator that was killed could not remove: the folder that it made for its
        socket."""
        for child, path in self._sockets:
            if child in children:
                shutil.rmtree(path.parent, ignore_errors=True)


@dataclass(frozen=True)
class Stack:
    """A coordinator and the workers of one set of settings, as processes of ours."""

    address: str
    configuration: Configuration
    coordinator: Child
    workers: tuple[Child, ...]

    def connect(self) -> Client:
        return Client(open_link(self.address, role="client"))

    def losses(self) -> list[DovetailError]:
        """What the processes that have ended meanwhile have to say."""
        return [child.failure() for child in (self.coordinator, *self.workers) if child.ended]


def start_stack(
    supervisor: Supervisor,
    configuration: Configuration,
    *,
    layout: CoreLayout | None = None,
    prefix: str = "",
    anew: bool = False,
) -> Stack:
    """Start what the settings ask for; it is not ready yet. `anew`: for what is measured, no reply
    goes on from what another one left.

    Nobody starts one of these workers again: unless the settings say so, a session whose target is
    lost does not wait for another.
    """
    check_stack(configuration)
    layout = layout or layout_of(configuration.settings)
    began = len(supervisor.children)
    waits = [] if configuration.given("coordinator.recovery_s") else ["--coordinator.recovery_s=0"]
    flags = [
        *coordinator_arguments(configuration),
        *waits,
        *(["--coordinator.reuse=false"] if anew else []),
    ]
    address = supervisor.start_coordinator(
        layout.coordinator.cores, f"{prefix}coordinator", flags=flags
    )
    for role in processes_of(configuration.settings):
        settings = with_room_for_draft(configuration) if role == "target" else configuration
        supervisor.start(
            f"{prefix}{role} worker", worker_arguments(settings, role, address, layout)
        )
    coordinator, *workers = supervisor.children[began:]
    return Stack(address, configuration, coordinator, tuple(workers))


def check_stack(configuration: Configuration) -> None:
    """`UserError` for what these settings ask for and cannot be started, as far as a look at the
    models tells."""
    check_files("dovetail", LEAST_FILES)
    check_target(configuration.settings)
    _check_pair(configuration)
    if configuration.settings.draft.kind != "none":
        check_draft(configuration.settings)
    check_memory(
        configuration.settings,
        ("coordinator", *processes_of(configuration.settings)),
        node=only_node(layout_of(configuration.settings).target),
    )


def layout_of(settings: Settings) -> CoreLayout:
    """The places of the processes that these settings ask for, on this machine."""
    target = settings.target
    return lay_out_here(
        numa=target.numa, threads=target.threads, target_bytes=estimated_bytes(target)
    )


def wait_until_ready(
    supervisor: Supervisor, stack: Stack, note: Callable[[str], None] = lambda _: None
) -> Reported:
    """Wait until all workers of a stack are registered; what a process that ends before has to say
    is raised. `note` hears what is waited for."""
    wanted = ["target", *(["draft"] if stack.configuration.settings.draft.kind != "none" else [])]
    intervals = Intervals()
    with stack.connect() as client:
        while True:
            state = client.status()
            missing = [
                role for role in wanted if not any(role in worker.roles for worker in state.workers)
            ]
            if not missing:
                return state
            words = [
                line
                for child in stack.workers
                for line in child.last_words()[-1:]
                if line.endswith(QUANTISED)
            ]
            note(
                f"loading {' and '.join(missing)}"
                + "".join(f" ({line})" for line in words)
                + loading_text(state.loading)
            )
            if not sys.stderr.isatty():
                intervals.tell(state.loading)
            supervisor.check()
            time.sleep(POLL_S)


def coordinator_arguments(configuration: Configuration) -> list[str]:
    """Its settings as flags, but for where it listens."""
    return [
        flag
        for flag in configuration.arguments("coordinator")
        if not flag.startswith(("--coordinator.listen=", "--coordinator.keys="))
    ]


def processes_of(settings: Settings) -> tuple[Played, ...]:
    """What the workers' processes are that these settings ask for."""
    if settings.draft.kind == "none":
        return ("target",)
    return ("unified",) if settings.draft.share is True else ROLES


def worker_arguments(
    configuration: Configuration, role: Role | Played, address: str, layout: CoreLayout
) -> list[str]:
    """The command of a worker with these settings in its place; a draft that is a head reads the
    target's embedding, a substitute all of it."""
    place = layout.draft if role == "draft" else layout.target
    cores = (
        sorted({*layout.target.cores, *layout.draft.cores}) if role == "unified" else place.cores
    )
    where = [f"--cores={format_numbers(cores)}", f"--memory-nodes={format_numbers(place.nodes)}"]
    target = configuration.settings.target.model
    reads = [f"--target.model={target}"] if role == "draft" and target else []
    if role == "draft" and configuration.settings.draft.kind == "substitute":
        reads += [
            flag
            for flag in configuration.arguments("target")
            if flag.startswith("--target.inflate=")
        ]
    own = configuration.arguments(*SECTIONS[role])
    stuck = f"--coordinator.stuck_s={configuration.settings.coordinator.stuck_s}"
    return [
        "worker",
        f"--role={role}",
        f"--connect={address}",
        f"--name={role}",
        *where,
        *own,
        *reads,
        stuck,
    ]


def with_room_for_draft(configuration: Configuration) -> Configuration:
    """The settings of a target that is started with its draft: of a GPU that both have, the draft
    gets its memory first. `SettingsError` if nothing is left."""
    memory, taken = configuration.settings.memory, draft_bytes(configuration.settings)
    if memory.vram_bytes is None or not taken:
        return configuration
    if taken >= memory.vram_bytes:
        text = (
            f"memory.vram = {memory.vram!r}, and the draft alone takes {taken / 1e9:.3g} GB of it"
        )
        raise SettingsError(f"{text}: choose a smaller draft, or raise memory.vram")
    return configuration.over(
        "memory.vram, without what the draft takes",
        {"memory.vram": f"{memory.vram_bytes - taken}B"},
    )


def _check_pair(configuration: Configuration) -> None:
    """The embedded draft shares the vocabulary of the embedded target only: for another target, a
    draft has to be named."""
    settings = configuration.settings
    if (
        settings.target.model
        and not settings.draft.model
        and settings.draft.kind not in MODELLESS_KINDS
    ):
        remedy = (
            "add --draft FOLDER with a smaller model of its vocabulary, --draft ngram or "
            "substitute, which need none, or --draft none for the target alone"
        )
        there = Path(settings.target.model).expanduser().is_dir()
        looked = (
            ""
            if there
            else ", which is no folder here and would be looked for at the Hugging Face hub"
        )
        check_whole(settings.target.model)
        raise UserError(
            f"no draft is named for the target {settings.target.model!r}{looked}: {remedy}"
        )


def _unwind(number: signal.Signals) -> NoReturn:
    if number is signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)
