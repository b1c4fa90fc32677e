"""Where tensors live and how one waits for them. Filled by `cpu`, `cuda` and, for tests,
`pretended`; nothing else asks which device it is on."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices import cpu, cuda, pretended


@dataclass(frozen=True)
class Device:
    """One device of this process, set up for decoding."""

    name: str
    """cpu, cuda:N or pretended:0."""
    torch_device: torch.device
    library: str
    """What computes here, as it stands in a fingerprint: library, instruction set or chip,
    threads."""
    draft_weights: str
    """The type of weights that suits a draft here: a draft's rounding changes no token."""
    capture: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None
    """What makes of a function of fixed shapes one that does the same again faster; None: here
    nothing would."""

    def transfer(self) -> "cpu.HostTransfer | cuda.CudaTransfer":
        """A way to this device for weights that pass through it."""
        if self.torch_device.type == pretended.NAME:
            return pretended.PretendedTransfer()
        return (
            cpu.HostTransfer()
            if self.torch_device.type == "cpu"
            else cuda.CudaTransfer(self.torch_device.index)
        )


def open_device(name: str, threads: int) -> Device:
    """The device `name` (cpu, cuda:N or pretended), with `threads` CPU threads for this process;
    makes the settings that hold for the whole process."""
    cpu.set_threads(threads)
    if name == "cpu":
        return Device(name, torch.device("cpu"), cpu.library(), "stored")
    if found := re.fullmatch(r"cuda(?::(\d+))?", name):
        index = int(found[1] or 0)
        cuda.open_gpu(index)
        return Device(
            f"cuda:{index}",
            torch.device("cuda", index),
            cuda.library(index),
            "fp16",
            partial(cuda.capture, index),
        )
    if name in (pretended.NAME, f"{pretended.NAME}:0"):
        place = pretended.device()
        return Device(
            str(place), place, f"{cpu.library()}-{pretended.NAME}", "fp16", pretended.capture
        )
    raise SettingsError(f"there is no device {name!r}; write cpu or cuda:N")


def first_device() -> str:
    """Where a draft goes unless told otherwise: the first GPU if there is one, else the CPU."""
    return "cuda:0" if cuda.is_there() else "cpu"


def against_int4(device: torch.device) -> str:
    """Why torch's int4 products, which take the matrix units of compute capability 8, cannot run on
    a device; empty if they can."""
    if device.type != "cuda" or (found := cuda.capability(device.index)) >= (8, 0):
        return ""
    return (
        f"torch's int4 products need a GPU of compute capability 8.0 or more, and {device} "
        f"has {found[0]}.{found[1]}"
    )


def free_bytes(device: torch.device) -> int:
    """Memory that is free for what lives on a device."""
    return cpu.free_bytes() if device.type in ("cpu", pretended.NAME) else cuda.free_bytes(device)
