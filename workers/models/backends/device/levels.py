"""Levels of trees that a model drafts on a device, in passes of fixed shape (`fixed.py`), and their
children, ranked within the captured pass, so that few numbers are copied back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.workers.devices.base import Capture
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels.layer_plan import LayerPlan
from dovetail.workers.models.attention import Attending
from dovetail.workers.models.backends.device.attention import takes_width
from dovetail.workers.models.backends.device.fixed import (
    MOST_ROWS,
    ArenaCache,
    FixedPass,
    Form,
    Graphs,
    Inputs,
    Shapes,
    captured,
    form_of,
    passes_of,
)
from dovetail.workers.models.backends.device.parts import Turn
from dovetail.workers.models.backends.device.rows import FixedRows, Ours, PlacedRows
from dovetail.workers.models.cache import HALF
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.states import ModelPass

Floats = NDArray[np.float32]
CHUNK = 2048  # numbers searched at a time: the chunks of a vocabulary in parallel, then their best
LEAST_CHUNKED = 8 * CHUNK  # rows of fewer numbers are searched as a whole
LEAST_WIDTH = 32  # fewest ranked children per row: trees of different widths share a pass


@dataclass(frozen=True)
class DeviceRanking:
    """Ranks the children of N nodes by z = (logits / temperature + noise) / sharpening."""

    width: int
    vocabulary_size: int
    temperatures: Floats  # [N], above 0, which a greedy ranking does not read
    sharpenings: Floats
    noise: Sequence[Tensor] | None  # a row [V] for each node; None: the ranking is greedy


class RankingShape(NamedTuple):
    """The shape of a ranking."""

    vocabulary_size: int
    width: int
    noisy: bool

    @classmethod
    def of(cls, rankings: Sequence[DeviceRanking | None]) -> "RankingShape | None":
        """Return the shape of the rankings in a pass, its width a power of two, or None."""
        width, vocabulary_size, noisy = LEAST_WIDTH, 0, False
        for ranking in rankings:
            if ranking is not None:
                width = ranking.width if ranking.width > width else width
                vocabulary_size = ranking.vocabulary_size
                noisy = noisy or ranking.noise is not None
        if not vocabulary_size:
            return None
        return cls(vocabulary_size, min(1 << (width - 1).bit_length(), vocabulary_size), noisy)


class Arriving:
    """The children of all rows of a pass, being copied to the host."""

    def __init__(self, wait: Callable[[], None], here: NDArray[np.int32]) -> None:
        """`here`: int32 [2, T, K], the destination of ids and the bits of gains."""
        self._wait, self._here = wait, here
        self.found: tuple[NDArray[np.int32], Floats] | None = None
        """Ids and gains, once they are complete; None until then."""

    def take(self) -> tuple[NDArray[np.int32], Floats]:
        """Return ids and gains [T, K], once they have been copied."""
        if self.found is None:
            self._wait()
            tokens, bits = self._here.copy()
            self.found = tokens, bits.view(np.float32)
        return self.found


@dataclass(frozen=True)
class Fetched:
    """The children of N rows of a pass."""

    whole: Arriving
    rows: slice

    def take(self) -> tuple[NDArray[np.int32], Floats]:
        """Return ids and gains [N, at least as many as requested], once they have been copied."""
        tokens, gains = self.whole.take()
        return tokens[self.rows], gains[self.rows]


@dataclass(frozen=True)
class Ranked:
    """The logits of a level's rows, and their children."""

    logits: Tensor  # [N, V] on the device
    best: Fetched | None  # None: the host ranks them


