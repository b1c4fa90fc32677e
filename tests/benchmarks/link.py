"""A link of a limited rate between the memory of the host and a CPU that stands for a GPU: bytes
arrive as slowly as they would over PCIe.

Copies are made one after the other by a thread that sleeps through the rest of their time, so that
computing goes on meanwhile; or, to compare with, by whoever asks for them, who waits. A `Transfer`.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dovetail.workers.devices.base import Mark


class LimitedLink:
    """A link of so many bytes a second; `waits`: copies are made while nothing is computed;
    `copied`: the bytes so far."""

    def __init__(self, bytes_per_s: float) -> None:
        self.device = torch.device("cpu")
        self.bytes_per_s, self.waits, self.copied = bytes_per_s, False, 0
        self._thread = ThreadPoolExecutor(1)

    def pin(self, memory: Tensor) -> None:
        """It stays where it is."""

    def buffer(self, size: int) -> Tensor:
        """uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8)

    def copy(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Copy without waiting for `after`: what a CPU computes is done when it has been asked
        for."""
        if self.waits:
            self._copy(source, target)
            return None
        return self._thread.submit(self._copy, source, target)

    def computed(self) -> Mark:
        """Everything is."""
        return None

    def wait(self, mark: Mark) -> None:
        """The last bytes of a copy are there."""
        if isinstance(mark, Future):
            mark.result()

    def _copy(self, source: Tensor, target: Tensor) -> None:
        self.copied += source.numel()
        end = time.perf_counter() + source.numel() / self.bytes_per_s
        target.copy_(source)
        time.sleep(max(0.0, end - time.perf_counter()))
