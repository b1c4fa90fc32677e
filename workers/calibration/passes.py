"""Passes over a cache of some length, timed by their rows."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from dovetail.protocol.calibration import RowsSeconds
from dovetail.workers.kernels.probe import seconds_of
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.models.timing import timed

MOST_ROWS = 64
EVERY_ROW = tuple(range(1, MOST_ROWS + 1))
LADDER = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
"""Measured if all 64 would take too long; T_V is nearly a polyline with its bends at the kernels'
tile heights."""
SHORT_LADDER = (1, 2, 4, 8, 16, 32, 64)
CHILDREN = 4
CONTEXT = 512
CHUNK = 128  # rows of a prefill pass


class Computes(Protocol):
    """The model of the passes: a `LanguageModel` or the like."""

    @property
    def vocabulary_size(self) -> int: ...

    def new_cache(self, capacity: int) -> Cache:
        """Return a cache for one session."""

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        segments: Sequence[Segment],
        *,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits [R, V] of `rows`; None: of all."""


class Passes:
    """Passes of a model over one cache; `done` is called with the elapsed share of a curve's
    time."""

    def __init__(self, model: Computes, capacity: int) -> None:
        self._model = model
        self._cache: Cache = model.new_cache(capacity)
        self._generator = torch.Generator().manual_seed(1)
        self._prefill_s = 0.0
        self.experts: dict[int, int] = {}
        """By rows: the median number of experts that passes of the last curve used; 0 if not
        counted."""
        self.done: Callable[[float], None] = lambda _: None

    def fill(self, length: int) -> None:
        """Prefill random tokens until the cache holds `length` rows."""
        while (start := self._cache.length) < length:
            count = min(CHUNK, length - start)
            positions = torch.arange(start, start + count)
            segment, last = Segment(self._cache, start, count), torch.tensor([count - 1])
            took = seconds_of(partial(self._forward, positions, segment, last))
            self._cache.keep(range(start, start + count), count)
            self._prefill_s = took / count

    def seconds_to(self, length: int) -> float:
        """Estimate how long it takes to fill the cache up to this length."""
        return self._prefill_s * max(0, length - self._cache.length)

    def curve(self, rows: Sequence[int], budget_s: float, *, scale: float = 1.0) -> RowsSeconds:
        """Return the median seconds of passes over this many rows, times `scale`; fewer row counts
        (LADDER) if not all can be measured within `budget_s`."""
        self.once(max(rows))  # warm-up: allocates memory, wakes threads
        slowest, fastest = self.once(max(rows)), self.once(min(rows))
        if LEAST_PASSES * len(rows) * (slowest + fastest) / 2 > budget_s:
            rows = [count for count in rows if count in LADDER]
        began = time.perf_counter()
        taken: dict[int, list[float]] = {count: [] for count in rows}
        through: dict[int, list[int]] = {count: [] for count in rows}
        for turn in range(MOST_PASSES):
            gone = (time.perf_counter() - began) / max(budget_s, 1e-9)
            if turn >= LEAST_PASSES and gone > 1:
                break
            self.done(min(1.0, max(gone, turn / MOST_PASSES)))
            for count in rows if turn % 2 == 0 else reversed(rows):
                seconds, experts = self.counted(count)
                taken[count].append(seconds)
                through[count].append(experts)
        self.experts = {count: statistics.median_low(through[count]) for count in rows}
        return RowsSeconds(
            rows=tuple(rows),
            seconds=tuple(statistics.median(taken[count]) * scale for count in rows),
        )

    def counted(self, rows: int, tokens: int | None = None) -> tuple[float, int]:
        """Return the seconds of a pass over a tree of `rows` rows, and how many experts it uses.
        `tokens`: draw the rows' tokens among the first `tokens` ids; None: among all."""
        with timed() as parts:
            return self.once(rows, tokens), parts.experts

    def once(self, rows: int, tokens: int | None = None) -> float:
        """Return the seconds of one pass over a tree of this many rows; nothing is committed."""
        root = self._cache.length
        paths = tree_paths(rows)
        segment = Segment(
            self._cache,
            root,
            rows,
            Paths.of(root, [[root + node for node in path] for path in paths]),
        )
        positions = torch.tensor([root + len(path) - 1 for path in paths])
        return seconds_of(lambda: self._forward(positions, segment, None, tokens))

    def _forward(
        self,
        positions: torch.Tensor,
        segment: Segment,
        rows: torch.Tensor | None,
        among: int | None = None,
    ) -> float:
        tokens = torch.randint(
            among or self._model.vocabulary_size, (segment.count,), generator=self._generator
        )
        return self._model.forward(tokens, positions, [segment], rows=rows)[
            0, 0
        ].item()  # waits for the GPU


def tree_paths(rows: int) -> list[list[int]]:
    """Return for each row of a tree with CHILDREN children a node, filled level by level, its
    ancestors, root first, and itself."""
    paths: list[list[int]] = [[0]]
    for node in range(1, rows):
        paths.append([*paths[(node - 1) // CHILDREN], node])
    return paths


LEAST_PASSES, MOST_PASSES = 3, 25
