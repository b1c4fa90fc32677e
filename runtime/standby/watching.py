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
from dovetail.protocol.errors import LinkError
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
    ready: Callable[[], None],
    progress: Callable[[], None],
) -> list[Arrived]:
    """Copy the journal of the coordinator at an address until it is time to take over; return what
    those said who wait to be let in. `leads_on`: it is time as soon as the other one is known not
    to lead; `ready` hears that this has begun, `progress` that it goes on. `UserError` if the
    coordinator refuses this standby."""
    follower = Follower(hub, journal, address, leads_on=leads_on, now_s=time.monotonic())
    opening = Opening(connect)
    ready()
    try:
        while (arrived := follower.step(time.monotonic(), opening.link)) is None:
            progress()
            await asyncio.sleep(LOOK_EVERY_S)
        return arrived
    finally:
        opening.over.set()
        follower.close()


class Opening:
    """Links that are opened in threads, one at a time, which end with the process."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._opened: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.over = threading.Event()
        """Set when no link is wanted any more."""

    def link(self) -> Link | None:
        """Return a link that has been opened, or try to open one and return None."""
        with contextlib.suppress(queue.Empty):
            return self._opened.get_nowait()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._open, name="dovetail-follow", daemon=True)
            self._thread.start()
        return None

    def _open(self) -> None:
        try:
            link = self._connect(CONNECT_S)
        except LinkError as error:
            log.debug("%s", error)
            return
        if self.over.is_set():
            link.close()
        else:
            self._opened.put(link)


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
