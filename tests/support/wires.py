"""Hubs and links of all three kinds, opened for tests and closed with them, and waiting without
sleeping."""

import contextlib
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from dovetail.protocol import links
from dovetail.protocol.links import Hub, Link
from support.memory_links import memory_links
from support.patience import PATIENCE_S


class Wire:
    """A hub, and how to reach it."""

    def __init__(
        self,
        hub: Hub,
        folder: Path | None,
        dial: Callable[[str], Link],
        stack: contextlib.ExitStack,
    ) -> None:
        self.hub = hub
        self.keys = folder
        self._dial = dial
        self._stack = stack

    def dial(self, role: str = "target") -> Link:
        """A new link, closed with the test."""
        link = self._dial(role)
        self._stack.callback(link.close)
        return link

    def arrived(self) -> tuple[bytes, list[bytes]]:
        """The next message at the hub, awaited by its descriptor."""
        while (message := self.hub.receive()) is None:
            assert readable(self.hub.fileno()), "nothing arrived"
        return message

    def greet(self, link: Link) -> bytes:
        """The name by which the hub knows a link."""
        link.send([b"hello"])
        peer, frames = self.arrived()
        assert frames == [b"hello"]
        return peer

    def departed(self) -> int:
        """Return how many peers disconnected, at least one, awaited by the monitor's descriptor."""
        while not (gone := self.hub.disconnects()):
            assert readable(self.hub.monitor_fileno()), "nobody disconnected"
        return gone


def spawn(stack: contextlib.ExitStack, script: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """A process of its own that runs `script` and has said that it is ready; killed with the test,
    at the latest."""
    child = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stack.callback(end, child)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def end(child: "subprocess.Popen[bytes]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], PATIENCE_S)[0])


def until(condition: Callable[[], bool], wait: Callable[[], object]) -> None:
    """Wait, by `wait`, until `condition` holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        wait()


def open_wire(kind: str, folder: Path | None, stack: contextlib.ExitStack) -> Wire:
    if kind == "memory":
        memory = memory_links()
        stack.callback(memory.close)
        return Wire(memory, None, lambda role: memory.connect(), stack)
    hub = links.open_hub("ipc" if kind == "ipc" else "tcp://127.0.0.1:*", keys=folder)
    stack.callback(hub.close)
    return Wire(
        hub, folder, lambda role: links.open_link(hub.address, keys=folder, role=role), stack
    )
