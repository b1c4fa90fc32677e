"""Keys and values of one session: slots 0..length-1 hold the committed tokens in order; later slots
are free or hold rows of a tree. `KVCache` is the layout for torch, `backends/blocked_cache.py` the
kernels'."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.workers.kernels.layer_plan import CODES
from dovetail.workers.models.recurrent import RecurrentStates, session_bytes, token_bytes
from dovetail.workers.models.segment import SLACK

HALF = torch.float16
"""Type of 16-bit keys and values: three bits more than bfloat16, clamped to 65504."""

CACHE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "half",
    torch.bfloat16: "half",
    CODES: "q8",
}
"""The types of keys and values by their names in the setting target.cache."""


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values in a cache's type, rounded as by the kernels: half to even, clamped."""
    if dtype != HALF or numbers.dtype == HALF:
        return numbers.to(dtype)
    largest = torch.finfo(HALF).max
    return numbers.clamp(-largest, largest).to(HALF)


@dataclass(frozen=True)
class Heads:
    """The heads of the keys and values of a layer."""

    kv_heads: int
    head_dim: int
    latent: int = 0  # numbers of a latent, which begins a key and is the value; 0: no latents


class SlotCache(ABC):
    """The common part of caches of all layouts. A `segment.Cache`."""

    capacity: int
    length: int
    states: RecurrentStates | None = None  # the states of layers that have one

    @property
    @abstractmethod
    def row_slots(self) -> int:
        """Return the number of allocated slots."""

    @property
    @abstractmethod
    def _row_size(self) -> int:
        """Return the bytes of a row's keys and values in all layers."""

    @abstractmethod
    def _move(self, slots: Sequence[int], first: int) -> None:
        """Move the rows of `slots` to the slots from `first` on."""

    @abstractmethod
    def _grow(self, capacity: int) -> None:
        """Move the committed rows into memory for `capacity` rows."""

    def keep(self, slots: Sequence[int], committed: int) -> None:
        free = range(self.length, self.capacity)
        if any(slot not in free for slot in slots) or not 0 <= committed <= len(slots):
            raise ValueError(f"cannot commit {committed} of slots {list(slots)}: free are {free}")
        moves = (i for i, slot in enumerate(slots) if slot != self.length + i)
        in_place = next(moves, len(slots))
        first, moved = self.length + in_place, slots[in_place:]
        if self.states is not None:
            self.states.keep(first, moved, self.length + committed)
        if moved:
            self._move(moved, first)
        self.length += committed

    def check_length(self, length: int) -> None:
        """ValueError unless `length` rows are committed."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} committed rows")

    def truncate(self, length: int) -> None:
        self.check_length(length)
        if self.states is not None:
            self.states.truncate(length)
        self.length = length

    def restorable(self, length: int) -> int:
        return length if self.states is None else self.states.restorable(length)

    def checkpoint(self) -> None:
        if self.states is not None:
            self.states.checkpoint()

    @abstractmethod
    def copied(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return copies of committed rows `start` to `stop` - 1, multiples of 16, on the host."""

    def append(self, rows: Sequence[Tensor]) -> None:
        """Commit `copied` rows of such a cache behind the committed ones; the length is a multiple
        of 16."""
        self.length += self._put(rows)

    @abstractmethod
    def _put(self, rows: Sequence[Tensor]) -> int:
        """Write copied rows behind the committed ones, and return how many they are."""

    def resize(self, capacity: int) -> None:
        if capacity < self.length:
            raise ValueError(f"a capacity of {capacity} rows, but {self.length} are committed")
        if not capacity <= self.row_slots <= SLACK * capacity:
            self._grow(capacity)
        self.capacity = capacity

    @property
    def branches(self) -> bool:
        """Return whether other sessions may start from this cache: states hold all rows."""
        return self.states is None

    @property
    def base_bytes(self) -> int:
        return 0 if self.states is None else session_bytes(self.states.shapes)

    @property
    def row_bytes(self) -> int:
        return self._row_size + (0 if self.states is None else token_bytes(self.states.shapes))


