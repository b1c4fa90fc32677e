"""Products over codes of a few bits: against the exact sum over rounded rows, and the same bytes in
every way that they can be computed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import Isa
from dovetail.workers.kernels.coded import GROUP, CodedMatrix, groups_of

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built"),
    pytest.mark.usefixtures("kernels_as_before"),
]
every_width = pytest.mark.parametrize("bits", [8, 4, 3, 2])
SHAPES = [(83, 128), (16, 64), (200, 704), (33, 150)]
"""[out, in]: no multiple of a vector's outputs, one group, several threads' worth, a last group of
22 inputs."""
ROWS = (1, 2, 3, 5, 8, 9, 17, 33, 130)


def draw(bits: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and offsets."""
    generator = torch.Generator().manual_seed(bits + n)
    codes = torch.randint(
        0, 1 << bits, (n, groups_of(k) * GROUP), dtype=torch.uint8, generator=generator
    )
    scales = (torch.rand(n, groups_of(k), generator=generator) * 0.01 + 0.001).half()
    return codes, scales, (torch.randn(n, groups_of(k), generator=generator) * 0.01).half()


def packed(bits: int, n: int, k: int, bias: Tensor | None = None) -> CodedMatrix:
    matrix = CodedMatrix(bits, n, k, bias=bias)
    matrix.pack_codes(*draw(bits, n, k))
    return matrix


def rows_of(count: int, k: int) -> Tensor:
    x = torch.randn(count, k, generator=torch.Generator().manual_seed(7))
    x[0] = x[0].abs()  # one-sided: sums of 8-bit products that saturate show here
    if count > 1:
        x[1] = 0.0
    return x


def expected(bits: int, n: int, k: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in double precision, with every group of a row rounded to 127 steps of its
    largest magnitude."""
    codes, scales, offsets = draw(bits, n, k)
    weight = (
        (codes.double() - (1 << bits - 1)).view(n, -1, GROUP) * scales.double()[..., None]
        + offsets.double()[..., None]
    ).view(n, -1)[:, :k]
    groups = pad(x, (0, groups_of(k) * GROUP - k)).view(len(x), -1, GROUP)
    steps = groups.abs().amax(dim=2, keepdim=True) / 127.0
    rounded = torch.where(
        steps > 0,
        (groups * (127.0 / groups.abs().amax(dim=2, keepdim=True))).round() * steps,
        torch.zeros_like(groups),
    ).view(len(x), -1)[:, :k]
    y = rounded.double() @ weight.T
    return y if bias is None else y + bias.double()


@every_width
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_sum_over_rounded_rows(bits: int, shape: tuple[int, int]) -> None:
    for bias in (None, torch.randn(shape[0], generator=torch.Generator().manual_seed(1))):
        x = rows_of(33, shape[1])
        wanted = expected(bits, *shape, x, bias)
        assert (
            float((packed(bits, *shape, bias).linear(x) - wanted).abs().max() / wanted.abs().max())
            < 1e-5
        )


@every_width
@pytest.mark.parametrize("isa", Isa, ids=lambda isa: isa.name)
def test_a_row_has_the_same_bytes_on_every_instruction_set_among_any_rows(
    bits: int, isa: Isa
) -> None:
    if isa not in kernels.isas():
        pytest.skip(f"this machine has no {isa.name}")
    matrix, x = packed(bits, 83, 128), rows_of(max(ROWS), 128)
    kernels.use_isa(Isa.PLAIN)
    whole = matrix.linear(x)
    kernels.use_isa(isa)
    for count in ROWS:
        assert torch.equal(matrix.linear(x[:count].contiguous()), whole[:count])


@every_width
def test_threads_and_ranges_of_rows_change_no_byte(bits: int) -> None:
    x = rows_of(17, 704)
    whole = packed(bits, 200, 704).linear(x)
    by_ranges = CodedMatrix(bits, 200, 704)
    codes = draw(bits, 200, 704)
    for first, end in ((150, 200), (0, 37), (37, 150)):
        by_ranges.pack_codes(*(part[first:end].contiguous() for part in codes), first)
    kernels.set_threads(3)
    assert torch.equal(by_ranges.linear(x), whole)


def test_what_is_not_finite_stays_visible() -> None:
    x = rows_of(3, 128)
    x[0, 5], x[2, 70] = float("nan"), float("inf")
    y = packed(4, 83, 128).linear(x)
    assert bool(y[0].isnan().all())
    assert bool(y[2].isnan().all())
    assert bool(y[1].isfinite().all())


def test_a_matrix_takes_the_memory_that_its_bits_say() -> None:
    n, k = 4096, 1024
    for bits in (8, 4, 3, 2):
        assert CodedMatrix(bits, n, k).nbytes == n * k * bits // 8 + n * k // GROUP * 4


def arrays_that_do_not_fit() -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    codes, scales, offsets = draw(4, 16, 64)
    yield codes.int(), scales, offsets, 0
    yield codes, scales.float(), offsets, 0
    yield codes[:, :32].contiguous(), scales, offsets, 0
    yield codes, scales, offsets, 1


def test_arrays_that_do_not_fit_are_refused() -> None:
    for codes, scales, offsets, first in arrays_that_do_not_fit():
        with pytest.raises(ValueError, match=r"expected a contiguous|rows 1"):
            CodedMatrix(4, 16, 64).pack_codes(codes, scales, offsets, first)


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kernels, "load", lambda: "the C++ kernels are not built; with a C++ compiler: build"
    )
    with pytest.raises(UserError, match="build"):
        CodedMatrix(4, 16, 64)
