"""`pretended`: the CPU behind the rules of a GPU, for tests of device code on machines that have
none.

Its tensors say that they are elsewhere, hold their numbers on the CPU, and are computed there. What
CUDA refuses is refused: an operation on tensors of two devices, numbers read without asking for
them (`.numpy()`), a random generator of another device, int4 codes that are not laid out as CUDA's,
and within a captured graph any wait for the device. Graphs are recorded operation by operation and
replayed on the same memory. Which operations take a tensor of the CPU beside those of a GPU is in
torch's native_functions.yaml: copies, indices of `x[...]`, and single numbers where the operation
is elementwise.

Nothing is known of streams, events, limits of memory, or time: the memory that is free is the
machine's, and everything is done when a call returns. torch is told of the device once for the
whole process, which changes nothing for other tensors. It is a test rig: it makes nothing faster.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices import cpu
from dovetail.workers.devices.base import Device, DeviceKind
from dovetail.workers.devices.cpu import HostTransfer
from dovetail.workers.devices.pretended_int4 import lay_out, multiply

ResultT = TypeVar("ResultT")
NAME = "pretended"
aten = torch.ops.aten
COPIES = (aten.copy_, aten._to_copy)
READS_BY_INDEX = (aten.index, aten._unsafe_index)
WRITES_BY_INDEX = (aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put)
FILLS = (
    aten.fill,
    aten.fill_,
    aten.masked_fill,
    aten.masked_fill_,
    aten.index_fill,
    aten.index_fill_,
)
"""Take a single number of the CPU, though they are not elementwise."""
WAITING = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.is_nonzero,
    aten.equal,
    aten.masked_select,
    aten.repeat_interleave,
)
"""Have the host wait for numbers of the device."""
POSSIBLE = hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_device_guard")
"""True if this torch can be told of a device from Python."""

_make_tensor = torch.tensor


class _Module(ModuleType):
    """The functions that torch looks for in the module of a device."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        """Return 0: torch need not look after its random numbers."""
        return 0

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: it has no random numbers of its own."""


class Elsewhere(Tensor):
    """A tensor on the pretended device; `held` are its numbers, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls: Any, held: Tensor) -> "Elsewhere":
        with torch.inference_mode(False):  # views of tensors that are no inference tensors are none
            made = Tensor._make_wrapper_subclass(
                cls,
                held.shape,
                strides=held.stride(),
                storage_offset=held.storage_offset(),
                dtype=held.dtype,
                device=torch.device(NAME, 0),
            )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(function, args, kwargs or {})

    def tolist(self) -> Any:
        """Return the numbers, which a GPU hands over where they are asked for in so many words."""
        if _recording() is not None:
            raise RuntimeError("tolist() waits for the device, and is being captured")
        return self.held.tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_indices(index, self.device))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index, self.device), value)

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({self.held!r})"


def _indices(index: Any, device: torch.device) -> Any:
    """Return an index with its lists as tensors on the device, to which torch copies them where a
    GPU is indexed."""
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.long, device=device)
    return tuple(_indices(part, device) for part in index) if isinstance(index, tuple) else index


@cache
def device() -> torch.device:
    """Return the device, of which torch is told at the first call; `SettingsError` where this torch
    cannot be told."""
    if not POSSIBLE:
        raise SettingsError(
            f"device {NAME!r} is a test rig, and torch {torch.__version__} cannot be told of a "
            "device from Python: use cpu or cuda:N"
        )
    from torch.utils._device import _device_constructors
    from torch.utils.backend_registration import _DummyDeviceGuard, rename_privateuse1_backend

    _device_constructors()  # remembers torch's own `tensor`, for `with torch.device(...)`
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module())  # type: ignore[no-untyped-call]
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())
    # what makes tensors comes here; all else is done by `Elsewhere`
    _LIBRARIES[0].fallback(_fall_back, "PrivateUse1")
    for maker in RESIZING:
        _LIBRARIES[1].impl(maker, partial(_fall_back, _overload(maker)), "PrivateUse1")
    torch.tensor = _tensor  # type: ignore[assignment]  # torch's own makes its tensor where no dispatch reaches
    return torch.device(NAME, 0)


_LIBRARIES: list[Any] = [torch.library.Library(name, "IMPL") for name in ("_", "aten")]  # type: ignore[no-untyped-call]
RESIZING = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "randperm")
"""Make an empty tensor and have another operation resize it, which a wrapper does not live
through."""


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _fall_back(function: Any, *args: Any, **kwargs: Any) -> Any:
    return compute(function, args, kwargs)


def _tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
    """Make a tensor as `torch.tensor` does."""
    if device is None or torch.device(device).type != NAME:
        return _make_tensor(data, device=device, **kwargs)
    return _make_tensor(data, device="cpu", **kwargs).to(device)


class PretendedTransfer(HostTransfer):
    """The way to the device, by the thread that copies where the CPU stands for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.device = device()

    def buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def copy(self, source: Tensor, target: Tensor, after: "Future[None]") -> "Future[None]":
        assert isinstance(target, Elsewhere)
        return super().copy(source, target.held, after)


@dataclass(frozen=True)
class _Recorded:
    """An operation of a graph: what it is called with, and the tensors that its results go to."""

    call: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Sequence[Tensor]

    def replay(self) -> None:
        found = tree_flatten(self.call(*self.args, **self.kwargs))[0]
        for old, new in zip(self.results, (r for r in found if isinstance(r, Tensor)), strict=True):
            if new.data_ptr() != old.data_ptr():
                old.copy_(new)


_thread = threading.local()


def _recording() -> list[_Recorded] | None:
    """Return the graph that this thread captures, if it does."""
    return getattr(_thread, "graph", None)


