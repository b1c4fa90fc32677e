"""Our products on a GPU over packed blocks of GGUF files, with rows in int8
(`kernels/cuda/rounded.cu`) or fp32 (`exact.cu`): the bytes of the CPU kernels. torch has no such
product: without ours, these weights cannot be used there."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.protocol.errors import SettingsError
from dovetail.workers.devices.base import Program
from dovetail.workers.kernels import Kind
from dovetail.workers.kernels.blocks import (
    PLAIN,
    VECTOR,
    WIDTH,
    BlockMatrix,
    Part,
    part_bytes,
    placed_parts,
)
from dovetail.workers.models.backends.blob import Lying, Matrix, unpack
from dovetail.workers.models.backends.device.choice import (
    TIMED_SHAPE,
    Contest,
    Function,
    Products,
    against_kernels,
    products_on,
)
from dovetail.workers.models.backends.device.own import SOURCE as PRODUCTS
from dovetail.workers.models.backends.device.own import (
    WORDS,
    OwnMatrix,
    multiply,
    own_matrix,
    rounded_rows,
    source_of,
)
from dovetail.workers.models.backends.device.products import Product, product
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS

HALF, HALF_AND_MORE, POWER, BYTE, BYTE_AND_LESS, BYTES, BYTES_AND_LESS = range(7)
"""`Scales` of `kernels/native/blocks.h`."""
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4)
"""Numbers of 4-bit codes: of IQ4_NL and IQ4_XS, and of MXFP4 with its middle added."""


class Format(NamedTuple):
    """A format of blocks, as in `kernels/native/blocks.h`."""

    bits: int
    middle: int
    scales: int
    signed: bool = False
    numbers: Sequence[int] = ()


SUPER = 8  # the number of blocks that share scales of scales


def scale_bytes(form: Format) -> int:
    """Return the bytes of the scales of a vector of outputs in a block."""
    return {POWER: 16, BYTE: 16, HALF_AND_MORE: 64, BYTES_AND_LESS: 64}.get(form.scales, 32)


def super_bytes(form: Format) -> int:
    """Return the bytes of the scales of scales in front of `SUPER` blocks."""
    return 0 if form.scales < BYTE else 64 if form.scales in (BYTE_AND_LESS, BYTES_AND_LESS) else 32


FORMATS: Mapping[int, Format] = {
    2: Format(4, 8, HALF),
    3: Format(4, 0, HALF_AND_MORE),
    6: Format(5, 16, HALF),
    7: Format(5, 0, HALF_AND_MORE),
    8: Format(8, 0, HALF, signed=True),
    10: Format(2, 0, BYTES_AND_LESS),
    11: Format(3, 4, BYTES),
    12: Format(4, 0, BYTE_AND_LESS),
    13: Format(5, 0, BYTE_AND_LESS),
    14: Format(6, 32, BYTES),
    20: Format(4, 0, HALF, signed=True, numbers=IQ4),
    23: Format(4, 0, BYTE, signed=True, numbers=IQ4),
    39: Format(4, 16, POWER, numbers=FP4),
}
"""ggml's number of a type -> its format."""


def _name(type: int) -> str:
    return f"blocks_{KINDS[type].name}"


def _defined(macro: str, type: int, own: Format) -> str:
    words = [
        int.from_bytes(bytes(number & 255 for number in own.numbers[at : at + 4]), "little")
        for at in range(0, len(own.numbers), 4)
    ]
    parts = (_name(type), WIDTH, own.bits, own.middle, str(own.signed).lower(), own.scales)
    table = (str(bool(words)).lower(), *(f"{word}u" for word in words or [0]))
    return f"{macro}({', '.join(map(str, (*parts, *table)))})\n"


SOURCE = "\n".join(
    [
        PRODUCTS,
        source_of("formats", "rounded").removeprefix(source_of()),
        *(_defined("DT_ROUNDED", type, own) for type, own in FORMATS.items()),
    ]
)
EXACT_SOURCE = "\n".join(
    [
        PRODUCTS,
        "#define DT_SINGLE_OUTPUTS",
        source_of("formats", "exact").removeprefix(source_of()),
        *(_defined("DT_EXACT", type, own) for type, own in FORMATS.items()),
    ]
)
EXACT_TILES, EXACT_THREADS = (8, 32), 128
"""The smallest number of rows of a block in fp32 that holds all, and its threads."""


