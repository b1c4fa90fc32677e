"""Rows of a matrix as blocks of a GGUF file. They replace a module's weight until they are packed,
and those of a file are read then, a few at a time."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels.blocks import wrong_row
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.unpacking import unpacked
from dovetail.workers.models.checkpoints.stored import Stored
from dovetail.workers.progress import count_bytes

ROWS = "rows_of_file"  # the attribute of a linear that has its rows


@dataclass(frozen=True)
class InFile:
    """Rows of one type of blocks that are read when they are needed."""

    stored: Stored  # the tensor of them, [rows, inputs] in its file
    name: str  # the name of the tensor in errors
    kind: int
    shape: tuple[int, int]  # numbers of rows and of the bytes of each
    order: Tensor | None = None  # int64 [rows]: the row of the file that each is; None: in turn
    blocks: Tensor | None = None
    """int64 [blocks]: the index of each block in the file; None: in order."""

    def whole(self) -> Tensor:
        """Return all rows, uint8 [rows, bytes]; `CheckpointError` if unreadable, or for NaN and
        infinity."""
        return self._piece(0, self.shape[0], InMemory())

    def pieces(self) -> Callable[[int, int], Tensor]:
        """Return a reader of `count` rows from `first`, for any thread; a thread's next piece
        reuses memory."""
        memory = InMemory()
        return lambda first, count: self._piece(first, count, memory)

    def _piece(self, first: int, count: int, memory: "InMemory") -> Tensor:
        if self.order is None:
            return self._run(first, count, memory)
        places = self.order[first : first + count]
        lowest, end = int(places.min()), int(places.max()) + 1
        if end - lowest <= 2 * count:
            return self._run(lowest, end - lowest, memory)[places - lowest]
        ends = (places.diff() != 1).nonzero().flatten() + 1
        runs = places.tensor_split(ends)
        return torch.cat([self._run(int(run[0]), len(run), memory).clone() for run in runs])

    def taken(self, places: Tensor) -> "InFile":
        """Return the rows of these places."""
        order = places if self.order is None else self.order[places]
        return replace(self, shape=(len(places), self.shape[1]), order=order)

    def _run(self, first: int, count: int, memory: "InMemory") -> Tensor:
        """Rows that are consecutive in the file."""
        width = self.shape[1]
        content = memory.take(count * width).view(count, width)
        self.stored.read_into(content.view(-1).numpy().data, self.name, first * width)
        if wrong_row(self.kind, content, _inputs(self.kind, width)) is not None:
            raise self.stored.not_finite(self.name)
        if self.blocks is None:
            return content
        return content.view(count, len(self.blocks), -1)[:, self.blocks].flatten(1)


class InMemory(threading.local):
    """Memory of each thread, reused for one piece after the other."""

    def __init__(self) -> None:
        self._content = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """Return `size` bytes, the same memory as before if the size is unchanged."""
        if len(self._content) < size:
            self._content = torch.empty(size, dtype=torch.uint8)
        return self._content[:size]


@dataclass(frozen=True)
class Rows:
    """Rows of one type of blocks."""

    kind: int  # ggml's number of the type
    source: Tensor | InFile  # uint8 [rows, bytes], or where to read them

    def __deepcopy__(self, memo: Any) -> "Rows":
        return self  # they never change, so a copy of a layer shares them

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return self.source.shape[0]

    @property
    def inputs(self) -> int:
        """Return the numbers of a row."""
        return _inputs(self.kind, self.source.shape[1])

    @property
    def content(self) -> Tensor:
        """Return all rows, uint8 [rows, bytes]; those of a file are read."""
        source = self.source
        if isinstance(source, Tensor):
            return source
        count_bytes(math.prod(source.shape))
        return source.whole()

    def taken(self, places: Tensor) -> "Rows":
        """Return the rows of these places."""
        source = self.source
        return replace(
            self, source=source[places] if isinstance(source, Tensor) else source.taken(places)
        )

    def numbers(self) -> Tensor:
        """Return the decoded values of all rows, [rows, inputs] in fp32."""
        content = bytearray(self.content.numpy().tobytes())
        return unpacked(content, self.kind, (self.count, self.inputs)).float()


@dataclass(frozen=True)
class Pile:
    """Rows of several matrices of a file, the types of which may differ."""

    parts: "Sequence[Content]"
    order: Tensor  # int64 [rows]: the index of each row in the concatenated parts

    def __deepcopy__(self, memo: Any) -> "Pile":
        return self  # as `Rows`

    @property
    def count(self) -> int:
        """Return the number of rows."""
        return len(self.order)

    @property
    def inputs(self) -> int:
        """Return the numbers of a row."""
        first = self.parts[0]
        return first.inputs if isinstance(first, Rows) else first.shape[1]

    def taken(self, places: Tensor) -> "Pile":
        """Return the rows of these places."""
        return replace(self, order=self.order[places])

    def numbers(self) -> Tensor:
        """Return the decoded values of all rows, [rows, inputs] in fp32."""
        return torch.cat(
            [part.numbers() if isinstance(part, Rows) else part.float() for part in self.runs()]
        )

    def runs(self) -> "list[Content]":
        """Return the rows in order, those in the same part together."""
        sizes = [part.count if isinstance(part, Rows) else len(part) for part in self.parts]
        ends = torch.tensor(sizes).cumsum(0)
        owner = torch.bucketize(self.order, ends, right=True)
        cuts = (owner.diff() != 0).nonzero().flatten() + 1
        found: list[Content] = []
        for places, owners in zip(
            self.order.tensor_split(cuts), owner.tensor_split(cuts), strict=True
        ):
            index = int(owners[0])
            own, part = places - (ends[index] - sizes[index]), self.parts[index]
            found.append(part.taken(own) if isinstance(part, Rows) else part[own])
        return found


def _inputs(kind: int, width: int) -> int:
    """The numbers of a row of this many bytes."""
    return width // KINDS[kind].size_bytes * KINDS[kind].numbers


Content = Rows | Tensor  # rows of a matrix: a file's blocks, or numbers [rows, inputs]


def keep_rows(part: nn.Module, rows: Rows | Pile | None) -> None:
    """Have a linear compute with these rows, once they are packed; None: it has no more."""
    part.__dict__[ROWS] = rows


def rows_of(part: nn.Module) -> Rows | Pile | None:
    """Return the rows of a linear whose weight is blocks; None for any other."""
    found: Rows | Pile | None = getattr(part, ROWS, None)
    return found


def contents_in(part: nn.Linear) -> Sequence[Content]:
    """Return a linear's rows in parts, blocks as in their file."""
    rows = rows_of(part)
    if isinstance(rows, Pile):
        return rows.runs()
    return [part.weight.detach() if rows is None else rows]


def weight_of(part: nn.Linear, places: Tensor) -> Tensor:
    """Return rows [places, in] of the weight of a linear in fp32."""
    rows = rows_of(part)
    return part.weight.detach()[places].float() if rows is None else rows.taken(places).numbers()


def take_places(part: nn.Linear, places: Tensor, into: nn.Linear) -> None:
    """Give a linear, which may be the same one, the outputs of another at these places."""
    rows = rows_of(part)
    if rows is None:
        into.weight = nn.Parameter(part.weight.detach()[places], requires_grad=False)
    else:
        keep_rows(into, rows.taken(places))
    if part.bias is not None:
        into.bias = nn.Parameter(part.bias.detach()[places], requires_grad=False)


def drop_weight(part: nn.Linear) -> None:
    """Remove the weight of a linear."""
    part.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    keep_rows(part, None)
