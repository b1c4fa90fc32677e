"""A device and its kind: the interface that each file of this folder implements. Names, placement
of tensors and bytes; nothing about models.
"""

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


Mark = Any
"""A place in what a device has been asked to do: it is passed when everything before it is done."""


class Transfer(Protocol):
    """The way between the memory of the host and that of a device, and the order of what is done on
    it."""

    device: torch.device

    def pin(self, memory: Tensor) -> None:
        """Have bytes of the host stay where they are, so that they are copied at the full rate of
        the link."""

    def buffer(self, size: int) -> Tensor:
        """Return uint8 [size] of the device."""

    def copy(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Start copying bytes of the host into a buffer, concurrently with computations, as soon as
        the mark `after` is passed; return a mark that is passed with the last of them."""

    def computed(self) -> Mark:
        """Return a mark that is passed when all that has been computed, or asked for, is done."""

    def wait(self, mark: Mark) -> None:
        """Let nothing that is computed from now on begin before the mark is passed."""


class InOrder:
    """The way to a device that copies in the order of what it computes, and has the host wait for
    each copy. A `Transfer`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, memory: Tensor) -> None:
        """Do nothing: the host waits for a copy, wherever its source lies."""

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Copy behind all that was asked for, `after` among it."""
        target.copy_(source)

    def computed(self) -> Mark:
        """Return None: what is asked for later is done later anyway."""

    def wait(self, mark: Mark) -> None:
        """Do nothing: all that was copied has been waited for."""


class Program(Protocol):
    """Functions of ours, compiled for a device."""

    about: str
    """The compiler and the chip, in words."""
    key: str
    """A digest of all that decides how fast the functions are: source, compiler, chip, torch."""
    units: int
    """The multiprocessors of the device."""
    timed: bool
    """False: times mean nothing here, as where the CPU stands for a GPU."""

    def launch(
        self,
        name: str,
        grid: tuple[int, int],
        threads: int,
        arguments: Sequence[Tensor | int | None],
    ) -> None:
        """Launch a function on the stream, with grid[0] times grid[1] blocks of this many threads.
        Nothing is allocated and the host does not wait, so that it can be captured in a graph.
        `arguments`: addresses of the device, and integers of 64 bits."""


class DeviceKind(ABC):
    """One kind of device; the devices of a kind are distinguished by their index."""

    type: ClassVar[str]
    """The name of the device in torch."""
    unproved: ClassVar[str] = ""
    """A clause stating that dovetail has never been run on a device of this kind; empty if it
    has."""

    def is_here(self) -> bool:
        """Return whether `type` means this kind to this build of torch: NVIDIA's and AMD's GPUs
        share a name."""
        return True

    @abstractmethod
    def open(self, name: str) -> "Device | None":
        """Return the device of that name, and set up the process for it; None: the name is not one
        of this kind. `SettingsError` where there is no such device."""

    def found(self) -> Sequence[str]:
        """Return the names of the GPUs of this kind that torch finds."""
        return ()

    def chip(self, device: torch.device) -> str:
        """Return what a GPU calls itself."""
        return str(device)

    def best(self) -> str | None:
        """Return the name of the device on which a draft is fastest; None: there is none."""
        return next(iter(self.found()), None)

    @abstractmethod
    def free_bytes(self, device: torch.device) -> int:
        """Return how much memory is free for what lives on a device."""

    def limit(self, device: torch.device, size: int) -> bool:
        """Have torch refuse this process more than `size` bytes of a device; False: it cannot."""
        return False

    def transfer(self, device: torch.device) -> Transfer:
        """Return a way to a device for weights that pass through it."""
        return InOrder(device)

    def pinned(self, size: int) -> Tensor:
        """Return zeros uint8 [size] in the memory of the host, from which a device can copy while
        the host goes on, where it can."""
        return torch.zeros(size, dtype=torch.uint8)

    def send(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Have a device copy `pinned` memory before it computes anything that it is asked for
        later; return what waits until the source may be written again."""
        target.copy_(source)
        return lambda: None

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        """Have a device copy what it has computed into `pinned` memory; return what waits until it
        is there."""
        target.copy_(source)
        return lambda: None

    def has_fp64(self, device: torch.device) -> bool:
        """Return whether a device computes in fp64; if not, the host computes what needs it."""
        return True

    def driver(self, device: torch.device) -> str:
        """Return the version of a device's driver, where `library` does not name it."""
        return ""

    counts_time: ClassVar[bool] = False
    """True: `clock` counts what operations would take, so that small ones are timed as exactly as
    large ones."""

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
        """Return functions of ours in CUDA C++, compiled for a device; or why there are none."""
        return f"dovetail compiles its functions for NVIDIA's GPUs alone, not for {device}"

    def own(self, name: str, count: int, remedy: str) -> int | None:
        """Return the index in the name of a device, such as cuda:1; None: it is not one of this
        kind, or another build of torch means it. `count`: the devices that torch finds.
        `SettingsError` with the `remedy` where there are fewer."""
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
    name: str
    """Its name in the settings."""
    torch_device: torch.device
    library: str
    """The library that computes here, as it stands in a fingerprint: library, instruction set or
    chip, threads."""
    draft_weights: str
    """The type of weights that suits a draft here: a draft's rounding changes no token."""
    capture: Capture | None = None
    """None: nothing would be faster for it."""

    @property
    def is_cpu(self) -> bool:
        """Return whether it computes in the host's memory, with the C++ kernels."""
        return self.torch_device.type == "cpu"

    def free_bytes(self) -> int:
        """Return how much memory is free for what lives here."""
        return self.kind.free_bytes(self.torch_device)

    def transfer(self) -> Transfer:
        """Return a way to this device for weights that pass through it."""
        return self.kind.transfer(self.torch_device)
