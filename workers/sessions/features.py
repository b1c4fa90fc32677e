"""The features of a target's rows that a draft reads, as they travel."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dovetail.protocol.messages import Reads
from dovetail.workers.models.segment import PROMPT_ROWS
from dovetail.workers.models.states import LAST
from dovetail.workers.sessions.results import Part
from dovetail.workers.sessions.wire import narrowed

PREFILL_ROWS = PROMPT_ROWS
"""Rows of a prefill pass, unless weights stream; and of features that travel together."""
COPIED_TOGETHER = 64
"""Additions to held features that are copied at once."""


def slices(part: Part | None) -> Iterator[Part]:
    """Yield the features of a pass, no more rows at a time than travel together."""
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
    """Features of a session's rows, [row] each, that wait until they are asked for.

    What is added may be a view of what a whole pass showed. It is copied with the next ones, many
    at a time, so that little of other sessions is kept alive by it.
    """

    def __init__(self) -> None:
        self._copied: list[Tensor] = []
        self._added: list[Tensor] = []
        self._rows = 0

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def add(self, rows: Tensor) -> None:
        """Add rows [n, row] behind the others."""
        self._rows += len(rows)
        self._added.append(rows)
        if len(self._added) == COPIED_TOGETHER:
            self._copied.append(torch.cat(self._added))
            self._added.clear()

    def take(self) -> Tensor:
        """Return all rows [n, row], of which there are some; none are left."""
        taken = torch.cat([*self._copied, *self._added])
        self._copied.clear()
        self._added.clear()
        self._rows = 0
        return taken
