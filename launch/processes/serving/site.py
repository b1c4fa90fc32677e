"""The interface to where the parts of a service run: this machine, or the nodes of a cluster."""

import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dovetail.launch.processes.child import LET_GO
from dovetail.launch.processes.stack import Played
from dovetail.launch.processes.supervise import Child
from dovetail.protocol.errors import DovetailError, printable
from dovetail.protocol.messages import WorkerState


@dataclass(frozen=True)
class Part:
    """A process of the service, and the parts that must be ready before it is started."""

    name: str
    after: tuple[str, ...] = ()
    known: bool = False  # true if it is ready exactly while it is registered with the root
    needed: bool = True  # true if requests cannot be served without it or a replacement
    beats: bool = False  # true if it sends heartbeats once it is ready


@dataclass(frozen=True)
class Ending:
    """The end of a process: its exit code, in words too."""

    code: int
    words: str
    mistake: bool = False  # true for a user error, which no restart mends
    let_go: bool = False  # true if the root dismissed it
    last_line: str = ""  # the last line that it wrote to stderr


@dataclass(frozen=True)
class Outage:
    """A missing part: why, since when, and when it is restarted."""

    part: str
    why: str
    since_s: float
    retry_s: float | None
    """Seconds until it is restarted; None if it has been started and is not ready yet."""


@dataclass(frozen=True)
class Start:
    """Start this part now."""

    name: str


@dataclass(frozen=True)
class Replace:
    """End this part, which is stuck, after it has dumped its stacks."""

    name: str


@dataclass(frozen=True)
class Stop:
    """End this part, which is restarting: it has been replaced."""

    name: str


@dataclass(frozen=True)
class Tell:
    """A line for the log."""

    text: str


@dataclass(frozen=True)
class GiveUp:
    """End the service with the error of this part; `why` it is not restarted, if that needs
    words."""

    name: str
    why: str = ""


@dataclass(frozen=True)
class Leave:
    """End the service, as requested."""


COORDINATOR, HTTP = "coordinator", "http"


class SiteLost(DovetailError):
    """The site is lost, and no part can be restarted."""


class Running(Protocol):
    """A started process of a part."""

    @property
    def pid(self) -> int:
        """Return its pid on its machine; 0 if it has none yet."""

    @property
    def host(self) -> str:
        """Return the name of its machine."""

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""

    def heard(self) -> str:
        """Return the line that it has printed on stdout; empty if it has not yet."""

    def beats(self) -> bool:
        """Return whether it has sent a heartbeat since the last call."""

    def cpu_s(self) -> float:
        """Return the CPU time that it has used in seconds."""

    def tell(self, line: str) -> bool:
        """Write a line to its stdin; False if it cannot take it now."""

    def listen(self) -> list[str]:
        """Return the lines of its stderr since the last call, also once it has ended."""

    def ending(self) -> Ending:
        """Return how it ended."""

    def failure(self) -> DovetailError:
        """Return its error."""

    def forget(self) -> None:
        """Release the resources of a process that has ended."""


class Site(Protocol):
    """Starts parts by name."""

    @property
    def workers(self) -> Mapping[str, Played]:
        """Return the names of the workers, with their roles."""

    @property
    def keys(self) -> Path | None:
        """Return the folder of the keys of a client; None: the coordinator is not reached by
        tcp."""

    def begin(self) -> None:
        """Start the slowest parts ahead."""

    def start(self, name: str, address: str, url: str) -> Running:
        """Start a part. `address`, `url`: those of the coordinator and of the HTTP API, as far as
        these have listened before."""

    def misfit(self, name: str, loading: Mapping[str, Running]) -> str:
        """Return why a worker cannot be started while others are loading; empty if it can."""

    def owns(self, address: str) -> None:
        """Keep this address of the coordinator."""

    def stuck(self, running: Running) -> None:
        """End a stuck process after it has dumped its stacks."""

    def end(self, running: Sequence[Running], grace_s: float) -> None:
        """End these, with some seconds to do it by themselves."""

    def kill(self) -> None:
        """End everything at once."""

    def mind(self) -> None:
        """Called from time to time: keep the cleanup for our own death working; `SiteLost` if the
        site is lost."""


LAST_WORDS_S = 0.3  # seconds that a stuck process has to dump its stacks
LOG_BYTES = 1 << 20
"""The file of a process's output is truncated after this many bytes have been read."""


def ending_of(child: Child) -> Ending:
    """Return how a process has ended: its last line with an exit code, but not with a signal that
    ended it at once."""
    code = child.process.returncode
    last = [] if code == -signal.SIGKILL else child.last_words()[-1:]
    last_line = printable(last[0].removeprefix("dovetail: ")) if last else ""
    return Ending(code, child.how_it_ended(), child.was_mistaken, code == LET_GO, last_line)


def let_speak_and_kill(child: Child) -> None:
    """Have a stuck process dump its stacks, if it can, and end it; its end is noticed as with any
    other."""
    child.process.send_signal(signal.SIGUSR1)
    time.sleep(LAST_WORDS_S)
    child.process.kill()
    child.process.wait()


def registered(ours: Mapping[str, tuple[str, int]], workers: Iterable[WorkerState]) -> set[str]:
    """Return which of our processes, given by machine and pid, are registered as workers; pids of
    other machines may be equal."""
    there = {(worker.host, worker.pid) for worker in workers}
    return {name for name, at in ours.items() if at in there}


class Ear:
    """Reads the stderr of a process line by line, also after it has ended."""

    def __init__(self, child: Child) -> None:
        self._log = os.dup(child.log.fileno())
        self._read, self._begun = 0, b""

    def listen(self) -> list[str]:
        """The complete lines since the last call; a long file is truncated."""
        said = os.pread(self._log, LOG_BYTES, self._read)
        self._read += len(said)
        if self._read > LOG_BYTES and self._read == os.fstat(self._log).st_size:
            os.ftruncate(self._log, 0)
            self._read = 0
        *lines, self._begun = (self._begun + said).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        os.close(self._log)