class RankedInputs(Inputs):
    """The inputs of a level, and the children from its logits."""

    def __init__(
        self,
        form: Form,
        more: Shapes,
        ranks: RankingShape | None,
        device: torch.device,
        scratch: Tensor | None = None,
    ) -> None:
        """`more`, `scratch`: as for `Inputs`. `ranks`: None leaves the ranking to the host."""
        scales = dict.fromkeys(("temperatures", "sharpenings"), (torch.float32, (form.rows,)))
        super().__init__(form, {**more, **scales}, device, scratch)
        width = ranks.vocabulary_size if ranks is not None and ranks.noisy else 0
        self._noise = torch.zeros(form.rows, width, device=device)  # [T, V]; [T, 0] if it is greedy
        shape = (2, form.rows, 0 if ranks is None else ranks.width)
        self._children = torch.zeros(*shape, dtype=torch.int32, device=device)
        self._kind = kind_of(device)
        size = max(1, self._children.numel())
        self._here = (
            self._kind.pinned(4 * size).view(torch.int32)[: self._children.numel()].view(shape)
        )
        self._numbers = self._here.numpy()
        self._arriving: Arriving | None = None

    def ask(
        self,
        segments: Sequence[Segment],
        rows: dict[str, NDArray[Any]],
        rankings: Iterable[tuple[slice, DeviceRanking | None]] = (),
    ) -> None:
        """Send the rows of segments, and their rankings with the results that each ranks."""
        if self._arriving is not None and self._arriving.found is None:
            self._arriving.take()
        self._arriving = None
        here, noise, start = self._packed.open(), list[Tensor](), 0
        for own, ranking in rankings:
            if ranking is None:
                continue
            first = own.start
            here["sharpenings"][own] = ranking.sharpenings
            here["temperatures"][own] = 0.0 if ranking.noise is None else ranking.temperatures
            if ranking.noise is not None:
                start = start if noise else first
                # rows in between that are ranked without noise also get some, which is not read
                noise += [ranking.noise[0]] * (first - start - len(noise))
                noise += ranking.noise
        self._send(here, segments, rows)
        if noise:
            torch.stack(noise, out=self._noise[start : start + len(noise)])

    def rank(self, logits: Tensor, ranks: RankingShape) -> None:
        """Rank the children by logits [T, V]."""
        count, z = len(logits), logits[:, : ranks.vocabulary_size]
        if ranks.noisy:
            heats = self["temperatures"][:count].unsqueeze(1)
            heated = (z - z.amax(-1, keepdim=True)) / heats + self._noise[:count]
            z = torch.where(heats > 0.0, heated, z)  # greedy rows have temperature 0
        sharpened = z / self["sharpenings"][:count].unsqueeze(1)
        values, ids = largest(sharpened, ranks.width)
        gains = values - sharpened.logsumexp(-1, keepdim=True)
        self._children[0, :count].copy_(ids)
        self._children[1, :count].copy_(gains.view(torch.int32))

    def fetch(self) -> Arriving:
        """Start copying the children of all rows to the host."""
        wait = self._kind.fetch(self._children, self._here)
        self._arriving = Arriving(wait, self._numbers)
        return self._arriving


