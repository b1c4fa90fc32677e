"""The command `limit`: the kernels' linears of one decoder layer against the limit of the hardware,
which is measured in the same rounds."""

import time
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import click
import torch

from benchmarks.figures import LIMIT
from benchmarks.measure import Estimate, estimate, limit_s, ratio
from benchmarks.models import SHAPES, Shape
from benchmarks.options import (
    Command,
    Numbers,
    checkpoint_type,
    compared,
    holds,
    option,
    options,
    pin,
    report,
)
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.probe import Arithmetic, bandwidth_gb_s, peak_gflop_s

KINDS = {"fp32": Kind.FP32, "fp16": Kind.FP16, "bf16": Kind.BF16, "int8": Kind.INT8}
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
WARM_UP = 2
PROBE_S = 0.05
"""Seconds of each probe of a round, which takes the best of what it sees in them."""
STORED = {
    Kind.FP32: torch.float32,
    Kind.FP16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.INT8: torch.float32,
}


@click.command(cls=Command)
@option("--rows", type=Numbers(), default="1,2,4,8,16,32,64", help="Rows of the products.")
@options("isa", "weights", "checkpoint", "shape", "pairs", "threads", "clock", "json")
def limit(
    rows: tuple[int, ...],
    isa: str | None,
    shape: str,
    pairs: int,
    threads: int,
    clock: str,
    as_json: bool,
    **wanted: Any,
) -> None:
    """The linears of one layer on the kernels against limit(M).

    limit(M) = max(packed bytes / bandwidth, 2 M parameters / peak of the instruction used);
    bandwidth and peak are measured in every round anew.
    """
    cores = pin(threads)
    kernels.set_threads(threads)
    if isa is not None:
        kernels.use_isa(kernels.Isa[isa])
    kind = KINDS[
        checkpoint_type(**wanted) if wanted["weights"] in ("half", "bf16") else wanted["weights"]
    ]
    with progress_bar(pairs + WARM_UP, "rounds") as step:
        machine, found = against_limit(SHAPES[shape], kind, rows, pairs, CLOCKS[clock], step)
    told = {
        "kind": kind.name,
        "isa": kernels.isa().name,
        "shape": shape,
        "cores": cores,
        "clock": clock,
    }
    result = {
        **told,
        "bandwidth": machine.bandwidth.as_json(),
        "peak": machine.peak.as_json(),
        "rows": [f.as_json() for f in found],
    }
    report(result, as_json, lambda: show(told, machine, found))


def show(told: dict[str, Any], machine: "Machine", found: "Sequence[Found]") -> None:
    measured = (
        f"{machine.bandwidth.median / 1e9:.1f} GB/s, {machine.peak.median / 1e9:.0f} G operations/s"
    )
    click.echo(
        f"{told['kind']} linears of a {told['shape']} layer, {told['isa']}, "
        f"{len(told['cores'])} core(s), {told['clock']} time: {measured}"
    )
    cells = [compared(f.rows, f.seconds, f.limits, f.ratio, f.figure) for f in found]
    print_table(("rows", "ms", "limit ms", "ratio (95 %)", "figure", "holds"), cells)


@dataclass(frozen=True)
class Found:
    """Seconds of all linears of a layer and their limit, round by round."""

    rows: int
    seconds: tuple[float, ...]
    limits: tuple[float, ...]

    @property
    def ratio(self) -> Estimate:
        return ratio(self.seconds, self.limits)

    @property
    def figure(self) -> float | None:
        return LIMIT.get(self.rows)

    def as_json(self) -> dict[str, Any]:
        taken = {
            "seconds": estimate(self.seconds).as_json(),
            "limit_s": estimate(self.limits).as_json(),
            "ratio": self.ratio.as_json(),
        }
        return {
            "rows": self.rows,
            **taken,
            "figure": self.figure,
            "holds": holds(self.ratio, self.figure),
        }


@dataclass(frozen=True)
class Machine:
    """The readings of the probes over all rounds: bytes and operations a second."""

    bandwidth: Estimate
    peak: Estimate


def against_limit(
    shape: Shape,
    kind: Kind,
    rows: Sequence[int],
    rounds: int,
    clock: Callable[[], float],
    step: Callable[[str], None],
) -> tuple[Machine, list[Found]]:
    """`rounds` times: bandwidth, peak, and for each number of rows one product with every matrix of
    a layer."""
    matrices = pack_layer(shape, kind)
    packed, parameters = sum(m.nbytes for m in matrices), sum(m.n * m.k for m in matrices)
    work = {count: [_product(matrix, count) for matrix in matrices] for count in rows}
    bandwidth: list[float] = []
    peak: list[float] = []
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    for number in range(-WARM_UP, rounds):
        step("warming up" if number < 0 else "")
        bandwidth.append(1e9 * bandwidth_gb_s(budget_s=PROBE_S))
        peak.append(1e9 * _peak(kind))
        for count in rows:
            started = clock()
            for product in work[count]:
                product()
            seconds[count].append(clock() - started)
    reads, peaks = bandwidth[WARM_UP:], peak[WARM_UP:]
    found = []
    for count in rows:
        limits = [
            limit_s(count, packed_bytes=packed, parameters=parameters, bandwidth=b, peak=p)
            for b, p in zip(reads, peaks, strict=True)
        ]
        found.append(Found(count, tuple(seconds[count][WARM_UP:]), tuple(limits)))
    return Machine(estimate(reads), estimate(peaks)), found


def pack_layer(shape: Shape, kind: Kind) -> list[PackedMatrix]:
    """The four matrices of a layer, random: fused queries, keys and values; output; fused gate and
    up; down."""
    head = shape.hidden // shape.heads
    sizes = [
        ((shape.heads + 2 * shape.kv_heads) * head, shape.hidden),
        (shape.hidden, shape.heads * head),
        (2 * shape.intermediate, shape.hidden),
        (shape.hidden, shape.intermediate),
    ]
    matrices = []
    for number, (n, k) in enumerate(sizes):
        matrices.append(PackedMatrix(kind, n, k))
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(number)) / k**0.5
        matrices[-1].pack(weight.to(STORED[kind]))
    return matrices


def _product(matrix: PackedMatrix, rows: int) -> Callable[[], None]:
    """The product into memory that is there already, as a layer has it."""
    x, y = torch.randn(rows, matrix.k), torch.zeros(rows, matrix.n)
    library, struct = kernels.library(), byref(matrix.struct)

    def product() -> None:
        library.dt_linear(struct, x.data_ptr(), matrix.k, y.data_ptr(), matrix.n, rows)

    return product


def _peak(kind: Kind) -> float:
    """Return the peak of the instruction that the kernels use: that of fp32 for 16-bit weights too,
    since they are widened."""
    found = peak_gflop_s(
        Arithmetic.INT8 if kind is Kind.INT8 else Arithmetic.FP32, budget_s=PROBE_S
    )
    assert found is not None
    return found
