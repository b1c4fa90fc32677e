"""The computation of one level of a head's tree: launched operation by operation, or in fixed
shapes that a device can capture and replay.

On a GPU, launching the operations of a one-layer head takes longer than computing them. In fixed
shapes (`models/backends/device/fixed.py`) they are captured once per number of rows and replayed
for every level (CUDA graphs): gathering the parents' states, computing, writing the rows' own
states for their children, and ranking the children. If the number of rows follows the draft's
certainty, so does the graph (HeteroSpec's dynamic computational adaptation, section 4.3)."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.settings import TreeSettings
from dovetail.workers.devices.base import Capture
from dovetail.workers.drafters.passes import Rows, wanted_rows
from dovetail.workers.heads.head import Head, Predicted
from dovetail.workers.models.backends.device.fixed import (
    ArenaCache,
    FixedPass,
    Form,
    captured,
    form_of,
    passes_of,
)
from dovetail.workers.models.backends.device.levels import (
    Fetched,
    RankedInputs,
    RankingShape,
    join_parts,
    joined,
    rows_of,
    some_at_a_time,
)
from dovetail.workers.models.backends.device.rows import PlacedRows
from dovetail.workers.models.segment import Cache
from dovetail.workers.speculation.growth import Nodes


@dataclass(frozen=True)
class Kind:
    """The kind of a head's rows. Rows of one kind can share a pass."""

    true: bool  # True if they read the target's features, False if the head's own states
    contrast: bool = False  # True if rows in free shapes want the contrast output
    fixed: bool = False  # True for levels in fixed shapes


TREE, TRUE = Kind(true=False, fixed=True), Kind(true=True, fixed=True)


@dataclass(frozen=True, kw_only=True)
class Level(Rows):
    """N rows of one session that are computed in one pass: a level of its tree, or true rows, which
    have the target's `features` and want the result of the last row alone."""

    kind: Hashable = TREE
    levels: Any  # the `Levels` of its session
    above: Nodes  # [N]: for each row of a tree, the row of `states` that holds its parent's state
    into: int  # the first row of `states` for the new states
    contrast: bool = False


@dataclass(frozen=True)
class FreeLevels:
    """Compute rows in their own shapes, together with those of other sessions."""

    ranks: ClassVar[bool] = False  # True if children are ranked where levels are computed
    head: Head
    states: Tensor  # [1 + rows, H]: the state of the root's row, then of each row of the tree

    def ask(self, level: Level) -> Level:
        """Return a level of the tree as part of a pass, with the states from which it starts."""
        rows = torch.from_numpy(level.above).to(self.head.device)
        kind = Kind(true=False, contrast=level.contrast)
        return replace(level, kind=kind, features=self.states.index_select(0, rows))

    def take(self, level: Level, found: Predicted) -> None:
        """Write the states of a level for its children."""
        self.states[level.into : level.into + len(level.tokens)] = found.states


class LevelInputs(RankedInputs):
    """The inputs of a level of a head."""

    def __init__(
        self,
        form: Form,
        ranks: RankingShape | None,
        device: torch.device,
        scratch: Tensor | None,
        *,
        features: int,
    ) -> None:
        """`features`: the width of features for true rows; 0 for rows of a tree."""
        names = ("tokens", "above", "into", "wanted")
        more = dict.fromkeys(names, (torch.long, (form.rows,)))
        super().__init__(form, more, ranks, device, scratch)
        self.features = torch.zeros(form.rows, features, device=device)


