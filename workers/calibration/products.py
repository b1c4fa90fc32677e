"""The time of products with matrices of a type of weights, by their rows, for estimates of a target
that was not calibrated. Matrices fit into a cache, so that memory bandwidth does not count. They
hold zeros, which take as long as any other weights."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dovetail.protocol.calibration import RowsSeconds
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.blocks import PLAIN, BlockMatrix, Part
from dovetail.workers.models.backends.packing import DTYPES
from dovetail.workers.models.backends.sizes import INT4
from dovetail.workers.models.checkpoints.footprint import numbers_by_type
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS, Q4_K
from dovetail.workers.models.wanted import BLOCK_WEIGHTS, FILE_KINDS
from dovetail.workers.models.wanted import KINDS as WEIGHT_KINDS

SHAPE = (1024, 2048)  # [out, in]: whole blocks of every type, and one to eight megabytes
ROWS = (1, 2, 4, 8, 16, 32, 64)
TRIES = 5


def product_seconds(weights: str, folder: Path, activations: str = "int8") -> RowsSeconds | None:
    """Return the seconds of a product per weight, by its rows, on the threads in use; None if the
    kernels have no such weights. Weights `file` are the mean of all types in the GGUF file behind
    the folder, and int4 is Q4_K."""
    if not kernels.available():
        return None
    if weights == INT4:
        return _seconds({_matrix(BLOCK_WEIGHTS[f"{INT4}-{activations}"], Q4_K): 1})
    if weights != "file":
        kind = WEIGHT_KINDS.get("fp16" if weights == "half" else weights)
        return None if kind is None or weights == "bf16" else _seconds({_plain(kind): 1})
    numbers = numbers_by_type(folder)
    kind = FILE_KINDS[f"file-{activations}"]
    return _seconds({_matrix(kind, type): count for type, count in numbers.items()})


def _plain(kind: Kind) -> PackedMatrix:
    matrix = PackedMatrix(kind, *SHAPE)
    matrix.pack(torch.zeros(SHAPE, dtype=DTYPES[kind]))
    return matrix


def _matrix(kind: Kind, type: int) -> PackedMatrix:
    """Return a matrix of one of ggml's types."""
    if type in PLAIN:
        return _plain(PLAIN[type])
    outputs, inputs = SHAPE
    matrix = BlockMatrix(kind, [Part(type, outputs)], inputs)
    size = KINDS[type].size_of(SHAPE) // outputs
    matrix.pack_part(0, torch.zeros(outputs, size, dtype=torch.uint8))
    return matrix


def _seconds(matrices: Mapping[PackedMatrix, int]) -> RowsSeconds | None:
    """Return the mean seconds per weight; `matrices`: one of each type, with how many of the
    model's weights have that type."""
    whole = Counter(matrices).total()
    if not whole:
        return None
    means = [0.0] * len(ROWS)
    for matrix, count in matrices.items():
        each = count / whole / (matrix.n * matrix.k)
        means = [mean + each * taken for mean, taken in zip(means, _taken(matrix), strict=True)]
    return RowsSeconds.rising(ROWS, means)


def _taken(matrix: PackedMatrix) -> Sequence[float]:
    """Return the shortest of TRIES times for each of ROWS, measured in turn."""
    given = [torch.ones(rows, matrix.k) for rows in ROWS]
    least = [float("inf")] * len(ROWS)
    for _ in range(TRIES):
        for index, x in enumerate(given):
            began = time.perf_counter()
            matrix.linear(x)
            least[index] = min(least[index], time.perf_counter() - began)
    return least
