"""The computation of a level of a head's tree: launched operation by operation, or in fixed shapes,
so that a device can replay them at once.

On a GPU a head of one layer is over before its operations have been launched one after the other.
In fixed shapes (`models/backends/device/fixed.py`) all of them are captured once for the memory of
a cache and a number of rows, and replayed for every level (CUDA graphs): the states of the parents
are gathered, those of the rows written where their children find them, and the children ranked.
Where the number of rows follows how sure the draft is, so does the graph (HeteroSpec's dynamic
computational adaptation, section 4.3). Knows rows and slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.settings import TreeSettings
from dovetail.workers.drafters.passes import Rows, joined, wanted_rows
from dovetail.workers.heads.head import Head, Predicted
from dovetail.workers.models.backends.device.arenas import ArenaCache
from dovetail.workers.models.backends.device.fixed import Form, fixed_pass, form_of
from dovetail.workers.models.backends.device.ranked import (
    DeviceRanking,
    Fetched,
    RankedInputs,
    RankingShape,
)
from dovetail.workers.models.segment import Cache, Segment
from dovetail.workers.speculation.growth import Nodes

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]
"""A function of fixed shapes -> one that does the same again, into the same tensors."""


@dataclass(frozen=True)
class Level:
    """N rows of one session that are computed in one pass: a level of its tree, or true rows."""

    tokens: Tensor
    """int64 [N]; `positions` likewise."""
    positions: Tensor
    segment: Segment
    above: Nodes
    """[N]: the rows of `states` that they go on from, each its parent's."""
    into: int
    """The first of the rows of `states` that their own are written to."""
    contrast: bool = False
    ranking: DeviceRanking | None = None
    """The ranking of the children on the device; None: it is left to the host."""
    features: Tensor | None = None
    """[N, W] of the target, from which true rows go on; `above` is not read then, and results are
    wanted of the last row. None: these are rows of the tree."""

    @property
    def wanted(self) -> int:
        """Return the number of rows, the last ones, of which results are wanted."""
        return self.tokens.shape[0] if self.features is None else 1


@dataclass(frozen=True)
class FreeLevels:
    """Compute rows in the shape in which they come, beside those of other sessions."""

    ranks: ClassVar[bool] = False
    """True if children are ranked where levels are computed."""
    head: Head
    states: Tensor
    """[1 + rows, H]: the state of the root's row, then of each row of the tree."""

    def ask(self, level: Level) -> Rows:
        """Return the rows of a level as a part of a pass."""
        return Rows(
            level.tokens,
            level.positions,
            level.segment,
            wanted=len(level.tokens),
            kind=Kind(true=False, contrast=level.contrast),
            features=self.states.index_select(
                0, torch.from_numpy(level.above).to(self.head.device)
            ),
        )

    def take(self, level: Level, found: Predicted) -> None:
        """Write the states of a level where its children find them."""
        self.states[level.into : level.into + len(level.tokens)] = found.states


@dataclass(frozen=True)
class Found(Predicted):
    """The predictions of a level, and the children that a device has ranked by them."""

    best: Fetched | None = None
    """None: the host ranks them."""


def best_of(found: Predicted) -> Fetched | None:
    """Return the children that a device has ranked; None: it has ranked none."""
    return found.best if isinstance(found, Found) else None


@dataclass(frozen=True)
class LevelRows(Rows):
    """A level in fixed shapes, a pass of its own."""

    level: Level | None = None


class LevelInputs(RankedInputs):
    """The inputs of a level of a head."""

    def __init__(
        self, form: Form, ranks: RankingShape | None, device: torch.device, *, features: int
    ) -> None:
        """`features`: the width of features for true rows; 0: the rows are those of a tree."""
        names = ("tokens", "above", "into", "wanted")
        super().__init__(form, dict.fromkeys(names, (torch.long, (form.rows,))), ranks, device)
        self.features = torch.zeros(form.rows, features, device=device)


