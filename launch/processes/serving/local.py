"""The parts of a service as children of this process."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.preflight import text_here
from dovetail.launch.processes.serving.service import COORDINATOR, HTTP
from dovetail.launch.processes.stack import (
    Played,
    begin_workers,
    coordinator_arguments,
    http_arguments,
    layout_of,
    processes_of,
    with_room_for_draft,
    worker_arguments,
)
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.processes.worker import TOLD
from dovetail.launch.settings.configure import Configuration
from dovetail.launch.settings.models import with_target
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.memory import read_room


class Local:
    """This machine; use it within the block of its supervisor."""

    def __init__(self, supervisor: Supervisor, configuration: Configuration) -> None:
        self._supervisor, self._configuration = supervisor, configuration
        self._settings = configuration.settings
        self._layout = layout_of(configuration.settings)
        self.workers: Mapping[str, Played] = {
            f"{role} worker": role for role in processes_of(self._settings)
        }
        keys = self._settings.coordinator.keys
        self.keys = Path(keys) if keys else None
        self._early: dict[str, Child] = {}
        """Started workers that wait for the coordinator's address."""
        self._begun_early: Callable[[], dict[str, Child]] = dict
        """Return these workers once they have imported their modules."""

    def begin(self) -> None:
        """Start the workers early; a process without threads can fork them."""
        commands = {name: self._arguments(name, TOLD, "") for name in self.workers}
        self._begun_early = begin_workers(self._supervisor, self._settings, commands)

    def start(self, name: str, address: str, url: str) -> Child:
        """Start a part, or send the address to a worker that was started early; the coordinator and
        the HTTP API print their address on stdout."""
        if name in self.workers:
            self._early, self._begun_early = {**self._early, **self._begun_early()}, dict
        if (child := self._early.pop(name, None)) is not None:
            child.tell(address, last=True)
        else:
            hub, reads = name == COORDINATOR, name in (COORDINATOR, HTTP)
            arguments = self._arguments(name, address, url)
            child = self._supervisor.start(name, arguments, reads=reads, asks=hub)
        if name == COORDINATOR:
            assert child.process.stdin is not None
            os.set_blocking(child.process.stdin.fileno(), False)
        return child

    def misfit(self, name: str, loading: Mapping[str, Any]) -> str:
        room = read_room()
        if room is not None:
            held = sum(child.rss_bytes() for child in loading.values())
            room = replace(room, size=room.size + held)
        roles = [self.workers[part] for part in (name, *loading)]
        try:
            check_memory(self._settings, roles, nodes=nodes_of(self._layout.target), room=room)
        except SettingsError as misfit:
            return str(misfit)
        return ""

    def owns(self, address: str) -> None:
        if self._settings.coordinator.listen == "ipc":
            self._supervisor.owns_folder(Path(address.removeprefix("ipc://")).parent)

    def stuck(self, running: Any) -> None:
        running.kill_stuck()

    def end(self, running: Sequence[Any], grace_s: float) -> None:
        self._supervisor.end(running, grace_s)

    def kill(self) -> None:
        self._supervisor.kill()

    def mind(self) -> None:
        self._supervisor.mind()

    def _arguments(self, name: str, address: str, url: str) -> list[str]:
        configuration = self._configuration
        keys = [f"--coordinator.keys={self.keys}"] if self.keys else []
        if name == COORDINATOR:
            return [
                "coordinator",
                "--supervised",
                *self._listening(address),
                *coordinator_arguments(configuration),
                f"--cores={format_numbers(self._layout.coordinator.cores)}",
                *keys,
            ]
        if name == HTTP:
            here = text_here(with_target(self._settings.target).model)
            ahead = [f"--model-folder={here}"] if here is not None else []
            return [*http_arguments(configuration, address, url), "--supervised", *ahead, *keys]
        role = self.workers[name]
        settings = with_room_for_draft(configuration) if role == "target" else configuration
        return [*worker_arguments(settings, role, address, self._layout), *keys]

    def _listening(self, address: str) -> list[str]:
        """Return the coordinator's address: that of the settings until the exact one is known and
        stored."""
        listen = self._settings.coordinator.listen
        return [
            f"--coordinator.listen={address or listen}",
            *(["--own-folder"] if listen == "ipc" and address else []),
        ]
