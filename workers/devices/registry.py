"""The table of devices: one entry a kind, found by the name that it has in the settings.

What a command line has to know of a device stands here, since torch, which the kinds' own files
need, takes seconds to import. Such a file is opened by `load`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail.workers.devices.base import DeviceKind


class Memory(Enum):
    """A memory in which the weights of a device lie."""

    HOST = "the host's, where the CPU computes"
    SHARED = "the host's, which the device has in common with the CPU"
    OWN = "the device's own"


@dataclass(frozen=True)
class Entry:
    """A kind of device."""

    load: "Callable[[], DeviceKind]"
    """Import its file, and with it torch."""
    pattern: str
    """A regular expression that matches the names of its devices in the settings."""
    said: str
    """The names of its devices as an error message lists them; empty: another entry lists them, or
    the device is for tests alone."""
    memory: Memory


def _cuda() -> "DeviceKind":
    from dovetail.workers.devices.cuda import CUDA

    return CUDA


def _rocm() -> "DeviceKind":
    from dovetail.workers.devices.rocm import ROCM

    return ROCM


def _xpu() -> "DeviceKind":
    from dovetail.workers.devices.xpu import XPU

    return XPU


def _mps() -> "DeviceKind":
    from dovetail.workers.devices.mps import MPS

    return MPS


def _cpu() -> "DeviceKind":
    from dovetail.workers.devices.cpu import CPU

    return CPU


def _pretended() -> "DeviceKind":
    from dovetail.workers.devices.pretended import PRETENDED

    return PRETENDED


ENTRIES: Sequence[Entry] = (
    Entry(_cuda, r"cuda(:\d{1,3})?", "cuda:N (NVIDIA, AMD)", Memory.OWN),
    Entry(_rocm, r"cuda(:\d{1,3})?", "", Memory.OWN),
    Entry(_xpu, r"xpu(:\d{1,3})?", "xpu:N (Intel)", Memory.OWN),
    Entry(_mps, "mps", "mps (Apple)", Memory.SHARED),
    Entry(_cpu, "cpu", "cpu", Memory.HOST),
    Entry(_pretended, "pretended", "", Memory.HOST),
)
"""All kinds of devices, the one that a draft runs fastest on first."""


def entry_of(name: str) -> Entry | None:
    """Return the entry of a device; None: no kind has such names."""
    return next((entry for entry in ENTRIES if re.fullmatch(entry.pattern, name)), None)


def memory_of(name: str) -> Memory | None:
    """Return where the weights lie that a device computes with; None: it is no name of a device,
    such as `auto`."""
    return None if (entry := entry_of(name)) is None else entry.memory


def known(*others: str) -> str:
    """Return the names of devices, behind `others`, as an error message lists them."""
    *names, last = (*others, *(entry.said for entry in ENTRIES if entry.said))
    return f"{', '.join(names)} or {last}"
