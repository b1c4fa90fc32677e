"""Training data of draft heads: sequences with the target's hidden states, stored in a folder or
computed on demand. For a trainer both are the same: all sequences concatenated; a row of a batch is
a slice."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers.training.data.examples import Examples, prompt_of
from dovetail.workers.training.data.states import DTYPES, Origin, TargetStates
from dovetail.workers.training.data.store import Store

TYPICAL_ROWS = 512  # rows from which the size of a stream is measured


@dataclass(frozen=True)
class Batch:
    """B rows of n columns: concatenated sequences, the last one cut at the end of the row."""

    tokens: Tensor  # [B, n] int64
    learn: Tensor
    """[B, n] bool: the token is the target's own output, and is learned where it is predicted."""
    sequence: Tensor
    """[B, n] int32: the sequence of its row that a column belongs to, 0, 1, ...; -1 for padding at
    the end."""
    position: Tensor  # [B, n] int64: place of the token in its sequence
    g: Tensor  # [B, n, H] in the origin's type: the last hidden states, after the final norm
    taps: Tensor | None
    """[B, n, K * H]: the residual streams entering the origin's layers, concatenated; None if it
    has none."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device."""
        taps = None if self.taps is None else self.taps.to(device)
        return Batch(
            self.tokens.to(device),
            self.learn.to(device),
            self.sequence.to(device),
            self.position.to(device),
            self.g.to(device),
            taps,
        )


def open_features(folders: Sequence[Path]) -> "Features":
    """Open the features that `dovetail features` wrote into these folders, one after the other.
    Raises `UserError` if their targets or layers differ."""
    stores = [Store(folder) for folder in folders]
    first = stores[0].index.origin
    for folder, store in zip(folders, stores, strict=True):
        own = store.index.origin
        for name in ("digest", "taps", "dtype"):
            if getattr(own, name) != getattr(first, name):
                raise UserError(
                    f"{folder} has features with {name} {getattr(own, name)}, {folders[0]} with "
                    f"{getattr(first, name)}: they cannot be used together"
                )
    source = stores[0] if len(stores) == 1 else Several(stores)
    return Features(first, source, 0, len(source.offsets) - 1)


class Several:
    """Several stores as one: the sequences of each follow those of the previous one."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores
        self.digest = hashlib.sha256(" ".join(s.digest for s in stores).encode()).hexdigest()
        self.tokens = np.concatenate([store.tokens for store in stores])
        self.learn = np.concatenate([store.learn for store in stores])
        self._starts = np.cumsum([0, *(len(store.tokens) for store in stores)])
        ends = [
            store.offsets[1:] + start
            for store, start in zip(stores, self._starts[:-1], strict=True)
        ]
        self.offsets: NDArray[np.int64] = np.concatenate([[0], *ends])

    def read(self, start: int, stop: int) -> Tensor:
        """Return the states [stop - start, row] of tokens start..stop-1."""
        spans = zip(self._stores, self._starts[:-1], self._starts[1:], strict=True)
        return torch.cat(
            [
                store.read(max(start, low) - low, min(stop, high) - low)
                for store, low, high in spans
                if start < high and low < stop
            ]
        )


def online_features(examples: Examples, reader: TargetStates) -> "Features":
    """Return features that are not stored: the target computes them whenever a row is drawn."""
    return Features(reader.origin, Online(examples, reader), 0, len(examples.rows))


class Online:
    """Computes the states of a slice: those of the sequences that it touches, each up to the
    slice's end."""

    def __init__(self, examples: Examples, reader: TargetStates) -> None:
        self.digest = examples.digest()  # SHA-256 of the sequences
        self.tokens = np.concatenate([row.tokens for row in examples.rows])
        self.learn = np.concatenate([row.learn for row in examples.rows])
        # [S + 1]: where each sequence begins, and where the last one ends
        self.offsets: NDArray[np.int64] = np.concatenate(
            [[0], np.cumsum([len(row.tokens) for row in examples.rows], dtype=np.int64)]
        )
        self._reader = reader

    def read(self, start: int, stop: int) -> Tensor:
        """Return the states [stop - start, row] of tokens start..stop-1."""
        first = int(np.searchsorted(self.offsets, start, "right")) - 1
        begins = [int(begin) for begin in self.offsets[first:] if begin < stop]
        ends = [*begins[1:], stop]
        sequences = [
            torch.from_numpy(self.tokens[begin:end])
            for begin, end in zip(begins, ends, strict=True)
        ]
        states = torch.empty(
            stop - begins[0], self._reader.origin.row, dtype=DTYPES[self._reader.origin.dtype]
        )
        for begin, end, rows in zip(begins, ends, self._reader.read(sequences), strict=True):
            states[begin - begins[0] : end - begins[0]] = rows
        return states[start - begins[0] :]


