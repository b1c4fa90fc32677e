"""The parts of a service as children of this process."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dovetail.launch.machine.fit import check_memory, nodes_of
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.preflight import text_here
from dovetail.launch.processes.serving.site import (
    COORDINATOR,
    HTTP,
    Ear,
    Ending,
    Running,
    ending_of,
    let_speak_and_kill,
)
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
from dovetail.launch.settings.embedded import with_target
from dovetail.protocol.errors import DovetailError, SettingsError
from dovetail.protocol.memory import read_room


@dataclass(frozen=True)
class LocalPart:
    """A child process, and the reader of its stderr."""

    child: Child

    @cached_property
    def _ear(self) -> Ear:
        return Ear(self.child)

    @property
    def pid(self) -> int:
        return self.child.process.pid

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def ended(self) -> bool:
        return self.child.ended

    def heard(self) -> str:
        return self.child.heard()

    def beats(self) -> bool:
        return bool(self.child.heard())

    def cpu_s(self) -> float:
        return self.child.cpu_s()

    def tell(self, line: str) -> bool:
        assert self.child.process.stdin is not None
        try:
            os.write(self.child.process.stdin.fileno(), f"{line}\n".encode())
        except (BlockingIOError, BrokenPipeError):
            return False  # a stuck process reads it later; a lost one is noticed elsewhere
        return True

    def listen(self) -> list[str]:
        return self._ear.listen()

    def ending(self) -> Ending:
        return ending_of(self.child)

    def failure(self) -> DovetailError:
        return self.child.failure()

    def forget(self) -> None:
        self._ear.close()


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
        """Workers that have been started and wait for the address of the coordinator."""
        self._begun_early: Callable[[], dict[str, Child]] = dict
        """Return these workers once they have imported their modules."""

    def begin(self) -> None:
        """Start the workers ahead; a process without threads can fork them."""
        commands = {name: self._arguments(name, TOLD, "") for name in self.workers}
        self._begun_early = begin_workers(self._supervisor, self._settings, commands)

    def start(self, name: str, address: str, url: str) -> LocalPart:
        """Start a part, or send the address to a worker that was started ahead; the coordinator and
        the HTTP API print their address on stdout."""
        if name in self.workers:
            self._early, self._begun_early = {**self._early, **self._begun_early()}, dict
        if (child := self._early.pop(name, None)) is not None:
            self._supervisor.tell(child, address)
        else:
            hub, reads = name == COORDINATOR, name in (COORDINATOR, HTTP)
            arguments = self._arguments(name, address, url)
            child = self._supervisor.start(name, arguments, reads=reads, asks=hub)
        if name == COORDINATOR:
            assert child.process.stdin is not None
            os.set_blocking(child.process.stdin.fileno(), False)
        part = LocalPart(child)
        part._ear  # noqa: B018 - it is read from its beginning, also once the child is closed
        return part

    def misfit(self, name: str, loading: Mapping[str, Running]) -> str:
        room = read_room()
        if room is not None:
            held = sum(_child(part).rss_bytes() for part in loading.values())
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

    def stuck(self, running: Running) -> None:
        let_speak_and_kill(_child(running))

    def end(self, running: Sequence[Running], grace_s: float) -> None:
        self._supervisor.end([_child(part) for part in running], grace_s)

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
        """Return the coordinator's address: that of the settings until the exact one is known,
        which is kept."""
        listen = self._settings.coordinator.listen
        return [
            f"--coordinator.listen={address or listen}",
            *(["--own-folder"] if listen == "ipc" and address else []),
        ]


def _child(running: Running) -> Child:
    assert isinstance(running, LocalPart)
    return running.child
