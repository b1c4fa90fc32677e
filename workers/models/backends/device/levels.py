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
from dovetail.workers.models.backends.device.fixed import Form, Inputs, fixed_pass, form_of
from dovetail.workers.models.backends.device.rows import FixedRows
from dovetail.workers.models.segment import Segment

MOST_ROWS = 64
"""Passes of more rows are no levels of a tree, and computed as they come."""
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

    def compute(self, states: Tensor, positions: Tensor, segment: Segment) -> Tensor:
        """states [T, hidden], positions [T], both on the CPU -> logits [T, V] on the device: one
        copy there, and one launch."""
        cache, form = segment.cache, form_of(segment)
        assert isinstance(cache, ArenaCache)
        level = fixed_pass(cache, self, form, partial(self._open, cache, form), self.capture)
        level.inputs.send(segment, {"states": states.numpy(), "positions": positions.numpy()})
        return level.replay()[: segment.count].clone()

    def _open(self, cache: ArenaCache, form: Form) -> tuple[Inputs, Callable[[], Tensor]]:
        """Return the inputs of a pass, and what computes it."""
        inputs = Inputs(form, {"states": (torch.float32, (form.rows, self.hidden))}, self.device)
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
            return self.logits(passing)

        return inputs, run
