"""Streams, events and pinned memory for any `torch.accelerator`, and trials of what a device may
lack."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.devices.base import DeviceKind

GROUP, TILES = 64, 4  # weights that share a scale in int4, and the tiles of torch's layout
SHAPES = ((6, 64), (80, 64), (32, 64))  # shapes of rows, matrix and keys in a device's proof
CLOSE = 5e-3  # largest error of a device, as a share of the largest number: fp16 has 11 bits
TOLERANCE = 2e-2  # largest error of an int4 product in bf16, as a share of its largest number


class Streams:
    """A `Transfer` for devices with streams: copies run on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: Any = torch.Stream(device)

    def pin(self, memory: Tensor) -> None:
        """Do nothing: torch can lock existing pages for CUDA only, so copies are slower."""

    def buffer(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self._copies)  # it is not reused before its last copy is done
        return buffer

    def copy(self, source: Tensor, target: Tensor, after: Any) -> Any:
        self._copies.wait_event(after)
        with self._copying():
            target.copy_(source, non_blocking=True)
        return self._copies.record_event()

    def computed(self) -> Any:
        return self._computes().record_event()

    def wait(self, mark: Any) -> None:
        self._computes().wait_event(mark)

    def _computes(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def _copying(self) -> Any:
        return self._copies


class WithStreams(DeviceKind):
    """Kinds of devices with streams and pinned memory, as torch has them for all accelerators."""

    def transfer(self, device: torch.device) -> Streams:
        return Streams(device)

    def pinned(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    def send(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        return copied(source, target, self._computes(target.device))

    def fetch(self, source: Tensor, target: Tensor) -> Callable[[], None]:
        return copied(source, target, self._computes(source.device))

    def _computes(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)


def copied(source: Tensor, target: Tensor, computes: Any) -> Callable[[], None]:
    """Start a copy from or to pinned memory on a stream; return what waits for its end."""
    target.copy_(source, non_blocking=True)
    return partial(_wait, computes.record_event())


def _wait(event: torch.Event) -> None:
    """Have the host wait for an event, which has passed most of the time."""
    if not event.query():
        event.synchronize()


def wrong_numbers(device: torch.device) -> str:
    """Return which operations of a draft a device computes wrongly; empty if none."""
    try:
        ours, theirs = _sample(torch.device("cpu")), _sample(device)
    except RuntimeError as error:
        return f"torch cannot compute a draft there ({_line(error)})"
    for name, expected in ours.items():
        found = theirs[name].cpu()
        if found.is_floating_point():
            apart = float((found.float() - expected.float()).abs().max())
            if not apart <= CLOSE * float(expected.float().abs().max()):
                return f"its results for {name} are off by {apart:.1e}"
        elif not torch.equal(found, expected):
            return f"its results for {name} are wrong"
    return ""


def _sample(device: torch.device) -> dict[str, Tensor]:
    """Run small computations, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    x, weight, keys = (torch.randn(shape, generator=generator).to(device) for shape in SHAPES)
    memory, slots = keys.clone(), torch.tensor([5, 2, 7]).to(device)
    memory.index_copy_(0, slots, x[:3])
    mask = torch.zeros(len(x), len(keys), device=device)
    mask.scatter_(1, slots.expand(len(x), -1), -torch.inf)
    products = torch.nn.functional.linear(x, weight)
    return {
        "products": products,
        "products of 16 bits": torch.nn.functional.linear(x.half(), weight.half()).float(),
        "attention": (x @ memory.t() + mask).softmax(-1) @ memory,
        "ranking": products.topk(4).indices,
        "64-bit integers": (slots << 33 | 5) * 3,
        "views of bytes": products.view(torch.int32).view(torch.uint8).view(torch.float32),
    }


@cache
def tried_int4(device: torch.device) -> str:
    """Return why torch's int4 products fail on a device, after trying a small one; empty if they
    work."""
    generator, outputs, inputs = torch.Generator().manual_seed(1), 16, 2 * GROUP
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    scales, zeros = torch.rand(2, inputs // GROUP, outputs, generator=generator).bfloat16()
    x = torch.randn(5, inputs, generator=generator).bfloat16()
    parts = (codes.view(outputs, -1, GROUP) - 8.0) * scales.t().float()[..., None]
    expected = x.float() @ (parts + zeros.t().float()[..., None]).view(outputs, inputs).t()
    nibbles = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)
    aten: Any = torch.ops.aten
    try:
        packed = aten._convert_weight_to_int4pack(nibbles.to(device), TILES)
        pairs = torch.stack([scales, zeros], dim=2).to(device)
        found = aten._weight_int4pack_mm(x.to(device), packed, GROUP, pairs).float().cpu()
    except RuntimeError as error:
        return f"torch has no int4 products for {device} ({_line(error)})"
    apart = float((found - expected).abs().max() / expected.abs().max())
    if not apart <= TOLERANCE:
        return f"torch's int4 products are wrong on {device}, by {apart:.1e} of the largest number"
    return ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
