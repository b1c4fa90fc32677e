"""Memory of the host that is pinned for the pretended device: the host need not wait for copies
from it and to it, but may not write to it before it has waited."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

SPOILT = 0xFF
"""Bytes of a target before its copy: no numbers as floats, and -1 as integers."""
_pinned: dict[int, int] = {}
"""Address -> bytes."""
_sent: dict[int, Tensor] = {}
"""Address -> the bytes that the device is to copy from there, until somebody has waited for
that."""


def pin(memory: Tensor) -> None:
    """Have bytes of the host count as pinned for as long as they live."""
    address = memory.data_ptr()
    _pinned[address] = memory.numel() * memory.element_size()
    weakref.finalize(memory.untyped_storage(), _forget, address).atexit = False


def is_pinned(memory: Tensor) -> bool:
    """Return whether a tensor of the host lies in pinned memory."""
    at = memory.data_ptr()
    return any(begin <= at < begin + size for begin, size in [*_pinned.items()])


def sent(memory: Tensor) -> Callable[[], None]:
    """Return what waits until pinned memory has been copied; `RuntimeError` where nobody has waited
    for the copy before, or the memory was written meanwhile: a GPU may not have copied it yet."""
    if (address := memory.data_ptr()) in _sent:
        raise RuntimeError("pinned memory is sent again, and nobody has waited for the copy before")
    _sent[address] = memory.clone()
    return partial(_wait, memory)


def _wait(memory: Tensor) -> None:
    before = _sent.pop(memory.data_ptr(), None)
    if before is not None and not torch.equal(before, memory):
        raise RuntimeError("pinned memory was written before its copy had been waited for")


def fetched(memory: Tensor) -> Callable[[], None]:
    """Spoil pinned memory that a device has just been asked to write; return what waits until it
    has."""
    content = memory.clone()
    memory.view(torch.uint8).fill_(SPOILT)
    return partial(_arrive, memory, content)


def _arrive(memory: Tensor, content: Tensor) -> None:
    memory.copy_(content)


def _forget(address: int) -> None:
    _pinned.pop(address, None)
    _sent.pop(address, None)
