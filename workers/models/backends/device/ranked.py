"""Levels whose children are ranked where their logits are computed, within the captured pass, so
that a few numbers travel back instead of logits. Knows rows and logits; nothing of trees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.workers.devices import kind_of
from dovetail.workers.models.backends.device.fixed import Form, Inputs, Shapes
from dovetail.workers.models.segment import Segment

Floats = NDArray[np.float32]
CHUNK = 2048
"""Numbers among which the largest are looked for at a time: a device does so for all chunks of a
vocabulary at once, and then among those that were found."""
LEAST_CHUNKED = 8 * CHUNK
"""Rows of fewer numbers are searched as a whole."""


@dataclass(frozen=True)
class DeviceRanking:
    """The ranking of the children of N nodes that a device is asked for: by z = (logits /
    temperature + noise) / sharpening, row by row."""

    width: int
    vocabulary_size: int
    temperatures: Floats
    """[N], which a greedy ranking does not read."""
    sharpenings: Floats
    noise: Sequence[Tensor] | None
    """A row [V] for each node; None: the ranking is greedy."""


@dataclass(frozen=True)
class RankingShape:
    """The shape of a ranking."""

    vocabulary_size: int
    width: int
    noisy: bool

    @classmethod
    def of(cls, ranking: DeviceRanking) -> "RankingShape":
        """Return the shape of a ranking, its width the next power of two."""
        width = min(1 << (ranking.width - 1).bit_length(), ranking.vocabulary_size)
        return cls(ranking.vocabulary_size, width, ranking.noise is not None)


class Fetched:
    """The children of N rows, on their way to the host."""

    def __init__(self, wait: Callable[[], None], here: NDArray[np.int32], rows: slice) -> None:
        """`here`: int32 [2, T, K], where ids and the bits of gains are to arrive."""
        self._wait, self._here, self._rows = wait, here, rows
        self._found: tuple[NDArray[np.int32], Floats] | None = None

    def take(self) -> tuple[NDArray[np.int32], Floats]:
        """Return ids and gains [N, at least as many as were asked for], once they are there."""
        if self._found is None:
            self._wait()
            tokens, bits = self._here[:, self._rows].copy()
            self._found = tokens, bits.view(np.float32)
        return self._found


@dataclass(frozen=True)
class Ranked:
    """The logits of a level's rows, and their children."""

    logits: Tensor
    """[N, V] on the device."""
    best: Fetched | None
    """None: the host ranks them."""


class RankedInputs(Inputs):
    """The inputs of a level, and the children that follow from its logits."""

    def __init__(
        self, form: Form, more: Shapes, ranks: RankingShape | None, device: torch.device
    ) -> None:
        """`more`: further inputs, as for `Inputs`. `ranks`: None leaves the ranking to the host."""
        scales = dict.fromkeys(("temperatures", "sharpenings"), (torch.float32, (form.rows,)))
        super().__init__(form, {**more, **scales}, device)
        width = ranks.vocabulary_size if ranks is not None and ranks.noisy else 0
        self._noise = torch.zeros(form.rows, width, device=device)
        """[T, V] on the device alone; [T, 0] for a greedy ranking."""
        shape = (2, form.rows, 0 if ranks is None else ranks.width)
        self._children = torch.zeros(*shape, dtype=torch.int32, device=device)
        self._kind = kind_of(device)
        size = max(1, self._children.numel())
        self._here = (
            self._kind.pinned(4 * size).view(torch.int32)[: self._children.numel()].view(shape)
        )
        self._numbers = self._here.numpy()
        self._fetched: Fetched | None = None

    def ask(
        self,
        segment: Segment,
        rows: dict[str, NDArray[Any]],
        ranking: DeviceRanking | None,
        first: int = 0,
    ) -> None:
        """Bring the rows of a segment to the device, and what those from `first` on are ranked
        by."""
        if self._fetched is not None:
            self._fetched.take()
            self._fetched = None
        if ranking is not None:
            rows["temperatures"] = _behind(first, ranking.temperatures)
            rows["sharpenings"] = _behind(first, ranking.sharpenings)
        self.send(segment, rows)
        if ranking is not None and ranking.noise is not None:
            stop = first + len(ranking.noise)
            torch.stack(list(ranking.noise), out=self._noise[first:stop])

    def rank(self, logits: Tensor, ranks: RankingShape) -> None:
        """Find the children that logits [T, V] give."""
        count, z = len(logits), logits[:, : ranks.vocabulary_size]
        if ranks.noisy:
            heated = (z - z.amax(-1, keepdim=True)) / self["temperatures"][:count].unsqueeze(1)
            z = heated + self._noise[:count]
        sharpened = z / self["sharpenings"][:count].unsqueeze(1)
        values, ids = largest(sharpened, ranks.width)
        gains = values - sharpened.logsumexp(-1, keepdim=True)
        self._children[0, :count].copy_(ids)
        self._children[1, :count].copy_(gains.view(torch.int32))

    def fetch(self, first: int, count: int) -> Fetched:
        """Have the children of rows copied to the host; they are kept when these inputs are used
        again."""
        wait = self._kind.fetch(self._children, self._here)
        self._fetched = Fetched(wait, self._numbers, slice(first, first + count))
        return self._fetched


def largest(z: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the `width` largest numbers in each row of z [T, V], and their places, as
    `torch.topk` does: of a long row first those of each chunk."""
    rows, count = z.shape
    if count < LEAST_CHUNKED or width > CHUNK:
        return z.topk(width)
    chunks = -(-count // CHUNK)
    padded = torch.nn.functional.pad(z, (0, chunks * CHUNK - count), value=-torch.inf)
    values, places = padded.view(rows, chunks, CHUNK).topk(width)
    places += CHUNK * torch.arange(chunks, device=z.device).unsqueeze(1)
    best, which = values.flatten(1).topk(width)
    return best, places.flatten(1).gather(1, which)


def _behind(first: int, numbers: Floats) -> Floats:
    return numbers if not first else np.concatenate((np.ones(first, np.float32), numbers))
