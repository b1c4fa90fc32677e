"""Passes of fixed shape, for the levels of a draft's tree on a device: rows of one session,
captured once for the memory of a cache and replayed as one launch.

Rows are padded to a power of two, paths to one of a few lengths, and attention reads slots in
multiples of `SLOTS`. The device makes the mask from the paths. Knows rows and slots, not what a
draft computes from them.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.workers.devices import Capture, kind_of
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.segment import Segment

SLOTS = 512
"""Attention in fixed shapes reads slots in multiples of it: a session with SubSpec's tree has one
such number or two, and each is captured once."""
PATHS, LONGER = 16, 4
"""Slots of the shortest path that rows are padded to, and the factor to the next length."""
ALIGNMENT = 16
"""Bytes: every tensor of a pass's inputs begins at a multiple of it."""
Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
ResultT = TypeVar("ResultT")
InputsT = TypeVar("InputsT", bound="Inputs")


@dataclass(frozen=True)
class Form:
    """The shape of a pass."""

    rows: int
    slots: int
    path: int
    """Slots of each row's path."""


def form_of(segment: Segment, least_rows: int = 1) -> Form:
    """Return the shape of the pass that computes a segment with paths in an `ArenaCache`, padded to
    at least so many rows."""
    paths, cache = segment.paths, segment.cache
    assert paths is not None
    assert isinstance(cache, ArenaCache)
    # of few numbers a list is faster than an array
    stop = max(segment.start + segment.count, max(paths.slots.tolist()) + 1)
    longest, path = max(paths.lengths.tolist()), PATHS
    while path < longest:
        path *= LONGER
    return Form(
        1 << (max(segment.count, least_rows) - 1).bit_length(),
        min(-(-stop // SLOTS) * SLOTS, cache.rows.shape[3]),
        path,
    )


class Packed:
    """Zeros of some types and shapes by their names, on the host and on a device, one behind the
    other in one buffer: one copy brings all of them there, and the host does not wait for it."""

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


class Inputs:
    """The inputs of a pass of fixed shape, T rows over S slots."""

    def __init__(self, form: Form, more: Shapes, device: torch.device) -> None:
        """`more`: tensors [T, ...] beside positions, slots and paths, by their names."""
        rows = (form.rows,)
        shapes = {
            "positions": (torch.long, rows),
            "slots": (torch.long, rows),
            "paths": (torch.long, (form.rows, form.path)),
            **more,
            "prefix": (torch.long, (1,)),
        }
        self._packed, self._form = Packed(shapes, device), form
        self._by_row = [name for name in shapes if name != "prefix"]
        self._slots, self._steps = (
            torch.arange(count, device=device) for count in (form.slots, form.path)
        )
        # while a pass is captured, all rows write the last slot, and see it
        for name in ("slots", "paths"):
            self[name].fill_(form.slots - 1)

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor on the device."""
        return self._packed[name]

    def send(self, segment: Segment, rows: dict[str, NDArray[np.generic]]) -> None:
        """Bring the rows of a segment and their other tensors `rows` to the device. Rows of padding
        repeat the last one, and write the same to the same slot."""
        paths, count = segment.paths, segment.count
        assert paths is not None
        here = self._packed.open()
        slots = np.arange(segment.start, segment.start + count)
        which = np.repeat(np.arange(count), paths.lengths)
        step = np.arange(len(which)) - paths.offsets[which]
        here["prefix"][0] = paths.prefix
        here["slots"][:count] = slots
        here["paths"][:count] = slots[:, None]  # behind its path a row sees itself again
        here["paths"][which, step] = paths.slots
        for name, content in rows.items():
            here[name][:count] = content  # a single one stands for all
        if count < self._form.rows:
            for name in self._by_row:
                here[name][count:] = here[name][count - 1]
        self._packed.send()

    def mask(self, dtype: torch.dtype, window: int = 0) -> Tensor:
        """Return the mask [T, S] of 0 and -inf on the device, 0 where a row sees a slot. `window`:
        the positions that a row sees, its own the last of them; 0: all."""
        form, prefix, paths = self._form, self["prefix"], self["paths"]
        mask = torch.full((form.rows, form.slots), -torch.inf, dtype=dtype, device=paths.device)
        seen, added = self._slots < prefix, torch.zeros_like(paths, dtype=dtype)
        if window:
            oldest = (self["positions"] - window + 1).unsqueeze(1)
            seen = seen & (self._slots >= oldest)
            added.masked_fill_(prefix + self._steps < oldest, -torch.inf)
        return mask.masked_fill_(seen, 0.0).scatter_(1, paths, added)


@dataclass(frozen=True)
class FixedPass(Generic[InputsT, ResultT]):
    """A pass of fixed shape and its inputs. Its result is good until another one is replayed."""

    inputs: InputsT
    replay: Callable[[], ResultT]


def fixed_pass(
    cache: ArenaCache,
    key: Hashable,
    form: Form,
    make: Callable[[], tuple[InputsT, Callable[[], ResultT]]],
    capture: Capture,
) -> FixedPass[InputsT, ResultT]:
    """Return the pass of one shape over the memory of a cache, captured at the first call. `key`
    tells it from others of that shape; `make` returns its inputs, and what computes it."""
    captured, whole = cache.arena.captured, (key, form)
    if whole not in captured:
        inputs, run = make()
        captured[whole] = FixedPass(inputs, _captured(cache, form, run, capture))
    found: FixedPass[InputsT, ResultT] = captured[whole]
    return found


def _captured(
    cache: ArenaCache, form: Form, run: Callable[[], ResultT], capture: Capture
) -> Callable[[], ResultT]:
    last = form.slots - 1  # which all rows write meanwhile
    held = cache.rows[:, :, :, last].clone()
    replay = capture(run)
    cache.rows[:, :, :, last] = held
    return replay
