"""Apple's GPU, by `torch.mps`, in the memory of the host: copies in order, no fp64, no graphs."""

from collections.abc import Callable, Sequence

import torch

from dovetail.workers.devices import cpu
from dovetail.workers.devices.accelerator import tried_int4
from dovetail.workers.devices.base import Device, DeviceKind
from dovetail.workers.devices.memory import HELD


class _Mps(DeviceKind):
    type = "mps"
    remedy = "Apple GPU; use device cpu, or install torch for macOS on Apple silicon"
    unproved = "dovetail has never been run on an Apple GPU"

    def open(self, name: str) -> Device | None:
        if self.own(name, len(self.found()), self.remedy) is None:
            return None
        HELD.add_cache(torch.mps.empty_cache)
        library = f"torch-{torch.__version__}-mps"
        return Device(self, self.type, torch.device(self.type, 0), library, "fp16")

    def found(self) -> Sequence[str]:
        return [self.type] if torch.backends.mps.is_available() else []

    def chip(self, device: torch.device) -> str:
        """Return the name of the GPU, which older versions of torch do not report."""
        told: Callable[[], str] = getattr(torch.backends.mps, "get_name", lambda: "an Apple GPU")
        return told()

    def free_bytes(self, device: torch.device) -> int:
        """Return Metal's recommended memory less the used one, at most the host's free memory."""
        free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        return max(0, min(free, cpu.free_bytes()))

    def limit(self, device: torch.device, size: int) -> bool:
        most = torch.mps.recommended_max_memory()
        torch.mps.set_per_process_memory_fraction(min(1.0, size / most))
        return True

    def has_fp64(self, device: torch.device) -> bool:
        return False

    def against_int4(self, device: torch.device) -> str:
        return tried_int4(device)


MPS = _Mps()
