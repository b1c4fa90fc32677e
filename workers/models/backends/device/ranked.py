"""Levels whose children are ranked within the captured pass, to copy few numbers back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.workers.devices.opening import kind_of
from dovetail.workers.models.backends.device.fixed import Form, Inputs, Shapes
from dovetail.workers.models.segment import Segment

Floats = NDArray[np.float32]
CHUNK = 2048  # numbers searched at a time: the chunks of a vocabulary in parallel, then their best
LEAST_CHUNKED = 8 * CHUNK  # rows of fewer numbers are searched as a whole
LEAST_WIDTH = 32  # children of a row that are ranked at least: trees of other widths share a pass


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
    """The children of all rows of a pass, on their way to the host."""

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
    """The inputs of a level, and the children that follow from its logits."""

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
        rankings: Sequence[tuple[int, DeviceRanking | None]] = (),
    ) -> None:
        """Send the rows of segments, and the first row and ranking of each."""
        if self._arriving is not None and self._arriving.found is None:
            self._arriving.take()
        self._arriving = None
        here, noise, start = self._packed.open(), list[Tensor](), 0
        for first, ranking in rankings:
            if ranking is None:
                continue
            own = slice(first, first + len(ranking.sharpenings))
            here["sharpenings"][own] = ranking.sharpenings
            here["temperatures"][own] = 0.0 if ranking.noise is None else ranking.temperatures
            if ranking.noise is not None:
                start = start if noise else first
                # rows in between that are not ranked by noise get some too, which is not read
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
    """Return the `width` largest numbers of each row of z [T, V] and their places, as
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
