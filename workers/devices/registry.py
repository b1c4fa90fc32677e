"""The table of devices, by their names in the settings, without torch: `load` imports a device's
file. The environment variable `DOVETAIL_DEVICES` adds devices that are not part of dovetail."""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING

from dovetail.protocol.errors import SettingsError

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

    load: "Callable[[], DeviceKind]"  # import its file, and with it torch
    pattern: str  # a regular expression that matches the names of its devices in the settings
    said: str  # the names of its devices in an error message's list; empty: they are not in it
    memory: Memory


def _kind(module: str, name: str) -> "DeviceKind":
    found: DeviceKind = getattr(import_module(f"dovetail.workers.devices.{module}"), name)
    return found


ENTRIES: Sequence[Entry] = (
    Entry(partial(_kind, "cuda", "CUDA"), r"cuda(:\d{1,3})?", "cuda:N (NVIDIA, AMD)", Memory.OWN),
    Entry(partial(_kind, "rocm", "ROCM"), r"cuda(:\d{1,3})?", "", Memory.OWN),
    Entry(partial(_kind, "xpu", "XPU"), r"xpu(:\d{1,3})?", "xpu:N (Intel)", Memory.OWN),
    Entry(partial(_kind, "mps", "MPS"), "mps", "mps (Apple)", Memory.SHARED),
    Entry(partial(_kind, "cpu", "CPU"), "cpu", "cpu", Memory.HOST),
)
"""dovetail's own kinds of devices, the fastest for a draft first."""
VARIABLE = "DOVETAIL_DEVICES"  # a variable with more import paths, `package.module:ENTRY`


@cache
def entries() -> Sequence[Entry]:
    """Return all kinds of devices, added ones first; `SettingsError` for a path that is no
    `Entry`."""
    added = filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(",")))
    return (*map(_added, added), *ENTRIES)


def _added(path: str) -> Entry:
    module, _, name = path.partition(":")
    try:
        entry = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"{VARIABLE}: cannot import {path!r}: {error}") from error
    if not isinstance(entry, Entry):
        raise SettingsError(f"{VARIABLE}: {path!r} is not an Entry of {__name__}")
    return entry


def entry_of(name: str) -> Entry | None:
    """Return the entry of a device; None if no kind has such names."""
    return next((entry for entry in entries() if re.fullmatch(entry.pattern, name)), None)


def memory_of(name: str) -> Memory | None:
    """Return the memory that holds a device's weights; None for `auto` and the like."""
    return None if (entry := entry_of(name)) is None else entry.memory


def known(*others: str) -> str:
    """Return the names of devices, behind `others`, as an error message lists them."""
    *names, last = (*others, *(entry.said for entry in entries() if entry.said))
    return f"{', '.join(names)} or {last}"
