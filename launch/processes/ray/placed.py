"""Starts what `dovetail serve --engine ray` serves: one service, or several behind a router."""

from contextlib import ExitStack
from pathlib import Path

from dovetail.launch.processes.ray.cluster import Cluster
from dovetail.launch.processes.ray.replicas import Replicas
from dovetail.launch.processes.ray.site import RaySite
from dovetail.launch.processes.serving.service import Service
from dovetail.launch.processes.supervise import Supervisor
from dovetail.launch.settings.configure import Configuration


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
