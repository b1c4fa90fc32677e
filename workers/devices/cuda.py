"""NVIDIA GPUs; the only module that calls torch.cuda."""

import re
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TypeVar

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices.base import Device, DeviceKind
from dovetail.workers.devices.memory import HELD
from dovetail.workers.devices.nvidia import nvrtc
from dovetail.workers.devices.nvidia.compiled import compiled_for
from dovetail.workers.devices.nvidia.driver import Functions, load_functions

ResultT = TypeVar("ResultT")
WARM_UPS = 3
"""Runs before a capture: libraries choose their kernels and take their memory in the first ones,
which a capture must not see."""


def is_there() -> bool:
    """Return whether torch finds a GPU that it can use."""
    return torch.cuda.is_available()


def open_gpu(index: int) -> None:
    """Check that GPU `index` is there and make its products exact in fp32: no TF32, which would
    round the inputs to 10 bits."""
    if not torch.cuda.is_available():
        raise SettingsError(
            f"there is no cuda:{index}: torch {torch.__version__} finds no CUDA device; use "
            "device cpu, or install torch for CUDA and a driver"
        )
    if index >= torch.cuda.device_count():
        raise SettingsError(
            f"there is no cuda:{index}: this machine has {torch.cuda.device_count()} CUDA "
            f"devices; use cuda:0 to cuda:{torch.cuda.device_count() - 1}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # some versions of torch advise an interface that others have not
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def architectures() -> tuple[str, ...]:
    """Return what this build of torch has GPU code for, such as sm_80 and compute_90; nothing in a
    build for CPUs. Asked of the build, so that no GPU is needed."""
    flags: str | None = torch._C._cuda_getArchFlags() if torch.version.cuda is not None else None
    return tuple((flags or "").split())


def capabilities() -> tuple[str, ...]:
    """The compute capability of every GPU that torch finds, such as 8.6."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        "{}.{}".format(*torch.cuda.get_device_capability(index))
        for index in range(torch.cuda.device_count())
    )


def devices() -> Sequence[torch.device]:
    """Return the GPUs that torch finds."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def library(index: int) -> str:
    """Version of torch and CUDA, and the chip."""
    return f"torch-{torch.__version__}-cuda{torch.version.cuda}-{torch.cuda.get_device_name(index).replace(' ', '-')}"  # noqa: E501


def capability(index: int) -> tuple[int, int]:
    """The compute capability of a GPU."""
    return torch.cuda.get_device_capability(index)


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that is free."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free


def capture(index: int, function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Capture `function`, which reads and writes the same tensors of GPU `index` each time and asks
    it nothing, as a CUDA graph; returns what replays it.

    The result is always the same tensors, with new numbers after each replay. They are good until
    another graph is replayed, because all graphs of a GPU share their memory. What other threads
    ask of the GPU meanwhile does not end the capture.
    """
    with torch.cuda.device(index):
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=_first_graph(index).pool(), capture_error_mode="thread_local"
        ):
            result = function()

    def replay() -> ResultT:
        with torch.cuda.device(index):
            graph.replay()
        return result

    return replay


@cache
def _first_graph(index: int) -> torch.cuda.CUDAGraph:
    """Return a graph whose memory all graphs of a GPU share, since they are replayed one after the
    other. It stays: a pool without a graph is closed for good."""
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device=f"cuda:{index}")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        number + 1.0
    return graph


def program(device: torch.device, source: str) -> Functions | str:
    """Return functions of ours for the chip of a GPU, compiled by NVRTC unless the cache has them;
    or why there are none."""
    compiler = nvrtc.find(torch.version.cuda or "")
    if isinstance(compiler, str):
        return compiler
    major, minor = capability(device.index)
    code = compiled_for(compiler, source, 10 * major + minor)
    if isinstance(code, str):
        return code
    torch.empty(1, device=device)  # makes the context in which torch computes
    return load_functions(
        code,
        device.index,
        library(device.index),
        partial(torch._C._cuda_getCurrentRawStream, device.index),
        torch.cuda.get_device_properties(device).multi_processor_count,
    )


class CudaTransfer:
    """The way between the host's memory and a GPU's: a stream of its own for copies, and events
    between it and the stream that computes. A `Transfer`."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def pin(self, memory: Tensor) -> None:
        """Lock pages where they are, for as long as this tensor lives: torch's own pinned memory
        comes in powers of two."""
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

    def buffer(self, size: int) -> Tensor:
        """uint8 [size] on the GPU, whose memory goes to nobody else before the last copy into it is
        done."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self._copies)
        return buffer

    def copy(self, source: Tensor, target: Tensor, after: torch.cuda.Event) -> torch.cuda.Event:
        """Put a copy into the stream of copies, behind `after`."""
        self._copies.wait_event(after)
        with torch.cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        return self._marked(self._copies)

    def computed(self) -> torch.cuda.Event:
        """The end of what has been put into the stream that computes."""
        return self._marked(torch.cuda.current_stream(self.device))

    def wait(self, mark: torch.cuda.Event) -> None:
        """The stream that computes goes on behind the mark; the host does not wait."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def _marked(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _wait(event: torch.cuda.Event) -> None:
    """Have the host wait for an event, which has passed most of the time."""
    if not event.query():  # type: ignore[no-untyped-call]
        event.synchronize()


def _unpin(device: torch.device, address: int) -> None:
    """Let locked pages go, when nothing is copied from them any more."""
    torch.cuda.synchronize(device)
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class _Cuda(DeviceKind):
    """NVIDIA GPUs, by their index."""

    type = "cuda"
    names = "cuda:N"

    def open(self, name: str) -> Device | None:
        if (found := re.fullmatch(r"cuda(?::(\d+))?", name)) is None:
            return None
        index = int(found[1] or 0)
        open_gpu(index)
        HELD.add_cache(torch.cuda.empty_cache)
        return Device(
            self,
            f"cuda:{index}",
            torch.device("cuda", index),
            library(index),
            "fp16",
            partial(capture, index),
        )

    def best(self) -> str | None:
        return "cuda:0" if is_there() else None

    def free_bytes(self, device: torch.device) -> int:
        return free_bytes(device)

    def transfer(self, device: torch.device) -> CudaTransfer:
        return CudaTransfer(device.index)

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        target.copy_(source, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(target.device))
        return partial(_wait, copied)

    def against_int4(self, device: torch.device) -> str:
        """The products take the matrix units of compute capability 8."""
        if (found := capability(device.index)) >= (8, 0):
            return ""
        return (
            f"torch's int4 products need a GPU of compute capability 8.0 or more, and {device} "
            f"has {found[0]}.{found[1]}"
        )

    def program(self, device: torch.device, source: str) -> Functions | str:
        return program(device, source)


CUDA = _Cuda()