def capture(function: Callable[[], ResultT]) -> Callable[[], ResultT]:
    """Capture `function` as a CUDA graph is captured; returns what replays it.

    It is run once before, and while it is captured it may neither meet a tensor of the CPU nor ask
    for a number. The result is always the same tensors, and whatever `function` read or wrote when
    it was captured is what a replay reads and writes.
    """
    function()
    graph: list[_Recorded] = []
    _thread.graph = graph
    try:
        result = function()
    finally:
        _thread.graph = None

    @torch.inference_mode()
    def replay() -> ResultT:
        for operation in graph:
            operation.replay()
        return result

    with torch.inference_mode():
        for tensor in _floats(result):
            tensor.fill_(float("nan"))  # a capture computes nothing: only a replay does
    return replay


def _floats(result: Any) -> Sequence[Tensor]:
    """Return the float tensors of what a captured function returned."""
    if is_dataclass(result):
        result = [getattr(result, field.name) for field in fields(result)]
    found = tree_flatten(result)[0]
    return [t.held for t in found if isinstance(t, Elsewhere) and t.is_floating_point()]


def compute(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do an operation of torch on whichever device its tensors are; `RuntimeError` where CUDA would
    refuse it."""
    if (
        function._can_decompose()
    ):  # in inference mode operations that consist of others arrive whole
        return function.decompose(*args, **kwargs)
    packet, given = function.overloadpacket, tree_flatten((args, dict(kwargs)))[0]
    ours = [tensor for tensor in given if isinstance(tensor, Elsewhere)]
    asked = kwargs.get("device")
    asked_here = asked is not None and torch.device(asked).type == NAME
    if not ours and not asked_here:
        return function(*args, **kwargs)
    others = [t for t in given if isinstance(t, Tensor) and not isinstance(t, Elsewhere)]
    if ours and others:
        _check_devices(function, args, others)
    if (generator := kwargs.get("generator")) is not None:
        raise RuntimeError(
            f"{packet}: expected a generator of {NAME}, found one of {generator.device}"
        )
    if _recording() is not None:
        leaves = packet is aten._to_copy and asked is not None and not asked_here
        if packet in WAITING or leaves or any(tensor.dim() > 0 for tensor in others):
            raise RuntimeError(f"{packet} waits for the device, and is being captured")
    return _done(function, args, kwargs, ours, asked_here)


def _check_devices(function: Any, args: Sequence[Any], others: Sequence[Tensor]) -> None:
    """`RuntimeError` unless CUDA lets tensors of the CPU take part in an operation with its own."""
    packet = function.overloadpacket
    if packet in COPIES:
        return
    if packet in READS_BY_INDEX or packet in WRITES_BY_INDEX:
        if not isinstance(args[0], Elsewhere):
            raise RuntimeError(f"{packet}: indices should be on the CPU, as the indexed tensor is")
        if packet in READS_BY_INDEX or isinstance(args[2], Elsewhere) or args[2].dim() == 0:
            return
    elif packet in FILLS or torch.Tag.pointwise in function.tags:
        others = [tensor for tensor in others if tensor.dim() > 0]
        if not others:
            return
    raise RuntimeError(
        f"{packet} meets tensors of the CPU {[tuple(t.shape) for t in others]} and of {NAME}: "
        "expected all tensors to be on the same device"
    )


def _done(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    ours: Sequence[Elsewhere],
    here: bool,
) -> Any:
    """Do the operation on the CPU, and say of its results where they are. `here`: the device was
    asked for by name."""
    packet = function.overloadpacket
    plain = {
        name: torch.device("cpu") if name == "device" and value is not None else value
        for name, value in kwargs.items()
        if name != "pin_memory"
    }
    call, held = _int4(packet) or function, tree_map(_held, (tuple(args), plain))
    result = call(*held[0], **held[1])
    if any(tensor.held.shape != tensor.shape for tensor in ours):
        raise NotImplementedError(f"{packet} resizes a tensor, which {NAME} cannot follow")
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if packet is aten._to_copy and kwargs.get("device") is not None:
        stays = here
    else:
        stays = here or (isinstance(first, Elsewhere) if packet is aten.copy_ else bool(ours))
    if not stays:
        return result
    if (graph := _recording()) is not None:
        results = [part for part in tree_flatten(result)[0] if isinstance(part, Tensor)]
        graph.append(_Recorded(call, held[0], held[1], results))
    back = {id(tensor.held): tensor for tensor in ours}
    return tree_map(lambda part: _wrapped(part, back) if isinstance(part, Tensor) else part, result)


def _wrapped(part: Tensor, back: Mapping[int, Elsewhere]) -> Elsewhere:
    return back[id(part)] if id(part) in back else Elsewhere(part)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _int4(packet: Any) -> Callable[..., Tensor] | None:
    """Return CUDA's layout and product of 4-bit codes, computed by those of the CPU."""
    of: dict[Any, Callable[..., Tensor]] = {
        aten._convert_weight_to_int4pack: lay_out,
        aten._weight_int4pack_mm: multiply,
    }
    return of.get(packet)


class _Pretended(DeviceKind):
    """The one pretended device."""

    type = NAME

    def open(self, name: str) -> Device | None:
        if name not in (NAME, f"{NAME}:0"):
            return None
        place = device()
        return Device(self, str(place), place, f"{cpu.library()}-{NAME}", "fp16", capture)

    def free_bytes(self, device: torch.device) -> int:
        return cpu.free_bytes()

    def transfer(self, device: torch.device) -> PretendedTransfer:
        return PretendedTransfer()


PRETENDED = _Pretended()
