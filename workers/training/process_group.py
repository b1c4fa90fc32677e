"""The processes of one training run: a single one, or several of the `accelerate` library that
average their gradients. `accelerate` is imported only if there are several."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dovetail.protocol.errors import UserError
from dovetail.workers.devices.opening import first_device


class ProcessGroup:
    """A single process."""

    rank = 0
    count = 1
    device: str | None = None  # the device of this process; None: any

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes."""

    def agree(self, spent_s: float) -> float:
        """Return the first process's number in every process, so that they all stop at the same
        step."""
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
                "'dovetail-llm[train]', or start one process only"
            ) from error
        self._accelerator: Any = Accelerator(cpu=first_device() == "cpu")
        self.rank, self.count = self._accelerator.process_index, self._accelerator.num_processes
        self.device = str(self._accelerator.device)

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # unused by this process's batch, but maybe not by another's
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = self._accelerator.reduce(parameter.grad, reduction="mean")

    def agree(self, spent_s: float) -> float:
        gathered = self._accelerator.gather(
            torch.tensor([spent_s], dtype=torch.float32, device=self.device)
        )
        return float(gathered[0].item())
