"""A cluster's nodes as the site of a service: a bundle for the coordinator and the HTTP API, by
default here, and one for each worker. On one node they connect over ipc, else over tcp with keys
made for this run. A worker starts early, and reads the address from stdin."""

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dovetail.launch.cli import installed_version
from dovetail.launch.processes.ray.bundles import bundles_of, why_not
from dovetail.launch.processes.ray.cluster import Cluster, RemoteSeat
from dovetail.launch.processes.ray.part import LOOK_EVERY_S, Failed, RemotePart, SeatCommand
from dovetail.launch.processes.ray.replicas import Replicas
from dovetail.launch.processes.ray.seat import FOLDER, IP
from dovetail.launch.processes.serving.service import COORDINATOR, HTTP, Service, SiteLost
from dovetail.launch.processes.stack import (
    Played,
    coordinator_arguments,
    http_arguments,
    processes_of,
    with_room_for_draft,
    worker_arguments,
)
from dovetail.launch.processes.supervise import GRACE_S, Supervisor
from dovetail.launch.processes.worker import TOLD
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.http_keys import read_keys
from dovetail.protocol.errors import UserError
from dovetail.protocol.keys import COORDINATOR as HUB
from dovetail.protocol.keys import generate_keys, own_key_for
from dovetail.protocol.messages import VERSION

API_KEYS = "api.keys"
PARTS_OF: Mapping[Played, tuple[str, ...]] = {
    "target": ("target",),
    "draft": ("draft",),
    "unified": ("target", "draft"),
}
"""The roles of the keys that a worker needs."""
END_S = 2.0  # beyond the grace of a process; then we no longer wait for its node


