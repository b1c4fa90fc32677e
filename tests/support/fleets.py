"""A coordinator over tcp with keys and its workers, each a process of its own, as on several
machines: what faults are tried on.

Whoever has a fleet looks after it: `tend` starts again what has ended, as a supervisor on each
machine would. Between a worker and the coordinator there may be a proxy (`proxy.py`), and a worker
may run on another machine (`machines.py`).
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from dovetail.protocol.keys import generate_keys
from dovetail.protocol.links import open_link
from dovetail.protocol.messages import Reported, Role, WorkerState
from dovetail.runtime.client import Client
from support.patience import PATIENCE_S
from support.proxy import Proxy

LOOPBACK = "127.0.0.1"
POLL_S = 0.05
GRACE_S = 5.0
LAST_BYTES = 2000


@dataclass
class Member:
    """A worker's process, and the one after that. `losses` of it were found and made good."""

    name: str
    role: Role
    command: Sequence[str]
    log: IO[bytes]
    proxy: Proxy | None = None
    process: "subprocess.Popen[bytes]" = field(init=False)
    losses: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.log,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def last_words(self) -> str:
        """The end of what its processes have said on stderr."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), LAST_BYTES, max(0, size - LAST_BYTES)).decode(
            errors="replace"
        )


class Fleet:
    """Use it as a context, in the main thread: the processes end with it, and with the thread."""

    def __init__(self, *flags: str, host: str = LOOPBACK, script: str = "") -> None:
        """Starts the coordinator, at `host`, with these flags. `script`: Python that runs the
        command, in its place."""
        self.members: dict[str, Member] = {}
        self._owned = ExitStack()
        self.keys = (
            Path(self._owned.enter_context(tempfile.TemporaryDirectory(prefix="dovetail-fleet-")))
            / "keys"
        )
        generate_keys(self.keys)
        self.log = self._owned.enter_context(Path(self.keys.parent, "log").open("w+b"))  # noqa: SIM115  # it closes with the others
        command = [
            *_dovetail("coordinator", script=script),
            f"--listen=tcp://{host}:*",
            f"--keys={self.keys}",
            *flags,
        ]
        self.coordinator = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        assert self.coordinator.stdout is not None
        self.address = self.coordinator.stdout.readline().decode().strip()
        assert self.address, self.said()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        """Workers whose coordinator has gone have no reason to be quick: they are ended first."""
        for process in (*(member.process for member in self.members.values()), self.coordinator):
            _end(process)
        for member in self.members.values():
            member.log.close()
            if member.proxy is not None:
                member.proxy.close()
        assert self.coordinator.stdout is not None
        self.coordinator.stdout.close()
        self._owned.close()

    def add(
        self,
        name: str,
        role: Role,
        *flags: str,
        prefix: Sequence[str] = (),
        proxied: bool = False,
        seed: int = 0,
        script: str = "",
    ) -> Member:
        """Start a worker; with `proxied` its connections go through a proxy of its own. `script`:
        as of the coordinator."""
        proxy = Proxy(self.address, seed=seed) if proxied else None
        address = self.address if proxy is None else proxy.address
        worker = _dovetail(
            "worker",
            f"--role={role}",
            f"--name={name}",
            f"--connect={address}",
            f"--keys={self.keys}",
            script=script,
        )
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the fleet
        self.members[name] = member = Member(name, role, [*prefix, *worker, *flags], log, proxy)
        return member

    def tend(self) -> list[Member]:
        """Start again the workers that have ended; which these are."""
        assert self.coordinator.poll() is None, f"the coordinator has ended: {self.said()}"
        ended = [member for member in self.members.values() if member.ended]
        for member in ended:
            member.losses += 1
            member.start()
        return ended

    @contextmanager
    def client(self) -> Iterator[Client]:
        with Client(open_link(self.address, keys=self.keys, role="client")) as client:
            yield client

    def wait_until(
        self,
        client: Client,
        condition: Callable[[Reported], bool],
        what: str,
        *,
        within_s: float = PATIENCE_S,
    ) -> Reported:
        """The coordinator's first state of which it is true; meanwhile workers that end are started
        again."""
        deadline = time.monotonic() + within_s
        while not condition(state := client.status()):
            assert time.monotonic() < deadline, f"{what}, in {within_s:g} s\n{self.tale()}"
            self.tend()
            time.sleep(POLL_S)
        return state

    def wait_until_ready(self, client: Client, *, within_s: float = PATIENCE_S) -> Reported:
        return self.wait_until(client, self.ready, "not everybody is registered", within_s=within_s)

    def ready(self, state: Reported) -> bool:
        """Return whether each worker is registered, once, with the process that it has."""
        return (
            sorted(worker.pid for worker in state.workers)
            == sorted(member.pid for member in self.members.values())
            and not state.degraded
        )

    def said(self) -> str:
        """The end of what the coordinator has said on stderr."""
        size = os.fstat(self.log.fileno()).st_size
        return os.pread(self.log.fileno(), LAST_BYTES, max(0, size - LAST_BYTES)).decode(
            errors="replace"
        )

    def tale(self) -> str:
        """The last words of all processes."""
        return "\n".join(
            (
                f"coordinator: {self.said()}",
                *(f"{member.name}: {member.last_words()}" for member in self.members.values()),
            )
        )


def of(state: Reported, member: Member) -> WorkerState | None:
    """Return what the coordinator knows of a worker's process."""
    return next((worker for worker in state.workers if worker.pid == member.pid), None)


def _dovetail(*arguments: str, script: str = "") -> list[str]:
    program = ["-c", script] if script else ["-m", "dovetail.launch.cli"]
    return [sys.executable, "-P", *program, *arguments, f"--parent={os.getpid()}"]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process by SIGTERM, and by SIGKILL if that does not suffice; a stopped one hears no
    SIGTERM."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