Write = Callable[[str, Tensor, Tensor | None, Tensor], None]
"""Writes x W^T + bias to y [T, n], maybe columns of a wider matrix: the function's name, packed
weights, bias, y."""


def rounded_inputs(program: Program, x: Tensor) -> Write:
    """Return the product with rows in int8."""
    rows = rounded_rows(program, x, WIDTH)
    return lambda name, packed, bias, y: multiply(program, name, packed, rows, bias, y)


def exact_inputs(program: Program, x: Tensor) -> Write:
    """Return the product with rows in fp32, which begin at multiples of 16 bytes."""
    aligned = x.is_contiguous() and x.storage_offset() % WORDS == 0
    own = x if aligned else x.clone(memory_format=torch.contiguous_format)

    def write(name: str, packed: Tensor, bias: Tensor | None, y: Tensor) -> None:
        (rows, count), blocks = y.shape, own.shape[1] // WIDTH
        tile = next((tile for tile in EXACT_TILES if rows <= tile), EXACT_TILES[-1])
        grid = (-(-count // VECTOR), -(-rows // tile))
        arguments = (packed, own, bias, y, count, y.stride(0), blocks, rows)
        program.launch(f"{name}_{tile}", grid, EXACT_THREADS, arguments)

    return write


INPUTS: Mapping[Kind, Callable[[Program, Tensor], Write]] = {
    Kind.BLOCKS: rounded_inputs,
    Kind.EXACT_BLOCKS: exact_inputs,
}
"""Kind of matrices in blocks -> the function that prepares rows [T, k] for them."""


@dataclass(frozen=True)
class OwnPart:
    """Outputs of a matrix that share a type of numbers."""

    first: int
    count: int
    name: str  # the function that multiplies blocks; empty: `plain` does
    packed: Tensor
    plain: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class OwnBlocks:
    """A matrix of parts on a GPU, and its product."""

    program: Program
    n: int
    k: int
    parts: Sequence[OwnPart]
    bias: Tensor | None
    kind: Kind

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, k] fp32 -> x W^T + bias [T, n] fp32; x is rounded to 8 bits for kind BLOCKS."""
        y = x.new_empty(len(x), self.n)
        if not len(x):
            return y
        write: Write | None = None
        for part in self.parts:
            own = slice(part.first, part.first + part.count)
            if part.plain is not None:
                y[:, own] = part.plain(x)
                continue
            write = write or INPUTS[self.kind](self.program, x)
            bias = None if self.bias is None else self.bias[own]
            write(part.name, part.packed, bias, y[:, own])
        return y


def blocks_on(
    products: Products | None, device: torch.device, lying: Lying, memory: Tensor
) -> OwnBlocks:
    """Return a matrix of blocks that stays in `memory` on a device; `SettingsError` without a
    product."""
    contest = CONTESTS[Kind(lying.kind)]
    program = None if products is None else products.owner(contest)
    why = _unknown(device, (part.type for part in lying.parts))
    if program is None or why:
        why = why or (
            f"{device}: torch multiplies none" if products is None else products.said[contest.kind]
        )
        raise SettingsError(f"{why}; use weights half or int8, or compute it on the CPU")
    return own_blocks(program, lying, memory)


def _unknown(device: torch.device, types: Iterable[int]) -> str:
    names = sorted({KINDS[type].name for type in types if type not in (*FORMATS, *PLAIN)})
    return f"{device}: no product multiplies blocks of {' and '.join(names)}" if names else ""


def against_blocks(device: torch.device, types: Iterable[int]) -> str:
    """Return why blocks of these types cannot be multiplied on a device; empty if they can."""
    if why := _unknown(device, types):
        return why
    products = products_on(device)
    return "" if products.owner(CONTEST) is not None else products.said[CONTEST.kind]


def own_blocks(program: Program, lying: Lying, memory: Tensor) -> OwnBlocks:
    """Return a matrix of blocks that lies in `memory` on the device, and stays there."""
    whole = memory[lying.offset : lying.offset + lying.size]
    structs, end = placed_parts(lying.parts, lying.k)
    bias = whole[end : end + 4 * lying.n].view(torch.float32) if lying.bias else None
    found = []
    for part, struct in zip(lying.parts, structs, strict=True):
        packed = whole[struct.offset : struct.offset + part_bytes(part, lying.k)]
        if (kind := PLAIN.get(part.type)) is None:
            found.append(OwnPart(struct.first, part.count, _name(part.type), packed))
            continue
        own = Lying(kind, part.count, lying.k, 0, packed.numel(), False)
        matrix = unpack(own, packed) if kind is Kind.FP32 else own_matrix(program, own, packed)
        own_bias = None if bias is None else bias[struct.first : struct.first + part.count]
        plain = partial(_plain, matrix, own_bias)
        found.append(OwnPart(struct.first, part.count, "", packed, plain))
    return OwnBlocks(program, lying.n, lying.k, found, bias, Kind(lying.kind))


def _plain(matrix: Matrix | OwnMatrix, bias: Tensor | None, x: Tensor) -> Tensor:
    y = product(matrix, x)
    return y if bias is None else y + bias


# ---- their proof and their timing

PROOF = 20, 1280  # [out, in]: two vectors, one narrow, and more blocks than at a time
TIMED_TYPE, TIMED_MATRICES = 12, 4
SMALL = 0x3B  # a byte below which the upper half of 16 bits is that of a number below 1


def random_blocks(
    parts: Sequence[Part], k: int, bias: Tensor | None, seed: int, kind: Kind = Kind.BLOCKS
) -> BlockMatrix:
    """Return a matrix of random codes, and of scales that are numbers. `kind`: or EXACT_BLOCKS."""
    matrix = BlockMatrix(kind, parts, k, bias=bias)
    memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    for part, struct in zip(parts, placed_parts(parts, k)[0], strict=True):
        own = memory[struct.offset : struct.offset + part_bytes(part, k)]
        if part.type in PLAIN:
            own.random_(0, SMALL, generator=generator)
            continue
        form = FORMATS[part.type]
        own.random_(0, 256, generator=generator)
        blocks, vectors = k // WIDTH, -(-part.count // VECTOR)
        twice = form.scales >= BYTE
        heads = blocks // SUPER if twice else blocks
        size = (scale_bytes(form) + 64 * form.bits) * (SUPER if twice else 1) + super_bytes(form)
        rows = own[: vectors * heads * size].view(vectors * heads, size)
        count = super_bytes(form) if twice else scale_bytes(form)
        low, high = (118, 131) if form.scales == POWER else (0, SMALL)
        rows[:, :count].random_(low, high, generator=generator)
    return matrix


def _against(kind: Kind, program: Program, device: torch.device) -> str:
    for type in FORMATS:
        bias = torch.linspace(-1, 1, PROOF[0])
        matrix = random_blocks([Part(type, PROOF[0])], PROOF[1], bias, 1, kind)
        if wrong := against_kernels(_copied(program, matrix, device), matrix, device):
            return f"{KINDS[type].name}: {wrong}"
    return ""


def _copied(program: Program, matrix: BlockMatrix, device: torch.device) -> OwnBlocks:
    memory = torch.frombuffer(matrix.memory, dtype=torch.uint8)[: matrix.nbytes].to(device)
    return own_blocks(program, Lying.of(matrix), memory)


def _pairs(
    kind: Kind, program: Program, device: torch.device
) -> Iterator[tuple[Product, Callable[[], Product]]]:
    def torchs() -> Product:
        raise RuntimeError("torch multiplies no blocks")

    for seed in range(TIMED_MATRICES):
        parts = [Part(TIMED_TYPE, TIMED_SHAPE[0])]
        matrix = random_blocks(parts, TIMED_SHAPE[1], None, seed, kind)
        yield _copied(program, matrix, device), torchs


CONTEST = Contest(
    Function.BLOCKS,
    "product multiplies blocks of GGUF files",
    SOURCE,
    partial(_against, Kind.BLOCKS),
    partial(_pairs, Kind.BLOCKS),
    torchs=False,
)
EXACT = Contest(
    Function.EXACT_BLOCKS,
    "product multiplies blocks of GGUF files with activations in fp32",
    EXACT_SOURCE,
    partial(_against, Kind.EXACT_BLOCKS),
    partial(_pairs, Kind.EXACT_BLOCKS),
    torchs=False,
)
CONTESTS: Mapping[Kind, Contest] = {Kind.BLOCKS: CONTEST, Kind.EXACT_BLOCKS: EXACT}
"""Kind of matrices in blocks -> the function that multiplies by them."""
