"""Products over the blocks of GGUF files: against the numbers that the `gguf` package has for them,
and the same bytes in every way that they can be computed."""

from collections.abc import Sequence

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from dovetail.workers import kernels
from dovetail.workers.kernels import Isa, Kind, PackedMatrix
from dovetail.workers.kernels.blocks import WIDTH, BlockMatrix, Part, part_bytes, unpack, wrong_row
from dovetail.workers.models.backends.packing import product_of
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.rows import unpacked
from support.gguf_files import BLOCKED, HALVES, coded
from support.kernels import every_isa, use

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built"),
    pytest.mark.usefixtures("kernels_as_before"),
]
every_format = pytest.mark.parametrize("kind", BLOCKED, ids=lambda kind: kind.name)
N, K = 83, 512  # no multiple of a vector's outputs; two blocks of the largest
MOST = 64
WRAPPING = (Type.Q6_K, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS)
"""Types whose sums of products may wrap around in 16 bits before they are complete."""


def blocks_of(kind: Type, n: int = N, k: int = K) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks [n, bytes], and the numbers [n, k] that they stand for."""
    seeds = np.random.default_rng(kind)
    data, _ = coded(seeds.standard_normal((n, k), np.float32) * 0.05, kind, seeds)
    data = data.reshape(n, -1)
    if kind is Type.Q8_0:
        data[:, 2:5] = 0x80  # a code that no quantiser writes
    return data, gguf.quants.dequantize(data, kind)


def packed(
    kinds: Sequence[Type], how: Kind = Kind.BLOCKS, n: int = N, bias: Tensor | None = None
) -> BlockMatrix:
    """A matrix with n outputs of each kind, one below the other."""
    matrix = BlockMatrix(how, [Part(kind, n) for kind in kinds], K, bias=bias)
    for index, kind in enumerate(kinds):
        matrix.pack_part(index, blocks_of(kind, n)[0])
    return matrix


def rows_of(count: int) -> Tensor:
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(7))
    x[0] = x[0].abs()  # one-sided: sums of 8-bit products that saturate show here
    x[1:2] = 0.0
    return x


def rounded(x: Tensor) -> Tensor:
    """Each 32 numbers of a row in 127 steps of their largest magnitude."""
    blocks = x.double().view(len(x), -1, WIDTH)
    steps = (blocks.abs().amax(dim=2, keepdim=True) / 127).clamp(min=1e-30)
    return ((blocks / steps).round() * steps).view(x.shape)


@every_format
def test_rows_stand_for_the_numbers_of_the_package_bit_for_bit(kind: Type) -> None:
    data, numbers = blocks_of(kind)
    found = np.empty((N, K), np.float32)
    unpack(kind, data, found)
    matrix = packed([kind])
    rows = np.stack([matrix.row(index) for index in range(N)])
    by_torch = unpacked(bytearray(data), int(kind), (N, K)).float().numpy()
    for one in (found, rows, by_torch):
        assert (one.view(np.uint32) == numbers.view(np.uint32)).all()


@every_isa
@pytest.mark.parametrize("count", [1, 5])
def test_a_sum_that_overflows_stays_infinite(count: int, isa: Isa) -> None:
    use(isa)
    x = rows_of(count)
    x[0, :WIDTH], x[0, WIDTH:] = 3e38, 1.0
    matrix = BlockMatrix(Kind.BLOCKS, [Part(Type.Q8_0, 1)], K)
    block = np.concatenate(
        [np.array([100.0], np.float16).view(np.uint8), np.full(WIDTH, 9, np.uint8)]
    )
    matrix.pack_part(0, np.tile(block, (1, K // WIDTH)))
    assert matrix.linear(x)[0].item() == torch.inf


@every_format
def test_products_are_those_of_the_numbers_with_rounded_rows(kind: Type) -> None:
    x, bias = rows_of(9), torch.randn(N, generator=torch.Generator().manual_seed(1))
    expected = rounded(x) @ torch.from_numpy(blocks_of(kind)[1]).double().t() + bias
    difference = (packed([kind], bias=bias).linear(x) - expected).abs().max()
    assert difference < 1e-6 * expected.abs().max()


def test_the_proof_rounds_each_number_as_the_kernels_do() -> None:
    """One number in ten thousand lies so near to the middle between two steps that a step computed
    in another way rounds it to the other one, by which a whole row differs too much."""
    count = 4096
    matrix = BlockMatrix(Kind.BLOCKS, [Part(Type.Q8_0, N)], K)
    matrix.pack_part(0, blocks_of(Type.Q8_0)[0])
    x = torch.randn(count, K, generator=torch.Generator().manual_seed(11))
    weight = torch.from_numpy(blocks_of(Type.Q8_0)[1]).float()
    expected = product_of(matrix, torch.arange(N), x, weight)
    difference = (matrix.linear(x) - expected).norm(dim=1) / expected.norm(dim=1)
    assert difference.max() < 1e-5


@every_format
def test_a_row_has_the_same_bytes_in_any_company_thread_and_instruction_set(kind: Type) -> None:
    x, matrix = rows_of(MOST), packed([kind])
    kernels.use_isa(Isa.PLAIN)
    expected = matrix.linear(x)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        for count in range(1, MOST + 1) if isa is kernels.isas()[-1] else (1, 7, 35):
            kernels.set_threads(count % 3 + 1)
            first = count * 5 % (MOST - count + 1)
            assert torch.equal(
                matrix.linear(x[first : first + count]), expected[first : first + count]
            )


@every_format
def test_the_smallest_and_largest_rows_and_sums_half_way_between_two_floats_have_the_same_bytes(
    kind: Type,
) -> None:
    x, matrix = rows_of(7), packed([kind])
    x[2] = (x[2] * 30).round().clamp(-127, 127)
    x[2, ::WIDTH] = 127.0  # scales are powers of two, and so sums end early
    for row, size in enumerate((1e-25, 1e-29, 1e20, 1e33), 3):
        x[row] *= size
    kernels.use_isa(Isa.PLAIN)
    expected = matrix.linear(x)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        for first, end in ((0, 7), (2, 3), (3, 5), (5, 6)):
            found = matrix.linear(x[first:end])
            assert found.numpy().tobytes() == expected[first:end].numpy().tobytes(), isa.name


@pytest.mark.parametrize("kind", WRAPPING, ids=lambda kind: kind.name)
def test_the_largest_sums_have_the_same_bytes(kind: Type) -> None:
    """All codes and inputs are as large as possible, and all products have the same sign."""
    data = blocks_of(kind)[0].copy()
    size = KINDS[kind].size_bytes
    data.reshape(N, -1, size)[:, :, 2 : min(size, 192)] = np.arange(N).reshape(N, 1, 1) % 2 * 255
    matrix = BlockMatrix(Kind.BLOCKS, [Part(kind, N)], K)
    matrix.pack_part(0, data)
    x = torch.from_numpy(gguf.quants.dequantize(data, kind)[:9]).sign()
    kernels.use_isa(Isa.PLAIN)
    expected = matrix.linear(x)
    assert (expected.diagonal() > 0).all()
    for isa in kernels.isas():
        kernels.use_isa(isa)
        assert torch.equal(matrix.linear(x), expected), isa.name


@every_format
def test_with_rows_as_they_are_bytes_are_those_of_the_same_weights_in_fp32(kind: Type) -> None:
    twin = PackedMatrix(Kind.FP32, N, K)
    twin.pack(blocks_of(kind)[1])
    matrix, x = packed([kind], Kind.EXACT_BLOCKS), rows_of(MOST)
    for isa in kernels.isas():
        count = 3 if isa is Isa.PLAIN else MOST
        kernels.use_isa(isa)
        assert torch.equal(matrix.linear(x[:1]), twin.linear(x[:1]))
        assert torch.equal(matrix.linear(x[:count]), twin.linear(x[:count]))


@pytest.mark.parametrize("how", [Kind.BLOCKS, Kind.EXACT_BLOCKS])
def test_a_matrix_of_several_formats_is_its_parts_one_below_the_other(how: Kind) -> None:
    kinds, x = [Type.Q4_K, Type.F16, Type.Q6_K, Type.F32, Type.Q8_0], rows_of(5)
    bias = torch.randn(len(kinds) * N, generator=torch.Generator().manual_seed(1))
    matrix = BlockMatrix(how, [Part(kind, N) for kind in kinds], K, bias=bias)
    expected = []
    for index, kind in enumerate(kinds):
        own = bias[index * N : (index + 1) * N].contiguous()
        if kind in (Type.F16, Type.F32):
            weight = torch.randn(N, K).to(torch.float16 if kind is Type.F16 else torch.float32)
            alone = PackedMatrix(Kind.FP16 if kind is Type.F16 else Kind.FP32, N, K, bias=own)
            alone.pack(weight)
            matrix.pack_part(index, weight)
        else:
            alone = packed([kind], how, bias=own)
            matrix.pack_part(index, blocks_of(kind)[0])
        expected.append(alone.linear(x))
    assert torch.equal(matrix.linear(x), torch.cat(expected, dim=1))
    assert (matrix.row(2 * N + 3) == blocks_of(Type.Q6_K)[1][3]).all()


def test_rows_that_are_read_as_they_are_packed_are_packed_like_those_that_are_there() -> None:
    """Several threads read them, and each row once."""
    count, asked = 3000, list[tuple[int, int]]()
    data = blocks_of(Type.Q4_K, count)[0]
    whole, matrix = (BlockMatrix(Kind.BLOCKS, [Part(Type.Q4_K, count)], K) for _ in range(2))
    kernels.set_threads(3)

    def read(first: int, size: int) -> np.ndarray:
        asked.append((first, size))
        return data[first : first + size]

    whole.pack_part(0, data)
    matrix.pack_part(0, read)
    assert bytes(matrix.memory) == bytes(whole.memory)
    assert len(asked) > 2
    assert sorted(row for first, size in asked for row in range(first, first + size)) == [
        *range(count)
    ]


def test_a_row_that_is_not_finite_gives_nothing_finite_and_no_other_row_changes() -> None:
    x, matrix = rows_of(3), packed([Type.Q4_K])
    expected = matrix.linear(x)
    x[1, 100] = float("inf")
    found = matrix.linear(x)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


@every_format
def test_blocks_of_numbers_that_are_not_finite_are_found(kind: Type) -> None:
    data, _ = blocks_of(kind)
    assert wrong_row(kind, data, K) is None
    data = np.tile(data, (20, 1))
    place = HALVES.get(kind, (0,))[-1]
    data[1100, place : place + 2] = (0xFF, 0x7C)
    assert wrong_row(kind, data, K) == 1100


@every_format
def test_packed_blocks_take_what_is_said_of_them(kind: Type) -> None:
    said = KINDS[int(kind)].packed_size_of((64, K))
    assert part_bytes(Part(kind, 64), K) == said
