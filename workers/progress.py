"""Progress of what is computed: a beat for every layer, whoever hears it, and the watchdog that
ends a process which has stopped beating.

A pass may take minutes and is right to, while a deadlock or a loop without end never gets to the
next layer. So the models beat, and a loop that does commands listens, in the thread in which it
does them; where nobody listens, as in training, nothing happens. A listener may give up what is
computed, by `Abandoned`. Knows neither models nor messages; imports no torch.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TICKS = 4
"""The watchdog looks so many times within the time that it allows."""
DEAF = 6
"""A holder of the interpreter's lock holds the watchdog too: then the process is ended after so
many times the time."""

STDERR = 2


class Abandoned(BaseException):
    """The computation is of use to nobody any more. No failure: nothing that answers failures may
    take it for one."""


LoadingTold = Callable[[str, int, int], None]
"""Hears what is done with weights (checking, loading), how many bytes of how many have been
read."""


class _Thread(threading.local):
    listener: Callable[[], None] | None = None
    load_listener: LoadingTold | None = None
    count: Callable[[int], None] | None = None


_thread = _Thread()


def beat() -> None:
    """Something has been computed, and more is to come."""
    if (listener := _thread.listener) is not None:
        listener()


@contextmanager
def heard(listener: Callable[[], None]) -> Iterator[None]:
    """`listener` is called at every beat of this thread within the block."""
    before, _thread.listener = _thread.listener, listener
    try:
        yield
    finally:
        _thread.listener = before


@contextmanager
def hearing_loads(listener: LoadingTold) -> Iterator[None]:
    """`listener` hears of the bytes of weights that this thread reads within the block."""
    before, _thread.load_listener = _thread.load_listener, listener
    try:
        yield
    finally:
        _thread.load_listener = before


@contextmanager
def loading(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """Within the block `total` bytes of weights are read, to be checked or loaded; what it yields,
    and `count_bytes`, count them."""
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
    """So many bytes of weights have been read by this thread."""
    if (count := _thread.count) is not None:
        count(size)


class Watchdog:
    """Ends this process, with the stacks of all threads on stderr, when work goes on for `stuck_s`
    without a beat.

    It counts its own looks, not the time: a process that was stopped (SIGSTOP) and goes on has as
    long as before. Only where the interpreter's lock is held for DEAF times as long does time alone
    count, by faulthandler's thread, which needs no lock ("Timeout (0:01:00)!" and the stacks). That
    thread cannot tell a process that was stopped in the midst of its work for so long: it ends when
    it goes on.
    """

    def __init__(self, name: str, stuck_s: float) -> None:
        """`name`: of the worker, for what is said."""
        self._name, self._stuck_s = name, stuck_s
        self._beats = 0
        self._working = self._armed = False

    def start(self) -> None:
        """Look, until the process ends."""
        threading.Thread(target=self._look, name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """There is work, and it gets on."""
        self._beats += 1
        if not self._armed:
            self._arm()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Watch that this block gets on; that it began is no beat, since it may
        be next to nothing."""
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
        """Have faulthandler end the process later than this would, unless it is put off."""
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
