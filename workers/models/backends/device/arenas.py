"""Device memory for the caches of sessions, reused from one to the next: what is captured over it
stays valid, so that levels are captured once a worker."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dovetail.workers.devices.memory import HELD, is_out_of_memory, without_spare
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import SLACK

MOST_SPARE = 2  # arenas that are held for sessions to come


@dataclass(eq=False)
class Arena:
    """The memory of one cache."""

    rows: Tensor  # [layers, 2, kv_heads, slots, head_dim]
    captured: dict[Hashable, Any] = field(default_factory=dict)
    """The passes captured over it, by key."""


class Arenas:
    """The memory of all caches of one shape; slots come in multiples of a number."""

    def __init__(self, multiple: int = 1) -> None:
        self._multiple = multiple
        self._spare: list[Arena] = []
        self._all: weakref.WeakSet[Arena] = weakref.WeakSet()
        HELD.add(self)

    def take(self, shape: tuple[int, int, int], capacity: int, like: Tensor) -> Arena:
        """Return zeros [layers, 2, kv_heads, >= capacity, head_dim] like `like`. Spare arenas that
        do not fit are freed first, and others' spare memory if that runs out."""
        layers, kv_heads, head_dim = shape
        capacity = -(-capacity // self._multiple) * self._multiple
        for arena in sorted(self._spare, key=lambda arena: -len(arena.captured)):
            *outer, slots, width = arena.rows.shape
            fits = capacity <= slots <= SLACK * max(1, capacity)
            same = (outer, width, arena.rows.dtype) == ([layers, 2, kv_heads], head_dim, like.dtype)
            if fits and same:
                self._spare.remove(arena)
                arena.rows.zero_()
                return arena
        self.let_go()
        return self.make(like, layers, 2, kv_heads, capacity, head_dim)

    def make(self, like: Tensor, *shape: int) -> Arena:
        """Return a new arena of zeros."""
        arena = Arena(without_spare(lambda: _zeros(like, *shape)))
        self._all.add(arena)
        return arena

    def give(self, held: list[Arena]) -> None:
        """Take back what a cache has held; those over which nothing is captured go first."""
        spare = sorted([*held, *self._spare], key=lambda arena: -len(arena.captured))
        self._spare = spare[:MOST_SPARE]
        held.clear()

    def let_go(self) -> None:
        """Free the spare arenas."""
        self._spare.clear()

    def let_graphs_go(self) -> bool:
        """Free what has been captured over all arenas, and return whether there was anything."""
        captured = [arena.captured for arena in self._all if arena.captured]
        for passes in captured:
            passes.clear()
        return bool(captured)


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

    def branch(self, length: int, *, used: int = 0) -> "ArenaCache":
        """Return a cache in another arena with a copy of the first `length` committed rows."""
        layers, kv_heads, head_dim = self._shape
        other = ArenaCache(
            self._arenas,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=length,
            dtype=self.rows.dtype,
            device=self.rows.device,
        )
        other.rows[..., :length, :] = self.rows[..., :length, :]
        other.length = length
        return other

    def _grow(self, capacity: int) -> None:
        """Move to another arena; a cache that shrinks stays where it is if memory runs out."""
        before, kept = self._held.copy(), self.rows[..., : self.length, :]
        try:
            self._held[:] = [self._place_for(capacity)]
        except Exception as error:
            if capacity >= self.row_slots or not is_out_of_memory(error):
                raise
        else:
            self.rows[..., : self.length, :] = kept
            self._arenas.give(before)

    def _place_for(self, capacity: int) -> Arena:
        """Return an arena of at least this many rows, of exactly this many if the cache shrinks."""
        if capacity >= self.row_slots:
            return self._arenas.take(self._shape, capacity, self.rows)
        *outer, _, head_dim = self.rows.shape
        return self._arenas.make(self.rows, *outer, capacity, head_dim)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Return zeros like `like`, outside inference mode: the memory may outlive it."""
    with torch.inference_mode(False):
        return like.new_zeros(shape)
