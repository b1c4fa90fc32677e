"""The coordinator's asyncio loop around its hub, from the first message to the last.

It sends nothing itself. After anything that may have sent, `_arrived` reads the hub until it is
empty, since its descriptor is edge-triggered. At the end the sessions finish, and the workers are
released."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

from dovetail.protocol.errors import RequestError
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import Supervised
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.coordinator import DEFAULTS, Coordinator
from dovetail.runtime.engine.stored import MessageRecorder, ReplyStore
from dovetail.runtime.fleet.records import PairRecords
from dovetail.runtime.session.request import Request

log = logging.getLogger("dovetail.coordinator")

PROBE_EVERY_S = 0.25
STOP_GRACE_S = 5.0
FAREWELL_S = 0.5
DRAIN_EVERY_S = 0.02
READERS = 4  # threads that tokenize prompts; the journal writes in others


async def coordinate(
    hub: Hub,
    *,
    settings: CoordinatorSettings = DEFAULTS,
    recorder: MessageRecorder | None = None,
    journal: ReplyStore | None = None,
    records: PairRecords | None = None,
    ready: Callable[[], None] | None = None,
    progress: Callable[[], None] | None = None,
    supervised: int | None = None,
) -> None:
    """Run a coordinator on a hub until a client sends Stop or a signal arrives; close only what it
    opened. `recorder` records its sessions; `journal` stores its requests, `records` what its pairs
    learn; `progress` is called at every turn of the loop; `supervised`: a supervisor's pipe, to
    read from."""
    life = _Life(hub, settings, recorder, journal, records)
    with life.listening(supervised):
        gc.freeze()
        if ready is not None:
            ready()
        try:
            await life.serve(progress)
            await life.finish()
        finally:
            life.coordinator.end()


class _Life:
    """A coordinator on the running event loop, which watches its hub."""

    def __init__(
        self,
        hub: Hub,
        settings: CoordinatorSettings,
        recorder: MessageRecorder | None,
        journal: ReplyStore | None,
        records: PairRecords | None,
    ) -> None:
        self._hub, self._loop = hub, asyncio.get_running_loop()
        self._ended, self._hurried = asyncio.Event(), asyncio.Event()
        self._reading = ThreadPoolExecutor(READERS, "reading")
        if journal is not None:
            journal.aside = partial(self._loop.run_in_executor, None)
        self.coordinator = Coordinator(
            hub,
            defer=self._elsewhere,
            later=self._later,
            settings=settings,
            recorder=recorder,
            journal=journal,
            records=records,
        )

    # -- called by the loop ------------------------------------------------------------------------

    @contextmanager
    def listening(self, supervised: int | None) -> Iterator[None]:
        """Within the block, handle messages, departing peers, signals and a supervisor."""
        loop, signals = self._loop, (signal.SIGINT, signal.SIGTERM)
        readers = {self._hub.fileno(): self._arrived, self._hub.monitor_fileno(): self._left}
        for number in signals:
            loop.add_signal_handler(number, self._signalled)
        for descriptor, called in readers.items():
            loop.add_reader(descriptor, called)
        if supervised is not None:
            _listen(loop, supervised, self._heard)
        try:
            yield
        finally:
            for descriptor in (*readers, *(() if supervised is None else (supervised,))):
                loop.remove_reader(descriptor)
            for number in signals:
                loop.remove_signal_handler(number)

    def _arrived(self) -> None:
        self.coordinator.pump()
        if self.coordinator.ending:
            self._ended.set()

    def _left(self) -> None:
        self.coordinator.look_around()
        self._arrived()

    def _signalled(self) -> None:
        self._ended.set()
        self._hurried.set()

    def _heard(self, words: Supervised) -> None:
        self.coordinator.supervised(words)
        self._arrived()

    # -- called by the coordinator -----------------------------------------------------------------

    def _elsewhere(
        self,
        work: Callable[[], Request | RequestError],
        done: Callable[[Request | RequestError], None],
    ) -> None:
        def hand_back(reading: asyncio.Future[Request | RequestError]) -> None:
            done(reading.result())
            self._arrived()

        self._loop.run_in_executor(self._reading, work).add_done_callback(hand_back)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            self._arrived()

        self._loop.call_later(seconds, act)

    # -- from the first turn to the last -----------------------------------------------------------

    async def serve(self, progress: Callable[[], None] | None) -> None:
        """Do whatever is due, repeatedly, until the service ends."""
        while not self._ended.is_set():
            self.coordinator.tick()
            self._left()
            if progress is not None:
                progress()
            await _wait(self._ended, PROBE_EVERY_S)

    async def finish(self) -> None:
        """Let the running sessions end, after a signal for at most `STOP_GRACE_S`. Then wait until
        the workers have received their Drain: unread messages are lost when a connection closes."""
        coordinator, left_s = self.coordinator, STOP_GRACE_S
        coordinator.service.ending = True
        while not coordinator.idle and left_s > 0:
            coordinator.tick()
            await self._drain()
            left_s -= DRAIN_EVERY_S * self._hurried.is_set()
        coordinator.end()
        left_s = FAREWELL_S
        while coordinator.registry.workers and left_s > 0:
            await self._drain()
            left_s -= DRAIN_EVERY_S

    async def _drain(self) -> None:
        self.coordinator.look_around()
        self.coordinator.pump()
        await asyncio.sleep(DRAIN_EVERY_S)


def _listen(
    loop: asyncio.AbstractEventLoop, pipe: int, heard: Callable[[Supervised], None]
) -> None:
    """Pass on the lines of a supervisor's pipe, until it is closed."""
    begun = b""

    def read() -> None:
        nonlocal begun
        data = os.read(pipe, 1 << 16)
        if not data:
            loop.remove_reader(pipe)
        *lines, begun = (begun + data).split(b"\n")
        for line in lines:
            heard(Supervised.model_validate_json(line))

    loop.add_reader(pipe, read)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
