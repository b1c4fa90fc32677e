"""The command `experts`: a pass through a layer with experts against reading, once, the weights
that it reads: those of the experts that its rows go through, and what all rows share."""

import time
from collections.abc import Callable, Sequence
from ctypes import addressof, c_int64, memmove
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch

from benchmarks.measure import Estimate, estimate, ratio
from benchmarks.options import (
    Command,
    Numbers,
    checkpoint_type,
    holds,
    option,
    options,
    pin,
    report,
    verdict,
)
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.protocol.errors import UserError
from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.blocks import Part
from dovetail.workers.kernels.experts import stacked, stacked_matrices
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import (
    CacheRows,
    ExpertsPlan,
    LayerPlan,
    Norm,
    RouterPlan,
    new_cache,
)
from dovetail.workers.kernels.probe import bandwidth_gb_s
from dovetail.workers.models.backends.device.own_blocks import random_blocks
from dovetail.workers.models.checkpoints.gguf import kinds as formats

KINDS = {"fp32": Kind.FP32, "fp16": Kind.FP16, "bf16": Kind.BF16, "int8": Kind.INT8}
STORED = {
    Kind.FP32: torch.float32,
    Kind.FP16: torch.float16,
    Kind.BF16: torch.bfloat16,
    Kind.INT8: torch.float32,
}
WARM_UP = 2
PROBE_S = 0.05
"""Seconds of each probe of a round, which takes the best of what it sees in them."""
BLOCKS = {kind.name: kind for kind in formats.KINDS.values() if kind.numbers > 1}
"""Types of blocks by their names."""
BOUND = {16: 1.25}
"""Seconds of a pass over so many rows against those of reading what it reads; at most."""


@dataclass(frozen=True)
class Mixed:
    """The sizes of a layer with experts."""

    hidden: int
    units: int
    experts: int
    chosen: int
    heads: int
    kv_heads: int
    head_dim: int = 128


SHAPES = {
    "30b-a3b": Mixed(2048, 768, 128, 8, 32, 4),
    "20b-a4b": Mixed(2880, 2880, 32, 4, 64, 8, 64),
    "8x7b": Mixed(4096, 14336, 8, 2, 32, 8),
    "small": Mixed(512, 256, 32, 4, 8, 4, 64),
}
"""Qwen3-30B-A3B, gpt-oss-20b, Mixtral 8x7B, and one for a try of seconds."""


@click.command(cls=Command)
@option("--rows", type=Numbers(), default="1,2,4,8,16", help="Rows of the passes.")
@option("--shape", type=click.Choice([*SHAPES]), default="30b-a3b", help="Sizes of the layer.")
@option("--blocks", type=click.Choice([*BLOCKS]), help="Weights in blocks of a GGUF file.")
@options("weights", "checkpoint", "pairs", "threads", "json")
def experts(
    rows: tuple[int, ...],
    shape: str,
    blocks: str | None,
    pairs: int,
    threads: int,
    as_json: bool,
    **wanted: Any,
) -> None:
    """A decoder layer with experts against the bandwidth of the weights that it reads.

    Every pass has other random rows, and so other experts; the bytes of those that it goes through,
    of the router and of what all rows share are counted. Bandwidth is measured in every round.
    """
    cores = pin(threads)
    kernels.set_threads(threads)
    kind = KINDS[
        checkpoint_type(**wanted) if wanted["weights"] in ("half", "bf16") else wanted["weights"]
    ]
    if blocks is None:
        layer = make_layer(SHAPES[shape], partial(packed, kind), partial(stack, kind))
    else:
        own = SHAPES[shape]
        width = BLOCKS[blocks].numbers
        if any(size % width for size in (own.hidden, own.units, own.heads * own.head_dim)):
            raise UserError(f"--blocks {blocks}: {shape} has rows that are no {width} numbers each")
        of = next(number for number, one in formats.KINDS.items() if one is BLOCKS[blocks])
        layer = make_layer(own, partial(in_blocks, of), partial(stack_in_blocks, of))
    with progress_bar(pairs + WARM_UP, "rounds") as step:
        found = [Found(count) for count in rows]
        for number in range(-WARM_UP, pairs):
            step("warming up" if number < 0 else "")
            bandwidth = 1e9 * bandwidth_gb_s(budget_s=PROBE_S)
            for one in found:
                measured = run_pass(layer, one.rows, number)
                if number >= 0:
                    one.add(measured, bandwidth)
    told = {"kind": blocks or kind.name, "isa": kernels.isa().name, "shape": shape, "cores": cores}
    result = {**told, "rows": [one.as_json() for one in found]}
    report(result, as_json, lambda: show(told, found))


@dataclass(frozen=True)
class Measured:
    """A pass: its seconds, the experts that it went through, and the bytes that it read."""

    seconds: float
    unique: int
    read_bytes: int


