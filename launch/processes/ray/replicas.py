"""Several services, each on its nodes, behind a router, our child. A service that cannot be kept
running is dropped; losing the last one ends everything. Does not import Ray."""

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.launch.processes.serving.front import ROUTER, Front
from dovetail.launch.processes.serving.service import ENDING, Service, SiteLost
from dovetail.launch.processes.stack import LOADING_POLL_S, POLL_S
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError
from dovetail.protocol.messages import Fault, Reported

log = logging.getLogger("dovetail.serve")


class Replicas:
    """Services behind a router; use it within the block of its supervisor."""

    def __init__(
        self, supervisor: Supervisor, services: Sequence[Service], configuration: Configuration
    ) -> None:
        self._supervisor, self._services = supervisor, [*services]
        folder = Path(tempfile.mkdtemp(prefix="dovetail-replicas-"))
        supervisor.owns_folder(folder)
        self._list, self._listed = folder / "urls", ""
        self._front = Front(supervisor, configuration, f"--replicas={self._list}")
        self._left = False

    @property
    def url(self) -> str:
        return self._front.url

    @property
    def address(self) -> str:
        return " ".join(service.address for service in self._services)

    @property
    def pids(self) -> dict[str, int]:
        found = {
            f"{service.name} {part}": pid
            for service in self._services
            for part, pid in service.pids.items()
        }
        return {**found, **self._front.pids}

    @property
    def state(self) -> Reported | None:
        return self._services[0].state

    def faults(self, now_s: float) -> tuple[Fault, ...]:
        return tuple(
            fault.model_copy(update={"part": f"{service.name} {fault.part}"})
            for service in self._services
            for fault in service.faults(now_s)
        )

    def begin(self) -> None:
        for service in self._services:
            service.begin()

    def run_until_ready(self, say: Callable[[str], None]) -> None:
        """Start everything, and wait; the error of the first process that ends is raised."""
        while not (self._front.serving and all(service.serving for service in self._services)):
            self._supervisor.mind()
            for service in self._services:
                service.step()
            if all(service.serving for service in self._services):
                self._step_router()
            missing = [
                f"{service.name} {part}" for service in self._services for part in service.missing
            ]
            say(f"starting {' and '.join(missing or [ROUTER])}")
            time.sleep(LOADING_POLL_S)

    def run(self) -> None:
        """Keep everything running until one of the coordinators receives a Stop."""
        while not self._left:
            self._supervisor.mind()
            for service in [*self._services]:
                self._step(service)
                self._left |= service.left
            self._step_router()
            self._left |= self._front.left
            time.sleep(POLL_S)

    def drain(self) -> None:
        """End the router, then each service; another signal ends all of them at once."""
        try:
            log.info(ENDING)
            self._front.end()
            for service in self._services:
                service.drain()
        except (KeyboardInterrupt, SystemExit):
            self._supervisor.kill()

    def _step(self, service: Service) -> None:
        """Supervise a service; if it cannot be kept running the others continue."""
        try:
            service.step()
        except DovetailError as failure:
            if len(self._services) == 1 or isinstance(failure, SiteLost):
                raise
            log.error("%s is abandoned: %s", service.name, failure)
            self._services.remove(service)

    # -- the router --------------------------------------------------------------------------------

    def _step_router(self) -> None:
        urls = "".join(f"{service.url}\n" for service in self._services if service.url)
        if urls != self._listed:
            fresh = self._list.with_suffix(".new")
            fresh.write_text(urls, encoding="utf-8")
            fresh.replace(self._list)
            self._listed = urls
        self._front.step()
