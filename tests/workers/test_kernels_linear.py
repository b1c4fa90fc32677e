"""The packed linears: the bytes that one chain of fma per output gives, for every number of rows,
instruction set, thread count and way of packing."""

import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import HUGE_PAGE, Isa, Kind, PackedMatrix, build
from support.kernels import every_isa, needs_kernels, use

QEMU = shutil.which("qemu-x86_64")
ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(1, 1), (16, 4), (17, 5), (48, 128), (49, 131), (100, 70), (160, 257)]
"""n, k: one of each, whole vectors and panels, and what is left over of both."""

ROW_KINDS = [kind for kind in Kind if kind <= Kind.INT8]
"""Kinds that are packed from rows of numbers."""
every_kind = pytest.mark.parametrize("kind", ROW_KINDS, ids=lambda kind: kind.name)
pytestmark = pytest.mark.usefixtures("kernels_as_before")


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(kind: Kind, weight: Tensor) -> Tensor:
    """Float weights as a checkpoint of this kind has them."""
    return {Kind.FP16: weight.half(), Kind.BF16: weight.bfloat16()}.get(kind, weight)


def packed(kind: Kind, weight: Tensor, bias: Tensor | None = None) -> PackedMatrix:
    matrix = PackedMatrix(kind, *weight.shape, bias=bias)
    matrix.pack(stored(kind, weight))
    return matrix


def fma(x: np.ndarray, w: np.ndarray, addend: np.ndarray) -> np.ndarray:
    """x w + addend in float32, rounded once: the product is exact in float64, and the sum is
    rounded there to odd, so that the second rounding is right."""
    product, addend = x.astype(np.float64) * w, addend.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    towards = np.where((error > 0) == (total > 0), 1, -1)
    return (
        np.where((error != 0) & (bits % 2 == 0), bits + towards, bits)
        .view(np.float64)
        .astype(np.float32)
    )


def chain(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    total = np.zeros((len(x), len(weight)), np.float32)
    for k in range(x.shape[1]):
        total = fma(x[:, k : k + 1], weight[:, k], total)
    return total if bias is None else total + bias


def integers(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    def rows(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        most = np.abs(a).max(axis=1, keepdims=True)
        there = most >= np.float32(1e-30)
        to = np.divide(np.float32(127), most, out=np.zeros_like(most), where=there)
        return np.rint(a * to).astype(np.int64), np.where(
            there, most / np.float32(127), np.float32(0)
        )

    (xq, xs), (wq, ws) = rows(x), rows(weight)
    y = (xq @ wq.T).astype(np.float32) * (xs * ws.T)
    return y if bias is None else y + bias


def oracle(kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    slow = integers if kind is Kind.INT8 else chain
    return torch.from_numpy(
        slow(
            x.numpy(), stored(kind, weight).float().numpy(), None if bias is None else bias.numpy()
        )
    )


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a.view(torch.int32), b.view(torch.int32)))


# ---- the values


@needs_kernels
@every_isa
@every_kind
def test_the_bytes_are_those_of_one_ordered_sum_per_output(kind: Kind, isa: Isa) -> None:
    use(isa)
    for n, k in SHAPES:
        for bias in (None, draw(n, seed=1)):
            weight, x = draw(n, k, seed=2), draw(11, k, seed=3)
            y = packed(kind, weight, bias).linear(x)
            assert same_bytes(y, oracle(kind, x, weight, bias)), (
                f"{n} x {k}, bias: {bias is not None}"
            )


@needs_kernels
@every_isa
def test_products_are_rounded_once_where_a_double_is_half_way_between_two_floats(isa: Isa) -> None:
    """Sums just above and below the middle, by less than a double has room for; sums that lie in
    it; and the same among the numbers below the normal ones."""
    use(isa)
    near = 1 + np.arange(40, dtype=np.float32) * np.float32(2.0**-23)
    weight = np.stack([near, np.float32(2.0**-12) * near], axis=1)
    steps = np.float32(2.0**-23) * np.arange(-7, 8, dtype=np.float32)
    x = np.stack([np.ones(15, np.float32), np.float32(2.0**-12) * (1 + steps)], axis=1)
    for scale in (1.0, -1.0, 2.0**-127, 2.0**-137):
        rows = torch.from_numpy(x * np.float32(scale))
        own = torch.from_numpy(weight)
        expected = oracle(Kind.FP32, rows, own, None)
        assert same_bytes(packed(Kind.FP32, own).linear(rows), expected)
        own[4:8] = torch.nan  # beside numbers below the normal ones
        y = packed(Kind.FP32, own).linear(rows)
        assert y[:, 4:8].isnan().all()
        y[:, 4:8] = expected[:, 4:8]
        assert same_bytes(y, expected)


@needs_kernels
@every_isa
@every_kind
@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1e15, 1e30])
def test_extreme_values_one_sided_and_zero_rows_are_as_exact_as_others(
    kind: Kind, isa: Isa, scale: float
) -> None:
    """One-sided activations saturate 16-bit pair sums where bytes are multiplied carelessly; 1e-42
    is below the normal numbers."""
    use(isa)
    weight = draw(50, 70).abs().clamp_min(1.0)
    x = torch.stack(
        [
            draw(70, seed=1).abs() * scale,
            torch.zeros(70),
            torch.full((70,), -scale),
            draw(70, seed=2) * scale,
        ]
    )
    y = packed(kind, weight).linear(x)
    assert same_bytes(y, oracle(kind, x, weight, None))
    assert not y[1].any()


