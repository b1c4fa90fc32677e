"""A standby for real: its link to the coordinator is opened in a thread, and read with the hub some
times a second; and, once it has taken over, its calls to the coordinator that was."""

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

from dovetail.protocol.codec import encode
from dovetail.protocol.errors import LinkError, LinkRefused, UserError
from dovetail.protocol.links import Hub, Link
from dovetail.protocol.messages import Follow
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.standby.follower import Arrived, Follower

log = logging.getLogger("dovetail.coordinator")

LOOK_EVERY_S = 0.05
CALL_EVERY_S = 1.0
"""So often the coordinator that was is called, to hear that it has been taken over from."""

Connect = Callable[[float], Link]
"""Opens a link to the coordinator within so many seconds, blocking."""
CONNECT_S = 1.0


async def stand_by(
    hub: Hub,
    journal: Journal,
    address: str,
    connect: Connect,
    *,
    leads_on: bool,
    strict: bool,
    ready: Callable[[], None],
    progress: Callable[[], None],
) -> list[Arrived]:
    """Copy the journal of the coordinator at an address until it is time to take over; return what
    those said who wait to be let in. `leads_on`: it is time as soon as the other one is known not
    to lead; `strict`: a first attempt to connect that is refused ends this with `LinkRefused`;
    `ready` hears that this attempt is over, `progress` that it goes on. `UserError` if the
    coordinator refuses this standby, or keys are missing."""
    follower = Follower(hub, journal, address, leads_on=leads_on, now_s=time.monotonic())
    opening = Opening(connect, strict=strict)
    said = False
    try:
        while (arrived := follower.step(time.monotonic(), opening.link)) is None:
            if opening.tried and not said:
                said = True
                ready()
            progress()
            await asyncio.sleep(LOOK_EVERY_S)
        return arrived
    finally:
        opening.over.set()
        follower.close()


class Opening:
    """Links that are opened in threads, one at a time, which end with the process."""

    def __init__(self, connect: Connect, *, strict: bool) -> None:
        """`strict`: whoever takes no connection at the first attempt is not asked again."""
        self._connect, self._strict = connect, strict
        self._ends: queue.SimpleQueue[Link | LinkError | UserError] = queue.SimpleQueue()
        """The ends of attempts that nobody has heard of yet."""
        self._thread: threading.Thread | None = None
        self.tried = False
        """True once the first attempt is over."""
        self.over = threading.Event()
        """Set when no link is wanted any more."""

    def link(self) -> Link | None:
        """Return a link that has been opened, or try to open one and return None. `UserError` for
        keys that are not here; `LinkRefused` if this is strict."""
        with contextlib.suppress(queue.Empty):
            end = self._ends.get_nowait()
            strict, self.tried = self._strict and not self.tried, True
            if not isinstance(end, LinkError | UserError):
                return end
            if isinstance(end, UserError) or (strict and isinstance(end, LinkRefused)):
                raise end
            log.log(logging.WARNING if strict else logging.DEBUG, "%s; it is waited for", end)
            return None
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._open, name="dovetail-follow", daemon=True)
            self._thread.start()
        return None

    def _open(self) -> None:
        try:
            link = self._connect(CONNECT_S)
        except (LinkError, UserError) as error:
            self._ends.put(error)
            return
        if self.over.is_set():
            link.close()
        else:
            self._ends.put(link)


def call_on(connect: Connect, hub: Hub, term: int, over: threading.Event) -> None:
    """In a thread that ends with the process, or once it is `over` here: tell the coordinator that
    was, whenever it can be reached, that it has been taken over from."""

    def call() -> None:
        told = Follow(
            epoch=0,
            host=socket.gethostname()[:512],
            pid=os.getpid(),
            term=term,
            address=address,
        )
        while not over.is_set():
            try:
                link = connect(CONNECT_S)
                with contextlib.closing(link):
                    link.send(encode(told))
                    link.receive(CALL_EVERY_S)
            except LinkError as error:
                log.debug("%s", error)
            over.wait(CALL_EVERY_S)

    address = hub.address
    threading.Thread(target=call, name="dovetail-call", daemon=True).start()
