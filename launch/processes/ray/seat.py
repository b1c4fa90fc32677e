"""The body of an actor: one process on its node. In its command, `{folder}` is a private folder
with its keys, `{ip}` the node's address. Does not import Ray."""

import fcntl
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dovetail.launch.cli import installed_version
from dovetail.launch.files.directory import runtime_directory
from dovetail.launch.machine.topology import Place, Topology, format_numbers, read_topology
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.catalog import PREFIX
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import VERSION


def candidates(topology: Topology, *, last: bool = False) -> list[list[tuple[int, int]]]:
    """Return the hardware threads in the order of claiming, each as memory node and number, by
    memory node: first one of each physical core. `last`: from the last core downwards."""
    lists = []
    for node in topology.computing:
        cores = node.cores[::-1] if last else node.cores
        turns = range(max(map(len, cores)))
        lists.append(
            [(node.number, core[turn]) for turn in turns for core in cores if turn < len(core)]
        )
    return lists[::-1] if last else lists


class Claim:
    """Cores reserved for this process until it closes the claim or ends."""

    def __init__(self, place: Place, locks: Sequence[int]) -> None:
        self.place, self._locks = place, locks

    def close(self) -> None:
        """Release the cores."""
        for lock in self._locks:
            os.close(lock)


def claim(count: int, *, last: bool = False, topology: Topology | None = None) -> Claim:
    """Claim this many cores, of one memory node if possible, with that node's memory on a machine
    of several. `UserError` if fewer are left."""
    lists = candidates(topology or read_topology(), last=last)
    folder = runtime_directory()
    apart = len(lists) > 1
    free = 0
    for choice in [*lists, *([[core for own in lists for core in own]] if apart else [])]:
        taken = _take(folder, choice, count)
        if len(taken) == count:
            nodes = {node for node, _ in taken} if apart else set[int]()
            cores = tuple(sorted(number for _, number in taken))
            return Claim(Place(cores, tuple(sorted(nodes))), [*taken.values()])
        free = len(taken)
        Claim(Place(()), [*taken.values()]).close()
    known = format_numbers(sorted(core for own in lists for _, core in own))
    raise UserError(
        f"{count} cores were requested, but {free} of the cores {known} are free: request fewer"
    )


def _take(
    folder: Path, choice: Iterable[tuple[int, int]], count: int
) -> dict[tuple[int, int], int]:
    """Lock the files of this many free cores among these, or of all free ones if they are fewer;
    return the descriptors by core."""
    taken: dict[tuple[int, int], int] = {}
    for core in choice:
        if len(taken) == count:
            break
        path = folder / f"core-{core[1]}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        taken[core] = lock
    return taken


MOST_LINES = 200  # lines of stderr in one result
LOOK_S, ALONE_S = 1.0, 10.0
"""Seconds between checks of the node's process, and our grace after its end."""
FOLDER, IP = "{folder}", "{ip}"  # placeholders of a command that the node replaces


class Seat:
    """One process, from its start to its end."""

    def __init__(self, ip: str) -> None:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]  # all settings come from the command
        self._ip = ip
        self._supervisor = Supervisor(apart=True)
        self._folder = Path(tempfile.mkdtemp(prefix="dovetail-keys-"))
        self._supervisor.owns_folder(self._folder)
        self._claim: Claim | None = None
        self._child: Child | None = None
        self._heard = ""

    def introduce(self) -> dict[str, Any]:
        return {
            "host": socket.gethostname(),
            "ip": self._ip,
            "release": installed_version(),
            "protocol": list(VERSION),
        }

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        files: Mapping[str, str],
        cores: int,
        *,
        last: bool,
        reads: bool,
    ) -> dict[str, Any]:
        """Start a command with these files in its folder, on this many cores (0: not bound) that no
        other seat on this machine has, from the last one downwards if `last`; `reads`: it prints
        its address on stdout. Return its pid, or why it was not started."""
        for file, text in files.items():
            path = self._folder / file
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        known = {FOLDER: str(self._folder), IP: self._ip}
        command = [_filled(argument, known) for argument in arguments]
        try:
            if cores:
                self._claim = claim(cores, last=last)
                place = self._claim.place
                command += [f"--cores={place.cores_text}"]
                command += [f"--memory-nodes={format_numbers(place.nodes)}"] if place.nodes else []
            self._child = self._supervisor.start(name, command, reads=reads, asks=True)
        except DovetailError as error:
            return {"why": str(error), "mistake": isinstance(error, UserError)}
        assert self._child.process.stdin is not None
        os.set_blocking(self._child.process.stdin.fileno(), False)
        return {"pid": self._child.process.pid}

    def look(self) -> dict[str, Any]:
        assert self._child is not None
        self._supervisor.mind()
        ended = self._child.ended
        said = self._child.heard() if self._child.process.stdout is not None else ""
        beats = bool(self._heard and said)
        self._heard = self._heard or said
        failure = self._child.failure() if ended else None
        return {
            "heard": self._heard,
            "beats": beats,
            "cpu_s": self._child.cpu_s(),
            "lines": self._child.listen()[-MOST_LINES:],
            "ending": asdict(self._child.ending()) if ended else None,
            "failure": str(failure or ""),
        }

    def tell(self, line: str) -> None:
        assert self._child is not None
        self._child.tell(line)

    def stuck(self) -> None:
        """End the process, which is stuck, after it has dumped its stacks."""
        if self._child is not None and not self._child.ended:
            self._child.kill_stuck()

    def end(self, grace_s: float) -> list[str]:
        """End the process, with some seconds to end by itself; return its last output."""
        lines: list[str] = []
        if self._child is not None:
            self._supervisor.end([self._child], grace_s)
            lines = self._child.listen()
        if self._claim is not None:
            self._claim.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return lines[-MOST_LINES:]


def end_with(node: int) -> None:
    """Wait until the node's process has ended, then end ours, which is orphaned; the rest is
    cleaned up as after any killed supervisor."""
    while os.getppid() == node:
        time.sleep(LOOK_S)
    time.sleep(ALONE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _filled(argument: str, known: Mapping[str, str]) -> str:
    for word, value in known.items():
        argument = argument.replace(word, value)
    return argument