class KVCache(SlotCache):
    """Keys and values in one tensor [layers, 2, kv_heads, capacity, head_dim]."""

    rows: Tensor

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.rows = torch.empty(layers, 2, kv_heads, capacity, head_dim, dtype=dtype, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values [..., slots, head_dim]."""
        return [self.rows]

    @tensors.setter
    def tensors(self, parts: list[Tensor]) -> None:
        (self.rows,) = parts

    def of_layer(self, layer: int) -> Tensor:
        """Return [2, kv_heads, slots, head_dim] of a layer, or latents [1, 1, slots, width]."""
        return self.rows[layer]

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        """Write key, value [kv_heads, T, head_dim], rounded, to the slots from `start` on of a
        layer."""
        stop = start + key.shape[1]
        if not self.length <= start <= stop <= self.capacity:
            most = self.capacity - 1
            raise ValueError(f"slots {start}..{stop - 1} are not within {self.length}..{most}")
        for own, given in zip(self.of_layer(layer), (key, value), strict=False):
            own[:, start:stop] = rounded(given, own.dtype).to(own.device)

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return views [kv_heads, stop - start, head_dim] of a layer's keys and values."""
        return self.rows[layer, 0, :, start:stop], self.rows[layer, 1, :, start:stop]

    def _move(self, slots: Sequence[int], first: int) -> None:
        for rows in self.tensors:
            source = torch.tensor(slots, device=rows.device)
            rows[..., first : first + len(slots), :] = rows.index_select(-2, source)

    def _grow(self, capacity: int) -> None:
        parts = []
        for rows in self.tensors:
            *outer, _, head_dim = rows.shape
            # in fixed shapes a masked slot is multiplied by 0
            parts.append(rows.new_zeros(*outer, capacity, head_dim))
            parts[-1][..., : self.length, :] = rows[..., : self.length, :]
        self.tensors = parts

    def copied(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(rows[..., start:stop, :].clone().cpu() for rows in self.tensors)

    def _put(self, rows: Sequence[Tensor]) -> int:
        count = rows[0].shape[-2] if rows else 0
        for own, given in zip(self.tensors, rows, strict=True):
            own[..., self.length : self.length + count, :] = given.to(own.device)
        return count

    def branch(self, length: int, *, used: int = 0) -> "KVCache":
        """Return a cache with a copy of the first `length` committed rows."""
        self.check_length(length)
        other = copy.copy(self)
        other.tensors = [rows[..., :length, :].clone() for rows in self.tensors]
        other.length = other.capacity = length
        return other

    @property
    def row_slots(self) -> int:
        return self.rows.shape[3]

    @property
    def _row_size(self) -> int:
        numbers = (math.prod((*rows.shape[:-2], rows.shape[-1])) for rows in self.tensors)
        return sum(numbers) * self.tensors[0].element_size() if self.tensors else 0


class MixedKVCache(KVCache):
    """Keys and values, or latents, of layers whose heads differ: a tensor for each layer."""

    def __init__(
        self, heads: Sequence[Heads], *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = self._room = capacity
        self.length = 0
        self._heads = heads
        shapes = [(1 if own.latent else 2, own.kv_heads, capacity, own.head_dim) for own in heads]
        self._rows = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]

    @property
    def tensors(self) -> list[Tensor]:
        return self._rows

    @tensors.setter
    def tensors(self, parts: list[Tensor]) -> None:
        self._rows = parts

    def of_layer(self, layer: int) -> Tensor:
        return self._rows[layer]

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = self._rows[layer][:, :, start:stop]
        if (latent := self._heads[layer].latent) > 0:
            return rows[0], rows[0, :, :, :latent]
        return rows[0], rows[1]

    @property
    def row_slots(self) -> int:
        return self._rows[0].shape[2] if self._rows else self._room

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._room = max(self._room, capacity)
