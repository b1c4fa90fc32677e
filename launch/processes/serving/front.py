"""The router before several services or models: our child, restarted when it is lost."""

import logging
import os
import select
import time
from collections.abc import Callable, Sequence

from dovetail.launch.processes.serving.service import DRAIN_S
from dovetail.launch.processes.serving.watch import Action, GiveUp, Leave, Part, Start, Tell, Watch
from dovetail.launch.processes.supervise import GRACE_S, Child, Supervisor
from dovetail.launch.settings.configure import Configuration
from dovetail.protocol.errors import DovetailError

log = logging.getLogger("dovetail.serve")

ROUTER = "router"
TAKEN = ("host", "api_key_file", "receive_s", "body", "connections", "cors")
"""The settings of the HTTP API that a router also has, except its port."""
PIECE = 1 << 16


class Front:
    """The router; use it within the block of its supervisor."""

    def __init__(
        self,
        supervisor: Supervisor,
        configuration: Configuration,
        *arguments: str,
        taken: Sequence[str] = TAKEN,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """`arguments`: of the command `router`; `taken`: the settings `http.*` that it gets;
        `started` is called whenever it has been started."""
        self._supervisor, self._configuration = supervisor, configuration
        self._arguments, self._taken, self._started = arguments, taken, started
        stuck_s = configuration.settings.coordinator.stuck_s
        self._watch = Watch((Part(ROUTER),), time.monotonic(), stuck_s=stuck_s)
        self._child: Child | None = None
        self._rest = b""
        self.left = False  # True if it has ended by itself without an error
        self.url = ""

    @property
    def serving(self) -> bool:
        return self._watch.serving

    @property
    def pids(self) -> dict[str, int]:
        return {ROUTER: self._child.pid} if self._child is not None else {}

    def tell(self, line: str) -> bool:
        """Write a line to its stdin; False if it cannot take it now."""
        return self._child is not None and self._child.tell(line)

    def end(self) -> None:
        """End it, with some seconds for running requests."""
        if self._child is not None:
            self._supervisor.end([self._child], GRACE_S + DRAIN_S)

    def step(self) -> list[str]:
        """Start or restart it, pass on its log, and return the new lines of its stdout, without its
        URL; raise its error if it cannot be kept running."""
        now_s, child, lines = time.monotonic(), self._child, list[str]()
        if child is not None and child.ended:
            self._perform(self._watch.ended(ROUTER, child.ending(), now_s), child)
            self._supervisor.end([child])
            self._child = None
        elif child is not None:
            lines = self._read(child)
            url = next((line for line in lines if line.startswith("http://")), "")
            if url and ROUTER in self._watch.missing:
                self.url = url
                self._perform(self._watch.ready(ROUTER, now_s))
            elif ROUTER not in self._watch.missing:
                self._watch.answered((), now_s)
        if child is not None and self._watch.serving:
            for line in child.listen():
                log.info("%s: %s", ROUTER, line)
        self._perform(self._watch.due(now_s))
        return [line for line in lines if not line.startswith("http://")]

    def _read(self, child: Child) -> list[str]:
        assert child.process.stdout is not None
        pipe = child.process.stdout.fileno()
        while select.select([pipe], [], [], 0.0)[0] and (piece := os.read(pipe, PIECE)):
            self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def _perform(self, actions: Sequence[Action], ended: Child | None = None) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start()
                case Tell(text):
                    log.info("%s", text)
                case Leave():
                    self.left = True
                case GiveUp(_, why):
                    assert ended is not None
                    failure = ended.failure()
                    raise failure if not why else DovetailError(f"the router {why}; {failure}")

    def _start(self) -> None:
        names = {f"--http.{name}" for name in self._taken}
        flags = [
            flag
            for flag in self._configuration.arguments("http")
            if flag.partition("=")[0] in names
        ]
        port = self.url.rpartition(":")[2] or self._configuration.settings.http.port
        arguments = ["router", *self._arguments, *flags, f"--http.port={port}"]
        self._rest = b""
        self._child = self._supervisor.start(ROUTER, arguments, reads=True, asks=True)
        self._started()
