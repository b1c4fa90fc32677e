"""The keys and values of one session in one model: preallocated, with slots for the rows of a tree
behind the committed ones.

Slots 0..length-1 hold the committed tokens in order; whatever lies behind is free, or rows of a
tree whose fate is not known yet. Knows neither tokens nor trees: its owner says which slots
survive. This is the layout for torch's operations; `backends/fused.py` has that of the kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

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


class KVCache:
    """One tensor [layers, 2, kv_heads, capacity, head_dim] and the number of its rows that are
    committed."""

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

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        """Put key, value [kv_heads, T, head_dim] into slots start..start+T-1 of a layer, rounded to
        the cache's type."""
        stop = start + key.shape[1]
        if not self.length <= start <= stop <= self.capacity:
            raise ValueError(
                f"slots {start}..{stop - 1} lie outside {self.length}..{self.capacity - 1}, "
                "the slots that may be written"
            )
        self.rows[layer, 0, :, start:stop] = rounded(key, self.rows.dtype)
        self.rows[layer, 1, :, start:stop] = rounded(value, self.rows.dtype)

    def view(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, stop - start, head_dim] of slots start..stop-1 of a layer;
        nothing is copied."""
        return self.rows[layer, 0, :, start:stop], self.rows[layer, 1, :, start:stop]

    def keep(self, slots: Sequence[int], committed: int) -> None:
        """Move `slots` (distinct, none committed) to length, length+1, ... in this order and commit
        the first `committed`; only these rows move."""
        in_place = slots_in_place(self, slots, committed)
        if in_place < len(slots):
            moved = torch.tensor(slots[in_place:], device=self.rows.device)
            self.rows[:, :, :, self.length + in_place : self.length + len(slots)] = (
                self.rows.index_select(3, moved)
            )
        self.length += committed

    def truncate(self, length: int) -> None:
        """Let the committed rows from slot `length` on go."""
        check_truncation(self, length)
        self.length = length

    def restorable(self, length: int) -> int:
        """Return the greatest length up to this one to which `truncate` can go back: any."""
        return length

    def checkpoint(self) -> None:
        """Nothing: every length is `restorable`."""

    def resize(self, capacity: int) -> None:
        """Have slots for `capacity` rows; the committed ones stay, and move only where memory is
        too small, or much too large."""
        if has_to_move(self, self.rows.shape[3], capacity):
            layers, both, kv_heads, _, head_dim = self.rows.shape
            rows = self.rows.new_zeros(
                layers, both, kv_heads, capacity, head_dim
            )  # in fixed shapes a masked slot is multiplied by 0
            rows[:, :, :, : self.length] = self.rows[:, :, :, : self.length]
            self.rows = rows
        self.capacity = capacity

    @property
    def base_bytes(self) -> int:
        """Memory of a session beside that of its rows: none."""
        return 0

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        layers, both, kv_heads, _, head_dim = self.rows.shape
        return layers * both * kv_heads * head_dim * self.rows.element_size()
