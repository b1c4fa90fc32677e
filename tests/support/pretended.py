"""A GPU that is pretended: tensors that say they are elsewhere, compute on the CPU, and refuse to meet a tensor of the CPU, as on a GPU.

What a real one forbids is an error here too: an operation on tensors of two devices (but for copies, indices and single numbers), numbers read without asking
for them (`.numpy()`), and int4 products that are not laid out as CUDA's. Nothing is said of streams, events or time. torch is told of such a device once
for the whole process, which disturbs nobody.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from dovetail.workers.devices.cpu import HostTransfer

ResultT = TypeVar("ResultT")
aten = torch.ops.aten
NAME = "privateuseone"
"""What torch calls the device of somebody else's."""
COPIES = (aten.copy_, aten._to_copy, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten.set_, aten._unsafe_index)
"""Take tensors of two devices on a GPU too: CPU indices are sent there."""
WAITING = (aten._local_scalar_dense, aten.nonzero, aten.is_nonzero, aten.equal, aten.masked_select)
"""Ask the device for numbers."""
INT4_TILES = (2, 4, 8)
POSSIBLE = hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_device_guard")
"""Whether this torch can be told of a device from Python."""


class _Module(ModuleType):
    """What `torch.cuda` is to CUDA."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        """None whose random numbers are anybody's business."""
        return 0

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """It has no random numbers of its own."""


@cache
def device() -> torch.device:
    """The pretended one; all that torch itself has to know of it is how to enter it, and that it need not look after it."""
    from torch.utils.backend_registration import _DummyDeviceGuard

    torch._register_device_module(NAME, _Module())  # type: ignore[no-untyped-call]
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())
    return torch.device(NAME, 0)


class Elsewhere(Tensor):
    """A tensor on the pretended device; what it holds is on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> "Elsewhere":
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=device()
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})

    def tolist(self) -> Any:
        """The numbers, which a GPU hands over where they are asked for in so many words."""
        return self.held.tolist()

    def __repr__(self, **unused: Any) -> str:
        return f"Elsewhere({self.held!r})"


class PretendedTransfer(HostTransfer):
    """The way to it, by the thread that copies where the CPU stands for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.device = device()

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, source: Tensor, target: Tensor, after: "Future[None]") -> "Future[None]":
        assert isinstance(target, Elsewhere)
        return super().copy(source, target.held, after)


class _Making(TorchDispatchMode):
    """Makes tensors where it is asked to."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """`torch.tensor` makes its tensors behind the back of a dispatch mode."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.tensor or torch.device(kwargs.get("device") or "cpu").type != NAME:
            return function(*args, **kwargs)
        return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])


@contextmanager
def pretending() -> Iterator[torch.device]:
    """Within it tensors can be made on the pretended device."""
    place = device()
    with _Making(), _FromNumbers():
        yield place


_capturing: list[bool] = []


def capture(function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """In the place of a CUDA graph: it runs once to be captured, and then must neither meet a tensor of the CPU nor ask for a number."""
    _capturing.append(True)
    try:
        function()
    finally:
        _capturing.pop()
    return function


def compute(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation of torch on whichever device its tensors are."""
    packet, given = function.overloadpacket, tree_flatten((args, dict(kwargs)))[0]
    ours = [tensor for tensor in given if isinstance(tensor, Elsewhere)]
    asked = kwargs.get("device")
    if not ours and (asked is None or torch.device(asked).type != NAME):
        return function(*args, **kwargs)
    others = [tensor for tensor in given if isinstance(tensor, Tensor) and not isinstance(tensor, Elsewhere) and tensor.dim() > 0]
    if ours and others and packet not in COPIES:
        raise RuntimeError(f"{packet} meets tensors of the CPU {[tuple(t.shape) for t in others]} and of the device {[tuple(t.shape) for t in ours]}")
    if _capturing and (packet in WAITING or others or (packet is aten._to_copy and asked is not None and torch.device(asked).type != NAME)):
        raise RuntimeError(f"{packet} waits for the device, and is being captured")
    back = {id(tensor.held): tensor for tensor in ours}
    plain = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items() if name != "pin_memory"}
    result = (_int4(packet) or function)(*tree_map(_held, args), **tree_map(_held, plain))
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if packet is aten._to_copy:
        there = torch.device(asked).type == NAME if asked is not None else isinstance(first, Elsewhere)
    elif packet in COPIES:
        there = isinstance(first, Elsewhere)
    else:
        there = bool(ours) or asked is not None
    if not there:
        return result
    return tree_map(lambda part: _wrapped(part, back) if isinstance(part, Tensor) else part, result)


def _wrapped(part: Tensor, back: Mapping[int, "Elsewhere"]) -> "Elsewhere":
    return back[id(part)] if id(part) in back else Elsewhere(part)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _int4(packet: Any) -> Callable[..., Tensor] | None:
    """CUDA's layout and product of 4-bit codes, by those of the CPU."""
    return {aten._convert_weight_to_int4pack: _lay_out, aten._weight_int4pack_mm: _multiply}.get(packet)


def _lay_out(nibbles: Tensor, tiles: int) -> Tensor:
    """uint8 [n, k / 2], the first of two codes in the upper half of a byte (aten/src/ATen/native/cuda/int4mm.cu)."""
    rows, half = nibbles.shape
    assert nibbles.dtype == torch.uint8
    assert nibbles.is_contiguous()
    assert tiles in INT4_TILES
    assert rows % 8 == 0
    assert 2 * half % (16 * tiles) == 0
    codes = torch.stack([nibbles >> 4, nibbles & 15], dim=2).view(rows, 2 * half)
    return codes.view(rows // 8, 8, -1).to(torch.int32)


def _multiply(x: Tensor, packed: Tensor, group: int, scales_and_zeros: Tensor) -> Tensor:
    assert x.dtype == scales_and_zeros.dtype == torch.bfloat16
    assert x.is_contiguous()
    assert scales_and_zeros.is_contiguous()
    assert group in (32, 64, 128, 256)
    codes = packed.flatten(0, 1).float()
    rows, inputs = codes.shape
    assert tuple(scales_and_zeros.shape) == (inputs // group, rows, 2)
    scales, zeros = scales_and_zeros.float().transpose(0, 1).unsqueeze(2).unbind(3)
    weight = (codes.view(rows, -1, group) - 8.0) * scales.view(rows, -1, 1) + zeros.view(rows, -1, 1)
    return (x.float() @ weight.view(rows, inputs).t()).to(torch.bfloat16)