class Found:
    """The seconds of passes over so many rows, and of reading their weights, round by round."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seconds: list[float] = []
        self.reading: list[float] = []
        self.unique: list[float] = []

    def add(self, measured: Measured, bandwidth: float) -> None:
        """Add a pass."""
        self.seconds.append(measured.seconds)
        self.unique.append(float(measured.unique))
        self.reading.append(measured.read_bytes / bandwidth)

    @property
    def ratio(self) -> Estimate:
        return ratio(self.seconds, self.reading)

    def as_json(self) -> dict[str, Any]:
        bound = BOUND.get(self.rows)
        return {
            "rows": self.rows,
            "experts": estimate(self.unique).as_json(),
            "seconds": estimate(self.seconds).as_json(),
            "reading_s": estimate(self.reading).as_json(),
            "ratio": self.ratio.as_json(),
            "bound": bound,
            "holds": holds(self.ratio, bound),
        }


def show(told: dict[str, Any], found: Sequence[Found]) -> None:
    click.echo(
        f"{told['kind']} layer of {told['shape']}, {told['isa']}, {len(told['cores'])} core(s)"
    )
    cells = [
        (
            one.rows,
            estimate(one.unique).median,
            1e3 * estimate(one.seconds).median,
            1e3 * estimate(one.reading).median,
            str(one.ratio),
            *verdict(one.ratio, BOUND.get(one.rows)),
        )
        for one in found
    ]
    print_table(("rows", "experts", "ms", "reading ms", "ratio (95 %)", "bound", "holds"), cells)


def filled(matrix: PackedMatrix) -> PackedMatrix:
    """A matrix with random weights of a kind that numbers are packed as."""
    numbers = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1))
    size = matrix.n * matrix.k
    weight = numbers.repeat(-(-size // len(numbers)))[:size].view(matrix.n, matrix.k)
    matrix.pack((weight / matrix.k**0.5).to(STORED[Kind(matrix.kind)]))
    return matrix


def packed(kind: Kind, n: int, k: int) -> PackedMatrix:
    """A random matrix [n, k]."""
    return filled(PackedMatrix(kind, n, k))


def stack(kind: Kind, count: int, n: int, k: int) -> list[PackedMatrix]:
    """Random matrices [n, k] side by side."""
    return [filled(matrix) for matrix in stacked_matrices(kind, count, n, k)]


def in_blocks(type: int, n: int, k: int) -> PackedMatrix:
    """A random matrix [n, k] in blocks of a type."""
    return random_blocks([Part(type, n)], k, None, 1)


def stack_in_blocks(type: int, count: int, n: int, k: int) -> list[PackedMatrix]:
    """Random matrices [n, k] in blocks of a type, side by side."""
    one = random_blocks([Part(type, n)], k, None, 1)
    matrices: list[PackedMatrix] = [*stacked(one, count)]
    for matrix in matrices:
        memmove(matrix.struct.packed, one.struct.packed, one.nbytes)
    return matrices


def make_layer(
    shape: Mixed,
    matrix: Callable[[int, int], PackedMatrix],
    stack: Callable[[int, int, int], list[PackedMatrix]],
) -> DecoderLayer:
    """A layer of random weights, of matrices [n, k] and of stacks of them."""
    generator = torch.Generator().manual_seed(2)
    logits = PackedMatrix(Kind.FP32, shape.experts, shape.hidden)
    logits.pack(torch.randn(shape.experts, shape.hidden, generator=generator))
    hidden, inner = shape.hidden, shape.heads * shape.head_dim
    queries = inner + 2 * shape.kv_heads * shape.head_dim
    plan = LayerPlan(
        index=0,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        qkv=matrix(queries, hidden),
        output=matrix(hidden, inner),
        gate_up=None,
        down=None,
        attention_norm=Norm(torch.ones(hidden)),
        mlp_norm=Norm(torch.ones(hidden)),
        experts=ExpertsPlan(
            RouterPlan(logits, shape.chosen, normalised=True),
            stack(shape.experts, 2 * shape.units, hidden),
            stack(shape.experts, hidden, shape.units),
        ),
    )
    return DecoderLayer(plan)


def run_pass(layer: DecoderLayer, rows: int, number: int) -> Measured:
    """One pass over random rows."""
    plan = layer.plan
    assert plan.experts is not None
    assert plan.qkv is not None
    states = torch.randn(rows, plan.qkv.k, generator=torch.Generator().manual_seed(number + 9))
    keys, values = new_cache(
        layers=1, kv_heads=plan.kv_heads, head_dim=plan.head_dim, capacity=rows
    )
    seen = LayerPass(torch.arange(rows), [CacheRows(keys, values, 0, rows)])
    added = (c_int64 * 3)()
    seen.time_parts(addressof(added))
    began = time.perf_counter()
    layer.run(seen, states)
    seconds, unique = time.perf_counter() - began, added[2]
    one = plan.experts.gate_up[0].nbytes + plan.experts.down[0].nbytes
    shared = sum(matrix.nbytes for matrix in (*plan.matrices, plan.experts.router.logits))
    return Measured(seconds, unique, unique * one + shared)
