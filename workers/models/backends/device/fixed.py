"""Passes of fixed shape for a draft's levels, captured once and replayed as one launch. With our
attention, inputs contain the address of each row's keys and values, so a pass serves rows of any
sessions of a worker; with torch's, a pass is captured for one cache. Rows are padded to a power of
two, paths to a few lengths, slots to a power of two or, in one cache, a multiple of `SLOTS`. The
memory of caches is reused from session to session, so that captured passes over it stay valid."""

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.workers.devices.base import Capture
from dovetail.workers.devices.memory import HELD, is_out_of_memory, without_spare
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.models.backends.device.attention import PLACE
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import SLACK, Segment

MOST_SPARE = 2  # arenas held for later sessions


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
        """Take a cache's arena back; arenas without captured passes are freed first."""
        spare = sorted([*held, *self._spare], key=lambda arena: -len(arena.captured))
        self._spare = spare[:MOST_SPARE]
        held.clear()

    def let_go(self) -> None:
        """Free the spare arenas."""
        self._spare.clear()

    def let_graphs_go(self) -> bool:
        """Free the captured passes over all arenas, and return whether there were any."""
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
        """Return its memory."""
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
        """Move to another arena; if memory runs out, a shrinking cache stays in its arena."""
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


SLOTS = 512  # fixed shapes read slots in multiples of it, or beyond it in powers of two
MOST_ROWS = 64  # the most rows of a pass
PATHS, LONGER = 16, 4  # slots of the shortest padded path, and the factor to the next
ALIGNMENT = 16  # bytes: every tensor of a pass's inputs begins at a multiple of it
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
ResultT = TypeVar("ResultT")
InputsT = TypeVar("InputsT", bound="Inputs")


class Form(NamedTuple):
    """The shape of a pass."""

    rows: int
    slots: int
    path: int  # slots of each row's path


