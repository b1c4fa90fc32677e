"""Notifies the service manager (sd_notify(3), NOTIFY_SOCKET) that a process is ready and makes
progress. The working code notifies, never a timer, so that systemd ends a stuck process."""

import logging
import math
import os
import socket
import time
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from types import SimpleNamespace

from dovetail.protocol.errors import UserError
from dovetail.protocol.messages import Open

log = logging.getLogger("dovetail.notify")

FEEDS = 4  # notifications of progress within the watchdog's limit
LOADING_S = 900
"""Additional seconds for a process that is reading or processing its model."""
EXTEND_EVERY_S = 1.0


class Notifier:
    """The connection to the service manager; one per process."""

    def __init__(
        self,
        parts: Sequence[str] = ("",),
        *,
        environment: MutableMapping[str, str] = os.environ,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remove the manager's variables from the environment, so that no child uses them. `parts`:
        the loops of this process, all of which must make progress. `UserError` for a socket of
        another family."""
        name = environment.pop("NOTIFY_SOCKET", "")
        most_us = int(environment.pop("WATCHDOG_USEC", "0"))
        if int(environment.pop("WATCHDOG_PID", os.getpid())) != os.getpid():
            most_us = 0
        if name and name[0] not in "/@":
            raise UserError(f"NOTIFY_SOCKET = {name!r} does not begin with / or @")
        self._name = "\0" + name[1:] if name.startswith("@") else name
        self._every_s, self._clock_s = most_us / 1e6 / FEEDS, clock_s
        self._parts, self._ready, self._heard = frozenset(parts), set[str](), set[str]()
        self._due_s = self._extend_s = -math.inf

    def part(
        self,
        name: str,
        serves: Callable[[], None] = lambda: None,
        opens: Callable[[Open], None] = lambda _: None,
    ) -> SimpleNamespace:
        """Return a worker's `Listener` for one of the loops, with `serves` and `opens` as its
        methods."""
        ready, progress = partial(self.ready, name), partial(self.progress, name)
        return SimpleNamespace(ready=ready, progress=progress, serves=serves, opens=opens)

    def ready(self, part: str = "") -> None:
        """Note that a part is ready; notify once, when all are."""
        if self._parts > self._ready:
            self._ready.add(part)
            if self._parts == self._ready:
                self._send("READY=1")

    def progress(self, part: str = "") -> None:
        """Note the progress of a part; when all have made progress since the last notification, and
        it is time, notify."""
        if not self._every_s:
            return
        self._heard.add(part)
        if self._heard == self._parts and (now_s := self._clock_s()) >= self._due_s:
            self._heard.clear()
            self._due_s = now_s + self._every_s
            self._send("WATCHDOG=1")

    def loading(self) -> None:
        """Request more time for the start, since the model is still being read."""
        if self._name and (now_s := self._clock_s()) >= self._extend_s:
            self._extend_s = now_s + EXTEND_EVERY_S
            self._send(f"EXTEND_TIMEOUT_USEC={LOADING_S * 1_000_000}")

    def _send(self, text: str) -> None:
        """Send one message, without waiting or failing if the manager does not read."""
        if not self._name:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(text.encode(), self._name)
            except OSError as error:
                log.warning("NOTIFY_SOCKET did not get %s: %s", text, error.strerror)
