"""Our products on a GPU, directly over the kernels' packed matrices: the bytes of the CPU kernels
for every row (`kernels/cuda/products.cu`, `rounded.cu`). A 16-bit weight moves 2 bytes."""

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from dovetail.workers import kernels
from dovetail.workers.devices.base import Program
from dovetail.workers.kernels import ALIGNMENT, Kind
from dovetail.workers.kernels.coded import GROUP, Coded
from dovetail.workers.models.backends.blob import ELEMENTS, STEP, VECTOR, Lying

FOLDER = Path(kernels.__file__).parent / "cuda"


@dataclass(frozen=True)
class ThreadBlock:
    """A block of threads, by its part of a product; see `products.cu`."""

    vectors: int  # vectors of 16 outputs: 1, or 3, which are a panel
    columns: int  # outputs of a thread
    rows: int  # rows of a thread
    groups: int  # threads with the same outputs
    steps: int  # consecutive inputs of a group

    @property
    def tile(self) -> int:
        """Rows of the block."""
        return self.rows * self.groups

    @property
    def outputs(self) -> int:
        return self.vectors * VECTOR

    @property
    def threads(self) -> int:
        return self.outputs // self.columns * self.groups

    def name(self, kind: IntEnum) -> str:
        """Return the name of the function for a type of weights."""
        return f"{kind.name.lower()}_{self.tile}{'_wide' if self.vectors > 1 else ''}"

    def defined(self, kind: Kind) -> str:
        """Return the line of C++ that makes the function for a type of weights."""
        sizes = (
            self.name(kind),
            kind.name,
            self.vectors,
            self.columns,
            self.rows,
            self.groups,
            self.steps,
        )
        return f"DT_PRODUCT({', '.join(map(str, sizes))})\n"


BLOCKS = (
    ThreadBlock(1, 1, 1, 4, 128),
    ThreadBlock(1, 2, 1, 8, 64),
    ThreadBlock(1, 2, 2, 8, 64),
    ThreadBlock(1, 2, 4, 8, 64),
)
"""The smallest block for all rows, or the largest repeatedly; narrow to use all processors."""
WIDE = ThreadBlock(3, 1, 1, 4, 64)  # of few rows if every multiprocessor has `ENOUGH` of them
ENOUGH = 2


def source_of(*names: str) -> str:
    """Return the CUDA C++ of some files of `kernels/cuda`, after the common prelude."""
    texts = ((FOLDER / f"{name}.cu").read_text(encoding="utf-8") for name in ("numbers", *names))
    return "\n".join(texts)


SOURCE = source_of("products") + "".join(
    block.defined(kind) for kind in (Kind.FP16, Kind.BF16, Kind.INT8) for block in (*BLOCKS, WIDE)
)
CODES_SOURCE = source_of("formats", "rounded") + "".join(
    f"DT_ROUNDED(codes{bits}, {GROUP}, {bits}, {1 << bits - 1}, false, HALF_AND_MORE, false, 0)\n"
    for bits in (8, 4, 3, 2)
)
WORDS = 4  # rows of x begin at multiples of this many words
ROW_THREADS, GROUP_THREADS = 512, 128  # threads of a block that rounds a row, or groups by warps
RELAY_ROWS, RELAY_THREADS = 8, 256
"""Rows and threads of a block over codes, of a substitute or of a GGUF file."""
DEPTH = 4  # rows of x have their groups in multiples of this many
RELAY_BLOCKS = 2  # blocks of that kind that a multiprocessor has at a time
WARP = 32


