"""Matrices of a substitute's codes, and their products on a device: ours over the kernels' layout,
if proved and fast, else torch's int4."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dovetail.workers.devices.base import Program
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels.coded import GROUP, KINDS, Coded, CodedMatrix, groups_of
from dovetail.workers.kernels.experts import stacked
from dovetail.workers.models.backends.blob import STEP, VECTOR, Lying, alone
from dovetail.workers.models.backends.device.choice import (
    TIMED_SHAPE,
    Contest,
    Products,
    against_kernels,
    choice_on,
    products_on,
)
from dovetail.workers.models.backends.device.own import CODES_SOURCE, own_codes
from dovetail.workers.models.backends.device.products import Product
from dovetail.workers.models.substitutes.quantize import BITS, CodedProduct, Codes, from_bytes

TORCHS, OWN = "torch-int4", "own-codes"  # the products of codes, in a model's description

SHAPE = (83, 1100)
"""[out, in] of the proof: narrow at both ends, and more groups than a block has at a time."""
TIMED_MATRICES = 4


def coded_product(lying: Lying, memory: Tensor, products: Products | None) -> Product:
    """Return the product of codes of a blob in `memory` on a device: ours over these bytes, else
    torch's, which frees them. `products` None: torch's."""
    program = _program(Coded(lying.kind).bits, products)
    if program is not None:
        return own_codes(program, lying, memory)
    codes, bias = unpack_codes(lying, memory)
    return CodedProduct(codes, bias, memory.device)


def linear_product(codes: Codes, bias: Tensor | None, device: torch.device) -> Product:
    """Return the product of one linear over its codes, on any device."""
    program = _program(codes.bits, choice_on(device))
    if program is None:
        return CodedProduct(codes, bias, device)
    return _own(program, pack_codes([codes], [bias]), device)


def computed_by(bits: int, products: Products | None) -> str:
    """Return the name of the products in use; `products`: as for `coded_product`."""
    return TORCHS if _program(bits, products) is None else OWN


def _program(bits: int, products: Products | None) -> Program | None:
    return None if products is None else products.owner(CONTESTS[bits])


def unpack_codes(lying: Lying, memory: Tensor) -> tuple[Codes, Tensor | None]:
    """Return a blob's codes in `memory` on any device, and the bias [n]
    (`kernels/native/packing.h`)."""
    bits, groups = Coded(lying.kind).bits, groups_of(lying.k)
    whole = memory[lying.offset : lying.offset + lying.size]
    vectors, numbers = -(-lying.n // VECTOR), 2 * 2 * VECTOR
    size = numbers + GROUP * VECTOR * bits // 8
    blocks = whole[: vectors * groups * size].view(vectors, groups, size)
    pairs = blocks[..., :numbers].contiguous().view(torch.float16)
    scales, offsets = pairs.view(vectors, groups, 2, VECTOR).permute(2, 0, 3, 1).flatten(1, 2)
    steps = from_bytes(blocks[..., numbers:].flatten(0, 1), bits)
    by_row = steps.view(vectors, groups, -1, VECTOR, STEP).permute(0, 3, 1, 2, 4)
    codes = by_row.reshape(vectors * VECTOR, groups * GROUP)
    bias = whole[-4 * lying.n :].view(torch.float32).clone() if lying.bias else None
    return Codes(bits, lying.k, *(part[: lying.n] for part in (codes, scales, offsets))), bias


def pack_codes(parts: Sequence[Codes], biases: Sequence[Tensor | None]) -> CodedMatrix:
    """Return one matrix of the kernels from codes with the same inputs, concatenated by outputs."""
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                torch.zeros(part.shape[0]) if b is None else b.detach().float()
                for part, b in zip(parts, biases, strict=True)
            ]
        )
    count = sum(part.shape[0] for part in parts)
    matrix, first = CodedMatrix(parts[0].bits, count, parts[0].shape[1], bias=bias), 0
    for part in parts:
        _pack(matrix, part, first)
        first += part.shape[0]
    return matrix


def _pack(matrix: CodedMatrix, codes: Codes, first: int = 0) -> None:
    own, scales, offsets = (
        part.contiguous() for part in (codes.codes, codes.scales, codes.offsets)
    )
    matrix.pack_codes(own, scales, offsets, first)


def pack_stack(
    codes: Callable[[int], Codes], count: int, biases: Tensor | None
) -> Sequence[CodedMatrix]:
    """Return matrices of the codes of `count` experts side by side, with biases [count, out]."""
    first = codes(0)
    bias = None if biases is None else biases[0]
    matrices = stacked(CodedMatrix(first.bits, *first.shape, bias=bias), count, biases)
    for index, matrix in enumerate(matrices):
        _pack(matrix, codes(index))
    return matrices


def against_codes(device: torch.device, weights: str) -> str:
    """Return why a device has no product of codes; empty if it has one. `weights`: such as int4."""
    why_not, contest = kind_of(device).against_int4(device), CONTESTS[BITS[weights]]
    if not why_not or products_on(device).owner(contest) is not None:
        return ""
    return f"{why_not}; {products_on(device).said[contest.kind]}"


def _random(bits: int, shape: tuple[int, int], seed: int) -> Codes:
    generator, (rows, inputs) = torch.Generator().manual_seed(seed), shape
    groups = groups_of(inputs)
    size = (rows, groups * GROUP)
    codes = torch.randint(0, 1 << bits, size, generator=generator, dtype=torch.uint8)
    scales, offsets = (torch.rand(2, rows, groups, generator=generator) * 0.1).half()
    return Codes(bits, inputs, codes, scales, offsets)


def _against(bits: int, program: Program, device: torch.device) -> str:
    bias = torch.linspace(-1, 1, SHAPE[0])
    matrix = pack_codes([_random(bits, SHAPE, 1)], [bias])
    return against_kernels(_own(program, matrix, device), matrix, device)


def _own(program: Program, matrix: CodedMatrix, device: torch.device) -> Product:
    lying, memory = alone(matrix)
    return own_codes(program, lying, memory.to(device))


def _pairs(
    bits: int, program: Program, device: torch.device
) -> Iterator[tuple[Product, Callable[[], Product]]]:
    for seed in range(TIMED_MATRICES):
        codes = _random(bits, TIMED_SHAPE, seed)

        def torchs(codes: Codes = codes) -> Product:
            if why_not := kind_of(device).against_int4(device):
                raise RuntimeError(why_not)
            return CodedProduct(codes, None, device)

        yield _own(program, pack_codes([codes], [None]), device), torchs


CONTESTS = {
    bits: Contest(
        kind,
        f"product multiplies {kind.name.lower()} weights",
        CODES_SOURCE,
        partial(_against, bits),
        partial(_pairs, bits),
    )
    for bits, kind in KINDS.items()
}
"""Bits of a code -> our product and torch's."""
