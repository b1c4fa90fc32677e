"""The command `recurrence`: the cost of the state in a layer with the gated delta rule, as ratios:
a prompt with the recurrence over one without, a tree over a chain, the memory of a node over a copy
of the state."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click
import torch

from benchmarks.experts import KINDS, STORED, WARM_UP
from benchmarks.measure import Estimate, estimate, ratio, take_turns
from benchmarks.options import (
    Command,
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
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import CacheRows, LayerPlan, Norm, new_cache
from dovetail.workers.kernels.states import ScanPlan, ScanRule
from dovetail.workers.models.recurrent import RecurrentStates
from dovetail.workers.models.segment import PROMPT_ROWS, Paths

BEHIND = PROMPT_ROWS
"""Rows before a tree."""
TAPS = 4
TREE = (-1, 0, 0, 0, 1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 9, 10)
"""Parents: a root, three children, and branches of up to six levels."""
CHAIN = tuple(range(-1, len(TREE) - 1))
PROMPT_BOUND, TREE_BOUND, MEMORY_BOUND = 1.15, 1.15, 0.1
"""The bounds: of the time of a prompt with the recurrence over that without, of a tree over a chain
of as many rows, and of the memory of a node over that of the state."""


@dataclass(frozen=True)
class Recurrent:
    """The sizes of a layer with the gated delta rule."""

    hidden: int
    units: int
    key_heads: int
    value_heads: int
    dim: int = 128

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def values(self) -> int:
        return self.value_heads * self.dim


SHAPES = {
    "0.8b": Recurrent(1024, 3584, 16, 16),
    "2b": Recurrent(2048, 6144, 16, 16),
    "4b": Recurrent(2560, 9216, 16, 32),
    "27b": Recurrent(5120, 17408, 16, 48),
}
"""Qwen3.5 of these sizes."""


@click.command(cls=Command)
@option("--shape", type=click.Choice([*SHAPES]), default="0.8b", help="Sizes of the layer.")
@option("--prompt", type=click.IntRange(min=1), default=512, help="Tokens of the prompt.")
@options("weights", "checkpoint", "pairs", "threads", "json")
def recurrence(
    shape: str, prompt: int, pairs: int, threads: int, as_json: bool, **wanted: Any
) -> None:
    """A layer with a state against one without, and its trees against chains.

    The layer without has a convolution alone in the place of the state, and an MLP that is wider by
    as many weights as its mixer lacks, so that both have the same products to compute.
    """
    cores = pin(threads)
    kernels.set_threads(threads)
    torch.manual_seed(0)
    kind = KINDS[
        checkpoint_type(**wanted) if wanted["weights"] in ("half", "bf16") else wanted["weights"]
    ]
    layer = make_layer(SHAPES[shape], kind)
    prompts = [prompt_side(of, prompt) for of in (layer, make_plain(SHAPES[shape], kind))]
    trees = tree_sides(layer)
    times: list[tuple[float, ...]] = []
    with progress_bar(pairs + WARM_UP, "rounds") as step:
        for number in range(-WARM_UP, pairs):
            step("warming up" if number < 0 else "")
            found = (*take_turns(prompts, number), *take_turns(trees, number))
            if number >= 0:
                times.append(found)
    with_it, without, tree, chain = (list(of_one) for of_one in zip(*times, strict=True))
    told = {"kind": kind.name, "isa": kernels.isa().name, "shape": shape, "cores": cores}
    figures = [
        Figure(f"prompt of {prompt} tokens, beside none", with_it, without, PROMPT_BOUND),
        Figure(f"tree of {len(TREE)} rows, beside a chain", tree, chain, TREE_BOUND),
    ]
    memory = node_memory(layer)
    result = {**told, "figures": [one.as_json() for one in figures], "memory": memory}
    report(result, as_json, lambda: show(told, figures, memory))


@dataclass(frozen=True)
class Figure:
    """Two sides of pairs, in seconds, and the most that their ratio may be."""

    name: str
    left: Sequence[float]
    right: Sequence[float]
    bound: float

    @property
    def ratio(self) -> Estimate:
        return ratio(self.left, self.right)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": estimate(self.left).as_json(),
            "beside_s": estimate(self.right).as_json(),
            "ratio": self.ratio.as_json(),
            "bound": self.bound,
            "holds": holds(self.ratio, self.bound),
        }


def show(told: dict[str, Any], figures: Sequence[Figure], memory: float) -> None:
    click.echo(
        f"{told['kind']} layer of {told['shape']}, {told['isa']}, {len(told['cores'])} core(s)"
    )
    cells = [compared(one.name, one.left, one.right, one.ratio, one.bound) for one in figures]
    print_table(("of the layer", "ms", "beside ms", "ratio (95 %)", "bound", "holds"), cells)
    kept = "yes" if memory <= MEMORY_BOUND else "NO"
    click.echo(f"memory of a node / copy of the state: {memory:.3f}, <= {MEMORY_BOUND:g}: {kept}")


def make_layer(shape: Recurrent, kind: Kind) -> DecoderLayer:
    """A layer of random weights."""
    scan = ScanPlan(
        ScanRule.GATED_DELTA,
        torch.randn(TAPS, 2 * shape.keys + shape.values) * 0.3,
        key_heads=shape.key_heads,
        value_heads=shape.value_heads,
        key_dim=shape.dim,
        value_dim=shape.dim,
        decay=-torch.rand(shape.value_heads),
        step_bias=torch.randn(shape.value_heads),
        norm=torch.ones(shape.dim),
        norm_width=shape.dim,
        query_scale=shape.dim**-0.5,
    )
    return DecoderLayer(_plan_of(shape, kind, scan))


def make_plain(shape: Recurrent, kind: Kind) -> DecoderLayer:
    """The layer without the recurrence, of as many weights."""
    scan = ScanPlan(ScanRule.SHORT_CONVOLUTION, torch.randn(TAPS, shape.values) * 0.3)
    lacking = 2 * shape.keys + 2 * shape.values + 2 * shape.value_heads - scan.widths[0]
    return DecoderLayer(_plan_of(replace(shape, units=shape.units + lacking // 3), kind, scan))


def _plan_of(shape: Recurrent, kind: Kind, scan: ScanPlan) -> LayerPlan:
    def matrix(n: int, k: int) -> PackedMatrix:
        packed = PackedMatrix(kind, n, k)
        packed.pack((torch.randn(n, k) * k**-0.5).to(STORED[kind]))
        return packed

    given, taken = scan.widths
    return LayerPlan(
        index=0,
        heads=0,
        kv_heads=0,
        head_dim=0,
        scale=0.0,
        qkv=matrix(given, shape.hidden),
        output=matrix(shape.hidden, taken),
        gate_up=matrix(2 * shape.units, shape.hidden),
        down=matrix(shape.hidden, shape.units),
        attention_norm=Norm(torch.ones(shape.hidden)),
        mlp_norm=Norm(torch.ones(shape.hidden)),
        scan=scan,
    )


def _width_of(layer: DecoderLayer) -> int:
    assert layer.plan.qkv is not None
    return layer.plan.qkv.k


def prompt_side(layer: DecoderLayer, tokens: int) -> Callable[[], float]:
    """The seconds of a prompt of a new session."""
    hidden = torch.randn(tokens, _width_of(layer))

    def run() -> float:
        states, rows = _states_of(layer), hidden.clone()
        began = time.perf_counter()
        for start in range(0, tokens, PROMPT_ROWS):
            part = rows[start : start + PROMPT_ROWS]
            layer.run(_prompt_pass(states, start, len(part)), part)
        return time.perf_counter() - began

    return run


def tree_sides(layer: DecoderLayer) -> list[Callable[[], float]]:
    """The seconds of a tree behind some rows, and of a chain of as many."""
    states, hidden = _states_of(layer), torch.randn(BEHIND, _width_of(layer))
    layer.run(_prompt_pass(states, 0, BEHIND), hidden)

    def side(parents: Sequence[int]) -> Callable[[], float]:
        rows = _tree_pass(states, parents)

        def run() -> float:
            own = hidden[: len(parents)].clone()
            began = time.perf_counter()
            layer.run(rows, own)
            return time.perf_counter() - began

        return run

    return [side(TREE), side(CHAIN)]


def node_memory(layer: DecoderLayer) -> float:
    """The memory that a node takes, over that of the state."""
    assert layer.plan.scan is not None
    sizes = layer.plan.scan.shape
    return sizes.row / sizes.state


def _states_of(layer: DecoderLayer) -> RecurrentStates:
    assert layer.plan.scan is not None
    return RecurrentStates([layer.plan.scan.shape])


def _prompt_pass(states: RecurrentStates, start: int, count: int) -> LayerPass:
    keys, values = new_cache(layers=1, kv_heads=1, head_dim=1, capacity=start + count)
    rows = states.rows(start, start, count, chain=True)
    return LayerPass(torch.arange(count), [CacheRows(keys, values, start, count, None, rows)])


def _tree_pass(states: RecurrentStates, parents: Sequence[int]) -> LayerPass:
    keys, values = new_cache(layers=1, kv_heads=1, head_dim=1, capacity=BEHIND + len(parents))
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), BEHIND + node])
    rows = states.rows(BEHIND, BEHIND, len(parents), chain=False)
    segment = CacheRows(keys, values, BEHIND, len(parents), Paths.of(BEHIND, paths), rows)
    return LayerPass(torch.arange(len(parents)), [segment])
