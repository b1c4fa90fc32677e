"""Rows of a matrix as blocks of a GGUF file, which replace a module's weight until they are packed,
and the blocks' numbers: uint8 [blocks, bytes] to fp32 [blocks, numbers], a function for each format
(ggml's `ggml-common.h`). With 32 numbers, byte j holds number j in its low half and j + 16 in its
high one; with 256, sub-blocks have scales of their own."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.workers.kernels.blocks import wrong_row
from dovetail.workers.models.checkpoints.gguf.codebooks import chosen, even
from dovetail.workers.models.checkpoints.gguf.kinds import BF16, F16, F32, I64, KINDS, MXFP4
from dovetail.workers.models.checkpoints.stored import Stored
from dovetail.workers.progress import count_bytes

E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the numbers of e2m1
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of IQ4_NL and IQ4_XS."""


def mxfp4(block: Tensor) -> Tensor:
    """2^(e - 128) for each block, e its first byte; that of e = 0 and 1 is subnormal."""
    exponents = block[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    return _table(E2M1)[_nibbles(block[:, 1:]).int()] * bits.view(torch.float32)


def q5_k(block: Tensor) -> Tensor:
    """Bit b of byte l is the fifth of number l of sub-block b."""
    high = block[:, 16:48, None].transpose(1, 2) >> _shifts(8, 1) & 1
    return _scaled(block, _pairs(block[:, 48:]) | high << 4)


def q6_k(block: Tensor) -> Tensor:
    """Halves of 128 numbers in four rows of 32; 8-bit scales for each 16."""
    low = block[:, :128].reshape(-1, 2, 1, 2, 32)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    high = block[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(4, 2) & 3
    scales = _signed(block[:, 192:208]) * _half(block, 208)
    return _by_sixteens(_less(low | high << 4, 32), scales)


def q3_k(block: Tensor) -> Tensor:
    """Two bits and a third one, whose absence takes 4 away; six-bit scales less 32."""
    absent = (block[:, :32].unsqueeze(1) >> _shifts(8, 1) & 1 ^ 1).view(-1, 2, 4, 32)
    codes = _crumbs(block[:, 32:96]).view(torch.int8) - (absent << 2).view(torch.int8)
    low, high = block[:, 96:104].unsqueeze(1), block[:, 104:108].unsqueeze(1)
    scales = (low >> _shifts(2, 4) & 15).flatten(1) | (high >> _shifts(4, 2) & 3).flatten(1) << 4
    return _by_sixteens(codes.float(), _less(scales, 32) * _half(block, 108))


def q2_k(block: Tensor) -> Tensor:
    """A scale and a minimum of four bits for each 16."""
    scales = (block[:, :16] & 15).float() * _half(block, 80)
    minima = (block[:, :16] >> 4).float() * _half(block, 82)
    found = _by_sixteens(_crumbs(block[:, 16:80]).float(), scales).view(-1, 16, 16)
    return (found - minima.unsqueeze(2)).flatten(1)


def iq4_xs(block: Tensor) -> Tensor:
    """Sub-blocks of 32 with six-bit scales less 32: four bits here, two there."""
    low = _neighbours(block[:, 4:8])
    high = (block[:, 2:4].unsqueeze(2) >> _shifts(4, 2).view(1, 1, 4) & 3).flatten(1)
    scales = _less(low | high << 4, 32) * _half(block, 0)
    codes = block[:, 8:].reshape(-1, 8, 16)
    numbers = _table(IQ4)[torch.cat([codes & 15, codes >> 4], dim=2).int()]
    return (numbers * scales.unsqueeze(2)).flatten(1)


def iq2_xxs(block: Tensor) -> Tensor:
    """For every 32 numbers: four indices, four groups of seven signs, and a 4-bit scale."""
    indices = block[:, 2:].reshape(-1, 8, 8)[:, :, :4].flatten(1)
    words = block[:, 2:].contiguous().view(torch.int32)[:, 1::2]
    return chosen("IQ2_XXS", indices, _sevens(words), _odd(words >> 28 & 15, block, 0.25))


def iq2_xs(block: Tensor) -> Tensor:
    """9-bit indices with seven signs each; a scale for every 16 numbers."""
    words = block[:, 2:66].contiguous().view(torch.int16).int() & 0xFFFF
    scales = _odd(_neighbours(block[:, 66:]), block, 0.25)
    return chosen("IQ2_XS", words & 511, even(words >> 9), scales)


def iq2_s(block: Tensor) -> Tensor:
    """10-bit indices, two bits of which are stored apart; a scale for every 16 numbers."""
    high = (block[:, 66:74].unsqueeze(2) >> _shifts(4, 2).view(1, 1, 4) & 3).flatten(1)
    indices = block[:, 2:34].int() | high.int() << 8
    return chosen("IQ2_S", indices, block[:, 34:66], _odd(_neighbours(block[:, 74:]), block, 0.25))


def iq3_xxs(block: Tensor) -> Tensor:
    """Eight indices for every 32 numbers; stored apart: four groups of seven signs, and a scale."""
    words = block[:, 66:].contiguous().view(torch.int32)
    return chosen("IQ3_XXS", block[:, 2:66], _sevens(words), _odd(words >> 28 & 15, block, 0.5))


def iq3_s(block: Tensor) -> Tensor:
    """9-bit indices, one bit of which is stored apart; a scale for every 32 numbers."""
    high = (block[:, 66:74].unsqueeze(2) >> _shifts(8, 1).view(1, 1, 8) & 1).flatten(1)
    indices = block[:, 2:66].int() | high.int() << 8
    return chosen("IQ3_S", indices, block[:, 74:106], _odd(_neighbours(block[:, 106:]), block, 2.0))


def tq1_0(block: Tensor) -> Tensor:
    """Five base-3 digits per byte, four in the last four; the first digit of every byte leads."""
    groups = (block[:, :32], 5), (block[:, 32:48], 5), (block[:, 48:52], 4)
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8).view(5, 1)
    fractions = [(codes.unsqueeze(1) * powers[:count]).flatten(1) for codes, count in groups]
    return ((torch.cat(fractions, dim=1).int() * 3 >> 8) - 1).float() * _half(block, 52)


def _sevens(words: Tensor) -> Tensor:
    """Signs from 32-bit words [blocks, 8], four groups of seven in each: uint8 [blocks, 32]."""
    return even(words.unsqueeze(2) >> torch.arange(0, 28, 7) & 127).flatten(1)


def _odd(codes: Tensor, block: Tensor, unit: float) -> Tensor:
    """Scales from codes: (code + 1/2) units, times the scale of the block."""
    return (codes.float() + 0.5) * unit * _half(block, 0)


def _neighbours(codes: Tensor) -> Tensor:
    """4-bit codes, the lower half of each byte first."""
    return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)