@dataclass(frozen=True)
class OwnMatrix:
    """A matrix of the kernels on a GPU, and its product."""

    program: Program
    kind: IntEnum
    n: int
    k: int
    packed: Tensor  # uint8: the layout of `kernels/native/packing.h`
    scales: Tensor | None  # [n] of INT8
    bias: Tensor | None
    wide: bool = False  # True if few rows are computed in blocks of whole panels

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] fp32 -> x W^T + bias [T, n] fp32."""
        rows = x.shape[0]
        y = x.new_empty(rows, self.n)
        if not rows:
            return y
        steps, row_scales = self.k, None
        if self.kind is Kind.INT8:
            steps, x = -(-self.k // STEP), x.contiguous()
            words = x.new_empty(rows, -(-steps // WORDS) * WORDS, dtype=torch.int32)
            row_scales = x.new_empty(rows)
            arguments = (x, words, row_scales, self.k)
            self.program.launch("round_rows", (rows, 1), ROW_THREADS, arguments)
            x = words
        elif self.k % WORDS or x.storage_offset() % WORDS:
            x = pad(x, (0, -self.k % WORDS))
        else:
            x = x.contiguous()
        block = next((block for block in BLOCKS if rows <= block.tile), BLOCKS[-1])
        if self.wide and rows <= WIDE.tile:
            block = WIDE
        self.program.launch(
            block.name(self.kind),
            (-(-self.n // block.outputs), -(-rows // block.tile)),
            block.threads,
            (self.packed, x, row_scales, self.scales, self.bias, y, self.n, steps, rows),
        )
        return y


def own_matrix(program: Program, lying: Lying, memory: Tensor) -> OwnMatrix:
    """Return a matrix of a blob in `memory` on the device, which stays there."""
    whole = memory[lying.offset : lying.offset + lying.size]
    beside = STEP if lying.kind is Kind.INT8 else 1
    columns = -(-lying.n // VECTOR) * VECTOR
    size = columns * -(-lying.k // beside) * beside * ELEMENTS[lying.kind].itemsize
    size += 4 * columns if lying.kind is Kind.INT8 else 0
    end = -(-size // ALIGNMENT) * ALIGNMENT
    scales = bias = None
    if lying.kind is Kind.INT8:
        scales, end = whole[end : end + 4 * lying.n].view(torch.float32), end + 4 * lying.n
    if lying.bias:
        bias = whole[end : end + 4 * lying.n].view(torch.float32)
    wide = lying.n >= ENOUGH * WIDE.outputs * program.units
    return OwnMatrix(program, lying.kind, lying.n, lying.k, whole[:size], scales, bias, wide)


@dataclass(frozen=True)
class RoundedRows:
    """Rows in int8, in the layout of our products over codes (`kernels/cuda/rounded.cu`)."""

    rows: int
    groups: int
    values: Tensor  # int8 [tiles of 8 rows, groups padded to 4, 8, inputs of a group]
    abouts: Tensor  # [tiles, groups up to a multiple of 4, 8, 4]: scales and sums


def rounded_rows(program: Program, x: Tensor, width: int) -> RoundedRows:
    """Return x [T, k] fp32 rounded to 8 bits, with a scale for every `width` inputs (64 or 32)."""
    (rows, k), x = x.shape, x.contiguous()
    groups = -(-k // width)
    shape = -(-rows // RELAY_ROWS), -(-groups // DEPTH) * DEPTH, RELAY_ROWS
    values = x.new_empty(*shape, width, dtype=torch.int8)
    abouts = x.new_empty(*shape, 4)
    grid = (-(-rows * groups // (GROUP_THREADS // WARP)), 1)
    arguments = (x, values, abouts, k, groups, rows)
    program.launch(f"round_{width}", grid, GROUP_THREADS, arguments)
    return RoundedRows(rows, groups, values, abouts)


def multiply(
    program: Program, name: str, packed: Tensor, x: RoundedRows, bias: Tensor | None, y: Tensor
) -> None:
    """Write x W^T + bias to y [T, n], maybe columns of a wider matrix; `name`: the format's
    function."""
    count, tiles = y.shape[1], len(x.abouts)
    at_once = -(-RELAY_BLOCKS * program.units // tiles)
    grid = (min(-(-count // VECTOR), at_once), tiles)
    arguments = (packed, x.values, x.abouts, bias, y, count, y.stride(0), x.groups, x.rows)
    program.launch(name, grid, RELAY_THREADS, arguments)


@dataclass(frozen=True)
class OwnCodes:
    """A matrix of codes on a GPU, and its product."""

    program: Program
    bits: int
    n: int
    k: int
    packed: Tensor  # uint8: the layout of `kernels/native/packing.h`
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] fp32 -> x W^T + bias [T, n] fp32, the rows of x rounded to 8 bits."""
        y = x.new_empty(x.shape[0], self.n, dtype=torch.float32)
        if len(x):
            rows = rounded_rows(self.program, x.float(), GROUP)
            multiply(self.program, f"codes{self.bits}", self.packed, rows, self.bias, y)
        return y


def own_codes(program: Program, lying: Lying, memory: Tensor) -> OwnCodes:
    """Return a matrix of codes of a blob that lies in `memory` on the device, and stays there."""
    whole = memory[lying.offset : lying.offset + lying.size]
    bias = whole[-4 * lying.n :].view(torch.float32) if lying.bias else None
    return OwnCodes(program, Coded(lying.kind).bits, lying.n, lying.k, whole, bias)


def bits_of(number: float) -> int:
    """Return the bits of an fp32 number as an integer, the form of our functions' parameters."""
    return int(struct.unpack("<I", struct.pack("<f", number))[0])
