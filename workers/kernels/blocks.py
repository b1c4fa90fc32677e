"""Matrices whose weights are the blocks of a GGUF file, in the layout of the C++ kernels: without
further rounding, and about as large as in the file.

A matrix is a list of parts, ranges of outputs with one type of numbers each, all of which read the
same rows of x. Rows are rounded to 8 bits, with a scale for each 32 inputs, or multiplied as they
are; either way a row gives the same bytes of y whatever the other rows. Types have ggml's
numbers."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import Array as CArray
from ctypes import Structure, c_int32, c_int64, sizeof
from dataclasses import dataclass
from typing import Any

from dovetail.workers.kernels import (
    ALIGNMENT,
    Array,
    Kind,
    PackedMatrix,
    address_of,
    library,
    stored_rows,
    threads,
)

WIDTH = 32  # inputs that share a scale when a row of x is rounded
VECTOR = 16  # outputs that are interleaved
TURN = 64 * VECTOR  # the most rows that a thread packs at a time
TURN_BYTES = 1 << 19
"""Bytes of rows packed at a time, which stay in a cache between reading and packing."""
PLAIN = {0: Kind.FP32, 1: Kind.FP16, 30: Kind.BF16}  # ggml's types of plain numbers


class PartStruct(Structure):
    """`Part` of native/blocks.h."""

    _fields_ = (
        *((name, c_int32) for name in ("type", "first", "count", "vectors")),
        ("offset", c_int64),
    )


class PartsStruct(Structure):
    """The beginning of `Parts` of native/blocks.h."""

    _fields_ = (("count", c_int64), ("vectors", c_int64))


@dataclass(frozen=True)
class Part:
    """Outputs with one type of numbers."""

    type: int  # ggml's number of the type
    count: int


def part_bytes(part: Part, inputs: int) -> int:
    """Return the bytes of a packed part."""
    size: int = library().dt_part_bytes(_own(part.type), part.count, inputs)
    return -(-size // ALIGNMENT) * ALIGNMENT


def _own(type: int) -> int:
    """Return a type's number in native/blocks.h."""
    return -1 - PLAIN[type] if type in PLAIN else type


def placed_parts(parts: Sequence[Part], k: int) -> tuple[CArray[PartStruct], int]:
    """Return the place of each part of a matrix of `k` inputs, and the offset after the last
    one."""
    structs = (PartStruct * len(parts))()
    offset = -(-(sizeof(PartsStruct) + sizeof(structs)) // ALIGNMENT) * ALIGNMENT
    first = vectors = 0
    for struct, part in zip(structs, parts, strict=True):
        struct.type, struct.first, struct.count = _own(part.type), first, part.count
        struct.vectors, struct.offset = vectors, offset
        offset += part_bytes(part, k)
        first += part.count
        vectors += _vectors(part)
    return structs, offset


def _vectors(part: Part) -> int:
    """Return the number of vectors of outputs in a part of blocks; 0 for plain numbers."""
    return 0 if part.type in PLAIN else -(-part.count // VECTOR)


class BlockMatrix(PackedMatrix):
    """A matrix [n out, k in] of parts."""

    def __init__(
        self, kind: Kind, parts: Sequence[Part], k: int, *, bias: Array | None = None
    ) -> None:
        """`kind`: BLOCKS or EXACT_BLOCKS; k: a multiple of every part's block size."""
        self.parts = tuple(parts)
        structs, size = placed_parts(parts, k)
        vectors = sum(_vectors(part) for part in parts)
        head = bytes(PartsStruct(len(parts), vectors)) + bytes(structs)
        count = sum(part.count for part in parts)
        super().__init__(kind, count, k, bias=bias, size=size, head=head)
        self._structs = structs

    def pack_part(self, index: int, rows: Array | Callable[[int, int], Array]) -> None:
        """Pack all rows of a part with the threads that share a call: uint8 [count, bytes] as in a
        file, [count, k] of a plain type, or a function (first, count) -> blocks, called by these
        threads."""
        struct, part = self._structs[index], self.parts[index]
        packed = self.struct.packed + struct.offset
        if part.type in PLAIN:
            kind = PLAIN[part.type]
            stored, start = stored_rows(kind, rows, (part.count, self.k))
            library().dt_pack(kind, stored, start, 0, part.count, part.count, self.k, packed, None)
            return
        if not callable(rows):
            address_of(rows, (part.count, rows.shape[1]), ("uint8",))

        def pack(first: int, count: int) -> None:
            own = rows(first, count) if callable(rows) else rows[first : first + count]
            start = address_of(own, (count, own.shape[1]), ("uint8",))
            library().dt_pack_blocks(part.type, start, first, count, self.k, packed)

        _in_turns(pack, part.count, part_bytes(part, self.k) // part.count)


def _in_turns(work: Callable[[int, int], Any], count: int, width: int) -> list[Any]:
    """Return the results of `work` for chunks of rows of `width` bytes, computed with the threads
    that share a call."""
    turn = min(TURN, max(TURN_BYTES // width // VECTOR, 1) * VECTOR)
    if count <= turn:
        return [work(0, count)]
    firsts = range(0, count, turn)
    with ThreadPoolExecutor(threads()) as pool:
        return list(pool.map(work, firsts, (min(turn, count - first) for first in firsts)))


def wrong_row(type: int, rows: Array, inputs: int) -> int | None:
    """Return a row of uint8 [count, bytes] of a type of blocks that decodes to numbers that are not
    finite, or nearly so; None if there is none."""
    count, width = rows.shape
    start = address_of(rows, (count, width), ("uint8",))

    def look(first: int, size: int) -> int:
        found: int = library().dt_wrong_row(type, start + first * width, size, inputs)
        return found if found < 0 else first + found

    return next((row for row in _in_turns(look, count, width) if row >= 0), None)


def search(type: int, numbers: Array, out: Array) -> None:
    """Quantise rows float32 [count, k] to blocks of a type, uint8 out [count, bytes], as in a file:
    the Q4_K, Q5_0, Q6_K or Q8_0 blocks of least error, the same bytes for any instruction set, on
    the calling thread alone."""
    count, inputs = numbers.shape
    source = address_of(numbers, (count, inputs), ("float32",))
    to = address_of(out, (count, out.shape[1]), ("uint8",))
    if not library().dt_search(type, source, count * inputs, to):
        raise ValueError(f"blocks of type {type} are not searched for")


def unpack(type: int, rows: Array, out: Array) -> None:
    """Unpack rows uint8 [count, bytes] of a type of blocks, as in a file, to float32 out [count,
    k]."""
    count, inputs = out.shape
    source = address_of(rows, (count, rows.shape[1]), ("uint8",))
    to = address_of(out, (count, inputs), ("float32",))
    library().dt_unpack_blocks(type, source, count, inputs, to)
