"""The body of an actor: one process on its node, started and watched there. In its command the node
replaces words in braces: `{folder}`, a private folder with the keys of the process, and `{ip}`, the
address of the node. Results are plain values. Does not import Ray.
"""

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dovetail.launch.cli import installed_version
from dovetail.launch.machine.claims import Claim, claim
from dovetail.launch.machine.topology import format_numbers
from dovetail.launch.processes.child_output import Ear, ending_of, let_speak_and_kill
from dovetail.launch.processes.supervise import Child, Supervisor
from dovetail.launch.settings.catalog import PREFIX
from dovetail.protocol.errors import DovetailError, UserError
from dovetail.protocol.messages import VERSION

MOST_LINES = 200  # lines of stderr in one result
LOOK_S, ALONE_S = 1.0, 10.0
"""Seconds between two checks of the node's process, and the grace for our process once that has
ended."""
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
        self._ear: Ear | None = None
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
        other seat on this machine has, from the `last` ones on if set; `reads`: it prints its
        address on stdout. Return its pid, or why it was not started."""
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
        self._ear = Ear(self._child)
        return {"pid": self._child.process.pid}

    def look(self) -> dict[str, Any]:
        assert self._child is not None
        assert self._ear is not None
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
            "lines": self._ear.listen()[-MOST_LINES:],
            "ending": asdict(ending_of(self._child)) if ended else None,
            "failure": str(failure or ""),
        }

    def tell(self, line: str) -> None:
        """Write a line to its stdin; its loss is noticed elsewhere."""
        assert self._child is not None
        assert self._child.process.stdin is not None
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._child.process.stdin.fileno(), f"{line}\n".encode())

    def stuck(self) -> None:
        """End the process, which is stuck, after it has dumped its stacks."""
        if self._child is not None and not self._child.ended:
            let_speak_and_kill(self._child)

    def end(self, grace_s: float) -> list[str]:
        """End the process, with some seconds to end by itself; return its last output."""
        if self._child is not None:
            self._supervisor.end([self._child], grace_s)
        lines = self._ear.listen() if self._ear is not None else []
        if self._claim is not None:
            self._claim.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        return lines[-MOST_LINES:]


def end_with(node: int) -> None:
    """Wait until the node's process has ended, and end ours, which is orphaned then; the rest is
    cleaned up as after any killed supervisor."""
    while os.getppid() == node:
        time.sleep(LOOK_S)
    time.sleep(ALONE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _filled(argument: str, known: Mapping[str, str]) -> str:
    for word, value in known.items():
        argument = argument.replace(word, value)
    return argument
