"""Levels of a tree that a model drafts on a device, in passes of fixed shape (`fixed.py`). Knows
layers and rows; nothing of drafts or sessions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dovetail.workers.devices import Capture
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.attention import Attending
from dovetail.workers.models.backends.device.angles import Turn
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.backends.device.fixed import Form, fixed_pass, form_of
from dovetail.workers.models.backends.device.ranked import (
    DeviceRanking,
    Ranked,
    RankedInputs,
    RankingShape,
)
from dovetail.workers.models.backends.device.rows import FixedRows
from dovetail.workers.models.segment import Segment

MOST_ROWS = 64
"""Passes of more rows are no levels of a tree, and computed operation by operation."""
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

    def compute(
        self,
        states: Tensor,
        positions: Tensor,
        segment: Segment,
        wanted: int,
        ranking: DeviceRanking | None = None,
    ) -> Ranked:
        """Return what follows the last `wanted` rows of states [T, hidden] at positions [T], both
        on the CPU: by one copy there, one launch, and one copy back if there is a ranking."""
        cache, form = segment.cache, form_of(segment)
        assert isinstance(cache, ArenaCache)
        ranks = None if ranking is None else RankingShape.of(ranking)
        make = partial(self._open, cache, form, ranks)
        level = fixed_pass(cache, (self, ranks), form, make, self.capture)
        inputs, first = level.inputs, segment.count - wanted
        rows = {"states": states.numpy(), "positions": positions.numpy()}
        inputs.ask(segment, rows, ranking, first)
        logits = level.replay()
        best = None if ranks is None else inputs.fetch(first, wanted)
        return Ranked(logits[first : segment.count].to(torch.float32, copy=True), best)

    def _open(
        self, cache: ArenaCache, form: Form, ranks: RankingShape | None
    ) -> tuple[RankedInputs, Callable[[], Tensor]]:
        """Return the inputs of a pass, and what computes it."""
        shapes = {"states": (torch.float32, (form.rows, self.hidden))}
        inputs = RankedInputs(form, shapes, ranks, self.device)
        written, windows = cache.rows, {plan.window for plan in self.plans}
        seeing = {(plan.window, plan.heads // plan.kv_heads) for plan in self.plans}

        def run() -> Tensor:
            masks = {window: inputs.mask(torch.float32, window) for window in windows}
            seen = FixedRows(
                self.turn(inputs["positions"]),
                written,
                inputs["slots"],
                {(window, groups): masks[window].repeat(groups, 1) for window, groups in seeing},
                by=self.by,
            )
            passing = inputs["states"].clone()
            for layer in self.layers:
                layer(seen, passing)
            logits = self.logits(passing)
            if ranks is not None:
                inputs.rank(logits.float(), ranks)
            return logits

        return inputs, run


class Captured:
    """The part of a back end that computes levels."""

    levels: Levels | None = None
    """None: all passes are computed operation by operation."""

    @property
    def captures(self) -> bool:
        """Return whether levels of a tree are captured."""
        return self.levels is not None

    def level(
        self,
        tokens: Tensor,
        positions: Tensor,
        segment: Segment,
        wanted: int,
        ranking: DeviceRanking | None = None,
    ) -> Ranked | None:
        """Return what follows the last `wanted` rows of a level; None: the pass is not a level."""
        own = self._own(segment)
        if self.levels is None or not self.levels.cover([own]):
            return None
        return self.levels.compute(self._states(tokens), positions, own, wanted, ranking)

    def level_of(
        self, tokens: Tensor, positions: Tensor, segments: Sequence[Segment], rows: Tensor | None
    ) -> Tensor | None:
        """Return the logits [R, V] of a pass if it is a level; else None."""
        if len(segments) > 1:
            return None
        level = self.level(tokens, positions, segments[0], len(tokens))
        if level is None or rows is None:
            return None if level is None else level.logits
        return level.logits[rows.to(level.logits.device)]

    def _own(self, segment: Segment) -> Segment:
        """Return a segment with the cache that the layers write."""
        return segment

    def _states(self, tokens: Tensor) -> Tensor:
        """Return the states float32 [T, hidden] that enter the first layer, on the CPU."""
        raise NotImplementedError
