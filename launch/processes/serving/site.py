"""The interface to where the parts of a service run: this machine, or the nodes of a cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dovetail.launch.processes.serving.parts import Ending
from dovetail.launch.processes.stack import Played
from dovetail.protocol.errors import DovetailError

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
