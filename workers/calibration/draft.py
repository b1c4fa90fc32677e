"""The cost of a level of a draft's tree on this machine, t_D, measured with the same passes as a
draft worker makes.

t_D(rows) is one pass over this many nodes with the logits of all of them, behind a cache of some
length: for a small model its forward pass, for a head a level as in `drafters/head_levels.py`, from
states instead of features. Ranking the children comes on top and depends on the tree; the
coordinator learns it from rounds. The model is opened as by the worker, with the weights of the
settings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dovetail.protocol.calibration import ContextCurve
from dovetail.protocol.profile import ProfileKey
from dovetail.protocol.settings import DraftSettings
from dovetail.workers import kernels
from dovetail.workers.calibration.passes import CONTEXT, Computes, Passes
from dovetail.workers.devices.base import Capture
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.head_levels import Level, Levels, compute_level, open_levels
from dovetail.workers.drafters.levels import levels_key
from dovetail.workers.drafters.model import Drafter
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.head import Head
from dovetail.workers.models.segment import Cache, Segment

LEVELS = (1, 2, 4, 8, 10, 16)  # rows of one level of a draft


def calibrate_draft(
    settings: DraftSettings,
    *,
    threads: int,
    target: str,
    seconds: float,
    context: int | None = None,
    cache: Path | None = None,
) -> tuple[ProfileKey, ContextCurve]:
    """Measure t_D of the draft of `settings` (a small model, a head of the model `target`, or its
    substitute, cached in the folder `cache`) for about `seconds`, behind a cache of CONTEXT rows or
    as many as the draft allows; return it with its key. Raises `UserError` as `open_draft_worker`
    does."""
    device = open_device(settings.device, threads)
    if kernels.available():
        kernels.use_isa(kernels.isa_of(settings.isa), "draft.isa")
    own = settings.model_copy(update={"device": device.name})
    engine = open_draft_worker(
        own,
        name="draft",
        threads=threads,
        target=target,
        context=context,
        cache=cache,
    ).engine
    if isinstance(engine, HeadDrafter):
        head = engine.head
        made = _Blocks(head) if head.spec.block else _Guesses(head, device.capture)
        return levels_key(head, device.library), _measure(made, head.spec.context, seconds)
    assert isinstance(engine, Drafter)
    return levels_key(engine.model, device.library), _measure(
        engine.model, engine.model.context, seconds
    )


def _measure(model: Computes, context: int, seconds: float) -> ContextCurve:
    length = max(1, min(CONTEXT, context - LEVELS[-1]))
    passes = Passes(model, length + LEVELS[-1])
    passes.fill(length)
    return ContextCurve(context=length, t_v=passes.curve(LEVELS, seconds))


class _Guesses:
    """Computes levels of a head for one session; the states and tokens are made up, which costs the
    same."""

    def __init__(self, head: Head, capture: Capture | None) -> None:
        self._head, self._capture = head, capture
        self._levels: Levels | None = None
        self.vocabulary_size = head.vocabulary_size

    def new_cache(self, capacity: int) -> Cache:
        cache, self._levels = open_levels(self._head, capacity, self._capture, of_tree=LEVELS[-1])
        return cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, V] of `rows`, or of all rows, computed as a level."""
        (segment,) = segments
        if rows is not None:
            states = torch.zeros(len(tokens), self._head.spec.hidden, device=self._head.device)
            return self._head.forward(
                tokens, states, positions, segments, true=False, rows=rows
            ).logits
        assert self._levels is not None
        above, levels = np.zeros(len(tokens), np.int64), self._levels
        level = Level(tokens, positions, segment, len(above), levels=levels, above=above, into=1)
        return compute_level(self._head, level).logits


class _Blocks:
    """Computes the pass of a block drafter, which costs the same however many nodes a tree has;
    the features and tokens are made up."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self.vocabulary_size = head.vocabulary_size

    def new_cache(self, capacity: int) -> Cache:
        return self._head.new_cache(capacity + self._head.spec.block)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Sequence[Segment],
        *,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return zeros [1, 1] for `rows`, which are true rows, or the logits [R, V] of a block."""
        head, spec, (segment,) = self._head, self._head.spec, segments
        true = rows is not None
        if not true:
            first, tokens = int(positions[0]), tokens[:1].expand(spec.block)
            positions = torch.arange(first, first + spec.block)
            segment = Segment(segment.cache, segment.start, spec.block)
        true_rows = true or head.mask_features is not None
        width = spec.feature_width if true_rows else spec.hidden
        features = torch.zeros(len(tokens), width, device=head.device)
        found = head.forward(tokens, features, positions, [segment], true=true_rows).logits
        return torch.zeros(1, 1) if true else found
