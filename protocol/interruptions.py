"""Defers signals that end a process while their handler's exception would be lost."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Run the block (of some milliseconds) uninterrupted; signals that arrive meanwhile are handled
    after it.

    pydantic's compiled half turns an exception that a handler raises within it - SystemExit,
    KeyboardInterrupt - into a SchemaError, or swallows it. Python runs handlers in the main thread
    only, so nothing is deferred in others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    handlers = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if callable(handler := signal.getsignal(number))
    }
    try:
        for number in handlers:
            signal.signal(number, lambda *signalled: came.append(signalled))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for told, frame in came:
            handlers[signal.Signals(told)](told, frame)
