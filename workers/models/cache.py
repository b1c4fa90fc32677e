"""The keys and values of one session in one model: preallocated, with slots for the rows of a tree
behind the committed ones.

Slots 0..length-1 hold the committed tokens in order; whatever lies behind is free, or rows of a
tree whose fate is not known yet. Tokens and trees are unknown here: the owner decides which slots
survive. This is the layout for torch's operations; `backends/blocked_cache.py` has that of the
kernels.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dovetail.workers.models.recurrent.states import RecurrentStates, session_bytes, token_bytes
from dovetail.workers.models.segment import check_truncation, has_to_move, slots_in_place

HALF = torch.float16
"""The type of 16-bit keys and values. A number keeps three bits more than in bfloat16, and what is
beyond the largest, 65504, is held there, so that none becomes infinite."""

CACHE_NAMES = {torch.float32: "fp32", torch.float16: "half", torch.bfloat16: "half"}
"""The types of keys and values as the setting target.cache calls them."""


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in the type of a cache, as the kernels round them: to the nearest number, the
    even one of two; none becomes infinite."""
    if dtype != HALF or numbers.dtype == HALF:
        return numbers.to(dtype)
    largest = torch.finfo(HALF).max
    return numbers.clamp(-largest, largest).to(HALF)


@dataclass(frozen=True)
class Heads:
    """The heads of the keys and values of a layer."""

    kv_heads: int
    head_dim: int
    latent: int = 0
    """Numbers of a latent, with which a key begins, and which is the value; 0: there are keys and
    values."""


class KVCache:
    """One tensor [layers, 2, kv_heads, capacity, head_dim] and the number of its rows that are
    committed."""

    rows: Tensor
    states: RecurrentStates | None = None
    """The states of layers that have one; None: there are none."""

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
    def _parts(self) -> list[Tensor]:
        """Keys and values [..., slots, head_dim]."""
        return [self.rows]

    @_parts.setter
    def _parts(self, parts: list[Tensor]) -> None:
        (self.rows,) = parts

    def of_layer(self, layer: int) -> Tensor:
        """Keys and values of a layer [2, kv_heads, slots, head_dim], or its latents with their keys
        [1, 1, slots, width]."""
        return self.rows[layer]

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        """Put key, value [kv_heads, T, head_dim] into slots start..start+T-1 of a layer, rounded to
        the cache's type and brought to its device."""
        stop = start + key.shape[1]
        if not self.length <= start <= stop <= self.capacity:
            raise ValueError(
                f"slots {start}..{stop - 1} lie outside {self.length}..{self.capacity - 1}, "
                "the slots that may be written"
            )
        for own, given in zip(self.of_layer(layer), (key, value), strict=False):
            own[:, start:stop] = rounded(given, own.dtype).to(own.device)

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, stop - start, head_dim] of slots start..stop-1 of a layer;
        nothing is copied."""
        return self.rows[layer, 0, :, start:stop], self.rows[layer, 1, :, start:stop]

    def keep(self, slots: Sequence[int], committed: int) -> None:
        """Move `slots` (distinct, none committed) to length, length+1, ... in this order and commit
        the first `committed`; only these rows move."""
        in_place = slots_in_place(self, slots, committed)
        if self.states is not None:
            moved = self.length + in_place
            self.states.keep(moved, slots[in_place:], self.length + committed)
        if in_place < len(slots):
            first, stop = self.length + in_place, self.length + len(slots)
            for rows in self._parts:
                source = torch.tensor(slots[in_place:], device=rows.device)
                rows[..., first:stop, :] = rows.index_select(-2, source)
        self.length += committed

    def truncate(self, length: int) -> None:
        """Let the committed rows from slot `length` on go."""
        check_truncation(self, length)
        if self.states is not None:
            self.states.truncate(length)
        self.length = length

    def restorable(self, length: int) -> int:
        """Return the greatest length up to this one to which `truncate` can go back."""
        return length if self.states is None else self.states.restorable(length)

    def checkpoint(self) -> None:
        """Make the length `restorable`, or nearly: of states a copy is needed for that."""
        if self.states is not None:
            self.states.checkpoint()

    def resize(self, capacity: int) -> None:
        """Have slots for `capacity` rows; the committed ones stay, and move only where memory is
        too small, or much too large."""
        if has_to_move(self, self._slots, capacity):
            parts = []
            for rows in self._parts:
                *outer, _, head_dim = rows.shape
                # in fixed shapes a masked slot is multiplied by 0
                parts.append(rows.new_zeros(*outer, capacity, head_dim))
                parts[-1][..., : self.length, :] = rows[..., : self.length, :]
            self._parts = parts
        self.capacity = capacity

    @property
    def branches(self) -> bool:
        """Return whether other sessions may begin with rows of this cache while it is in use: not
        if it has states, which hold all of its rows."""
        return self.states is None

    def branch(self, length: int, *, used: int = 0) -> "KVCache":
        """Return a cache with a copy of the first `length` committed rows."""
        check_truncation(self, length)
        other = copy.copy(self)
        other._parts = [rows[..., :length, :].clone() for rows in self._parts]
        other.length = other.capacity = length
        return other

    @property
    def _slots(self) -> int:
        """Slots that there is memory for."""
        return self.rows.shape[3]

    @property
    def base_bytes(self) -> int:
        """Memory of a session in addition to that of its rows."""
        return 0 if self.states is None else session_bytes(self.states.shapes)

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        shapes = () if self.states is None else self.states.shapes
        numbers = (math.prod((*rows.shape[:-2], rows.shape[-1])) for rows in self._parts)
        own = sum(numbers) * self._parts[0].element_size() if self._parts else 0
        return own + token_bytes(shapes)


class MixedKVCache(KVCache):
    """The keys and values of layers whose heads differ, or which have latents in their place: a
    tensor for each layer."""

    def __init__(
        self, heads: Sequence[Heads], *, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = self._room = capacity
        self.length = 0
        self._heads = heads
        self._rows = [
            torch.zeros(
                *(1 if own.latent else 2, own.kv_heads, capacity, own.head_dim),
                dtype=dtype,
                device=device,
            )
            for own in heads
        ]

    @property
    def _parts(self) -> list[Tensor]:
        return self._rows

    @_parts.setter
    def _parts(self, parts: list[Tensor]) -> None:
        self._rows = parts

    def of_layer(self, layer: int) -> Tensor:
        return self._rows[layer]

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = self._rows[layer][:, :, start:stop]
        if (latent := self._heads[layer].latent) > 0:
            return rows[0], rows[0, :, :, :latent]
        return rows[0], rows[1]

    @property
    def _slots(self) -> int:
        return self._rows[0].shape[2] if self._rows else self._room

    def resize(self, capacity: int) -> None:
        super().resize(capacity)
        self._room = max(self._room, capacity)
