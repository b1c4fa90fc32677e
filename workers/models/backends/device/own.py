"""Products of ours on a GPU, over the packed matrices of the kernels as they lie there: a row has
the bytes that the kernels give it on the CPU, whatever its neighbours are
(`kernels/cuda/products.cu`).

Nothing is laid out anew and nothing is widened in memory: a weight of 16 bits moves 2 bytes. Knows
matrices and their bytes; whether a product is used, `choice.py` decides.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dovetail.workers import kernels
from dovetail.workers.devices import Program
from dovetail.workers.kernels import ALIGNMENT, Kind
from dovetail.workers.kernels.coded import GROUP, CodedMatrix
from dovetail.workers.models.backends.blob import ELEMENTS, PANEL, STEP, VECTOR, Lying

FOLDER = Path(kernels.__file__).parent / "cuda"
SOURCE = (FOLDER / "products.cu").read_text(encoding="utf-8")
TILES = (4, 16, 32, 64)
"""Rows that a block computes; the smallest that holds all rows is taken."""
THREADS = 192
CODE_ROWS, CODE_THREADS = 8, 128
"""Rows and threads of a block over codes."""
WARP = 32


@dataclass(frozen=True)
class OwnMatrix:
    """A matrix of the kernels on a GPU, and its product."""

    program: Program
    kind: Kind
    n: int
    k: int
    packed: Tensor
    """uint8: the layout of `kernels/native/packing.h`."""
    scales: Tensor | None
    """[n] of INT8."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] fp32 -> x W^T + bias [T, n] fp32."""
        rows, x = x.shape[0], x.contiguous()
        y = x.new_empty(rows, self.n)
        if not rows:
            return y
        steps, row_scales = self.k, None
        if self.kind is Kind.INT8:
            steps = -(-self.k // STEP)
            words = x.new_empty(rows, steps, dtype=torch.int32)
            row_scales = x.new_empty(rows)
            self.program.launch("round_rows", (rows, 1), THREADS, (x, words, row_scales, self.k))
            x = words
        tile = next((tile for tile in TILES if rows <= tile), TILES[-1])
        self.program.launch(
            f"{self.kind.name.lower()}_{tile}",
            (-(-self.n // PANEL), -(-rows // tile)),
            THREADS,
            (self.packed, x, row_scales, self.scales, self.bias, y, self.n, steps, rows),
        )
        return y


def own_matrix(program: Program, lying: Lying, memory: Tensor) -> OwnMatrix:
    """Return a matrix of a blob that lies in `memory` on the device, and stays there."""
    whole = memory[lying.offset : lying.offset + lying.size]
    beside = STEP if lying.kind is Kind.INT8 else 1
    columns = -(-lying.n // VECTOR) * VECTOR
    size = columns * -(-lying.k // beside) * beside * ELEMENTS[lying.kind].itemsize
    end = _aligned(size + 4 * columns if lying.kind is Kind.INT8 else size)
    scales = bias = None
    if lying.kind is Kind.INT8:
        scales, end = whole[end : end + 4 * lying.n].view(torch.float32), end + 4 * lying.n
    if lying.bias:
        bias = whole[end : end + 4 * lying.n].view(torch.float32)
    return OwnMatrix(program, lying.kind, lying.n, lying.k, whole[:size], scales, bias)


@dataclass(frozen=True)
class OwnCodes:
    """A matrix of codes on a GPU, and its product."""

    program: Program
    bits: int
    n: int
    k: int
    packed: Tensor
    """uint8: the layout of `kernels/native/packing.h`."""
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] fp32 -> x W^T + bias [T, n] fp32, the rows of x rounded to 8 bits."""
        rows, groups, x = x.shape[0], -(-self.k // GROUP), x.float().contiguous()
        words = x.new_empty(rows, groups, GROUP // STEP, dtype=torch.int32)
        abouts, y = x.new_empty(rows, groups, 4), x.new_empty(rows, self.n)
        if not rows:
            return y
        self.program.launch(
            "round_groups",
            (-(-rows * groups // (CODE_THREADS // WARP)), 1),
            CODE_THREADS,
            (x, words, abouts, self.k, groups, rows),
        )
        self.program.launch(
            f"codes{self.bits}",
            (-(-self.n // VECTOR), -(-rows // CODE_ROWS)),
            CODE_THREADS,
            (self.packed, words, abouts, self.bias, y, self.n, groups, rows),
        )
        return y


def own_codes(program: Program, matrix: CodedMatrix, bits: int, device: torch.device) -> OwnCodes:
    """Return a matrix of codes of the kernels, copied to a device."""
    whole = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes].to(device)
    bias = None
    if matrix.struct.bias:
        start = matrix.struct.bias - matrix.struct.packed
        bias = whole[start : start + 4 * matrix.n].view(torch.float32)
    return OwnCodes(program, bits, matrix.n, matrix.k, whole, bias)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
