"""The place where the parts of a service run, as the service sees it: this machine, or the nodes of
a cluster."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dovetail.launch.processes.serving.parts import Ending
from dovetail.launch.processes.stack import Played
from dovetail.protocol.errors import DovetailError

COORDINATOR, HTTP = "coordinator", "http"


class SiteLost(DovetailError):
    """The place where the parts run has gone, and none of them can be started again."""


class Running(Protocol):
    """A process of a part that was started."""

    @property
    def pid(self) -> int:
        """Return its number on its machine; 0: it has none yet."""

    @property
    def host(self) -> str:
        """Return the name of its machine."""

    @property
    def ended(self) -> bool:
        """Return whether it has ended."""

    def heard(self) -> str:
        """Return the line that it has said on stdout; empty if it has not yet."""

    def beats(self) -> bool:
        """Return whether it has sent a heartbeat since the last call."""

    def cpu_s(self) -> float:
        """Return the CPU time that it has used in seconds."""

    def tell(self, line: str) -> bool:
        """Write a line to its stdin; False: it does not take it now."""

    def listen(self) -> list[str]:
        """Return the lines of its stderr since the last call, also once it has ended."""

    def ending(self) -> Ending:
        """Return how it has ended."""

    def failure(self) -> DovetailError:
        """Return why it has ended, in its own words."""

    def forget(self) -> None:
        """Let go of what is kept here of a process that has ended."""


class Site(Protocol):
    """A place where parts are started, by their names."""

    @property
    def workers(self) -> Mapping[str, Played]:
        """Return the names of the workers, with what each of them plays."""

    @property
    def keys(self) -> Path | None:
        """Return the folder of the keys of a client; None: the coordinator is not reached by
        tcp."""

    def begin(self) -> None:
        """Begin to start what takes the longest, ahead of its turn."""

    def start(self, name: str, address: str, url: str) -> Running:
        """Start a part. `address`, `url`: those of the coordinator and of the HTTP API, as far as
        these have listened before."""

    def misfit(self, name: str, loading: Mapping[str, Running]) -> str:
        """Return why a worker cannot be started now beside those that are loading; empty if it
        can."""

    def owns(self, address: str) -> None:
        """The coordinator listens at this address, for good."""

    def stuck(self, running: Running) -> None:
        """End a process that is stuck; what it can still say of itself should be heard."""

    def end(self, running: Sequence[Running], grace_s: float) -> None:
        """End these, with some seconds to do it by themselves."""

    def kill(self) -> None:
        """End everything at once."""

    def mind(self) -> None:
        """See to it, from time to time, that nothing is left behind if this process is killed;
        `SiteLost` if the place has gone."""
