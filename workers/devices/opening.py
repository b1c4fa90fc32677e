"""Devices of this process by their names. Nothing else asks which kind of device it is on."""

from dataclasses import replace

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices import cpu
from dovetail.workers.devices.accelerator import wrong_numbers
from dovetail.workers.devices.base import Device, DeviceKind
from dovetail.workers.devices.memory import HELD, captured_if_possible
from dovetail.workers.devices.registry import entries, known

KINDS: tuple[DeviceKind, ...] = tuple(entry.load() for entry in entries())
"""All kinds, the fastest for drafts first."""


def open_device(name: str, threads: int) -> Device:
    """Return the device `name`, for `auto` the best for a draft, and set up the process. `threads`:
    of the CPU."""
    cpu.set_threads(threads)
    if name == "auto":
        name = first_device()
    for kind in KINDS:
        if (device := kind.open(name)) is not None:
            if kind.unproved:
                _prove(device)
            capture = device.capture and captured_if_possible(device.capture)
            return replace(device, capture=capture)
    raise SettingsError(f"there is no device {name!r}; write {known()}")


def _prove(device: Device) -> None:
    """Report that this kind of device is untested; `SettingsError` if its numbers are wrong."""
    HELD.tell(f"{device.name}: {device.kind.unproved}; its results are checked now, not its speed")
    if wrong := wrong_numbers(device.torch_device):
        raise SettingsError(f"{device.name} cannot be used: {wrong}; use device cpu")


def first_device() -> str:
    """Return the default device of a draft: the first GPU, else the CPU."""
    return next(name for kind in KINDS if (name := kind.best()) is not None)


def kind_of(device: torch.device) -> DeviceKind:
    """Return the kind of a device."""
    return next(kind for kind in KINDS if kind.type == device.type and kind.is_here())


def has_fp64(device: torch.device) -> bool:
    """Return whether a device computes in fp64."""
    return device.type == "cpu" or kind_of(device).has_fp64(device)


def in_fp64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64: on its device, or on the host where the device has no fp64."""
    return (tensor if has_fp64(tensor.device) else tensor.cpu()).double()
