"""The features of a target's rows that a draft reads, as they are sent."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from weakref import WeakSet

import torch
from torch import Tensor

from dovetail.protocol.messages import Reads
from dovetail.workers.models.segment import PROMPT_ROWS
from dovetail.workers.models.states import LAST
from dovetail.workers.sessions.results import Part, Verdict
from dovetail.workers.sessions.wire import narrowed

PREFILL_ROWS = PROMPT_ROWS
"""Rows of a prefill pass, unless weights stream; also the most features in one message."""
MOST_WAITING_ROWS = 512
"""The most rows of held passes before each session's own are copied out of them."""


def slices(part: Part | None) -> Iterator[Part]:
    """Yield the features of a pass in parts that fit into a message."""
    if part is not None:
        for first in range(0, len(part.features), PREFILL_ROWS):
            yield Part(part.start + first, part.features[first : first + PREFILL_ROWS])


def places_of(reads: Reads | None) -> Sequence[int]:
    """Return the layers whose states a draft reads."""
    return () if reads is None else reads.taps or (LAST,)


def features_of(reads: Reads, states: Mapping[int, Tensor], rows: Tensor | slice) -> Tensor:
    """Return the features that a draft reads of some rows of a pass, [n, row] on the CPU."""
    return narrowed(
        torch.cat([states[place][rows] for place in places_of(reads)], dim=1), reads.dtype
    ).cpu()


class HeldFeatures:
    """Features of a session's rows, [row] each, held until they are asked for."""

    def __init__(self) -> None:
        self._picked: list[Tensor] = []  # [n, row] each
        self._waiting: list[int] = []  # further rows, which are still in `_passes`
        self._passes: HeldPasses | None = None
        self._rows = 0

    def __len__(self) -> int:
        """The number of rows."""
        return self._rows

    def wait(self, passes: "HeldPasses", rows: Sequence[int]) -> bool:
        """Hold rows of passes behind the others; return whether they are the first of this
        session's in the passes. A session always uses the same passes."""
        first, self._passes = not self._waiting, passes
        self._waiting += rows
        self._rows += len(rows)
        return first

    def pick(self, features: Tensor) -> None:
        """Copy this session's rows from the features [n, row] of all passes."""
        if self._waiting:
            self._picked.append(features[self._waiting])
            self._waiting = []

    def rows(self) -> Tensor:
        """Return all rows [n, row], at least one, and keep holding them."""
        if self._passes is not None:
            self._passes.settle()
        return torch.cat(self._picked)

    def clear(self) -> None:
        """Drop all rows, which have been sent."""
        self._picked, self._waiting, self._rows = [], [], 0


class HeldPasses:
    """Passes whose features were not requested yet: copying each session's rows out of each pass
    would delay the next pass."""

    def __init__(self, reads: Reads) -> None:
        """`reads`: what all of their sessions' drafts read, apart from the models' names."""
        self._reads = reads
        self._passes: list[Sequence[Tensor]] = []
        """For each pass, the states [rows, hidden] of every layer that is read."""
        self._rows = 0
        self._sessions: WeakSet[HeldFeatures] = WeakSet()

    def add(
        self, states: Mapping[int, Tensor], paths: Sequence[tuple[HeldFeatures, Sequence[int]]]
    ) -> None:
        """Add a pass that computed `states` [rows, hidden], of which each session holds some rows.
        If this raises, no row of the pass is held."""
        if self._rows >= MOST_WAITING_ROWS:
            self.settle()
        computed = [states[place] for place in places_of(self._reads)]
        wanted, count = [row for _, path in paths for row in path], len(computed[0])
        if 2 * len(wanted) < count:  # the others would be kept alive
            index = torch.tensor(wanted, device=computed[0].device)
            computed, count = [own[index] for own in computed], len(wanted)
            ends = list(accumulate(len(path) for _, path in paths))
            paths = [
                (held, range(end - len(path), end))
                for (held, path), end in zip(paths, ends, strict=True)
            ]
        for held, path in paths:
            if held.wait(self, [self._rows + row for row in path]):
                self._sessions.add(held)
        self._passes.append(computed)
        self._rows += count

    def settle(self) -> None:
        """Have every session copy its rows, and drop the passes."""
        if not self._passes:
            return
        places = places_of(self._reads)
        states = {
            place: torch.cat([computed[number] for computed in self._passes])
            for number, place in enumerate(places)
        }
        features = features_of(self._reads, states, slice(None))
        for held in self._sessions:
            held.pick(features)
        self._passes, self._rows = [], 0
        self._sessions.clear()


def with_features(
    verdicts: Sequence[Verdict],
    paths: Sequence[tuple[HeldFeatures, Sequence[int]]],
    features: Tensor,
) -> list[Verdict]:
    """Return verdicts with the held features and each one's own rows from the stacked features
    [rows, row]."""
    parts = features.split_with_sizes([len(path) for _, path in paths])
    whole = []
    for verdict, (held, _), own in zip(verdicts, paths, parts, strict=True):
        if rows := len(held):
            item = verdict.item.model_copy(update={"held": rows})
            verdict, own = replace(verdict, item=item), torch.cat([held.rows(), own])
        whole.append(replace(verdict, features=own))
    return whole