class FixedLevels:
    """Compute rows in fixed shapes."""

    ranks: ClassVar[bool] = True

    def __init__(
        self, head: Head, cache: ArenaCache, capture: Capture, *, rows: int, least_rows: int = 1
    ) -> None:
        """`rows`: those of the largest tree. `least_rows`: a pass of tree rows is padded to so many
        at least; with the width of the tree, all levels have one shape."""
        self._head, self._cache, self._capture, self._least_rows = head, cache, capture, least_rows
        self._memory = self._take_states(1 + rows)
        self.states = self._memory[: 1 + rows]
        """[1 + rows, H]: the state of the root's row, then of each row of the tree."""

    def _take_states(self, rows: int) -> Tensor:
        """Return the memory of at least so many states, which goes with that of the cache, since
        levels are captured over both. The last row is written while a pass is captured."""
        captured, key = self._cache.arena.captured, (self._head, "states")
        if (known := captured.get(key)) is None or len(known) <= rows:
            captured.clear()
            head = self._head
            known = captured[key] = torch.zeros(
                rows + 1, head.spec.hidden, dtype=head.dtype, device=head.device
            )
        states: Tensor = known
        return states

    def ask(self, level: Level) -> LevelRows:
        """Return the rows of a level as a pass of its own."""
        kind = Kind(true=False, contrast=level.contrast, levels=self)
        rows = level.tokens, level.positions, level.segment
        return LevelRows(*rows, wanted=level.wanted, kind=kind, level=level)

    def take(self, level: Level, found: Predicted) -> None:
        """Do nothing: the pass has written the states."""

    def compute(self, level: Level) -> Found:
        """Compute a level by replaying its pass."""
        count, wanted, ranking = level.segment.count, level.wanted, level.ranking
        true = level.features is not None
        ranks = None if ranking is None else RankingShape.of(ranking)
        form = form_of(level.segment, 1 if true else self._least_rows)
        key = (self._head, level.contrast, ranks, true)
        make = partial(self._open, form, ranks, true=true, contrast=level.contrast)
        fixed = fixed_pass(self._cache, key, form, make, self._capture)
        rows: dict[str, NDArray[Any]] = {
            "tokens": level.tokens.numpy(),
            "positions": level.positions.numpy(),
            "above": np.arange(count) if true else level.above,
            "into": np.arange(level.into, level.into + wanted),
            "wanted": np.full(1, count - 1),
        }
        fixed.inputs.ask(level.segment, rows, ranking)
        if level.features is not None:
            fixed.inputs.features[:count] = level.features
        found = fixed.replay()
        return Found(
            found.logits[:wanted].clone(),
            self.states[level.into : level.into + wanted],
            None if found.contrast is None else found.contrast[:wanted].clone(),
            None if ranks is None else fixed.inputs.fetch(0, wanted),
        )

    def _open(
        self, form: Form, ranks: RankingShape | None, *, true: bool, contrast: bool
    ) -> tuple[LevelInputs, Callable[[], Predicted]]:
        """Return the inputs of a pass, and what computes it."""
        head, states, memory = self._head, self._memory, self._cache.rows
        width = head.spec.feature_width if true else 0
        inputs = LevelInputs(form, ranks, head.device, features=width)
        given, wanted = (inputs.features, 1) if true else (states, form.rows)
        inputs["into"].fill_(len(states) - 1)

        def run() -> Predicted:
            found = head.step(
                inputs["tokens"],
                given.index_select(0, inputs["above"]),
                inputs["positions"],
                inputs["slots"],
                inputs.mask(head.cached),
                memory[..., : form.slots, :],
                true=true,
                rows=inputs["wanted"][:wanted] if true else None,
                contrast=contrast,
            )
            states.index_copy_(0, inputs["into"][:wanted], found.states.to(states.dtype))
            if ranks is not None:
                inputs.rank(found.logits, ranks)
            return found

        return inputs, run


Levels = FreeLevels | FixedLevels


def open_levels(
    head: Head,
    rows: int,
    capture: Capture | None,
    *,
    of_tree: int,
    least_rows: int = 1,
    cache: Cache | None = None,
) -> tuple[Cache, Levels]:
    """Return a cache of at least `rows` rows for one session, `of_tree` of them for its trees, and
    what computes its levels: in fixed shapes if there is a `capture`.

    `cache`: one whose committed rows stay, in place of an empty one.
    """
    if cache is None:
        cache = head.new_cache(rows)
    else:
        cache.resize(rows)
    if capture is None:
        states = torch.zeros(1 + of_tree, head.spec.hidden, dtype=head.dtype, device=head.device)
        return cache, FreeLevels(head, states)
    if not isinstance(cache, ArenaCache):
        raise TypeError(f"a cache of type {type(cache).__name__} cannot be written in fixed shapes")
    return cache, FixedLevels(head, cache, capture, rows=of_tree, least_rows=least_rows)


def compute_level(head: Head, levels: Levels, level: Level) -> Predicted:
    """Compute a level of one session by itself."""
    (found,) = compute_rows(head, [levels.ask(level)])
    levels.take(level, found)
    return found


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
    levels: FixedLevels | None = None
    """Computes rows of one session in fixed shapes; None: rows are computed as they come."""


def compute_rows(head: Head, parts: Sequence[Rows]) -> Sequence[Predicted]:
    """Compute rows of one kind, of several sessions, in one pass; rows in fixed shapes are those of
    one session."""
    kind, first = parts[0].kind, parts[0]
    assert isinstance(kind, Kind)
    if kind.levels is not None and isinstance(first, LevelRows):
        assert first.level is not None
        return [kind.levels.compute(first.level)]
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
