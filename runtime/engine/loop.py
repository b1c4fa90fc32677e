"""The coordinator's life: one asyncio loop around its hub, from the first message to the last.

Sends nothing itself; after everything that may have sent, `arrived` reads the hub until it is
empty, since its descriptor fires on edges only.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from dovetail.protocol.errors import DovetailError, RequestError
from dovetail.protocol.links import Hub
from dovetail.protocol.messages import Supervised
from dovetail.protocol.settings import CoordinatorSettings
from dovetail.runtime.engine.coordinator import DEFAULTS, Coordinator
from dovetail.runtime.journal.journal import Journal
from dovetail.runtime.record.recorder import Recorder
from dovetail.runtime.session.request import Request

PROBE_EVERY_S = 0.25
STOP_GRACE_S = 5.0
FAREWELL_S = 0.5
DRAIN_EVERY_S = 0.02


async def coordinate(
    hub: Hub,
    *,
    settings: CoordinatorSettings = DEFAULTS,
    recorder: Recorder | None = None,
    journal: Journal | None = None,
    ready: Callable[[], None] | None = None,
    progress: Callable[[], None] | None = None,
    supervised: int | None = None,
    greetings: Sequence[tuple[bytes, list[bytes]]] = (),
) -> None:
    """Run a coordinator on a hub until a client says Stop or a signal comes; closes nothing but
    what it opened. `recorder`: notes its sessions; `journal`: keeps its requests; `progress` hears
    of every turn of the loop; `supervised`: the pipe from which a supervisor's words are read;
    `greetings`: what was received on the hub before. `DovetailError` if another coordinator has
    taken over."""
    loop, ended, hurried = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def elsewhere(
        work: Callable[[], Request | RequestError], done: Callable[[Request | RequestError], None]
    ) -> None:
        def hand_back(reading: asyncio.Future[Request | RequestError]) -> None:
            done(reading.result())
            arrived()

        loop.run_in_executor(None, work).add_done_callback(hand_back)

    def later(seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            action()
            arrived()

        loop.call_later(seconds, act)

    if journal is not None:
        journal.aside = partial(loop.run_in_executor, None)  # type: ignore[assignment]
    coordinator = Coordinator(
        hub,
        defer=elsewhere,
        later=later,
        settings=settings,
        recorder=recorder,
        journal=journal,
    )

    def arrived() -> None:
        coordinator.pump()
        if coordinator.ending or coordinator.service.deposed:
            ended.set()

    def left() -> None:
        coordinator.look_around()
        arrived()

    def signalled() -> None:
        ended.set()
        hurried.set()

    def heard(words: Supervised) -> None:
        coordinator.supervised(words)
        arrived()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    loop.add_reader(hub.fileno(), arrived)
    loop.add_reader(hub.monitor_fileno(), left)
    if supervised is not None:
        _listen(loop, supervised, heard)
    gc.freeze()
    if ready is not None:
        ready()
    try:
        for peer, frames in greetings:
            coordinator.hear(peer, frames)
        while not ended.is_set():
            coordinator.tick()
            left()
            if progress is not None:
                progress()
            await _wait(ended, PROBE_EVERY_S)
        if coordinator.service.deposed:
            raise DovetailError(coordinator.service.deposed)
        coordinator.service.ending = True
        await _finish_what_runs(coordinator, hurried)
        coordinator.end()
        await _see_off(coordinator)
    finally:
        loop.remove_reader(hub.fileno())
        loop.remove_reader(hub.monitor_fileno())
        if supervised is not None:
            loop.remove_reader(supervised)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        if not coordinator.service.deposed:  # else the workers are another one's
            coordinator.end()


def _listen(
    loop: asyncio.AbstractEventLoop, pipe: int, heard: Callable[[Supervised], None]
) -> None:
    """Hand on what a supervisor says on a pipe, a line each; until it closes it."""
    begun = b""

    def read() -> None:
        nonlocal begun
        said = os.read(pipe, 1 << 16)
        if not said:
            loop.remove_reader(pipe)
        *lines, begun = (begun + said).split(b"\n")
        for line in lines:
            heard(Supervised.model_validate_json(line))

    loop.add_reader(pipe, read)


async def _finish_what_runs(coordinator: Coordinator, hurried: asyncio.Event) -> None:
    """Let the running sessions end; after a signal they have `STOP_GRACE_S` for it."""
    left_s = STOP_GRACE_S
    while not coordinator.idle and left_s > 0:
        coordinator.tick()
        coordinator.look_around()
        coordinator.pump()
        await asyncio.sleep(DRAIN_EVERY_S)
        left_s -= DRAIN_EVERY_S * hurried.is_set()


async def _see_off(coordinator: Coordinator) -> None:
    """Wait for the workers, which were told to leave: what one of them has not read when its
    connection ends never reaches it."""
    left_s = FAREWELL_S
    while coordinator.registry.workers and left_s > 0:
        coordinator.look_around()
        coordinator.pump()
        await asyncio.sleep(DRAIN_EVERY_S)
        left_s -= DRAIN_EVERY_S


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
