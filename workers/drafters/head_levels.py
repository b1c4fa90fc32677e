"""The computation of a level of a head's tree: launched operation by operation, or in fixed shapes,
so that a device can replay them at once.

On a GPU a head of one layer is over before its operations have been launched one after the other.
In fixed shapes - the rows padded to a power of two, the whole cache under a mask - all of them are
captured once for the memory of a cache and a number of rows, and replayed for every level (CUDA
graphs). Where the number of rows follows how sure the draft is, so does the graph (HeteroSpec's
dynamic computational adaptation, section 4.3). Knows rows and slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dovetail.protocol.settings import TreeSettings
from dovetail.workers.drafters.passes import Rows, joined, wanted_rows
from dovetail.workers.heads.head import Head, Predicted
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.backends.device.packed import Packed
from dovetail.workers.models.segment import Cache, Paths, Segment

Capture = Callable[[Callable[[], Predicted]], Callable[[], Predicted]]
"""A function of fixed shapes -> one that does the same again, into the same tensors."""


class Levels(Protocol):
    """Computes for one session; the states that it returns are good until it is called again."""

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        paths: Paths,
        start: int,
        *,
        contrast: bool,
    ) -> Predicted:
        """Rows of tokens, positions int64 [N] and states [N, H], which see `paths` and are written
        to the slots from `start` on."""


@dataclass(frozen=True)
class FreeLevels:
    """Compute rows in the shape in which they come."""

    head: Head
    cache: Cache

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        paths: Paths,
        start: int,
        *,
        contrast: bool,
    ) -> Predicted:
        segment = Segment(self.cache, start, len(tokens), paths)
        return self.head.forward(
            tokens, states, positions, [segment], true=False, contrast=contrast
        )


@dataclass(frozen=True)
class _Fixed:
    """The inputs of a pass of fixed shape, here and on the device, and the pass."""

    here: Packed
    there: Packed
    states: Tensor
    replay: Callable[[], Predicted]


class FixedLevels:
    """Compute rows in fixed shapes. The cache's last slot is for the rows of the padding, which see
    nothing else."""

    def __init__(
        self, head: Head, cache: ArenaCache, capture: Capture, *, least_rows: int = 1
    ) -> None:
        """`least_rows`: a pass is padded to so many at least; the width of the tree makes one shape
        of all."""
        self._head, self._cache, self._capture, self._least_rows = head, cache, capture, least_rows

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        paths: Paths,
        start: int,
        *,
        contrast: bool,
    ) -> Predicted:
        count, spare = len(tokens), self._cache.rows.shape[3] - 1
        rows = 1 << (max(count, self._least_rows) - 1).bit_length()
        fixed = self._of(rows, contrast)
        mask, slots = fixed.here["mask"], fixed.here["slots"]
        mask.fill_(float("-inf"))
        mask[:count, : paths.prefix] = 0.0
        mask[count:, spare] = 0.0
        which = torch.repeat_interleave(torch.arange(count), torch.from_numpy(paths.offsets).diff())
        mask[which, torch.from_numpy(paths.slots).long()] = 0.0
        slots.fill_(spare)
        slots[:count] = torch.arange(start, start + count)
        fixed.here["tokens"][:count], fixed.here["positions"][:count] = tokens, positions
        fixed.there.copy_(fixed.here)
        fixed.states[:count] = states
        found = fixed.replay()
        later = None if found.contrast is None else found.contrast[:count].clone()
        return Predicted(found.logits[:count].clone(), found.states[:count], later)

    def _of(self, rows: int, contrast: bool) -> _Fixed:
        """The pass of so many rows, captured where it has not been over the cache's memory."""
        captured, key = self._cache.arena.captured, (self._head, rows, contrast)
        if key not in captured:
            captured[key] = self._open(rows, contrast)
        fixed: _Fixed = captured[key]
        return fixed

    def _open(self, rows: int, contrast: bool) -> _Fixed:
        """Make the inputs of a pass and capture it."""
        head, cache, device = self._head, self._cache, self._head.device
        slots_there = cache.rows.shape[3]
        shapes = {
            **dict.fromkeys(("tokens", "positions", "slots"), (torch.long, (rows,))),
            "mask": (torch.float32, (rows, slots_there)),
        }
        here, there = Packed(shapes, torch.device("cpu")), Packed(shapes, device)
        states = torch.zeros(rows, head.spec.hidden, device=device)
        there["slots"].fill_(slots_there - 1)
        there["mask"][:, :-1] = float("-inf")
        memory = cache.rows

        def step() -> Predicted:
            inputs = there["tokens"], states, there["positions"], there["slots"], there["mask"]
            return head.step(*inputs, memory, contrast=contrast)

        return _Fixed(here, there, states, self._capture(step))


def open_levels(
    head: Head,
    rows: int,
    capture: Capture | None,
    *,
    least_rows: int = 1,
    cache: Cache | None = None,
) -> tuple[Cache, Levels]:
    """A cache of at least `rows` rows for one session, and how its levels are computed: in fixed
    shapes where there is a `capture`.

    `cache`: one whose committed rows stay, in place of an empty one.
    """
    slots = rows if capture is None else rows + 1
    if cache is None:
        cache = head.new_cache(slots)
    else:
        cache.resize(slots)
    if capture is None:
        return cache, FreeLevels(head, cache)
    if not isinstance(cache, ArenaCache):
        raise TypeError(f"a cache of type {type(cache).__name__} cannot be written in fixed shapes")
    return cache, FixedLevels(head, cache, capture, least_rows=least_rows)


def adapts_shapes(tree: TreeSettings) -> bool:
    """Return whether passes of few rows have shapes of their own: not where heterospec is told to
    do without, and then all of them are as wide as the tree."""
    return not tree.traits.by_entropy or "compute" in tree.adapt


@dataclass(frozen=True)
class Kind:
    """The kind of a head's rows. Rows of one kind can share a pass."""

    true: bool
    """True if they read the target's features, False if the head's own states."""
    contrast: bool
    levels: Levels | None = None
    """Computes rows of one session in fixed shapes; None: rows are computed as they come."""


def compute_rows(head: Head, parts: Sequence[Rows]) -> Sequence[Predicted]:
    """Compute rows of one kind, of several sessions, in one pass; rows in fixed shapes are those of
    one session."""
    kind, first = parts[0].kind, parts[0]
    assert isinstance(kind, Kind)
    if kind.levels is not None and first.segment.paths is not None:
        there = first.segment.paths, first.segment.start
        rows = first.tokens, first.features, first.positions
        return [kind.levels(*rows, *there, contrast=kind.contrast)]
    found = head.forward(
        joined([part.tokens for part in parts]),
        joined([part.features for part in parts]),
        joined([part.positions for part in parts]),
        [part.segment for part in parts],
        true=kind.true,
        rows=wanted_rows(parts),
        contrast=kind.contrast,
    )
    counts = [part.wanted for part in parts]
    later = [None] * len(parts) if found.contrast is None else torch.split(found.contrast, counts)
    return [
        Predicted(*its)
        for its in zip(
            torch.split(found.logits, counts), torch.split(found.states, counts), later, strict=True
        )
    ]