def _half(block: Tensor, place: int) -> Tensor:
    """The 16-bit float of each block at a place, as fp32 [blocks, 1]."""
    return block[:, place : place + 2].contiguous().view(torch.float16).float()


def _signed(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.int8).float()


def _less(codes: Tensor, middle: int) -> Tensor:
    """Codes below 128 less their middle."""
    return (codes.view(torch.int8) - middle).float()


def _nibbles(codes: Tensor) -> Tensor:
    return torch.cat([codes & 15, codes >> 4], dim=1)


def _fifth(bits: Tensor, codes: Tensor) -> Tensor:
    """Nibbles with a fifth bit each: number i has bit i of four bytes."""
    high = (bits.unsqueeze(2) >> _shifts(8, 1).view(1, 1, 8) & 1).flatten(1)
    return _nibbles(codes) | high << 4


def _pairs(codes: Tensor) -> Tensor:
    """Codes [blocks, 8, 32] of 128 bytes: each 32 of them hold two sub-blocks."""
    rows = codes.reshape(-1, 4, 1, 32)
    return torch.cat([rows & 15, rows >> 4], dim=2).view(-1, 8, 32)


def _crumbs(codes: Tensor) -> Tensor:
    """Codes of two bits [blocks, 2, 4, 32] of 64 bytes: each 32 of them hold four rows."""
    return codes.reshape(-1, 2, 1, 32) >> _shifts(4, 2) & 3


