"""What states in trees cost: a tree of 16 rows beside a chain of 16, the memory of a tree beside
copies of the states, and a prompt with and without the recurrence.

    python tests/measures/states.py [--shape Qwen3.5-4B] [--weights int8] [--threads 1]

One layer of each kind with the sizes of a configuration below is filled with random numbers. Ways
are called in turn, and medians are compared.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import CacheRows, LayerPlan, Norm, lay_paths, new_cache
from dovetail.workers.kernels.states import ScanPlan, ScanRule
from dovetail.workers.models.backends.packing import DTYPES
from dovetail.workers.models.recurrent.states import RecurrentStates

NODES, PROMPT = 16, 256


@dataclass(frozen=True)
class Shape:
    """The sizes of a layer with a gated delta rule."""

    hidden: int
    units: int
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128


SHAPES = {
    "Qwen3.5-27B": Shape(5120, 17408, 16, 48),
    "Qwen3.5-4B": Shape(2560, 9216, 16, 32),
    "Qwen3.5-0.8B": Shape(1024, 3584, 16, 16),
}


def matrix(kind: Kind, n: int, k: int) -> PackedMatrix:
    packed = PackedMatrix(kind, n, k)
    packed.pack((torch.randn(n, k) * k**-0.5).to(DTYPES[kind]))
    return packed


def plan_of(shape: Shape, kind: Kind) -> LayerPlan:
    keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
    scan = ScanPlan(
        ScanRule.GATED_DELTA,
        torch.randn(4, 2 * keys + values) * 0.3,
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        decay=-torch.rand(shape.value_heads),
        step_bias=torch.randn(shape.value_heads),
        norm=torch.ones(shape.value_dim),
        norm_width=shape.value_dim,
        query_scale=shape.key_dim**-0.5,
    )
    return LayerPlan(
        index=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        scale=0.0,
        qkv=matrix(kind, 2 * keys + 2 * values + 2 * shape.value_heads, shape.hidden),
        output=matrix(kind, shape.hidden, values),
        gate_up=matrix(kind, 2 * shape.units, shape.hidden),
        down=matrix(kind, shape.hidden, shape.units),
        attention_norm=Norm(torch.ones(shape.hidden)),
        mlp_norm=Norm(torch.ones(shape.hidden)),
        scan=scan,
    )


def without_recurrence(plan: LayerPlan) -> LayerPlan:
    """The same layer with a convolution alone in the place of its state, as wide as its values."""
    assert plan.scan is not None
    width = plan.scan.value_heads * plan.scan.value_dim
    scan = ScanPlan(ScanRule.SHORT_CONVOLUTION, torch.randn(4, width) * 0.3)
    kind = Kind(plan.qkv.kind)
    return replace(plan, scan=scan, qkv=matrix(kind, 3 * width, plan.qkv.k))


def paths_of(parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


CHAIN = list(range(-1, NODES - 1))
TREE = [-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 9, 10]
"""A root, three children, and branches of up to six levels."""


def pass_of(states: RecurrentStates, committed: int, parents: Sequence[int] | None) -> LayerPass:
    """A pass of a tree behind committed rows; None: a part of a prompt from the beginning."""
    count = PROMPT if parents is None else len(parents)
    keys, values = new_cache(layers=1, kv_heads=1, head_dim=1, capacity=committed + count)
    paths = None
    if parents is not None:
        slots = [[committed + slot for slot in path] for path in paths_of(parents)]
        paths = lay_paths(committed, slots)
    rows = states.rows(committed, committed, count, chain=parents is None)
    segment = CacheRows(keys, values, committed, count, paths, rows)
    return LayerPass(torch.zeros(count, dtype=torch.int64), [segment])


def in_turn(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median seconds of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            start = perf_counter()
            way()
            if turn:
                times[name].append(perf_counter() - start)
    return {name: median(found) for name, found in times.items()}


def measure(name: str, shape: Shape, kind: Kind, rounds: int) -> None:
    plan = plan_of(shape, kind)
    assert plan.scan is not None
    layer, plain = DecoderLayer(plan), DecoderLayer(without_recurrence(plan))
    one, other = [plan.scan.shape], [plain.plan.scan.shape] if plain.plan.scan else []
    hidden, many = torch.randn(NODES, shape.hidden), torch.randn(PROMPT, shape.hidden)
    behind = RecurrentStates(one)
    layer.run(pass_of(behind, 0, None), many.clone())

    def walk(parents: Sequence[int]) -> Callable[[], None]:
        rows = pass_of(behind, PROMPT, parents)
        return lambda: layer.run(rows, hidden.clone())

    def prompt(of: DecoderLayer, shapes: list) -> Callable[[], None]:  # type: ignore[type-arg]
        return lambda: of.run(pass_of(RecurrentStates(shapes), 0, None), many.clone())

    seconds = in_turn({"tree": walk(TREE), "chain": walk(CHAIN)}, 3 * rounds)
    prompts = in_turn({"with": prompt(layer, one), "without": prompt(plain, other)}, rounds)
    weights = layer.plan.qkv.n - plain.plan.qkv.n
    state, row = one[0].state, one[0].row
    print(f"{name}, {kind.name}, {kernels.threads()} threads, {kernels.isa().name}")
    print(
        f"  tree of {NODES} / chain of {NODES}: {seconds['tree'] / seconds['chain']:.3f}"
        f"  ({seconds['tree'] * 1e3:.2f} ms a layer)"
    )
    print(f"  factors of a row / copy of the state: {row / state:.3f}  ({row * 4 / 1024:.0f} KiB)")
    print(
        f"  {PROMPT} rows of a prompt with / without recurrence: "
        f"{prompts['with'] / prompts['without']:.3f}  ({prompts['with'] * 1e3:.1f} ms a layer, "
        f"{weights:+d} outputs)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--weights", default="int8", choices=["fp32", "bf16", "int8"])
    parser.add_argument("--shape", default="Qwen3.5-4B", choices=SHAPES)
    given = parser.parse_args()
    kernels.set_threads(given.threads)
    torch.manual_seed(0)
    measure(given.shape, SHAPES[given.shape], Kind[given.weights.upper()], given.rounds)


if __name__ == "__main__":
    main()
