"""Converts tensors to the `Array` of a message and back."""

import torch
from torch import Tensor

from dovetail.protocol.arrays import Array

TYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
NAMES = {dtype: name for name, dtype in TYPES.items()}


def to_array(tensor: Tensor) -> Array:
    """Return a copy of a tensor's numbers for a message."""
    content = tensor.detach().cpu().contiguous()
    data = content.reshape(-1).view(torch.uint8).numpy().tobytes()
    return Array.model_validate(
        {"dtype": NAMES[tensor.dtype], "shape": tuple(tensor.shape), "data": data}
    )


def to_tensor(array: Array) -> Tensor:
    """Return the numbers of a message's array, on the CPU and writable."""
    dtype = TYPES[array.dtype]
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape)


def narrowed(states: Tensor, dtype: str) -> Tensor:
    """Return finite numbers in a 16-bit type; those beyond its range become its largest value,
    since an infinity would spoil every row that attends to it."""
    limit = torch.finfo(TYPES[dtype]).max
    return states.float().clamp(-limit, limit).to(TYPES[dtype])
