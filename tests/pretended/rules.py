"""The refusals of CUDA, by the `device_check` of torch's native_functions.yaml and the checks of
its indexing: an operation on tensors of two devices, and within a captured graph any wait for the
device. Knows tensors by the name of their device."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
"""Operations that take a single number of the CPU, though they are not elementwise."""
WAITING = (
    aten._local_scalar_dense,
    aten.nonzero,
    aten.is_nonzero,
    aten.equal,
    aten.masked_select,
    aten.repeat_interleave,
)
"""Operations that have the host wait for numbers of the device."""


def is_there(tensor: Any) -> bool:
    """Return whether something is a tensor of the device."""
    return isinstance(tensor, Tensor) and tensor.device.type == NAME


def check_devices(function: Any, args: Sequence[Any], others: Sequence[Tensor]) -> None:
    """`RuntimeError` unless CUDA lets tensors of the CPU take part in an operation with its own."""
    packet = function.overloadpacket
    if packet in COPIES:
        return
    if packet in READS_BY_INDEX or packet in WRITES_BY_INDEX:
        if not is_there(args[0]):
            raise RuntimeError(f"{packet}: indices should be on the CPU, as the indexed tensor is")
        if packet in READS_BY_INDEX or is_there(args[2]) or args[2].dim() == 0:
            return
    elif packet in FILLS or torch.Tag.pointwise in function.tags:
        others = [tensor for tensor in others if tensor.dim() > 0]
        if not others:
            return
    raise RuntimeError(
        f"{packet} meets tensors of the CPU {[tuple(t.shape) for t in others]} and of {NAME}: "
        "expected all tensors to be on the same device"
    )


def check_captured(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], others: Iterable[Tensor]
) -> None:
    """`RuntimeError` where an operation waits for the device, or copies from or to the host, since
    that cannot be captured."""
    packet = function.overloadpacket
    if waits(function, args) or leaves(packet, args, kwargs) or any(t.dim() > 0 for t in others):
        raise RuntimeError(f"{packet} waits for the device, and is being captured")


def waits(function: Any, args: Sequence[Any]) -> bool:
    """Return whether the host waits for numbers of the device that decide a shape or a branch."""
    packet = function.overloadpacket
    if packet in READS_BY_INDEX or packet in WRITES_BY_INDEX:  # masks are counted
        return any(is_there(part) and part.dtype in (torch.bool, torch.uint8) for part in args[1])
    return packet in WAITING


def leaves(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation copies numbers of the device to the host."""
    if packet is aten.copy_:
        return is_there(args[1]) and not is_there(args[0])
    asked = kwargs.get("device") if packet is aten._to_copy else None
    return asked is not None and is_there(args[0]) and torch.device(asked).type != NAME
