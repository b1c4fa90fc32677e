"""The features of a target's rows that are sent to a draft."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dovetail.protocol.messages import Reads
from dovetail.workers.models.segment import PROMPT_ROWS
from dovetail.workers.models.states import LAST
from dovetail.workers.sessions.results import Part, Verdict
from dovetail.workers.sessions.wire import narrowed

PREFILL_ROWS = PROMPT_ROWS
"""Rows of a prefill pass unless weights stream, and the maximum number of features in a message."""
MOST_WAITING = 64  # passes whose held rows are narrowed and joined at once


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
    """Features of a session's rows, held until they are asked for. They are narrowed and joined
    many at a time: doing so in each pass would delay the next one."""

    def __init__(self) -> None:
        self._picked: list[Tensor] = []  # [n, row] each
        self._waiting: list[Sequence[Tensor]] = []
        """Rows after these, [n, hidden] of every layer that is read; they may keep alive rows of
        other sessions in their pass."""
        self._rows = 0

    def __len__(self) -> int:
        """The number of rows."""
        return self._rows

    def hold(self, states: Sequence[Tensor]) -> None:
        """Hold further rows, [n, hidden] of every layer that is read."""
        self._waiting.append(states)
        self._rows += len(states[0])

    def settle(self, reads: Reads, most: int = MOST_WAITING) -> None:
        """Narrow and join the rows of at least `most` passes."""
        if len(self._waiting) >= most:
            parts = map(torch.cat, zip(*self._waiting, strict=True))
            joint = dict(zip(places_of(reads), parts, strict=True))
            self._picked.append(features_of(reads, joint, slice(None)))
            self._waiting = []

    def rows(self, reads: Reads) -> Tensor:
        """Return all rows [n, row], at least one, and keep holding them."""
        self.settle(reads, 1)
        return torch.cat(self._picked)

    def clear(self) -> None:
        """Drop all rows, which have been sent."""
        self._picked, self._waiting, self._rows = [], [], 0


def with_features(
    verdicts: Sequence[Verdict], held: Sequence[HeldFeatures], parts: Sequence[Tensor], reads: Reads
) -> list[Verdict]:
    """Return verdicts with the held features and each one's own rows [n, row]."""
    whole = []
    for verdict, its, own in zip(verdicts, held, parts, strict=True):
        if rows := len(its):
            item = verdict.item.model_copy(update={"held": rows})
            verdict, own = replace(verdict, item=item), torch.cat([its.rows(reads), own])
        whole.append(replace(verdict, features=own))
    return whole