@dataclass(frozen=True)
class Features:
    """The sequences first..last-1 of a source, with the target's hidden states."""

    origin: Origin  # the target and layers of the states
    source: Online | Store | Several
    first: int
    last: int

    @property
    def digest(self) -> str:
        """SHA-256 of all sequences of the source."""
        return self.source.digest

    @property
    def count(self) -> int:
        """The number of sequences."""
        return self.last - self.first

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return self._end - int(self.source.offsets[self.first])

    @property
    def _end(self) -> int:
        return int(self.source.offsets[self.last])

    def batch(self, rng: np.random.Generator, size: int, length: int) -> Batch:
        """Draw rows [size, length], the same ones for the same state of `rng`, that begin with a
        sequence, or inside one that is longer than a row."""
        begins = rng.choice(_begins(self, length), size)
        columns = np.minimum(begins[:, None] + np.arange(length), self._end - 1)
        padding = begins[:, None] + np.arange(length) >= self._end
        sequence = np.searchsorted(self.source.offsets, columns, "right") - 1
        position = columns - self.source.offsets[sequence]
        states = torch.zeros(size, length, self.origin.row, dtype=DTYPES[self.origin.dtype])
        for row, begin in enumerate(begins.tolist()):
            stop = min(begin + length, self._end)
            states[row, : stop - begin] = self.source.read(begin, stop)
        g, taps = self._parted(states)
        return Batch(
            tokens=torch.from_numpy(self.source.tokens[columns].astype(np.int64)),
            learn=torch.from_numpy(self.source.learn[columns].astype(np.bool_) & ~padding),
            sequence=torch.from_numpy(
                np.where(padding, -1, sequence - sequence[:, :1]).astype(np.int32)
            ),
            position=torch.from_numpy(position),
            g=g,
            taps=taps,
        )

    def split(self, held: float) -> "tuple[Features, Features]":
        """Return the first sequences, and a share `held` of them from the end; those with the same
        prompt stay together."""
        middle = self.first + round(self.count * (1 - held))
        while self.first < middle < self.last and self._prompt(middle) == self._prompt(middle - 1):
            middle += 1
        if not self.first < middle < self.last:
            least = max(2, math.floor(0.5 / held) + 1)
            raise UserError(
                f"{self.count} sequences cannot be split to hold out a share of {held}: give at "
                f"least {least}, with different prompts"
            )
        return replace(self, last=middle), replace(self, first=middle)

    def counts(self) -> Tensor:
        """Return [V] int64: how often each token is learned."""
        view = slice(int(self.source.offsets[self.first]), self._end)
        learned = self.source.tokens[view][self.source.learn[view].astype(np.bool_)]
        return torch.from_numpy(
            np.bincount(learned, minlength=self.origin.vocabulary_size).astype(np.int64)
        )

    def stream(self) -> float | None:
        """Return the root mean square of the last tap's numbers in a typical row; None without
        taps."""
        if not self.origin.taps:
            return None
        start = int(self.source.offsets[self.first])
        rows = self.source.read(start, min(start + TYPICAL_ROWS, self._end))
        return float(rows[:, -self.origin.width :].float().square().mean(-1).sqrt().median())

    def _parted(self, states: Tensor) -> tuple[Tensor, Tensor | None]:
        width = self.origin.width
        return states[..., :width], states[..., width:] if self.origin.taps else None

    def _prompt(self, number: int) -> bytes:
        start, stop = self.source.offsets[number : number + 2].tolist()
        return prompt_of(self.source.tokens[start:stop], self.source.learn[start:stop])


@cache
def _begins(view: Features, length: int) -> NDArray[np.int64]:
    """Return where a row may begin: at every sequence, and in one longer than a row at every half
    row that leaves more than half a row."""
    offsets = view.source.offsets[view.first : view.last + 1]
    half = max(1, length // 2)
    pieces = np.maximum(1, -(-(np.diff(offsets) - half) // half))
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins: NDArray[np.int64] = np.repeat(offsets[:-1], pieces) + within * half
    return begins
