"""The interface to where the parts of a service run: this machine, or the nodes of a cluster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dovetail.launch.processes.stack import Played
from dovetail.protocol.errors import DovetailError


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
