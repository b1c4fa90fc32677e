"""Memory of the host that is pinned for the pretended device: the host need not wait for copies
from it and to it."""

import weakref

from torch import Tensor

_pinned: dict[int, int] = {}
"""Address -> bytes."""


def pin(memory: Tensor) -> None:
    """Have bytes of the host count as pinned for as long as they live."""
    address = memory.data_ptr()
    _pinned[address] = memory.numel() * memory.element_size()
    weakref.finalize(memory.untyped_storage(), _pinned.pop, address, None).atexit = False


def is_pinned(memory: Tensor) -> bool:
    """Return whether a tensor of the host lies in pinned memory."""
    at = memory.data_ptr()
    return any(begin <= at < begin + size for begin, size in [*_pinned.items()])