@needs_kernels
@every_isa
def test_what_is_not_finite_stays_visible(isa: Isa) -> None:
    use(isa)
    x = draw(3, 70)
    x[0, 5], x[1, 6] = torch.nan, torch.inf
    for kind in ROW_KINDS:
        y = packed(kind, draw(50, 70, seed=1)).linear(x)
        assert not y[:2].isfinite().any()
        assert y[2].isfinite().all()


# ---- the same bytes whatever the company


@needs_kernels
@every_isa
@every_kind
def test_a_row_has_the_same_bytes_among_any_number_of_rows(kind: Kind, isa: Isa) -> None:
    use(isa)
    matrix, x = packed(kind, draw(100, 150), draw(100, seed=1)), draw(512, 150, seed=2)
    alone = torch.cat([matrix.linear(row[None]) for row in x])
    for rows in [*range(1, 65), 100, 255, 256, 257, 512]:
        assert same_bytes(matrix.linear(x[:rows]), alone[:rows]), f"{rows} rows"
        assert same_bytes(matrix.linear(x[-rows:]), alone[-rows:]), f"the last {rows} rows"


@needs_kernels
@every_kind
def test_a_sum_that_is_cut_into_sections_has_the_same_bytes(kind: Kind) -> None:
    matrix, x = packed(kind, draw(70, 7001)), draw(256, 7001, seed=1)
    alone = torch.cat([matrix.linear(row[None]) for row in x])
    for rows in (2, 9, 33, 64, 256):
        assert same_bytes(matrix.linear(x[:rows]), alone[:rows]), f"{rows} rows"


@needs_kernels
@every_kind
def test_threads_and_instruction_sets_do_not_change_a_byte(kind: Kind) -> None:
    matrix, x = packed(kind, draw(500, 300), draw(500, seed=1)), draw(130, 300, seed=2)
    expected = matrix.linear(x)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        for threads in (1, 2, 3, 7):
            kernels.set_threads(threads)
            assert kernels.threads() == threads
            for rows in (1, 5, 130):
                assert same_bytes(matrix.linear(x[:rows]), expected[:rows]), (
                    f"{isa.name}, {threads} threads, {rows} rows"
                )


