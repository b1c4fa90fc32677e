"""The interface of a device and its kind; each other file of this folder implements one."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""A function of fixed shapes -> one that does the same again, faster, into the same tensors."""


Mark = Any  # a place among what a device was asked: passed when all before it is done


class Transfer(Protocol):
    """Copies between the memory of the host and a device, in order with what is computed there."""

    device: torch.device

    def pin(self, memory: Tensor) -> None:
        """Lock bytes of the host in memory, so that they are copied at the full rate of the
        link."""

    def buffer(self, size: int) -> Tensor:
        """Return uint8 [size] of the device."""

    def copy(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Copy bytes of the host into a buffer, concurrently with computations, once `after` is
        passed; return the mark of its end."""

    def computed(self) -> Mark:
        """Return a mark that is passed when all that has been computed, or asked for, is done."""

    def wait(self, mark: Mark) -> None:
        """Delay all computations enqueued later until the mark is passed."""


class InOrder:
    """A `Transfer` in the order of computations; the host waits for each copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, memory: Tensor) -> None:
        """Do nothing: the host waits for a copy, wherever its source lies."""

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        target.copy_(source)

    def computed(self) -> Mark:
        """Do nothing: the work is done later anyway."""

    def wait(self, mark: Mark) -> None:
        """Do nothing: all that was copied has been waited for."""


class Program(Protocol):
    """Functions of ours, compiled for a device."""

    about: str  # the compiler and the chip, in words
    key: str  # a digest of what decides speed: source, compiler, chip, torch
    units: int  # the multiprocessors of the device
    timed: bool  # False: times mean nothing here, as where the CPU stands for a GPU

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
    ) -> None:
        """Launch grid[0] x grid[1] blocks of `threads` on the current stream. Nothing is allocated
        and the host does not wait, so it can be captured. `arguments`: device addresses and 64-bit
        integers."""


class DeviceKind(ABC):
    """One kind of device; the devices of a kind are distinguished by their index."""

    type: ClassVar[str]  # the name of the device in torch
    unproved: ClassVar[str] = ""  # why a kind is untested; empty: dovetail has run on one

    def is_here(self) -> bool:
        """Return whether this build of torch means this kind by `type`: NVIDIA and AMD share
        one."""
        return True

    @abstractmethod
    def open(self, name: str) -> "Device | None":
        """Return the device of that name, set up for this process; None: another kind's name.
        `SettingsError` if there is no such device."""

    def found(self) -> Sequence[str]:
        """Return the names of the GPUs of this kind that torch finds."""
        return ()

    def chip(self, device: torch.device) -> str:
        """Return the model name of a GPU."""
        return str(device)

    def best(self) -> str | None:
        """Return the name of the device on which a draft is fastest; None: there is none."""
        return next(iter(self.found()), None)

    @abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """Return how much memory is free on a device."""

    def limit(self, device: torch.device, size: int) -> bool:
        """Have torch refuse this process more than `size` bytes of a device; False: it cannot."""
        return False

    def transfer(self, device: torch.device) -> Transfer:
        """Return a way to a device for weights that pass through it."""
        return InOrder(device)

    def pinned(self, size: int) -> Tensor:
        """Return zeros uint8 [size] of the host, from which a device can copy asynchronously."""
        return torch.zeros(size, dtype=torch.uint8)

    def send(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Copy `pinned` memory to a device before its next computation; return what waits until the
        source may be reused."""
        target.copy_(source)
        return lambda: None

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Copy from a device into `pinned` memory; return what waits for the copy."""
        target.copy_(source)
        return lambda: None

    def has_fp64(self, device: torch.device) -> bool:
        """Return whether a device computes in fp64; if not, the host computes what needs it."""
        return True

    def driver(self, device: torch.device) -> str:
        """Return the version of a device's driver, where `library` does not name it."""
        return ""

    counts_time: ClassVar[bool] = False  # True: `clock` counts operations instead of time

    def clock(self) -> float:
        """Return the time in seconds by which a device is measured."""
        return time.perf_counter()

    def against_bf16(self, device: torch.device) -> str:
        """Return why torch's products of bf16 are not worth it on a device; empty if they are."""
        return ""

    def against_int4(self, device: torch.device) -> str:
        """Return why torch's int4 products cannot run on a device; empty if they can."""
        return ""

    def program(self, device: torch.device, source: str) -> Program | str:
        """Return our CUDA C++ functions compiled for a device; or why there are none."""
        return f"dovetail compiles its functions for NVIDIA's GPUs alone, not for {device}"

    def own(self, name: str, count: int, remedy: str) -> int | None:
        """Return the index in a device's name, such as cuda:1; None: not this kind. `SettingsError`
        with the `remedy` if torch finds fewer, of `count` devices."""
        found = re.fullmatch(rf"{self.type}(?::(\d+))?", name)
        if found is None or not self.is_here():
            return None
        if (index := int(found[1] or 0)) < count:
            return index
        if not count:
            raise SettingsError(
                f"there is no {self.type}:{index}: torch {torch.__version__} finds no {remedy}"
            )
        raise SettingsError(
            f"there is no {self.type}:{index}: this machine has {count} such devices; use "
            f"{self.type}:0 to {self.type}:{count - 1}"
        )


@dataclass(frozen=True)
class Device:
    """One device of this process, set up for decoding."""

    kind: DeviceKind
    name: str  # its name in the settings
    torch_device: torch.device
    library: str  # what computes, for fingerprints: library, instruction set or chip, threads
    draft_weights: str  # the type of weights that suits a draft, which changes no token
    capture: Capture | None = None  # None: nothing would be faster for it

    @property
    def is_cpu(self) -> bool:
        """Return whether it computes in the host's memory, with the C++ kernels."""
        return self.torch_device.type == "cpu"

    def free_bytes(self) -> int:
        """Return how much memory is free here."""
        return self.kind.free_bytes(self.torch_device)

    def transfer(self) -> Transfer:
        """Return a way to this device for weights that pass through it."""
        return self.kind.transfer(self.torch_device)
