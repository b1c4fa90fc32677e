"""Memory of a device for the keys and values of sessions, which goes from one that has ended to the
next: what is captured over it stays valid, so that levels are captured once a worker and not once
a session.

Knows tensors and slots; nothing of sessions.
"""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import SLACK, has_to_move

MOST_SPARE = 2
"""Arenas that are held for sessions to come."""


@dataclass(eq=False)
class Arena:
    """The memory of one cache."""

    rows: Tensor
    """[layers, 2, kv_heads, slots, head_dim]"""
    captured: dict[Hashable, Any] = field(default_factory=dict)
    """The passes that have been captured over its addresses, by whatever tells them apart."""


class Arenas:
    """The memory of all caches of one shape; slots come in multiples of a number."""

    def __init__(self, multiple: int = 1) -> None:
        self._multiple = multiple
        self._spare: list[Arena] = []

    def take(self, shape: tuple[int, int, int], capacity: int, like: torch.Tensor) -> Arena:
        """Return zeros [layers, 2, kv_heads, at least `capacity`, head_dim] of the type of `like`
        on its device. What is spare and does not fit is let go first."""
        layers, kv_heads, head_dim = shape
        capacity = -(-capacity // self._multiple) * self._multiple
        for arena in self._spare:
            *outer, slots, width = arena.rows.shape
            fits = capacity <= slots <= SLACK * max(1, capacity)
            if fits and (outer, width, arena.rows.dtype) == (
                [layers, 2, kv_heads],
                head_dim,
                like.dtype,
            ):
                self._spare.remove(arena)
                arena.rows.zero_()
                return arena
        self._spare.clear()
        return Arena(like.new_zeros(layers, 2, kv_heads, capacity, head_dim))

    def give(self, held: list[Arena]) -> None:
        """Take back what a cache has held."""
        self._spare = [*held, *self._spare][:MOST_SPARE]
        held.clear()


class ArenaCache(KVCache):
    """A cache in an arena."""

    def __init__(
        self,
        arenas: Arenas,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.capacity, self.length, self._arenas = capacity, 0, arenas
        self._shape = layers, kv_heads, head_dim
        like = torch.empty(0, dtype=dtype, device=device)
        self._held = [arenas.take(self._shape, capacity, like)]
        weakref.finalize(self, arenas.give, self._held).atexit = False

    @property
    def arena(self) -> Arena:
        """Return the memory in which it lies."""
        return self._held[0]

    @property
    def rows(self) -> Tensor:  # type: ignore[override]
        """The keys and values, [layers, 2, kv_heads, slots, head_dim]."""
        return self._held[0].rows

    def resize(self, capacity: int) -> None:
        if has_to_move(self, self._slots, capacity):
            before = self._held.copy()
            self._held[:] = [self._arenas.take(self._shape, capacity, before[0].rows)]
            self.rows[..., : self.length, :] = before[0].rows[..., : self.length, :]
            self._arenas.give(before)
        self.capacity = capacity