def largest(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` largest numbers of each row of z [T, V] and their places, like
    `torch.topk`."""
    rows, count = z.shape
    if count < LEAST_CHUNKED or width > CHUNK:
        return z.topk(width)
    chunks = -(-count // CHUNK)
    padded = torch.nn.functional.pad(z, (0, chunks * CHUNK - count), value=-torch.inf)
    values, places = padded.view(rows, chunks, CHUNK).topk(width)
    places += CHUNK * torch.arange(chunks, device=z.device).unsqueeze(1)
    best, which = values.flatten(1).topk(width)
    return best, places.flatten(1).gather(1, which)


Layer = Callable[[FixedRows, Tensor], None]  # a layer: (the rows of a pass, states), in place


def has_fixed_shapes(plan: LayerPlan) -> bool:
    """Return whether a layer's shapes are fixed: not with experts, states or shared keys."""
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


def is_placeable(plan: LayerPlan) -> bool:
    """Return whether our attention computes a layer, for any location of keys and values."""
    return not plan.softcap and takes_width(plan.head_dim)


def fixed_rows(
    inputs: Inputs,
    plans: Sequence[LayerPlan],
    cached: Tensor | PlacedRows,
    turn: Callable[[Tensor], Turn | None],
    by: Attending,
    *,
    turns: bool = True,
) -> FixedRows:
    """Return the rows of a pass for layers of these plans, within its capture."""
    masks = {window: inputs.mask(torch.float32, window) for window in {p.window for p in plans}}
    seeing = {(plan.window, plan.heads // plan.kv_heads) for plan in plans}
    seen = {(window, groups): masks[window].repeat(groups, 1) for window, groups in seeing}
    slots = inputs["slots"]
    return FixedRows(turn(inputs["positions"]), cached, slots, seen, by=by, turns=turns)


@dataclass(frozen=True)
class AskedRows:
    """Rows of one session: of a level of its tree, or the few that were added to its log."""

    tokens: Tensor  # int64 [N]; `positions` likewise
    positions: Tensor
    segment: Segment  # the slots of the rows, and the slots they see
    wanted: int  # the number of last rows whose results are requested
    ranking: DeviceRanking | None = field(default=None, kw_only=True)
    """The ranking of the children of the requested rows, for a captured pass; None: the host
    ranks."""


def join_parts(
    parts: Sequence[AskedRows], *, last_alone: bool = False
) -> tuple[list[Segment], list[DeviceRanking | None], list[int], list[slice]]:
    """Return the segments and rankings of the parts of a pass, the row after each part, and its
    share of the pass's results. `last_alone`: a pass has only results of each part's last row."""
    segments, rankings = list[Segment](), list[DeviceRanking | None]()
    stops, results, count = list[int](), list[slice](), 0
    for part in parts:
        segments.append(part.segment)
        rankings.append(part.ranking)
        count += part.segment.count
        stops.append(count)
        last = len(stops) if last_alone else count
        results.append(slice(last - part.wanted, last))
    return segments, rankings, stops, results


@dataclass(eq=False)
class Levels:
    """The levels of one model."""

    capture: Capture
    device: torch.device
    hidden: int  # width of a state
    plans: Sequence[LayerPlan]
    layers: Sequence[Layer]  # after the plans, in their order
    turn: Callable[[Tensor], Turn | None]  # positions int64 [T] on the device -> their angles
    by: Attending
    logits: Callable[[Tensor], Tensor]  # states [T, hidden] of the last layer -> logits [T, V]
    ours: Ours | None = None  # functions for rows of several sessions; None: torch's
    graphs: Graphs = field(default_factory=Graphs)

    def covers(self, segment: Segment) -> bool:
        """Return whether rows are a level."""
        if segment.paths is None or segment.count > MOST_ROWS:
            return False
        return isinstance(segment.cache, ArenaCache) and segment.cache.states is None

    def compute(self, states: Tensor, parts: Sequence[AskedRows]) -> list[Ranked]:
        """Return the results of the requested rows of each part, for states float32 [T, hidden] of
        all rows on the CPU: one copy in, one launch, one copy out if children are ranked."""
        caches = [part.segment.cache for part in parts]
        placed = self.ours is not None and all(
            isinstance(cache, ArenaCache) and cache.rows.dtype == HALF for cache in caches
        )
        if len(parts) == 1:
            return self._pass(states, parts, placed=placed)
        found, first = list[Ranked](), 0
        for some in some_at_a_time(parts, placed=placed):
            count = sum(part.segment.count for part in parts[some])
            found += self._pass(states[first : first + count], parts[some], placed=placed)
            first += count
        return found

    def _pass(self, states: Tensor, parts: Sequence[AskedRows], *, placed: bool) -> list[Ranked]:
        """Compute parts in one pass; unless `placed`, there is one part."""
        segments, rankings, stops, results = join_parts(parts)
        form, ranks = form_of(segments, placed=placed), RankingShape.of(rankings)
        cache = segments[0].cache
        assert isinstance(cache, ArenaCache)
        kept = self.graphs.captured if placed else cache.arena.captured
        make = partial(self._open, cache, form, ranks, placed=placed)
        level = passes_of(kept, (self, form, ranks), make)
        positions = parts[0].positions
        if len(parts) > 1:
            positions = joined([part.positions for part in parts])
        given = {"states": states.numpy(), "positions": positions.numpy()}
        level.inputs.ask(segments, given, zip(results, rankings, strict=True))
        logits = level.replay()
        arriving = None if ranks is None else level.inputs.fetch()
        logits = logits[: stops[-1]].to(torch.float32, copy=True)
        return [
            Ranked(logits[own], Fetched(arriving, own) if arriving and ranking else None)
            for own, ranking in zip(results, rankings, strict=True)
        ]

    def _open(
        self, cache: ArenaCache, form: Form, ranks: RankingShape | None, *, placed: bool
    ) -> FixedPass[RankedInputs, Tensor]:
        """Capture a pass. `cache`: the cache of its rows, or one of those that it will serve."""
        shapes = {"states": (torch.float32, (form.rows, self.hidden))}
        scratch = self.graphs.scratch(cache) if placed else None
        inputs = RankedInputs(form, shapes, ranks, self.device, scratch)
        cached: Tensor | PlacedRows = cache.rows
        if placed:
            assert self.ours is not None
            cached = PlacedRows(self.ours, inputs["places"], inputs["slots"], form.slots)

        def run() -> Tensor:
            seen = fixed_rows(inputs, self.plans, cached, self.turn, self.by)
            passing = inputs["states"].clone()
            for layer in self.layers:
                layer(seen, passing)
            logits = self.logits(passing)
            if ranks is not None:
                inputs.rank(logits.float(), ranks)
            return logits

        return FixedPass(inputs, captured(cache, form, run, self.capture, placed=placed))


class Captured(ABC):
    """The part of a back end that computes levels."""

    levels: Levels | None = None  # None: all passes are computed operation by operation

    @property
    def captures(self) -> bool:
        """Return whether levels of trees are captured."""
        return self.levels is not None

    def levels_of(self, parts: Sequence[AskedRows]) -> Sequence[Ranked | None]:
        """Return the ranked children of each part's requested rows; None if it is not a level."""
        if self.levels is None:
            return [None] * len(parts)
        own, places, found = list[AskedRows](), list[int](), list[Ranked | None]()
        for place, part in enumerate(parts):
            segment = self._own(part.segment)
            if self.levels.covers(segment):
                own.append(part if segment is part.segment else replace(part, segment=segment))
                places.append(place)
            found.append(None)
        if own:
            states = self._states(rows_of(own)[0])
            for place, level in zip(places, self.levels.compute(states, own), strict=True):
                found[place] = level
        return found

    def level_of(self, asked: ModelPass) -> Tensor | None:
        """Return the logits [R, V] of a pass if it is a level of one session without wanted states;
        else None."""
        if len(asked.segments) > 1 or asked.kept.wanted:
            return None
        own = AskedRows(asked.tokens, asked.positions, asked.segments[0], len(asked.tokens))
        (level,) = self.levels_of([own])
        if level is None or asked.rows is None:
            return None if level is None else level.logits
        return level.logits[asked.rows.to(level.logits.device)]

    def _own(self, segment: Segment) -> Segment:
        """Return a segment with the cache that the layers write."""
        return segment

    @abstractmethod
    def _states(self, tokens: Tensor) -> Tensor:
        """Return the states float32 [T, hidden] that enter the first layer, on the CPU."""


def some_at_a_time(parts: Sequence[AskedRows], *, placed: bool) -> list[slice]:
    """Return which parts share a pass: up to MOST_ROWS rows of one vocabulary; one if not
    `placed`."""
    found, first, rows, known = list[slice](), 0, 0, 0
    for place, part in enumerate(parts):
        vocabulary = 0 if part.ranking is None else part.ranking.vocabulary_size
        apart = not placed or (known and vocabulary and vocabulary != known)
        if place > first and (apart or rows + part.segment.count > MOST_ROWS):
            found.append(slice(first, place))
            first, rows, known = place, 0, 0
        rows, known = rows + part.segment.count, known or vocabulary
    return [*found, slice(first, len(parts))]


def rows_of(parts: Sequence[AskedRows]) -> tuple[Tensor, Tensor]:
    """Return tokens and positions int64 [T] of all parts."""
    if len(parts) == 1:
        return parts[0].tokens, parts[0].positions
    return joined([part.tokens for part in parts]), joined([part.positions for part in parts])


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors concatenated along their rows."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))
