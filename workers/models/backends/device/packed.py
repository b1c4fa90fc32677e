"""Tensors that lie one behind the other in one buffer, so that one copy brings all of them to a
device, and the host does not wait for it."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.workers.devices import kind_of

ALIGNMENT = 16
"""Bytes: every tensor begins at a multiple of it."""
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Packed:
    """Zeros of some types and shapes by their names, on the host and on a device."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._kind = kind_of(device)
        size = sum(_size(*shape) for shape in shapes.values())
        self._source = self._kind.pinned(size)
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self._here = {name: part.numpy() for name, part in _parts(self._source, shapes).items()}
        self._there = _parts(self._target, shapes)
        self._wait = _nothing

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor on the device."""
        return self._there[name]

    def open(self) -> Mapping[str, NDArray[np.generic]]:
        """Return the tensors on the host, to be written, once what was sent before is copied."""
        self._wait()
        return self._here

    def send(self) -> None:
        """Have the device copy all numbers before it computes anything that it is asked for
        later."""
        self._wait = self._kind.send(self._source, self._target)


def _nothing() -> None:
    """Wait for nothing."""


def _size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-dtype.itemsize * math.prod(shape) // ALIGNMENT) * ALIGNMENT


def _parts(buffer: Tensor, shapes: Shapes) -> dict[str, Tensor]:
    parts = torch.split(buffer, [_size(*shape) for shape in shapes.values()])
    return {
        name: part[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
        for part, (name, (dtype, shape)) in zip(parts, shapes.items(), strict=True)
    }
