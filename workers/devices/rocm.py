"""AMD GPUs, which torch for ROCm calls cuda:N. Everything works as on NVIDIA's (HIP), but for the
functions that are compiled for NVIDIA's GPUs."""

import torch

from dovetail.workers.devices.accelerator import tried_int4
from dovetail.workers.devices.base import Capture, Program
from dovetail.workers.devices.cuda import Cuda
from dovetail.workers.devices.graphs import proved


class _Rocm(Cuda):
    remedy = (
        "AMD GPU; use device cpu, or install AMD's driver (amdgpu, and membership of the groups "
        "render and video)"
    )
    unproved = "dovetail has never been run on an AMD GPU"

    def is_here(self) -> bool:
        return torch.version.hip is not None

    def library(self, index: int) -> str:
        """Return the version of torch and ROCm, and the chip."""
        properties = torch.cuda.get_device_properties(index)
        chip = f"{properties.name}-{getattr(properties, 'gcnArchName', '')}".replace(" ", "-")
        return f"torch-{torch.__version__}-rocm{torch.version.hip}-{chip}"

    def capture(self, device: torch.device) -> Capture | None:
        usual = super().capture(device)
        return usual and proved(usual, device)

    def driver(self, device: torch.device) -> str:
        return ""

    def against_bf16(self, device: torch.device) -> str:
        return ""

    def against_int4(self, device: torch.device) -> str:
        """Return why torch's int4 products cannot run; empty on CDNA 2 (gfx90a) and newer."""
        return tried_int4(device)

    def program(self, device: torch.device, source: str) -> Program | str:
        return f"dovetail compiles its functions for NVIDIA's GPUs alone, and {device} is AMD's"


ROCM = _Rocm()
