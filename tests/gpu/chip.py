"""The device, and the rate at which bytes move in its own memory and between it and pinned memory
of the host. The CPU may stand for it."""

import platform
import subprocess
import time
from collections.abc import Callable

import torch
from torch import Tensor

COPY_BYTES = 1 << 30
QUICK_BYTES = 1 << 24
TIMES = 8


def describe(device: torch.device) -> dict[str, str]:
    """Name, capability, memory, driver and torch build."""
    if device.type != "cuda":
        return {
            "device": f"the CPU in place of a GPU ({platform.processor() or platform.machine()})",
            "torch": torch.__version__,
        }
    facts = torch.cuda.get_device_properties(device)
    query = [
        "nvidia-smi",
        f"--id={device.index}",
        "--query-gpu=driver_version,pcie.link.gen.current,pcie.link.width.current",
        "--format=csv,noheader",
    ]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        driver = told.stdout.strip() or told.stderr.strip()
    except OSError as error:
        driver = f"nvidia-smi cannot be asked: {error.strerror}"
    return {
        "device": f"{facts.name}, compute capability {facts.major}.{facts.minor}, "
        f"{facts.total_memory / 1e9:.1f} GB, {facts.multi_processor_count} SMs",
        "driver; PCIe generation and width": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }


def finish(device: torch.device) -> None:
    """Wait until all that was asked for is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, work: Callable[[], object], times: int = TIMES) -> float:
    """The best of a few, after one that is not counted."""
    best = float("inf")
    for number in range(times + 1):
        finish(device)
        start = time.perf_counter()
        work()
        finish(device)
        if number:
            best = min(best, time.perf_counter() - start)
    return best


def link_gb_s(device: torch.device, size: int) -> tuple[float, float]:
    """10^9 bytes a second to the device and back, from and to pinned memory."""
    host = torch.ones(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return _rate(device, size, there, host), _rate(device, size, host, there)


def _rate(device: torch.device, size: int, target: Tensor, source: Tensor) -> float:
    return size / seconds_of(device, lambda: target.copy_(source, non_blocking=True)) / 1e9


def memory_gb_s(device: torch.device, size: int) -> float:
    """Return the rate of the device's memory in 10^9 bytes a second: every byte of a copy is read
    and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds_of(device, lambda: target.copy_(source)) / 1e9
