"""Progress of computations: models report a beat for every layer, and a watchdog ends a process
without beats. A pass may take minutes, but a deadlock or an endless loop never reaches the next
layer. The loop that executes commands listens for beats in its thread; without a listener, as in
training, they have no effect. A listener may cancel a computation by raising `Abandoned`. Imports
no torch."""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICKS = 4  # the watchdog's checks within its limit
DEAF = 6
"""Code that holds the interpreter's lock also blocks the watchdog; the process is then ended after
this multiple of the limit."""

STDERR = 2


class Abandoned(BaseException):
    """The computation is no longer needed. This is not a failure, and must not be answered as
    one."""


LoadingTold = Callable[[str, int, int], None]
"""Receives the phase (checking, loading), and the bytes of weights read and in total."""


class _Thread(threading.local):
    listener: Callable[[], None] | None = None
    load_listener: LoadingTold | None = None
    count: Callable[[int], None] | None = None


_thread = _Thread()


def beat() -> None:
    """Report that a step of a computation is done."""
    if (listener := _thread.listener) is not None:
        listener()


@contextmanager
def heard(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` at every beat of this thread within the block."""
    before, _thread.listener = _thread.listener, listener
    try:
        yield
    finally:
        _thread.listener = before


@contextmanager
def hearing_loads(listener: LoadingTold) -> Iterator[None]:
    """Call `listener` with the bytes of weights that this thread reads within the block."""
    before, _thread.load_listener = _thread.load_listener, listener
    try:
        yield
    finally:
        _thread.load_listener = before


@contextmanager
def loading(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Announce that the block reads `total` bytes of weights, to check or load them; the yielded
    function and `count_bytes` count them."""
    listener, before, done = _thread.load_listener, _thread.count, 0

    def count(size: int) -> None:
        nonlocal done
        done = min(total, done + size)
        if listener is not None:
            listener(doing, done, total)

    _thread.count = count
    try:
        count(0)
        yield count
    finally:
        _thread.count = before


def count_bytes(size: int) -> None:
    """Report bytes of weights read by this thread."""
    if (count := _thread.count) is not None:
        count(size)


class Watchdog:
    """Ends this process, with the stacks of all threads on stderr, when work continues for
    `stuck_s` without a beat. It counts its checks, not time: a process that was stopped (SIGSTOP)
    and continues has the same time left. If the interpreter's lock is held for DEAF times as long,
    faulthandler's thread, which needs no lock, ends the process by time alone ("Timeout (0:01:00)!"
    and the stacks). It also ends a process that continues after being stopped that long during
    work."""

    def __init__(self, name: str, stuck_s: float) -> None:
        """`name`: of the worker, for messages."""
        self._name, self._stuck_s = name, stuck_s
        self._beats = 0
        self._working = self._armed = False

    def start(self) -> None:
        """Check until the process ends."""
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Report progress."""
        self._beats += 1
        if not self._armed:
            self._arm()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Watch that this block makes progress. Entering it is not a beat: it may do almost
        nothing."""
        self._working = True
        try:
            yield
        finally:
            self._working = False

    def _look(self) -> None:
        seen = looks = 0
        while True:
            time.sleep(self._stuck_s / TICKS)
            beats, working = self._beats, self._working
            looks = looks + 1 if working and beats == seen else 0
            if looks >= TICKS:
                self._end()
            if beats != seen:
                self._arm()
            elif self._armed and not working:
                self._armed = False
                faulthandler.cancel_dump_traceback_later()
            seen = beats

    def _arm(self) -> None:
        """Make faulthandler end the process later, unless this is called again before."""
        faulthandler.dump_traceback_later(DEAF * self._stuck_s, exit=True, file=STDERR)
        self._armed = True

    def _end(self) -> None:
        os.write(
            STDERR,
            f"{self._name} has made no progress for {self._stuck_s:g} s (coordinator.stuck_s) "
            "and exits; its stack:\n".encode(),
        )
        faulthandler.dump_traceback(STDERR, all_threads=True)
        os._exit(1)