def _scaled(block: Tensor, codes: Tensor) -> Tensor:
    """Return numbers of codes [blocks, 8, 32], with the packed 6-bit scales and minima of Q4_K and
    Q5_K."""
    first, second, third = block[:, 4:8], block[:, 8:12], block[:, 12:16]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=1).float() * _half(block, 0)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=1).float()
    minima = minima * _half(block, 2)
    return (codes.float() * scales.unsqueeze(2) - minima.unsqueeze(2)).flatten(1)


def _by_sixteens(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes of 256 numbers by their 16 scales."""
    return (codes.reshape(-1, 16, 16) * scales.unsqueeze(2)).flatten(1)


def _shifts(count: int, step: int) -> Tensor:
    """Shifts by 0, `step`, ..., one for each of `count` rows."""
    return torch.arange(0, count * step, step, dtype=torch.uint8).view(count, 1)


def _table(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


CHUNK = 1 << 19  # numbers unpacked at a time: intermediate results stay in the CPU cache
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16, I64: torch.int64}
"""The kinds whose numbers are not in blocks."""
UNPACK: Mapping[int, Callable[[Tensor], Tensor]] = {  # `KINDS` has their names
    2: lambda block: _less(_nibbles(block[:, 2:]), 8) * _half(block, 0),
    3: lambda block: _nibbles(block[:, 4:]).float() * _half(block, 0) + _half(block, 2),
    6: lambda block: _less(_fifth(block[:, 2:6], block[:, 6:]), 16) * _half(block, 0),
    7: lambda block: (
        _fifth(block[:, 4:8], block[:, 8:]).float() * _half(block, 0) + _half(block, 2)
    ),
    8: lambda block: _signed(block[:, 2:]) * _half(block, 0),
    10: q2_k,
    11: q3_k,
    12: lambda block: _scaled(block, _pairs(block[:, 16:])),
    13: q5_k,
    14: q6_k,
    16: iq2_xxs,
    17: iq2_xs,
    18: iq3_xxs,
    20: lambda block: _table(IQ4)[_nibbles(block[:, 2:]).int()] * _half(block, 0),
    21: iq3_s,
    22: iq2_s,
    23: iq4_xs,
    34: tq1_0,
    35: lambda block: _less(_crumbs(block[:, :64]).flatten(1), 1) * _half(block, 64),
    MXFP4: mxfp4,
}


def unpacked(content: bytearray, kind: int, shape: Sequence[int]) -> Tensor:
    """Return a tensor's numbers [*shape] in their own type; blocks in fp32, MXFP4 in bf16."""
    if kind in PLAIN:
        return torch.frombuffer(content, dtype=PLAIN[kind]).view(tuple(shape))
    said, unpack = KINDS[kind], UNPACK[kind]
    blocks = torch.frombuffer(content, dtype=torch.uint8).view(-1, said.size_bytes)
    dtype = torch.bfloat16 if kind == MXFP4 else torch.float32
    whole = torch.empty(len(blocks), said.numbers, dtype=dtype)
    step = CHUNK // said.numbers
    for first in range(0, len(blocks), step):
        whole[first : first + step] = unpack(blocks[first : first + step])
    return whole.view(*shape)


ROWS = "rows_of_file"  # the attribute of a linear that has its rows


@dataclass(frozen=True)
class InFile:
    """Rows of one type of blocks that are read when they are needed."""

    stored: Stored  # the tensor of them, [rows, inputs] in its file
    name: str  # the name of the tensor in errors
    kind: int
    shape: tuple[int, int]  # numbers of rows and of the bytes of each
    order: Tensor | None = None  # int64 [rows]: the index of each row in the file; None: in order
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
    """Set the rows with which a linear computes once packed; None: it has none."""
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
