"""An inventory of torch and the C++ kernels on this machine, and a self-test of the kernels.

`python -m dovetail.workers.calibration.inventory` prints it as one JSON object, so that the caller
neither imports torch nor crashes with it if it is broken."""

import json
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from dovetail.workers import kernels
from dovetail.workers.devices import cuda
from dovetail.workers.devices.cuda import CUDA
from dovetail.workers.devices.opening import KINDS as DEVICE_KINDS
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.coded import GROUP, KINDS, CodedMatrix
from dovetail.workers.models.backends.device.choice import Products
from dovetail.workers.models.backends.device.own import SOURCE
from dovetail.workers.models.backends.device.trial import CONTESTS, here

SHAPE = (83, 70)  # [out, in] of the self-test's matrix: no multiple of any register's width
ROWS = (1, 2, 7, 16, 33)
TOLERANCE = {Kind.FP32: 1e-5, Kind.FP16: 1e-5, Kind.BF16: 1e-5, Kind.INT8: 3e-2}
"""Largest accepted difference to the product in double precision, relative to the largest output.
It covers the rounding of fp32 sums, and for int8 that of weights and rows."""
STORED = {
    Kind.FP32: torch.float32,
    Kind.FP16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.INT8: torch.float32,
}


def take_inventory() -> dict[str, Any]:
    """Return torch's version, build and GPUs, and the kernels' instruction sets and failures."""
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "xpu": getattr(torch.version, "xpu", None) or "",
        "architectures": cuda.architectures(),
        "capabilities": cuda.capabilities(),
        "found": [*found()],
        "products": [products_of(torch.device(name)) for name in CUDA.found()],
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "kernels_missing": kernels.why_not() or "",
        "kernels": kernels.in_words(),
        "isas": [isa.name.lower() for isa in kernels.isas()] if kernels.available() else [],
        "kernels_failures": list(kernel_failures()) if kernels.available() else [],
    }


def found() -> Iterator[dict[str, str]]:
    """Yield the GPUs that torch finds, by name and chip, with a note if dovetail has never been run
    on that kind."""
    for kind in DEVICE_KINDS:
        for name in kind.found():
            yield {"name": name, "chip": kind.chip(torch.device(name)), "unproved": kind.unproved}


def products_of(device: torch.device) -> dict[str, Any]:
    """Return which products of a GPU are ours and which are torch's, a sentence for each type of
    weights; or why none are ours, as `missing`."""
    if missing := kernels.why_not():
        return {"missing": missing, "said": []}
    products = Products(device, partial(kind_of(device).program, device), here)
    if isinstance(functions := products.functions(SOURCE), str):
        return {"missing": functions, "said": []}
    for contest in CONTESTS:
        products.owner(contest)
    return {"missing": "", "said": [*products.said.values()]}


def kernel_failures() -> Iterator[str]:
    """Yield errors of the kernels, a line each: products that differ from those in double
    precision, and bytes that differ between instruction sets or with other rows in the batch."""
    best = kernels.isa()
    try:
        for kind in STORED:
            yield from _failures_of(kind)
        for bits in KINDS:
            yield from _failures_of_codes(bits)
    finally:
        kernels.use_isa(best)


def _failures_of(kind: Kind) -> Iterator[str]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(SHAPE, generator=generator).to(STORED[kind])
    x = torch.randn(max(ROWS), SHAPE[1], generator=generator)
    x[1] = 0.0
    x[2] = x[2].abs()  # one-sided: saturating sums of int8 products show here
    expected = x.double() @ weight.double().T
    matrix = PackedMatrix(kind, *SHAPE)
    matrix.pack(weight)
    yield from _complaints(matrix, x, expected)


def _failures_of_codes(bits: int) -> Iterator[str]:
    outputs, groups = SHAPE[0], 3
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(
        0, 1 << bits, (outputs, groups * GROUP), dtype=torch.uint8, generator=generator
    )
    scales, offsets = (torch.rand(outputs, groups, generator=generator).half() for _ in range(2))
    x = torch.randn(max(ROWS), groups * GROUP, generator=generator)
    matrix = CodedMatrix(bits, outputs, groups * GROUP)
    matrix.pack_codes(codes, scales, offsets)
    weight = (codes.double() - (1 << bits - 1)).view(outputs, groups, GROUP) * scales.double()[
        ..., None
    ] + offsets.double()[..., None]
    expected = x.double() @ weight.view(outputs, -1).T
    yield from _complaints(matrix, x, expected)


def _complaints(matrix: PackedMatrix, x: torch.Tensor, expected: torch.Tensor) -> Iterator[str]:
    kind, reference = matrix.kind, None
    # rows of codes are rounded to 8 bits too
    most = TOLERANCE[kind if isinstance(kind, Kind) else Kind.INT8]
    for isa in kernels.isas():
        kernels.use_isa(isa)
        found = matrix.linear(x)
        reference = found if reference is None else reference
        name = f"{kind.name.lower()} on {isa.name.lower()}"
        difference = float((found - expected).abs().max() / expected.abs().max())
        if not difference <= most:
            yield f"{name}: differs from the exact product by {difference:.1e}"
        if not _same_bytes(found, reference):
            yield f"{name}: other bytes than on {kernels.isas()[0].name.lower()}"
        parts = (matrix.linear(x[:rows].contiguous()) for rows in ROWS)
        if not all(_same_bytes(part, found[: len(part)]) for part in parts):
            yield f"{name}: a row's bytes depend on the other rows"


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()


if __name__ == "__main__":
    said = os.dup(1)
    os.dup2(2, 1)  # keeps the libraries' own output (ONEDNN_VERBOSE and the like) out of the JSON
    with os.fdopen(said, "w", encoding="utf-8") as stdout:
        json.dump(take_inventory(), stdout)