class RaySite:
    """The placement of one service's parts in a cluster; use it as a context, within the block of
    its supervisor, which owns the processes on this machine."""

    def __init__(
        self,
        supervisor: Supervisor,
        cluster: Cluster,
        configuration: Configuration,
        *,
        behind_router: bool = False,
    ) -> None:
        """`behind_router`: only a router on this machine uses its HTTP API."""
        check_settings(configuration)
        self._supervisor, self._cluster = supervisor, cluster
        self._configuration, self._settings = configuration, configuration.settings
        self._behind_router = behind_router
        self.workers: Mapping[str, Played] = {
            f"{role} worker": role for role in processes_of(self._settings)
        }
        self._bundles = bundles_of(self._settings, self.workers, cluster.nodes(), cluster.here)
        self._reservation = cluster.reserve(self._bundles, self._settings.ray.strategy)
        self._parts: list[RemotePart] = []
        self._early: dict[str, RemotePart] = {}
        self._own_keys: Path | None = None  # the keys made for this run
        self.keys: Path | None = None
        self._near = True  # true if the coordinator and the HTTP API are on this machine
        self._mind_s = 0.0

    def __enter__(self) -> "RaySite":
        return self

    def __exit__(self, *_: object) -> None:
        if self._cluster.gone:  # only we can end the processes of its node
            self.end(self._parts, GRACE_S)
        for part in [*self._parts]:
            self._let_go(part)
        self._reservation.close()
        if self._own_keys is not None:
            shutil.rmtree(self._own_keys, ignore_errors=True)

    def begin(self) -> None:
        """Wait until the cluster has room, and start everything without waiting; `UserError` names
        the bundle that does not fit."""
        if not self._reservation.wait(self._settings.ray.wait_s):
            raise UserError(f"{self._why_not()}: change it, add a node, or raise ray.wait_s")
        nodes = self._reservation.nodes()
        self._near = nodes[0] == self._cluster.here
        if not self._near and not self._settings.http.api_key_file:
            why = "ray.coordinator puts the HTTP API on another machine"
            raise UserError(f"{why}, which requires http.api_key_file")
        if {*nodes} != {self._cluster.here}:
            self.keys = self._take_keys()
        for name in (COORDINATOR, HTTP, *self.workers):
            self._early[name] = self._seat(name)
        for name in self.workers:
            self._early[name].begin(self._command(name, TOLD, ""))

    def start(self, name: str, address: str, url: str) -> RemotePart:
        part = self._early.pop(name, None)
        if part is None:
            part = self._seat(name)
            if name in self.workers:
                part.begin(self._command(name, TOLD, ""))
        if name in self.workers:
            part.tell(address)
        else:
            part.begin(self._command(name, address, url))
        return part

    def misfit(self, name: str, loading: Mapping[str, Any]) -> str:
        """Always empty: its bundle has room, or Ray will find some."""
        del name, loading
        return ""

    def owns(self, address: str) -> None:
        if self.keys is None:
            self._supervisor.owns_folder(Path(address.removeprefix("ipc://")).parent)

    def stuck(self, running: Any) -> None:
        running.seat.order("stuck")
        self._let_go(running)
        running.lose("did not respond")

    def end(self, running: Sequence[Any], grace_s: float) -> None:
        for part in running:
            if part.pid and not part.ended:
                part.seat.ask("end", grace_s)
        end_s = time.monotonic() + grace_s + END_S
        for part in running:
            if part.pid and not part.ended:
                with suppress(Failed):
                    part.seat.answer(max(0.0, end_s - time.monotonic()))
            self._let_go(part)

    def kill(self) -> None:
        self._supervisor.kill()
        for part in [*self._parts]:
            self._let_go(part)

    def mind(self) -> None:
        now_s = time.monotonic()
        self._supervisor.mind()
        if self._cluster.gone:
            lost = ", the ".join([COORDINATOR, HTTP, *self.workers])
            why = "the Ray cluster of this command was lost (raylet has ended)"
            raise SiteLost(f"{why}, and with it the {lost}")
        if now_s >= self._mind_s:
            self._mind_s = now_s + LOOK_EVERY_S
            for part in self._parts:
                part.poll(now_s)

    def _let_go(self, part: RemotePart) -> None:
        part.seat.kill()
        if part in self._parts:
            self._parts.remove(part)

    def _why_not(self) -> str:
        return why_not(self._bundles, self._cluster.nodes(), self._settings.ray.strategy)

    def _seat(self, name: str) -> RemotePart:
        index = [COORDINATOR, *self.workers].index(name) if name != HTTP else 0
        guest = name in (COORDINATOR, HTTP)
        seat: RemoteSeat = self._reservation.seat(index, guest=guest)
        part = RemotePart(
            name,
            seat,
            release={"release": installed_version(), "protocol": list(VERSION)},
            patience_s=self._settings.ray.wait_s,
            why_waiting=self._why_not,
        )
        self._parts.append(part)
        return part

    # -- commands ----------------------------------------------------------------------------------

    def _command(self, name: str, address: str, url: str) -> SeatCommand:
        configuration, there = self._configuration, []
        if self.keys is not None:
            there = [f"--coordinator.keys={FOLDER}"]
        if name == COORDINATOR:
            listen = "ipc" if self.keys is None else f"tcp://{IP}:*"
            arguments = [
                "coordinator",
                "--supervised",
                f"--coordinator.listen={address or listen}",
                *(["--own-folder"] if address and self.keys is None else []),
                *coordinator_arguments(configuration),
                *there,
            ]
            return SeatCommand(arguments, self._files(HUB), reads=True)
        if name == HTTP:
            arguments = [*http_arguments(self._reachable(), address, url), "--supervised", *there]
            return SeatCommand(arguments, {**self._files("client"), **self._api_keys()}, reads=True)
        role = self.workers[name]
        settings = with_room_for_draft(configuration) if role == "target" else configuration
        bundle = next(bundle for bundle in self._bundles if bundle.part == name)
        return SeatCommand(
            [*worker_arguments(settings, role, address, None), *there],
            self._files(*PARTS_OF[role]),
            bundle.cores,
            last=role == "draft",
        )

    def _reachable(self) -> Configuration:
        values: dict[str, object] = {}
        if self._behind_router:
            values |= {"http.host": "127.0.0.1", "http.port": 0}
        if not self._near:
            values |= {"http.host": IP, "http.api_key_file": f"{FOLDER}/{API_KEYS}"}
        return self._configuration.over("--engine ray", values) if values else self._configuration

    def _api_keys(self) -> dict[str, str]:
        if self._near:
            return {}
        return {API_KEYS: "".join(f"{key}\n" for key in read_keys(self._settings.http))}

    def _take_keys(self) -> Path:
        if self._settings.coordinator.keys:
            return Path(self._settings.coordinator.keys)
        self._own_keys = Path(tempfile.mkdtemp(prefix="dovetail-keys-"))
        self._supervisor.owns_folder(self._own_keys)
        generate_keys(self._own_keys)
        return self._own_keys

    def _files(self, *roles: str) -> dict[str, str]:
        if self.keys is None:
            return {}
        names = [f"{HUB}.pub"]
        if roles == (HUB,):
            names += [f"{HUB}.key", *(path.name for path in self.keys.glob("*.pub"))]
        else:
            names += [f"{own_key_for(self.keys, role).name}.key" for role in roles]
        return {name: (self.keys / name).read_text(encoding="utf-8") for name in names}


def check_settings(configuration: Configuration) -> None:
    if configuration.given("coordinator.listen"):
        raise UserError(
            "--engine ray chooses where the coordinator listens: leave out coordinator.listen"
        )
    numa = configuration.settings.target.numa
    if numa != "auto":
        raise UserError(f"target.numa = {numa!r} has no effect with --engine ray: leave it out")


def open_services(configuration: Configuration, opened: ExitStack) -> Service | Replicas:
    """Return the services of the settings, with their placement groups requested; they end with the
    stack. `UserError` for a cluster that cannot be joined."""
    settings = configuration.settings.ray
    cluster = opened.enter_context(Cluster(settings.address))
    supervisor = opened.enter_context(Supervisor())

    def service(name: str) -> Service:
        own = _with_own_journal(configuration, name) if name else configuration
        site = RaySite(supervisor, cluster, own, behind_router=bool(name))
        return opened.enter_context(Service(opened.enter_context(site), own, name=name))

    if settings.replicas == 1:
        return service("")
    services = [service(f"replica {number}") for number in range(1, settings.replicas + 1)]
    return Replicas(supervisor, services, configuration)


def _with_own_journal(configuration: Configuration, name: str) -> Configuration:
    """Return the settings of one of several services: each gets a subfolder of a journal's
    folder."""
    journal = configuration.settings.coordinator.journal
    if journal in ("auto", "off"):
        return configuration
    folder = str(Path(journal) / name.replace(" ", "-"))
    return configuration.over("the replica's", {"coordinator.journal": folder})