def form_of(segments: Sequence[Segment], least_rows: int = 1, *, placed: bool) -> Form:
    """Return the shape of a pass over segments with paths in `ArenaCache`s. `placed`: rows have
    their own memory; else there is one segment."""
    count, stop, longest, path = 0, 1, 1, PATHS
    for segment in segments:
        assert segment.paths is not None
        count += segment.count
        stop = max(stop, segment.start + segment.count, segment.paths.stop)
        # a list of few numbers is faster than an array
        longest = max(longest, *segment.paths.lengths.tolist())
    while path < longest:
        path *= LONGER
    if placed:
        slots = max(SLOTS, 1 << (stop - 1).bit_length())
    else:
        (segment,) = segments
        assert isinstance(segment.cache, ArenaCache)
        slots = min(-(-stop // SLOTS) * SLOTS, segment.cache.rows.shape[3])
    return Form(1 << (max(count, least_rows) - 1).bit_length(), slots, path)


class Buffers:
    """Named zeros on the host and on a device, in one buffer each: one asynchronous copy sends
    all."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self._kind = kind_of(device)
        size = sum(_size(*shape) for shape in shapes.values())
        self._source = self._kind.pinned(size)
        self._target = torch.zeros(size, dtype=torch.uint8, device=device)
        self._here = {name: part.numpy() for name, part in _parts(self._source, shapes).items()}
        self._there = _parts(self._target, shapes)
        self._wait = _nothing

    def __getitem__(self, name: str) -> Tensor:
        return self._there[name]

    def open(self) -> Mapping[str, NDArray[np.generic]]:
        """Return the host's tensors for writing, once the previous copy has ended."""
        self._wait()
        return self._here

    def send(self) -> None:
        """Copy all numbers to the device before its next computation."""
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


class Inputs:
    """The inputs of a pass of fixed shape, T rows over S slots."""

    def __init__(
        self, form: Form, more: Shapes, device: torch.device, scratch: Tensor | None = None
    ) -> None:
        """`more`: further tensors [T, ...] by name. `scratch`: one slot that all rows use while a
        placed pass is captured; None: the last slot."""
        rows = (form.rows,)
        shapes = {
            "positions": (torch.long, rows),
            "slots": (torch.long, rows),
            "prefix": (torch.long, rows),
            "paths": (torch.long, (form.rows, form.path)),
            **({} if scratch is None else {"places": (torch.long, (form.rows, PLACE))}),
            **more,
        }
        self._packed, self.form, self._placed = Buffers(shapes, device), form, scratch is not None
        self._by_row = [*shapes]
        self._slots, self._steps = (
            torch.arange(count, device=device) for count in (form.slots, form.path)
        )
        if scratch is None:
            for name in ("slots", "paths"):
                self[name].fill_(form.slots - 1)
        else:
            self["places"].copy_(torch.tensor([scratch.data_ptr(), 1, 1]).expand(form.rows, PLACE))

    def __getitem__(self, name: str) -> Tensor:
        return self._packed[name]

    def send(self, segments: Sequence[Segment], rows: dict[str, NDArray[np.generic]]) -> None:
        """Send segments' rows and other tensors `rows`; padding repeats the last row."""
        self._send(self._packed.open(), segments, rows)

    def _send(
        self,
        here: Mapping[str, NDArray[Any]],
        segments: Sequence[Segment],
        rows: dict[str, NDArray[np.generic]],
    ) -> None:
        count = 0
        for segment in segments:
            self._lay(segment, slice(count, count + segment.count), here)
            count += segment.count
        for name, content in rows.items():
            here[name][:count] = content
        if count < self.form.rows:
            for name in self._by_row:
                here[name][count:] = here[name][count - 1]
        self._packed.send()

    def _lay(self, segment: Segment, to: slice, here: Mapping[str, NDArray[Any]]) -> None:
        paths, cache = segment.paths, segment.cache
        assert paths is not None
        slots = np.arange(segment.start, segment.start + segment.count)
        which = np.repeat(np.arange(segment.count), paths.lengths)
        step = np.arange(len(which)) - paths.offsets[which]
        here["prefix"][to] = paths.prefix
        here["slots"][to] = slots
        here["paths"][to] = slots[:, None]  # after the end of its path a row sees itself again
        here["paths"][to][which, step] = paths.slots
        if self._placed:
            assert isinstance(cache, ArenaCache)
            memory, stop = cache.rows, max(segment.start + segment.count, paths.stop)
            here["places"][to] = memory.data_ptr(), memory.shape[3], stop

    def mask(self, dtype: torch.dtype, window: int = 0) -> Tensor:
        """Return the mask [T, S] of 0 and -inf. `window`: the last slots of a row's path that it
        sees, its own included; 0: all."""
        form, prefix, paths = self.form, self["prefix"].unsqueeze(1), self["paths"]
        mask = torch.full((form.rows, form.slots), -torch.inf, dtype=dtype, device=paths.device)
        seen, added = self._slots < prefix, torch.zeros_like(paths, dtype=dtype)
        if window:
            above = (paths != self["slots"].unsqueeze(1)).sum(1, keepdim=True)
            oldest = prefix + above - window + 1
            seen = seen & (self._slots >= oldest)
            added.masked_fill_(prefix + self._steps < oldest, -torch.inf)
        return mask.masked_fill_(seen, 0.0).scatter_(1, paths, added)


@dataclass(frozen=True)
class FixedPass(Generic[InputsT, ResultT]):
    """A pass of fixed shape and its inputs. Its result is valid until another pass is replayed."""

    inputs: InputsT
    replay: Callable[[], ResultT]


class Graphs:
    """The passes that are captured for all sessions of a worker."""

    def __init__(self) -> None:
        self.captured: dict[Hashable, Any] = {}  # the passes, by their keys
        self._scratch: Tensor | None = None
        HELD.add(self)

    def let_go(self) -> None:
        """Do nothing: only graphs are kept for later."""

    def let_graphs_go(self) -> bool:
        """Free the passes, and return whether there were any."""
        had = bool(self.captured)
        self.captured.clear()
        return had

    def scratch(self, cache: ArenaCache) -> Tensor:
        """Return memory like that of a cache with one slot, which is kept."""
        if self._scratch is None:
            *outer, _, width = cache.rows.shape
            self._scratch = cache.rows.new_zeros(*outer, 1, width)
        return self._scratch


def passes_of(
    captured: dict[Hashable, Any], key: Hashable, make: Callable[[], FixedPass[InputsT, ResultT]]
) -> FixedPass[InputsT, ResultT]:
    """Return the captured pass of a key, made at the first call."""
    found: FixedPass[InputsT, ResultT] | None = captured.get(key)
    if found is None:
        found = captured[key] = make()
    return found


def captured(
    cache: ArenaCache, form: Form, run: Callable[[], ResultT], capture: Capture, *, placed: bool
) -> Callable[[], ResultT]:
    """Return a function that replays a pass: over one cache or, if `placed`, over any rows."""
    if placed:
        return capture(run)
    last = form.slots - 1  # written by all rows during a capture
    held = cache.rows[:, :, :, last].clone()
    replay = capture(run)
    cache.rows[:, :, :, last] = held
    return replay
