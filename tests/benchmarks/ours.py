"""Our side: a pass of the target over a tree's rows behind so many cached tokens, and a prefill, as
the target worker does them."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import obey, timed
from benchmarks.models import draw_tree, token_row
from dovetail.launch.machine.cores import parse_place
from dovetail.launch.machine.topology import Place, bind
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.kernels import PackedMatrix
from dovetail.workers.kernels.layer_plan import LANES
from dovetail.workers.kernels.shards import Shard
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.serving.sharded import begin_shards, settle_target
from dovetail.workers.verifier import Verifier, tree_paths
from support.opening import opening

MOST_ROWS = 64
FILLED = 1024
"""Cached tokens that are computed; those behind them have the same keys and values."""


def prepare(
    folder: Path,
    weights: str,
    backend: str,
    context: int,
    threads: int,
    cache_type: str,
    place: Place,
) -> tuple[Any, Any]:
    torch.set_num_threads(threads)
    if place.shards:
        begin_shards([Shard(cores, node) for cores, node in place.shards_at_nodes])
    model = load_language_model(
        str(folder), weights=weights, device="cpu", backend=backend, cache=cache_type
    )
    settle_target(model)
    cache = model.new_cache(context + MOST_ROWS)
    vocabulary = model.vocabulary_size
    fill(model, cache, context)

    def verify(rows: int) -> Mapping[str, Any]:
        tree = draw_tree(rows - 1)

        def work() -> None:
            positions = torch.tensor([context + depth for depth in (0, *tree.depths)])
            model.forward(
                torch.tensor(token_row(rows, vocabulary)),
                positions,
                [Segment(cache, context, rows, tree_paths(tree, context) if tree else None)],
            )

        return timed(work)

    def prefill(rows: int) -> Mapping[str, Any]:
        verifier = Verifier(model, Spans())
        prompt = token_row(rows, vocabulary)
        return timed(
            lambda: [
                *verifier.open(
                    opening(
                        1,
                        prompt,
                        key=bytes(32),
                        capacity=rows + 1,
                        sampling=Sampling(temperature=0.0),
                        tree=TreeSettings(),
                    )
                )
            ]
        )

    def linears(rows: int) -> Mapping[str, Any]:
        inputs = {matrix.k: torch.randn(rows, matrix.k) for matrix in packed_matrices(model)}

        def work() -> None:
            for matrix in packed_matrices(model):
                matrix.linear(inputs[matrix.k])

        return timed(work)

    def use(isa: str) -> Mapping[str, Any]:
        kernels.use_isa(kernels.Isa[isa])
        return {}

    hello = {
        "engine": f"dovetail {weights}",
        "backend": model.backend,
        "kernels": model.kernels,
        "choice": model.choice,
    }
    return hello, {"linears": linears, "verify": verify, "prefill": prefill, "use": use}


def fill(model: LanguageModel, cache: Any, context: int) -> None:
    """Have so many cached tokens: copies of the first ones, one behind the other."""
    first = min(context, FILLED)
    model.forward(
        torch.tensor(token_row(first, model.vocabulary_size)),
        torch.arange(first),
        [Segment(cache, 0, first)],
        rows=torch.tensor([first - 1]),
    )
    cache.keep(range(first), first)
    if context == first:
        return
    blocks = FILLED // LANES
    for start in range(first, context, first):
        stop = min(context, start + first)
        block, last = start // LANES, -(-stop // LANES)
        cache.values[..., start:stop, :] = cache.values[..., : stop - start, :]
        cache.keys[..., block:last, :, :] = cache.keys[..., : min(blocks, last - block), :, :]
    cache.length = context


def packed_matrices(model: LanguageModel) -> Iterator[PackedMatrix]:
    """Every matrix that a pass over the kernels multiplies with, in the order of a pass; none on
    the library."""
    if isinstance(back_end := model._back_end, Kernels):
        for layer in back_end._layers:
            yield from (layer.plan.qkv, layer.plan.output, layer.plan.gate_up, layer.plan.down)
        yield back_end._head._matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache", dest="cache_type", default="fp32")
    parser.add_argument("--cores", default="")
    parser.add_argument("--memory-nodes", default="")
    arguments = vars(parser.parse_args())
    cores, nodes = arguments.pop("cores"), arguments.pop("memory_nodes")
    place = parse_place(cores, nodes) if cores else Place(())
    if cores:
        bind(place)
    obey(lambda: prepare(**arguments, place=place))


if __name__ == "__main__":
    main()
