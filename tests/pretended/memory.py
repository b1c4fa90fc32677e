"""The memory of the pretended device: what its tensors take, up to a cap that a test sets.

As with torch's allocator, memory that was freed is this process's until its cache is emptied, and
does not count as free; a graph holds the most that was needed at once while it was captured.
Fragmentation is not known.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.devices import cpu
from pretended.rules import NAME

VARIABLE = "DOVETAIL_PRETENDED_BYTES"
"""The environment variable of the cap in bytes: processes that a test starts have it too."""
BLOCK = 512
"""Bytes: what torch takes for a tensor is a multiple of it."""


class Memory:
    """A count of the bytes that are taken of a device."""

    def __init__(self, cap: int | None) -> None:
        self.cap = cap
        self.limit: int | None = None
        """The most that may be used at once, of what there is; None: all."""
        self.used = 0
        """Bytes of tensors and graphs that live."""
        self.most = 0
        """The most that was used at once since that was last asked for."""
        self.reserved = 0
        """Bytes that are used, or were and are in the cache."""
        self._storages: set[int] = set()
        self._lock = threading.RLock()  # memory may be freed while more of it is taken

    def take(self, size: int, owner: Any) -> None:
        """Take so many bytes for as long as `owner` lives; `torch.OutOfMemoryError` where they are
        not there."""
        size = -(-size // BLOCK) * BLOCK
        with self._lock:
            most = min((one for one in (self.cap, self.limit) if one is not None), default=None)
            if most is not None and self.used + size > most:
                raise torch.OutOfMemoryError(
                    f"{NAME} out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a "
                    f"total capacity of {most / 2**20:.2f} MiB of which "
                    f"{(most - self.used) / 2**20:.2f} MiB is free."
                )
            self.used += size
            self.most, self.reserved = max(self.most, self.used), max(self.reserved, self.used)
        weakref.finalize(owner, self._free, size).atexit = False

    def take_for(self, tensor: Tensor, *, captured: bool) -> None:
        """Take the memory of a tensor, unless it lies in memory that has been taken. `captured`: it
        lies in that of its graph."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self._storages:
            return
        if not captured:
            self.take(storage.nbytes(), storage)
        self._storages.add(key)
        weakref.finalize(storage, self._storages.discard, key).atexit = False

    def _free(self, size: int) -> None:
        with self._lock:
            self.used -= size

    def free_bytes(self) -> int:
        """Return the bytes that are free: of the cap, or of the machine's memory if there is
        none."""
        return cpu.free_bytes() if self.cap is None else max(0, self.cap - self.reserved)

    def empty_cache(self) -> None:
        """Give freed memory back to the device."""
        self.reserved = self.used


MEMORY = Memory(int(os.environ[VARIABLE]) if VARIABLE in os.environ else None)


@contextmanager
def capped(size: int) -> Iterator[None]:
    """Let the device have `size` bytes within the block, in this process and in those that it
    starts."""
    before, MEMORY.cap, os.environ[VARIABLE] = MEMORY.cap, size, str(size)
    MEMORY.empty_cache()
    try:
        yield
    finally:
        MEMORY.cap = before
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = str(before)