class FixedLevels:
    """Compute rows in fixed shapes."""

    ranks: ClassVar[bool] = True

    def __init__(
        self, head: Head, cache: ArenaCache, capture: Capture, *, rows: int, least_rows: int = 1
    ) -> None:
        """`rows`: of the largest tree. `least_rows`: pad tree passes to at least this many; with
        the width of the tree, all levels have one shape."""
        self._head, self._cache, self._capture, self._least_rows = head, cache, capture, least_rows
        self._memory = self._take_states(1 + rows)
        self.states = self._memory[: 1 + rows]
        """[1 + rows, H]: the state of the root's row, then of each row of the tree."""
        self.placed = head.ours is not None  # True if passes can have rows of several sessions
        self._address = self._memory.data_ptr() if self.placed else 0
        self._row_bytes = self._memory.stride(0) * self._memory.element_size()

    def _take_states(self, rows: int) -> Tensor:
        """Return memory for at least this many states. It belongs to the cache's memory, since
        captured levels may use both. The last row is scratch space for captures."""
        captured, key = self._cache.arena.captured, "states"
        if (known := captured.get(key)) is None or len(known) <= rows:
            captured.clear()
            head = self._head
            known = captured[key] = torch.zeros(rows + 1, head.spec.hidden, device=head.device)
        states: Tensor = known
        return states

    def ask(self, level: Level) -> Level:
        """Return a level of the tree as part of a pass, which reads the states itself."""
        return level

    def take(self, level: Level, found: Predicted) -> None:
        """Do nothing: the pass has written the states."""

    def compute(self, parts: Sequence[Level]) -> Sequence[Predicted]:
        """Compute levels by replaying a captured pass: of this session, and also of others if they
        are `placed`."""
        true, contrast, least = parts[0].kind is TRUE, False, 1
        segments, rankings, stops, rows = join_parts(parts, last_alone=true)
        asked = list[tuple[Level, FixedLevels]]()
        for part in parts:
            asked.append((part, part.levels))
            contrast, least = contrast or part.contrast, max(least, part.levels._least_rows)
        form = form_of(segments, 1 if true else least, placed=self.placed)
        ranks, wanted = RankingShape.of(rankings), rows[-1].stop
        results = 1 << (wanted - 1).bit_length() if true else form.rows
        make = partial(self._open, form, ranks, results, true=true, contrast=contrast)
        kept = self._head.graphs.captured if self.placed else self._cache.arena.captured
        fixed = passes_of(kept, (contrast, ranks, true, results, form), make)
        tokens, positions = rows_of(parts)
        given: dict[str, NDArray[Any]] = {
            "tokens": tokens.numpy(),
            "positions": positions.numpy(),
            **(_true_rows(asked, stops) if true else _tree_rows(asked)),
        }
        if true:
            fixed.inputs.features[: stops[-1]] = joined([part.features for part in parts])
        fixed.inputs.ask(segments, given, zip(rows, rankings, strict=True))
        found = fixed.replay()
        arriving = None if ranks is None else fixed.inputs.fetch()
        logits = found.logits[:wanted].clone()
        later = None if found.contrast is None else found.contrast[:wanted].clone()
        return [
            Predicted(
                logits[its],
                own.states[one.into : one.into + one.wanted],
                later[its] if later is not None and one.contrast else None,
                Fetched(arriving, its) if arriving and one.ranking else None,
            )
            for (one, own), its in zip(asked, rows, strict=True)
        ]

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the locations of rows of `states` for a pass: addresses or row numbers."""
        return self._address + self._row_bytes * rows if self.placed else rows

    def _open(
        self,
        form: Form,
        ranks: RankingShape | None,
        results: int,
        *,
        true: bool,
        contrast: bool,
    ) -> FixedPass[LevelInputs, Predicted]:
        """Capture a pass. `results`: the number of rows whose results are requested."""
        head, states, cache = self._head, self._memory, self._cache
        ours, width = head.ours, head.spec.feature_width if true else 0
        scratch = None if ours is None else head.graphs.scratch(cache)
        inputs = LevelInputs(form, ranks, head.device, scratch, features=width)
        unused = self.at(np.array([len(states) - 1])).item()
        inputs["into"].fill_(unused)
        memory: Tensor | PlacedRows = cache.rows[..., : form.slots, :]
        if ours is not None:
            inputs["above"].fill_(0 if true else unused)
            memory = PlacedRows(ours, inputs["places"], inputs["slots"], form.slots)

        def given() -> Tensor:
            if true or ours is None:
                return (inputs.features if true else states).index_select(0, inputs["above"])
            above = torch.empty(form.rows, head.spec.hidden, device=head.device)
            return ours.parts.move(inputs["above"], above, there=False)

        def run() -> Predicted:
            found = head.step(
                inputs["tokens"],
                given(),
                inputs["positions"],
                inputs["slots"],
                inputs.mask(torch.float32),
                memory,
                true=true,
                rows=inputs["wanted"][:results] if true else None,
                contrast=contrast,
            )
            into, written = inputs["into"][:results], found.states
            if ours is None:
                states.index_copy_(0, into, written)
            else:
                ours.parts.move(into, written.contiguous(), there=True)
            if ranks is not None:
                inputs.rank(found.logits, ranks)
            return found

        return FixedPass(inputs, captured(cache, form, run, self._capture, placed=self.placed))


Asked = Sequence[tuple[Level, FixedLevels]]


def _true_rows(asked: Asked, stops: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return the inputs of true rows: each row's feature, the last row of each level, and the
    location for its state."""
    above = np.arange(stops[-1])
    into, wanted = np.zeros_like(above), np.zeros_like(above)
    for place, ((level, own), stop) in enumerate(zip(asked, stops, strict=True)):
        into[place:], wanted[place:] = own.at(np.array([level.into])), stop - 1
    return {"above": above, "into": into, "wanted": wanted}


