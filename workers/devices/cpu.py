"""The CPU: threads, its name in fingerprints, and concurrent copies as on a GPU."""

from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import memmove

import psutil
import torch
from torch import Tensor

from dovetail.protocol.memory import read_room
from dovetail.workers.devices.base import Device, DeviceKind


def set_threads(threads: int) -> None:
    """Use `threads` threads in an operation, and run one operation at a time."""
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)


def library() -> str:
    """Return the version of torch, instruction set and threads: each can change a rounding."""
    return f"torch-{torch.__version__}-{torch.backends.cpu.get_cpu_capability()}-{torch.get_num_threads()}t"  # noqa: E501


def free_bytes() -> int:
    """Return how much memory is free for a process of ours."""
    room = read_room()
    return room.size if room is not None else psutil.virtual_memory().available


class HostTransfer:
    """A `Transfer` to the CPU itself in place of a GPU: a thread copies in order."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._copies = ThreadPoolExecutor(1, "copies")

    def pin(self, memory: Tensor) -> None:
        """Do nothing: the CPU needs no preparation."""

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor, after: "Future[None]") -> "Future[None]":

        def copy_when_free() -> None:
            after.result()
            memmove(target.data_ptr(), source.data_ptr(), source.numel())

        return self._copies.submit(copy_when_free)

    def computed(self) -> "Future[None]":
        """Already done: this process computes synchronously."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def wait(self, mark: "Future[None]") -> None:
        mark.result()


class _Cpu(DeviceKind):
    type = "cpu"

    def open(self, name: str) -> Device | None:
        return (
            Device(self, name, torch.device("cpu"), library(), "stored") if name == "cpu" else None
        )

    def best(self) -> str | None:
        return "cpu"

    def free_bytes(self, device: torch.device) -> int:
        return free_bytes()

    def transfer(self, device: torch.device) -> HostTransfer:
        return HostTransfer()


CPU = _Cpu()
