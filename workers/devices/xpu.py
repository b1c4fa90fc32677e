"""Intel GPUs, by `torch.xpu`: Arc, integrated ones from Meteor Lake on, and Data Center GPU Max."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from dovetail.workers.devices import cpu
from dovetail.workers.devices.accelerator import WithStreams, tried_int4
from dovetail.workers.devices.base import Capture, Device
from dovetail.workers.devices.graphs import capture, proved
from dovetail.workers.devices.memory import HELD


class _Xpu(WithStreams):
    type = "xpu"
    remedy = (
        "Intel GPU; use device cpu, or install torch for XPU and Intel's compute runtime, as "
        "dovetail doctor says"
    )
    unproved = "dovetail has never been run on an Intel GPU"

    def open(self, name: str) -> Device | None:
        if (index := self.own(name, len(self.found()), self.remedy)) is None:
            return None
        HELD.add_cache(torch.xpu.empty_cache)
        place = torch.device(self.type, index)
        return Device(self, str(place), place, self.library(index), "fp16", self.capture(place))

    def found(self) -> Sequence[str]:
        count = torch.xpu.device_count() if torch.xpu.is_available() else 0
        return [f"{self.type}:{index}" for index in range(count)]

    def chip(self, device: torch.device) -> str:
        return str(torch.xpu.get_device_properties(device).name)

    def library(self, index: int) -> str:
        """Return the version of torch, and the chip and its driver."""
        found: Any = torch.xpu.get_device_properties(index)
        chip = f"{found.name}-{found.driver_version}".replace(" ", "-")
        return f"torch-{torch.__version__}-xpu-{chip}"

    def capture(self, device: torch.device) -> Capture | None:
        """Return what captures graphs (torch 2.11 or later); None if that is not possible."""
        new = getattr(torch.xpu, "XPUGraph", None)
        return new and proved(partial(capture, torch.xpu, new, device), device)

    def free_bytes(self, device: torch.device) -> int:
        """Return the free memory, or what this process has not taken if the driver does not
        know."""
        found: Any = torch.xpu.get_device_properties(device)
        try:
            free = torch.xpu.mem_get_info(device)[0]
        except RuntimeError:
            free = found.total_memory - torch.xpu.memory_reserved(device)
        shared = getattr(found, "is_integrated_gpu", False)
        return min(free, cpu.free_bytes()) if shared else free

    def limit(self, device: torch.device, size: int) -> bool:
        """Limit this process to `size` bytes; False: this version of torch cannot."""
        limit = getattr(torch.xpu, "set_per_process_memory_fraction", None)
        if limit is None:
            return False
        limit(min(1.0, size / torch.xpu.get_device_properties(device).total_memory), device)
        return True

    def has_fp64(self, device: torch.device) -> bool:
        """Return whether a GPU computes in fp64: Arc A and most integrated GPUs do not."""
        found: Any = torch.xpu.get_device_properties(device)
        return bool(found.has_fp64)

    def against_int4(self, device: torch.device) -> str:
        return tried_int4(device)


XPU = _Xpu()
