"""NVIDIA GPUs; with `rocm.py` the only module that calls torch.cuda."""

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices.accelerator import Streams, WithStreams
from dovetail.workers.devices.base import Capture, Device, Program
from dovetail.workers.devices.graphs import capture
from dovetail.workers.devices.memory import HELD
from dovetail.workers.devices.nvidia import nvrtc
from dovetail.workers.devices.nvidia.compiled import compiled_for
from dovetail.workers.devices.nvidia.driver import Functions, load_functions

CAPTURING: dict[str, Any] = {"capture_error_mode": "thread_local"}
"""The mode of captures: other threads may ask the GPU for anything meanwhile."""
DRIVER = Path("/sys/module/nvidia/version")  # the file with the version of NVIDIA's driver


def _make_products_exact() -> None:
    """Have products of fp32 computed in fp32, not in TF32, which rounds their inputs to 10 bits."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # some versions of torch advise an interface that others have not
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def architectures() -> tuple[str, ...]:
    """Return the architectures this build of torch has GPU code for, such as sm_80 or gfx1030; asks
    no GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        return ()
    flags: str | None = torch._C._cuda_getArchFlags()
    return tuple((flags or "").split())


def capabilities() -> tuple[str, ...]:
    """The compute capability of every GPU that torch finds, such as 8.6."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        "{}.{}".format(*torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    )


def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(index)


def program(device: torch.device, source: str) -> Functions | str:
    """Return our functions compiled for a GPU by NVRTC, or cached; or why there are none."""
    compiler = nvrtc.find(torch.version.cuda or "")
    if isinstance(compiler, str):
        return compiler
    major, minor = capability(device.index)
    architecture = 10 * major + minor
    code = compiled_for(compiler, source, architecture)
    if isinstance(code, str):
        return code
    torch.empty(1, device=device)  # makes the context in which torch computes
    return load_functions(
        code,
        device.index,
        CUDA.library(device.index),
        partial(torch._C._cuda_getCurrentRawStream, device.index),
        torch.cuda.get_device_properties(device).multi_processor_count,
        architecture,
    )


class CudaTransfer(Streams):
    """Transfers to an NVIDIA GPU, from locked pages, on torch.cuda's streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _computes(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _copying(self) -> torch.cuda.StreamContext:
        return torch.cuda.stream(self._copies)

    def pin(self, memory: Tensor) -> None:
        """Lock pages in place while this tensor lives: torch's pinned memory comes in powers of
        two."""
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
        if error != 0:
            raise SettingsError(
                f"{memory.numel() >> 20} MiB of weights cannot be locked in memory "
                f"(cudaHostRegister: error {error}): "
                "keep more layers on the GPU (target.resident), or raise the limit of locked "
                "memory (ulimit -l)"
            )
        weakref.finalize(
            memory, _unpin, self.device, memory.data_ptr()
        ).atexit = False  # else who gets these addresses next cannot lock them


def _unpin(device: torch.device, address: int) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class Cuda(WithStreams):
    """NVIDIA GPUs, by their index."""

    type = "cuda"
    remedy = (
        "CUDA device; use device cpu, or install torch for CUDA (for ROCm if it is an AMD GPU) and "
        "a driver, as dovetail doctor reports"
    )

    def is_here(self) -> bool:
        return torch.version.hip is None

    def open(self, name: str) -> Device | None:
        if (index := self.own(name, len(self.found()), self.remedy)) is None:
            return None
        _make_products_exact()
        HELD.add_cache(torch.cuda.empty_cache)
        place = torch.device(self.type, index)
        return Device(self, str(place), place, self.library(index), "fp16", self.capture(place))

    def library(self, index: int) -> str:
        """Return the version of torch and CUDA, and the chip."""
        name = self.chip(torch.device(self.type, index)).replace(" ", "-")
        return f"torch-{torch.__version__}-cuda{torch.version.cuda}-{name}"

    def capture(self, device: torch.device) -> Capture | None:
        """Return what captures functions as graphs on a GPU; None if that is not possible."""
        return partial(capture, torch.cuda, torch.cuda.CUDAGraph, device, **CAPTURING)

    def found(self) -> Sequence[str]:
        if not self.is_here() or not torch.cuda.is_available():
            return ()
        return [f"{self.type}:{index}" for index in range(torch.cuda.device_count())]

    def chip(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def free_bytes(self, device: torch.device) -> int:
        free: int = torch.cuda.mem_get_info(device)[0]
        return free

    def transfer(self, device: torch.device) -> CudaTransfer:
        return CudaTransfer(device)

    def _computes(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def limit(self, device: torch.device, size: int) -> bool:
        share = size / torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
        return True

    def driver(self, device: torch.device) -> str:
        return DRIVER.read_text(encoding="ascii").strip() if DRIVER.is_file() else ""

    def against_bf16(self, device: torch.device) -> str:
        """Return why bf16 is slower than fp32 (below compute capability 8.0); empty if not."""
        if (found := capability(device.index)) >= (8, 0):
            return ""
        return f"{device} has no bf16 arithmetic (compute capability {found[0]}.{found[1]})"

    def against_int4(self, device: torch.device) -> str:
        """Return why torch's int4 products cannot run (below 8.0); empty if they can."""
        if (found := capability(device.index)) >= (8, 0):
            return ""
        return (
            f"torch's int4 products need a GPU of compute capability 8.0 or more, and {device} "
            f"has {found[0]}.{found[1]}"
        )

    def program(self, device: torch.device, source: str) -> Program | str:
        return program(device, source)


CUDA = Cuda()
