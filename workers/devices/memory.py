"""When a device runs out of memory, what only serves speed is freed and the work is retried: first
spare memory, then captured graphs, after which nothing is captured for a while."""

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from dovetail.workers.devices.base import Capture, Device

ResultT = TypeVar("ResultT")
log = logging.getLogger(__name__)
EXHAUSTED = (
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    "UR_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    "MPS backend out of memory",
)
"""Fragments of the messages of errors for which torch has no class."""
PAUSE_S = 60.0  # seconds without captures after graphs were freed


class Holder(Protocol):
    """Something that holds memory of a device for speed."""

    def let_go(self) -> None:
        """Free memory that is kept for later use."""

    def let_graphs_go(self) -> bool:
        """Free captured graphs, and return whether there were any; they can be captured again."""


class Held:
    """The memory of this process's devices that it can do without."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._captures_from = clock, float("-inf")
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._caches: set[Callable[[], None]] = set()
        self._told: set[str] = set()
        self.trying = False  # True in `trial`: graphs are kept, and must fit

    def add(self, holder: Holder) -> None:
        """Ask a holder to free memory when it runs out, as long as the holder lives."""
        self._holders.add(holder)

    def add_cache(self, give_back: Callable[[], None]) -> None:
        """Have an allocator give freed memory that it keeps back to its device."""
        self._caches.add(give_back)

    @property
    def captures(self) -> bool:
        """Return whether anything may be captured now."""
        return self._clock() >= self._captures_from

    def let_go(self) -> None:
        """Free memory that is kept for later use."""
        for holder in [*self._holders]:
            holder.let_go()
        self.give_back()

    def give_back(self) -> None:
        """Have allocators return freed memory, so that later tensors do not fragment it."""
        for give_back in self._caches:
            give_back()

    def let_graphs_go(self) -> None:
        """Let go of all graphs as well."""
        if self.trying:
            return
        let_go = [holder.let_graphs_go() for holder in [*self._holders]]
        if any(let_go):
            self._captures_from = self._clock() + PAUSE_S
            self.tell(
                "the device ran out of memory: captured passes were freed, and none is captured "
                f"for {PAUSE_S:.0f} s, which is slower; free memory of the device, or run fewer "
                "requests at a time"
            )
        self.let_go()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Give up no graph within the block: one for which there is no room is an error."""
        self.trying = True
        try:
            yield
        finally:
            self.trying = False

    def tell(self, words: str) -> None:
        """Log a warning, once for the process."""
        if words not in self._told:
            self._told.add(words)
            log.warning("%s", words)


HELD = Held()


def limit_memory(device: Device, size: int | None) -> None:
    """Limit this process to `size` bytes of a GPU (None: no limit); report once if torch cannot."""
    if size is None or device.is_cpu or device.kind.limit(device.torch_device, size):
        return
    HELD.tell(
        f"{device.name}: torch cannot limit a process to {size / 1e9:.3g} GB there; memory.vram "
        "limits only what is counted"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device's memory is exhausted; some libraries only say so in the text."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in EXHAUSTED)
    )


def without_spare(work: Callable[[], ResultT]) -> ResultT:
    """Return what `work` returns; if memory runs out, free spare memory and retry."""
    return _tried(work, [HELD.let_go])


def without_graphs(work: Callable[[], ResultT]) -> ResultT:
    """Return what `work` returns; if memory runs out, free spare memory, then graphs, and retry."""
    return _tried(work, [HELD.let_go, HELD.let_graphs_go])


def _tried(work: Callable[[], ResultT], steps: Sequence[Callable[[], None]]) -> ResultT:
    """Try `work` before each step and after the last; a failed try's memory is free by then."""
    for step in steps:
        try:
            return work()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        step()
    return work()


def captured_if_possible(capture: Capture) -> Capture:
    """Return a capture that falls back to the function itself, and reports that once."""

    def attempt(function: Callable[[], Any]) -> Callable[[], Any]:
        if not HELD.captures:
            return function
        try:
            return without_spare(lambda: capture(function))
        except Exception as error:
            if HELD.trying and is_out_of_memory(error):
                raise
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            why = "there is no memory for it" if is_out_of_memory(error) else said
        HELD.tell(f"a pass cannot be captured and is computed as it comes, which is slower: {why}")
        return function

    return attempt
