"""The processes of one training run: alone, or several of the `accelerate` library that average
their gradients.

Knows neither model nor data. `accelerate` is imported only where a run has several processes.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dovetail.protocol.errors import UserError
from dovetail.workers.devices.opening import first_device


class ProcessGroup:
    """One process that is alone."""

    rank = 0
    count = 1
    device: str | None = None
    """The device on which this process is to compute; None: any."""

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes."""

    def agree(self, spent_s: float) -> float:
        """Return one number in every process, that of the first: they all stop at the same step."""
        return spent_s


ALONE = ProcessGroup()


class Accelerated(ProcessGroup):
    """Several processes, started by `accelerate launch` or `torchrun`."""

    def __init__(self) -> None:
        try:
            from accelerate import Accelerator
        except ImportError as error:
            raise UserError(
                "several training processes need the library accelerate: pip install "
                "'dovetail[train]', or start one process only"
            ) from error
        self._accelerator: Any = Accelerator(cpu=first_device() == "cpu")
        self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
        self.device = str(self._accelerator.device)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if (
                parameter.grad is None
            ):  # no row of this process's batch reached it, but one of another's may have
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")

    def agree(self, spent_s: float) -> float:
        gathered = self._accelerator.gather(
            torch.tensor([spent_s], dtype=torch.float32, device=self.device)
        )
        return float(gathered[0].item())
