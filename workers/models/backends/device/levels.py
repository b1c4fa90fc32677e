"""Levels of a draft's tree on a device: passes of one session's rows in fixed shapes, each captured
once for the memory of a cache, a number of rows and of slots, and replayed as one launch.

Rows are padded to a power of two, and attention reads slots in multiples of `SLOTS`. Knows layers,
rows and slots; nothing of drafts or sessions.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dovetail.workers.devices import Capture
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.attention import Attending
from dovetail.workers.models.backends.device.angles import Turn
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.backends.device.packed import Packed
from dovetail.workers.models.backends.device.rows import FixedRows
from dovetail.workers.models.segment import Segment

MOST_ROWS = 64
"""Passes of more rows are no levels of a tree, and computed as they come."""
SLOTS = 512
"""Attention in fixed shapes reads slots in multiples of it: a session with SubSpec's tree has one
such number or two, and each is captured once."""

Layer = Callable[[FixedRows, Tensor], None]
"""A layer of its own matrices: (the rows of a pass, states [T, hidden]), in place."""


def has_fixed_shapes(plan: LayerPlan) -> bool:
    """Return whether what a layer computes depends on nothing but the shapes of its inputs: experts
    and states do not, nor do layers that share keys and values."""
    return (
        plan.caches
        and plan.qkv is not None
        and plan.experts is None
        and plan.scan is None
        and plan.latent is None
        and plan.own_input is None
        and plan.reads is None
        and not plan.chunk
    )


class _Inputs(Packed):
    """The inputs of a level; masks [T, S] of 0 and -inf are named by the windows of layers."""

    def __init__(
        self, rows: int, slots: int, hidden: int, windows: Sequence[int], device: torch.device
    ) -> None:
        self._masks = {window: f"mask {window}" for window in windows}
        shapes = {
            "positions": (torch.long, (rows,)),
            "slots": (torch.long, (rows,)),
            "states": (torch.float32, (rows, hidden)),
            **dict.fromkeys(self._masks.values(), (torch.float32, (rows, slots))),
        }
        super().__init__(shapes, device)

    @property
    def masks(self) -> Mapping[int, Tensor]:
        """Return the masks by window."""
        return {window: self[name] for window, name in self._masks.items()}

    def fill(self, states: Tensor, positions: Tensor, segment: Segment) -> None:
        """Write the rows of a segment. Those of padding are the last one once more: they write the
        same to the same slot."""
        paths, count = segment.paths, segment.count
        assert paths is not None
        slots = torch.arange(segment.start, segment.start + count)
        for name, content in (("states", states), ("positions", positions), ("slots", slots)):
            self[name][:count] = content
            self[name][count:] = content[-1]
        lengths = np.diff(paths.offsets)
        which = np.repeat(np.arange(count), lengths)
        at = np.concatenate([paths.prefix + np.arange(length) for length in lengths])
        before = np.arange(paths.prefix)
        for window, whole in self.masks.items():
            mask = whole.numpy()
            oldest = positions.numpy() - window + 1 if window else np.zeros(count, np.int64)
            mask[:] = -np.inf
            mask[:count, : paths.prefix][before >= oldest[:, None]] = 0.0
            inside = at >= oldest[which]
            mask[which[inside], paths.slots[inside]] = 0.0
            mask[count:] = mask[count - 1]


@dataclass(frozen=True)
class _Level:
    """A pass of fixed shape, and its inputs here and on the device."""

    here: _Inputs
    there: _Inputs
    replay: Callable[[], Tensor]


@dataclass(eq=False)
class Levels:
    """The levels of one model."""

    capture: Capture
    device: torch.device
    hidden: int
    """Width of a state."""
    plans: Sequence[LayerPlan]
    layers: Sequence[Layer]
    """Behind the plans, in their order."""
    turn: Callable[[Tensor], Turn | None]
    """Positions int64 [T] on the device -> their angles."""
    by: Attending
    logits: Callable[[Tensor], Tensor]
    """States [T, hidden] behind the last layer -> logits [T, V] on the device."""

    def cover(self, segments: Sequence[Segment]) -> bool:
        """Return whether a pass of these segments is a level."""
        if len(segments) != 1 or segments[0].paths is None:
            return False
        cache, count = segments[0].cache, segments[0].count
        return count <= MOST_ROWS and isinstance(cache, ArenaCache) and cache.states is None

    def compute(self, states: Tensor, positions: Tensor, segment: Segment) -> Tensor:
        """states [T, hidden], positions [T], both on the CPU -> logits [T, V] on the device: one
        copy there, and one launch."""
        cache, paths, count = segment.cache, segment.paths, segment.count
        assert isinstance(cache, ArenaCache)
        assert paths is not None
        rows = 1 << (count - 1).bit_length()
        stop = max(segment.start + count, int(paths.slots.max()) + 1)
        level = self._of(cache, rows, min(-(-stop // SLOTS) * SLOTS, cache.rows.shape[3]))
        level.here.fill(states, positions, segment)
        level.there.copy_(level.here)
        return level.replay()[:count].clone()

    def _of(self, cache: ArenaCache, rows: int, slots: int) -> _Level:
        """The pass of so many rows over so many slots of a cache, captured where it has not been
        over that memory."""
        captured, key = cache.arena.captured, (self, rows, slots)
        if key not in captured:
            captured[key] = self._open(cache, rows, slots)
        level: _Level = captured[key]
        return level

    def _open(self, cache: ArenaCache, rows: int, slots: int) -> _Level:
        windows = sorted({plan.window for plan in self.plans})
        here, there = (
            _Inputs(rows, slots, self.hidden, windows, place)
            for place in (torch.device("cpu"), self.device)
        )
        written, last = cache.rows, slots - 1
        # while this is captured, all rows write the last slot, which nobody else does, and see it
        there["slots"].fill_(last)
        for mask in there.masks.values():
            mask[:, :last] = float("-inf")
        held = written[:, :, :, last].clone()
        seeing = {(plan.window, plan.heads // plan.kv_heads) for plan in self.plans}

        def run() -> Tensor:
            seen = FixedRows(
                self.turn(there["positions"]),
                written,
                there["slots"],
                {
                    (window, groups): there.masks[window].repeat(groups, 1)
                    for window, groups in seeing
                },
                by=self.by,
            )
            passing = there["states"].clone()
            for layer in self.layers:
                layer(seen, passing)
            return self.logits(passing)

        replay = self.capture(run)
        written[:, :, :, last] = held
        return _Level(here, there, replay)
