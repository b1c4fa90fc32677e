"""The products of a substitute's codes on a device: ours over the layout of the kernels, where they
are proved and fast there, else torch's int4 products."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dovetail.workers.devices import Program, kind_of
from dovetail.workers.kernels.coded import GROUP, KINDS, CodedMatrix, groups_of
from dovetail.workers.kernels.experts import stacked
from dovetail.workers.models.backends.device.choice import (
    TIMED_SHAPE,
    Contest,
    Product,
    Products,
    against_kernels,
    products_on,
)
from dovetail.workers.models.backends.device.own import SOURCE, own_codes
from dovetail.workers.models.substitutes.quantised import CodedProduct
from dovetail.workers.models.substitutes.quantize import BITS, Codes

SHAPE = (83, 1100)
"""[out, in] of the proof: narrow at both ends, and more groups than a block has at a time."""
TIMED_MATRICES = 4


def coded_product(
    parts: Sequence[Codes],
    biases: Sequence[Tensor | None],
    device: torch.device,
    products: Products | None,
) -> Product:
    """Return the product of linears with the same inputs, below each other, over their codes, on a
    device. `products`: the choice there; None: it is torch's."""
    bits = parts[0].bits
    program = None if products is None else products.owner(CONTESTS[bits])
    if program is None:
        return CodedProduct(parts, biases, device)
    return own_codes(program, pack_codes(parts, biases), bits, device)


def pack_codes(parts: Sequence[Codes], biases: Sequence[Tensor | None]) -> CodedMatrix:
    """One matrix of the kernels from codes with the same inputs, below each other."""
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                torch.zeros(part.shape[0]) if b is None else b.detach().float()
                for part, b in zip(parts, biases, strict=True)
            ]
        )
    matrix = CodedMatrix(
        parts[0].bits, sum(part.shape[0] for part in parts), parts[0].shape[1], bias=bias
    )
    first = 0
    for part in parts:
        matrix.pack_codes(
            part.codes.contiguous(), part.scales.contiguous(), part.offsets.contiguous(), first
        )
        first += part.shape[0]
    return matrix


def pack_stack(
    codes: Callable[[int], Codes], count: int, biases: Tensor | None
) -> Sequence[CodedMatrix]:
    """Matrices of the kernels from the codes of so many experts, side by side, with their biases
    [count, out]."""
    first = codes(0)
    bias = None if biases is None else biases[0]
    matrices = stacked(CodedMatrix(first.bits, *first.shape, bias=bias), count, biases)
    for index, matrix in enumerate(matrices):
        own = codes(index)
        matrix.pack_codes(own.codes.contiguous(), own.scales.contiguous(), own.offsets.contiguous())
    return matrices


def against_codes(device: torch.device, weights: str) -> str:
    """Return why no product of codes can run on a device, neither torch's nor ours; empty if one
    can. `weights`: the type of a substitute's weights, such as int4."""
    why_not, contest = kind_of(device).against_int4(device), CONTESTS[BITS[weights]]
    if not why_not or products_on(device).owner(contest) is not None:
        return ""
    return f"{why_not}; {products_on(device).said[contest.kind]}"


def _random(bits: int, shape: tuple[int, int], seed: int) -> Codes:
    generator, (rows, inputs) = torch.Generator().manual_seed(seed), shape
    groups = groups_of(inputs)
    codes = torch.randint(
        0, 1 << bits, (rows, groups * GROUP), generator=generator, dtype=torch.uint8
    )
    scales, offsets = (torch.rand(2, rows, groups, generator=generator) * 0.1).half()
    return Codes(bits, inputs, codes, scales, offsets)


def _against(bits: int, program: Program, device: torch.device) -> str:
    """Say where our product differs from the kernels'; empty if it is the same bytes."""
    bias = torch.linspace(-1, 1, SHAPE[0])
    matrix = pack_codes([_random(bits, SHAPE, 1)], [bias])
    return against_kernels(own_codes(program, matrix, bits, device), matrix, device)


def _pairs(
    bits: int, program: Program, device: torch.device
) -> Iterator[tuple[Product, Callable[[], Product]]]:
    for seed in range(TIMED_MATRICES):
        codes = _random(bits, TIMED_SHAPE, seed)

        def torchs(codes: Codes = codes) -> Product:
            if why_not := kind_of(device).against_int4(device):
                raise RuntimeError(why_not)
            return CodedProduct([codes], [None], device)

        yield own_codes(program, pack_codes([codes], [None]), bits, device), torchs


CONTESTS = {
    bits: Contest(
        kind,
        f"product multiplies {kind.name.lower()} weights",
        SOURCE,
        partial(_against, bits),
        partial(_pairs, bits),
    )
    for bits, kind in KINDS.items()
}
"""Bits of a code -> our product and torch's."""
