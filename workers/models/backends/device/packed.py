"""Tensors that lie one behind the other in one buffer, so that one copy brings all of them to a
device."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes: every tensor begins at a multiple of it."""


class Packed:
    """Zeros of some types and shapes, by their names."""

    def __init__(
        self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
    ) -> None:
        sizes = [
            -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT
            for dtype, shape in shapes.values()
        ]
        self._buffer = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        parts = torch.split(self._buffer, sizes)
        self._tensors = {
            name: part[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            for part, (name, (dtype, shape)) in zip(parts, shapes.items(), strict=True)
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def copy_(self, source: "Packed") -> None:
        """Take over all numbers of the same tensors elsewhere."""
        self._buffer.copy_(source._buffer)