@needs_kernels
@every_kind
def test_packing_by_ranges_of_rows_is_packing_at_once(kind: Kind) -> None:
    weight, x = draw(131, 90), draw(7, 90, seed=1)
    whole, parts = packed(kind, weight), PackedMatrix(kind, 131, 90)
    for first, end in ((100, 131), (0, 1), (1, 47), (47, 100)):
        parts.pack(stored(kind, weight)[first:end], first)
    assert bytes(parts.memory) == bytes(whole.memory)
    assert same_bytes(parts.linear(x), whole.linear(x))


@needs_kernels
@every_kind
def test_numpy_arrays_serve_as_well_as_tensors(kind: Kind) -> None:
    weight, x = draw(40, 30), draw(3, 30, seed=1)
    matrix = PackedMatrix(kind, 40, 30)
    rows = stored(kind, weight)
    matrix.pack(rows.view(torch.uint16).numpy() if rows.dtype.itemsize == 2 else rows.numpy())
    y = matrix.linear(x.numpy())
    assert same_bytes(torch.from_numpy(y), packed(kind, weight).linear(x))


@needs_kernels
@every_kind
def test_a_matrix_larger_than_a_huge_page_begins_with_one_and_asks_for_them(kind: Kind) -> None:
    matrix = PackedMatrix(kind, 1000, 3000)
    first, end = matrix.struct.packed, matrix.struct.packed + matrix.nbytes
    assert first % HUGE_PAGE == 0
    flags, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) < end and first < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags.append(line.split())
    assert flags
    assert all("hg" in own for own in flags)


# ---- refusals, and the library itself


@needs_kernels
def test_arrays_that_do_not_fit_are_refused() -> None:
    matrix = PackedMatrix(Kind.FP16, 40, 30)
    for wrong in (draw(40, 30), draw(40, 31).half(), draw(30, 40).half().T):
        with pytest.raises(ValueError, match="expected a contiguous"):
            matrix.pack(wrong)
    with pytest.raises(ValueError, match=r"rows 20\.\.60 of a matrix of 40"):
        matrix.pack(draw(40, 30).half(), 20)
    for wrong in (draw(3, 31), draw(3, 30).double(), draw(30, 3).T):
        with pytest.raises(ValueError, match="expected a contiguous"):
            matrix.linear(wrong)


@needs_kernels
@every_isa
def test_each_instruction_set_has_a_name_in_words(isa: Isa) -> None:
    use(isa)
    assert kernels.in_words() == kernels.TITLES[isa]


@needs_kernels
@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (Debian: qemu-user)")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the processor is one of x86-64")
def test_plain_kernels_on_a_processor_without_others_come_with_the_reason() -> None:
    code = "from dovetail.workers import kernels; print(kernels.in_words())"
    command = [str(QEMU), "-cpu", "Conroe", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"plain C++: {kernels.WHY_PLAIN['x86_64']}\n"


def test_the_library_is_there_wherever_a_compiler_is() -> None:
    if not build.compiler():
        pytest.skip("no C++ compiler on this machine")
    assert kernels.available(), kernels.why_not()


def test_without_the_library_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "absent.so")
    kernels.load.cache_clear()
    try:
        assert not kernels.available()
        with pytest.raises(
            UserError,
            match=r"not built; with a C\+\+ compiler: .*python.* -m "
            r"dovetail\.workers\.kernels\.build",
        ):
            PackedMatrix(Kind.FP32, 4, 4)
    finally:
        monkeypatch.undo()
        kernels.load.cache_clear()


def test_pip_and_the_build_by_hand_compile_the_same() -> None:
    (extension,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "setuptools"
    ]["ext-modules"]
    folder = ROOT / "workers" / "kernels" / "native"
    assert [ROOT / source for source in extension["sources"]] == sorted(folder.glob("*.cpp"))
    assert [ROOT / header for header in extension["depends"]] == sorted(
        {*folder.iterdir()} - {*folder.glob("*.cpp")}
    )
    assert tuple(extension["extra-compile-args"]) == build.FLAGS
    assert extension["optional"]
