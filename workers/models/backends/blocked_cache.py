"""Keys and values in the layout of the kernels: blocks of rows, side by side."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from dovetail.workers.kernels import shards
from dovetail.workers.kernels.layer import slots_of
from dovetail.workers.kernels.layer_plan import (
    LANES,
    CacheRows,
    LayerPlan,
    SharedRows,
    new_cache,
    stored_width,
)
from dovetail.workers.kernels.states import StateRows, StateShape, placed
from dovetail.workers.models.cache import SlotCache
from dovetail.workers.models.recurrent import RecurrentStates
from dovetail.workers.models.segment import Segment

LEAST_SHARED = 128  # fewer rows are copied: sharing rows moves the session's other rows
SHARED_GROWTH = 2  # shared rows are moved together again when they have grown by this factor
MOST_ROOM = 1024  # most rows of a cache beyond the requested ones: some turns of a conversation


def with_room(capacity: int) -> int:
    """Return the rows to allocate, so that the next turn of a conversation needs no move."""
    return capacity + min(capacity // 2, MOST_ROOM)


def give_rows(keys: Tensor, values: Tensor, length: int) -> None:
    """Place the first rows of fresh keys [..., heads, blocks, head_dim, 16] and values [..., heads,
    slots, head_dim] on their shards' nodes."""
    if shards.count() == 1:
        return
    heads, slots = values.shape[-3:-1]
    for part, rows in ((keys, -(-length // LANES) * LANES), (values, length)):
        if part.numel():
            head_bytes = part.stride(values.ndim - 3) * part.element_size()
            layers = part.numel() * part.element_size() // (heads * head_bytes)
            used = head_bytes * rows // slots
            shards.spread_heads(part.data_ptr(), (layers, heads), head_bytes, used)


class BlockedCache(SlotCache):
    """A session's keys and values for the kernels: keys of sixteen slots side by side."""

    shared: SharedRows | None = None  # the first rows, shared with other sessions; own rows follow

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        latent: bool = False,
    ) -> None:
        """`head_dim`: the stored width of a head. `dtype`: float32, float16 or CODES. `latent`:
        values are latents, and there are no keys."""
        self.capacity = capacity
        self.length = 0
        heads = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        self._new = partial(new_cache, **heads, dtype=dtype, latent=latent)
        self.keys, self.values = self._open(with_room(capacity))

    def keep(self, slots: Sequence[int], committed: int) -> None:
        if self.length < self.first:  # a window moves over rows that other sessions share
            self._begin_with(None, max(slots, default=-1) + 1, self.capacity)
        super().keep(slots, committed)

    def _move(self, slots: Sequence[int], first: int) -> None:
        source = torch.tensor(slots) - self.first
        target = torch.arange(first, first + len(slots)) - self.first
        for keys, values in self._views(self.keys, self.values):
            values[..., target, :] = values[..., source, :]
            moved = keys[..., source // LANES, :, source % LANES]
            keys[..., target // LANES, :, target % LANES] = moved

    def truncate(self, length: int) -> None:
        super().truncate(length)
        if length < self.first:
            self._begin_with(self._shared_rows(length), length, self.capacity)

    def _grow(self, capacity: int) -> None:
        self._begin_with(self.shared, self.length, capacity)

    def branch(self, length: int, *, used: int = 0) -> "BlockedCache":
        """Return a cache with the first `length` committed rows. Many rows are shared instead of
        copied; for this, those of both caches move once."""
        self.check_length(length)
        rows = length // LANES * LANES
        if rows >= LEAST_SHARED and rows > SHARED_GROWTH * self.first:
            shared = SharedRows(*self._copy(0, rows, rows), rows)
            self._begin_with(shared, self.length + used, self.capacity)
        other = copy.copy(self)
        other._begin_with(self._shared_rows(length), length, length)
        other.length = other.capacity = length
        return other

    def copied(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return self._copy(start, stop, stop)

    def _put(self, rows: Sequence[Tensor]) -> int:
        keys, values = rows
        count, first = slots_of(values), self.length - self.first
        own, given = (list(self._views(*its)) for its in ((self.keys, self.values), (keys, values)))
        for (own_keys, own_values), (new_keys, new_values) in zip(own, given, strict=True):
            own_keys[..., first // LANES : (first + count) // LANES, :, :] = new_keys
            own_values[..., first : first + count, :] = new_values
        return count

    def _shared_rows(self, length: int) -> SharedRows | None:
        if self.shared is None or length < LANES:
            return None
        return replace(self.shared, rows=min(length // LANES * LANES, self.shared.rows))

    def _begin_with(self, shared: SharedRows | None, length: int, capacity: int) -> None:
        """Begin with these shared rows; the rest of the first `length` move to own memory."""
        first = 0 if shared is None else shared.rows
        self.keys, self.values = self._copy(first, length, with_room(capacity))
        self.shared = shared

    def _copy(self, start: int, stop: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Return fresh keys and values for slots `start` (a multiple of 16) to `capacity` - 1, with
        the rows up to `stop` - 1."""
        keys, values = self._open(max(0, capacity - start))
        new = list(self._views(keys, values))
        for views in new:
            give_rows(*views, max(0, stop - start))
        for begin, end, held in self._stretches(start, stop):
            for (new_keys, new_values), (old_keys, old_values) in zip(new, held, strict=True):
                to, blocks = begin - start, -(-(end - begin) // LANES)
                block = to // LANES
                new_keys[..., block : block + blocks, :, :] = old_keys[..., :blocks, :, :]
                new_values[..., to : to + end - begin, :] = old_values[..., : end - begin, :]
        return keys, values

    def _stretches(
        self, start: int, stop: int
    ) -> Iterator[tuple[int, int, list[tuple[Tensor, Tensor]]]]:
        """Yield places of slots `start` to `stop` - 1: first, end, and views from the first on."""
        if self.shared is not None and start < min(stop, self.first):
            held = self._from(start, self.shared.keys, self.shared.values)
            yield start, min(stop, self.first), held
        if (begin := max(start, self.first)) < stop:
            yield begin, stop, self._from(begin - self.first, self.keys, self.values)

    def _from(self, slot: int, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [
            (own_keys[..., slot // LANES :, :, :], own_values[..., slot:, :])
            for own_keys, own_values in self._views(keys, values)
        ]

    @property
    def first(self) -> int:
        """The first slot of the cache's own memory."""
        return 0 if self.shared is None else self.shared.rows

    @property
    def row_slots(self) -> int:
        return self.first + slots_of(self.values)

    @property
    def _row_size(self) -> int:
        return self._numbers * self.values.element_size()

    @property
    def _numbers(self) -> int:
        layers, kv_heads, _, head_dim = self.values.shape
        return layers * kv_heads * (self.keys.shape[3] + head_dim)

    def _open(self, capacity: int) -> tuple[Tensor, Tensor]:
        return self._new(capacity=capacity)

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [kv_heads, stop - start, head_dim] of own slots of a layer."""
        keys, values = self.of_layer(layer)
        slots = torch.arange(start, stop) - self.first
        return keys[:, slots // LANES, :, slots % LANES].transpose(0, 1), values[:, slots]

    def write(self, layer: int, key: Tensor, value: Tensor, start: int) -> None:
        """Write keys and values [kv_heads, T, head_dim] to the slots from `start` on of a layer."""
        keys, values = self.of_layer(layer)
        slots = torch.arange(start, start + value.shape[1]) - self.first
        values[:, slots] = value
        keys[:, slots // LANES, :, slots % LANES] = key.transpose(0, 1)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return own keys [kv_heads, blocks, head_dim, 16] and values [kv_heads, slots,
        head_dim]."""
        return self.keys[layer], self.values[layer]

    def _views(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys [..., blocks, head_dim, 16] and values [..., slots, head_dim] of equal
        heads."""
        yield keys, values


class MixedCache(BlockedCache):
    """Keys and values of layers whose heads differ, [numbers of a row, slots], layer by layer."""

    def __init__(
        self, heads: Sequence[tuple[int, int]], *, capacity: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """`heads`: for each layer, the number and stored width of its key heads."""
        self._heads, self._dtype = heads, dtype
        self.capacity, self.length = capacity, 0
        self.keys, self.values = self._open(with_room(capacity))

    @property
    def _numbers(self) -> int:
        return 2 * sum(kv_heads * head_dim for kv_heads, head_dim in self._heads)

    def _open(self, capacity: int) -> tuple[Tensor, Tensor]:
        numbers = self._numbers // 2
        parts = new_cache(
            layers=1, kv_heads=1, head_dim=numbers, capacity=capacity, dtype=self._dtype
        )
        slots = parts[1].shape[2]
        return parts[0].view(numbers, slots), parts[1].view(numbers, slots)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return list(self._views(self.keys, self.values))[layer]

    def _views(self, keys: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        slots, first = values.shape[1], 0
        for kv_heads, head_dim in self._heads:
            own = slice(first, first + kv_heads * head_dim)
            yield (
                keys[own].view(kv_heads, slots // LANES, head_dim, LANES),
                values[own].view(kv_heads, slots, head_dim),
            )
            first = own.stop


def cache_of(
    heads: Sequence[tuple[int, int]],
    capacity: int,
    dtype: torch.dtype,
    shapes: Sequence[StateShape] = (),
    *,
    latent: bool = False,
) -> BlockedCache:
    """Return an empty cache of layers with these (key heads, size), and of states. `latent`: the
    heads are latents with a key."""
    heads = [(kv_heads, stored_width(head_dim, dtype)) for kv_heads, head_dim in heads]
    if len(set(heads)) == 1:
        kv_heads, head_dim = heads[0]
        size = {"layers": len(heads), "kv_heads": kv_heads, "head_dim": head_dim}
        cache = BlockedCache(**size, capacity=capacity, dtype=dtype, latent=latent)
    else:
        cache = MixedCache(heads, capacity=capacity, dtype=dtype)
    if shapes:
        cache.states = RecurrentStates(shapes)
    return cache


def cache_for(plans: Sequence[LayerPlan], capacity: int, dtype: torch.dtype) -> BlockedCache:
    """Return an empty cache of layers."""
    caching = [plan for plan in plans if plan.caches]
    return cache_of(
        [(plan.kv_heads, plan.head_dim) for plan in caching],
        capacity,
        dtype,
        [plan.scan.shape for plan in plans if plan.scan is not None],
        latent=any(plan.latent is not None for plan in caching),
    )


class CacheLayout:
    """Assigns places to layers, one after the other."""

    def __init__(self) -> None:
        self.plans: list[LayerPlan] = []  # the layers in their places, without readers of others
        self._places: dict[int, LayerPlan] = {}  # by the number of a layer in its model

    def take(self, plan: LayerPlan) -> LayerPlan:
        """Return a layer in its place after the others; `plan.index`: its number in the model."""
        if plan.reads is not None:
            source = self._places[plan.reads]
            return replace(plan, index=source.index, heads_before=source.heads_before)
        caching = [other for other in self.plans if other.caches]
        shapes = [other.scan.shape for other in self.plans if other.scan is not None]
        own = replace(
            plan,
            index=len(caching),
            heads_before=[(other.kv_heads, other.head_dim) for other in caching],
            scan=None if plan.scan is None else placed(plan.scan, shapes),
        )
        self.plans.append(own)
        self._places[plan.index] = own
        return own

    def caching(self, layer: int) -> LayerPlan:
        """Return a layer of the model in its place, which has its own keys and values."""
        return self._places[layer]

    def has(self, layer: int) -> bool:
        """Return whether the keys and values of a layer of the model have a place."""
        return layer in self._places


def states_of(states: RecurrentStates, segment: Segment) -> StateRows:
    """The states of a session for a segment of it."""
    return states.rows(
        segment.cache.length,
        segment.start,
        segment.count,
        chain=segment.paths is None,
        follows=segment.follows,
    )


def cache_rows(segment: Segment) -> CacheRows:
    """A segment as the kernels expect it."""
    cache = segment.cache
    if not isinstance(cache, BlockedCache):
        raise TypeError(f"a cache of type {type(cache).__name__} belongs to another back end")
    states = None if cache.states is None else states_of(cache.states, segment)
    keys, values, paths = cache.keys, cache.values, segment.paths
    return CacheRows(keys, values, segment.start, segment.count, paths, states, cache.shared)
