"""Our functions for what lies between products on a GPU, computed by the CPU statement by
statement, and compiled for every GPU that they are for."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch.nn.functional import rms_norm

from dovetail.workers.kernels.layer_plan import Norm, NormKind
from dovetail.workers.models.backends.device.choice import Products
from dovetail.workers.models.backends.device.parts import (
    CONTEST,
    MOST_WIDTH,
    SOURCE,
    DeviceNorm,
    Parts,
    Turning,
)
from dovetail.workers.models.backends.device.products import narrowed
from support.cases import everyday
from support.cuda_compilers import ARCHITECTURES, NVRTC, needs_a_compiler, needs_nvrtc
from support.emulated import Emulated, emulated

CPU = torch.device("cpu")


@needs_a_compiler
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_they_are_right_and_a_row_is_the_same_alone(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    if order == "backwards":
        monkeypatch.setenv("DT_BACKWARDS", "1")
    assert CONTEST.against(emulated(SOURCE), CPU) == ""


@needs_a_compiler
def test_halves_are_rounded_as_torch_rounds_them_and_none_becomes_infinite() -> None:
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(4, 3 * 64, generator=generator) * 10.0 ** torch.arange(-7, 1, 2)[:, None]
    numbers[0, 64:70] = torch.tensor([1e9, -1e9, 65519.9, 65520.0, 6e-8, 2.9e-8])
    keys, values = torch.zeros(2, 1, 4, 64).half()
    angles = torch.ones(4, 32), torch.zeros(4, 32)
    turning = Turning(emulated(SOURCE), 1, 1, None, None, 1e-5)
    query = turning(numbers, angles, torch.arange(4), keys, values)
    expected = numbers.view(4, 3, 64)
    assert torch.equal(query[0], expected[:, 0])
    largest = torch.finfo(torch.half).max
    for found, part in ((keys, expected[:, 1]), (values, expected[:, 2])):
        assert torch.equal(found[0], part.clamp(-largest, largest).half())


@needs_a_compiler
@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_nan_stays_nan_and_large_numbers_are_cut_where_rows_are_narrowed(
    dtype: torch.dtype,
) -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 65520.0, 1e-45, -3.4e38])
    found, expected = Parts(emulated(SOURCE)).narrow(x, dtype), narrowed(x, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert found[0].isnan()


def wrong_functions(change: Callable[[str, list[object]], None]) -> Callable[[str], Emulated]:
    class Wrong(Emulated):
        def launch(self, name: str, grid: tuple[int, int], threads: int, arguments: object) -> None:
            changed = list(arguments)  # type: ignore[call-overload]
            change(name, changed)
            super().launch(name, grid, threads, changed)

    return lambda source: Wrong(emulated(source)._library)


@needs_a_compiler
@pytest.mark.parametrize(
    ("function", "argument", "by", "said"),
    [
        ("norm_rows", 5, -1, "norm: differs from the exact result by"),
        ("gate_rows", 2, -1, "gate: differs from the exact result by"),
        ("turn_rows", 9, 40, "rotation, cached as torch.float16: "),
        ("turn_rows", 14, -4, "rotation, cached as torch.float16: queries differ"),
    ],
)
def test_wrong_ones_are_not_used(function: str, argument: int, by: int, said: str) -> None:
    def change(name: str, arguments: list[object]) -> None:
        if name == function:
            arguments[argument] += by  # type: ignore[operator]

    products = Products(CPU, wrong_functions(change))
    assert products.owner(CONTEST) is None
    assert f"dovetail's own is not proved here: {said}" in products.said[CONTEST.kind]


@needs_a_compiler
def test_they_are_timed_against_what_torch_computes() -> None:
    functions = emulated(SOURCE)
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(4))
    for ours, make in islice(CONTEST.pairs(functions, CPU), 1):
        torch.testing.assert_close(ours(x), make()(x), rtol=1e-5, atol=1e-5)
    assert functions.launches == ["norm_rows", "turn_rows", "gate_rows"]


@needs_a_compiler
def test_rows_that_do_not_lie_behind_each_other_are_taken() -> None:
    parts, x = Parts(emulated(SOURCE)), torch.randn(6, 40)
    assert torch.equal(parts.gate(x[::2, :20]), parts.gate(x[::2, :20].contiguous()))


@needs_nvrtc
@pytest.mark.parametrize("architecture", everyday(ARCHITECTURES, 120))
def test_the_functions_compile_for_every_gpu(architecture: int) -> None:
    assert not isinstance(NVRTC, str)
    code = NVRTC.compile(SOURCE, architecture)
    assert isinstance(code, bytes), code
    for name in ("norm_rows", "turn_rows", "gate_rows", "narrow_rows"):
        assert name.encode() in code


@needs_a_compiler
@pytest.mark.parametrize("width", [8192, 8193])
def test_a_norm_that_is_too_wide_for_ours_is_torchs(width: int) -> None:
    functions = emulated(SOURCE)
    x, weight = torch.randn(2, 2, width, generator=torch.Generator().manual_seed(5)).unbind()
    norm = DeviceNorm(NormKind.RMS, Norm(weight[0]), 1e-5, CPU, Parts(functions))
    expected = rms_norm(x, (width,), weight[0], 1e-5)
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)
    assert len(functions.launches) == (width <= MOST_WIDTH)
