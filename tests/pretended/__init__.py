"""The entry of the pretended GPU, a device for tests of device code on machines that have no GPU;
`device.py` has the device. This file imports no torch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.workers.devices.registry import VARIABLE, Entry, Memory

if TYPE_CHECKING:
    from dovetail.workers.devices.base import DeviceKind


def _load() -> "DeviceKind":
    from pretended.device import PRETENDED

    return PRETENDED


ENTRY = Entry(_load, "pretended", "", Memory.HOST)
"""Messages do not list it: what they say is the same with it and without."""


def add() -> None:
    """Add the device to the table of this process, if that was not read yet, and to those of the
    processes that it starts."""
    os.environ[VARIABLE] = f"{__name__}:ENTRY"
    paths = (str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
