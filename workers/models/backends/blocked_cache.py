"""Keys and values in the layout of the kernels: blocks of rows, side by side."""

from collections.abc import Sequence

import torch

from dovetail.workers.kernels.layer_plan import LANES, CacheRows, new_cache
from dovetail.workers.kernels.layer_plan import Paths as KernelPaths
from dovetail.workers.models.segment import (
    Segment,
    check_truncation,
    has_to_move,
    slots_in_place,
)

MOST_ROOM = 1024
"""Rows that a cache has beyond those asked for, at most: some turns of a conversation, and little
beside a long context."""


def with_room(capacity: int) -> int:
    """Rows to have memory for, so that the next turn of a conversation finds its place: to move 400
    rows into fresh memory takes longer than to read 12."""
    return capacity + min(capacity // 2, MOST_ROOM)


class BlockedCache:
    """A session's keys and values in the layout of the kernels: keys sixteen slots side by side, so
    that lanes run along slots."""

    def __init__(self, *, layers: int, kv_heads: int, head_dim: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.keys, self.values = new_cache(
            layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=with_room(capacity)
        )

    def keep(self, slots: Sequence[int], committed: int) -> None:
        """Move `slots` (distinct, none committed) to length, length+1, ... in this order and commit
        the first `committed`; only these rows move."""
        in_place = slots_in_place(self, slots, committed)
        if in_place < len(slots):
            source = torch.tensor(slots[in_place:])
            target = torch.arange(self.length + in_place, self.length + len(slots))
            self.values[:, :, target] = self.values[:, :, source]
            self.keys[:, :, target // LANES, :, target % LANES] = self.keys[
                :, :, source // LANES, :, source % LANES
            ]
        self.length += committed

    def truncate(self, length: int) -> None:
        """Let the committed rows from slot `length` on go."""
        check_truncation(self, length)
        self.length = length

    def resize(self, capacity: int) -> None:
        """Have slots for `capacity` rows; the committed ones stay, and move only where memory is
        too small, or much too large."""
        layers, kv_heads, slots, head_dim = self.values.shape
        if has_to_move(self, slots, capacity):
            blocks = -(-self.length // LANES)
            keys, values = new_cache(
                layers=layers, kv_heads=kv_heads, head_dim=head_dim, capacity=with_room(capacity)
            )
            keys[:, :, :blocks] = self.keys[:, :, :blocks]
            values[:, :, : self.length] = self.values[:, :, : self.length]
            self.keys, self.values = keys, values
        self.capacity = capacity

    @property
    def row_bytes(self) -> int:
        """Memory of one row."""
        layers, kv_heads, _, head_dim = self.values.shape
        return 2 * layers * kv_heads * head_dim * self.values.element_size()


def cache_rows(segment: Segment) -> CacheRows:
    """A segment in the words of the kernels."""
    cache = segment.cache
    if not isinstance(cache, BlockedCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    paths = segment.paths
    seen = (
        None
        if paths is None
        else KernelPaths(
            paths.prefix, torch.from_numpy(paths.offsets), torch.from_numpy(paths.slots)
        )
    )
    return CacheRows(cache.keys, cache.values, segment.start, segment.count, seen)