def _tree_rows(asked: Asked) -> dict[str, NDArray[Any]]:
    """Return the inputs of tree rows: the states from which they start, and the locations for their
    own."""
    (one, own), *more = asked
    above, into = own.at(one.above), own.at(np.arange(one.into, one.into + one.segment.count))
    for one, own in more:
        above = np.append(above, own.at(one.above))
        into = np.append(into, own.at(np.arange(one.into, one.into + one.segment.count)))
    return {"above": above, "into": into}


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
    the object that computes its levels: in fixed shapes if `capture` is given. `cache`: a cache to
    reuse, whose committed rows stay."""
    if cache is None:
        cache = head.new_cache(rows)
    else:
        cache.resize(rows)
    if capture is None:
        states = torch.zeros(1 + of_tree, head.spec.hidden, device=head.device)
        return cache, FreeLevels(head, states)
    if not isinstance(cache, ArenaCache):
        raise TypeError(f"a cache of type {type(cache).__name__} cannot be written in fixed shapes")
    return cache, FixedLevels(head, cache, capture, rows=of_tree, least_rows=least_rows)


def compute_level(head: Head, level: Level) -> Predicted:
    """Compute a level of one session alone."""
    (found,) = compute_rows(head, [level.levels.ask(level)])
    level.levels.take(level, found)
    return found


def adapts_shapes(tree: TreeSettings) -> bool:
    """Return whether passes of few rows have their own shapes. Not with heterospec's `compute` off:
    then all passes are as wide as the tree."""
    return not tree.traits.by_entropy or "compute" in tree.adapt


def compute_rows(head: Head, parts: Sequence[Rows]) -> Sequence[Predicted]:
    """Compute rows of one kind, of several sessions, in one pass; rows in fixed shapes share a pass
    where possible."""
    kind, found = parts[0].kind, list[Predicted]()
    assert isinstance(kind, Kind)
    if kind.fixed:
        levels = cast(Sequence[Level], parts)
        if len(parts) == 1:
            return list[Predicted](levels[0].levels.compute(levels))
        for some in some_at_a_time(parts, placed=levels[0].levels.placed):
            found += levels[some.start].levels.compute(levels[some])
        return found
    predicted = head.forward(
        joined([part.tokens for part in parts]),
        joined([part.features for part in parts]),
        joined([part.positions for part in parts]),
        [part.segment for part in parts],
        true=kind.true,
        rows=wanted_rows(parts),
        contrast=kind.contrast,
        recent=[(part.wanted, part.recent) for part in parts],
    )
    counts = [part.wanted for part in parts]
    logits, states = (torch.split(own, counts) for own in (predicted.logits, predicted.states))
    contrast = predicted.contrast
    later = [None] * len(parts) if contrast is None else torch.split(contrast, counts)
    return [Predicted(*its) for its in zip(logits, states, later, strict=True)]
