"""The command `bytes`: whether a token has the same bytes alone, in a tree and in a chunk of a
prompt.

These are its keys and values, the hidden states behind every layer, and its logits.

The text is computed one token at a time under the first instruction set with one thread; everything
else is compared with that, bit by bit.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.models import SHAPES, token_row
from benchmarks.options import ISAS, Command, Numbers, option, options, pin, report, written_model
from dovetail.launch.console.terminal import print_table, progress_bar
from dovetail.workers import kernels
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass
from dovetail.workers.kernels.layer_plan import LANES
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.backends.fused import Kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment

CHAIN = 16
"""The last tokens of the text are the ones that are put into trees."""
NEIGHBOURS = 20
"""Other nodes of such a tree, and rows of a second session in the same pass."""
TREES = 5
PARTS = ("keys", "values", "features", "logits")


@click.command("bytes", cls=Command)
@option(
    "--weights",
    type=click.Choice(("fp32", "half", "int8")),
    multiple=True,
    default=("fp32", "half", "int8"),
    help="Can be repeated.",
)
@option(
    "--isa",
    "isas",
    type=click.Choice(ISAS),
    multiple=True,
    help="Can be repeated.  [default: all here but PLAIN]",
)
@option(
    "--chunks", type=Numbers(), default="1,7,64,256,512", help="Rows of the passes of a prompt."
)
@option("--length", type=click.IntRange(min=32), default=528, help="Tokens of the text.")
@option("--shape", type=click.Choice(tuple(SHAPES)), default="1b", help="Sizes of a layer.")
@option("--layers", type=click.IntRange(min=1), default=2, help="Decoder layers.")
@options("checkpoint", "threads", "models", "json")
def bytes_command(
    weights: tuple[str, ...],
    isas: tuple[str, ...],
    chunks: tuple[int, ...],
    length: int,
    threads: int,
    as_json: bool,
    **model: Any,
) -> None:
    """Check that keys, values, features (hidden states) and logits of a token are the same bytes
    everywhere.

    Tokens are computed alone, in chunks of a prompt, and in trees whose nodes lie in any slots
    beside any neighbours and another session, under every instruction set and with --threads. All
    are compared with one token at a time under the first instruction set with one thread. The exit
    code is 1 if anything differs.
    """
    pin(threads)
    caps = (
        [kernels.Isa[name] for name in isas]
        or [isa for isa in kernels.isas() if isa is not kernels.Isa.PLAIN]
        or list(kernels.isas())
    )
    found = []
    with progress_bar(len(weights) * steps(caps, chunks), "computations") as step:
        for kind in weights:
            with written_model(weights=kind, **model) as folder:
                subject = Subject(
                    load_language_model(str(folder), weights=kind, device="cpu", backend="kernels"),
                    length,
                )
                for isa, place, parts in compare(subject, caps, chunks, threads, step):
                    found.append({"weights": kind, "isa": isa, "place": place, "differing": parts})
    result = {
        "shape": model["shape"],
        "layers": model["layers"],
        "tokens": length,
        "threads": threads,
        "reference": caps[0].name,
        "rows": found,
    }
    report(result, as_json, lambda: show(result))
    raise SystemExit(any(row["differing"] for row in found))


def show(result: Mapping[str, Any]) -> None:
    what = (
        f"{result['tokens']} tokens, {result['layers']} layers of {result['shape']}, "
        f"{result['threads']} thread(s)"
    )
    click.echo(f"{what}: keys, values, features, logits against {result['reference']} alone")
    verdicts: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        told = f"{'+'.join(row['differing'])} DIFFER" if row["differing"] else "same bytes"
        verdicts.setdefault((row["weights"], row["isa"]), {})[row["place"]] = told
    places = list(dict.fromkeys(("alone", *(row["place"] for row in result["rows"]))))
    print_table(
        ("weights", "instructions", *places),
        [
            (*where, *(told.get(place, "reference") for place in places))
            for where, told in verdicts.items()
        ],
    )


class Watched:
    """One layer, run as ever; what it leaves is handed on."""

    def __init__(self, layer: DecoderLayer, left: list[Tensor]) -> None:
        self._layer, self._left = layer, left

    def run(self, rows: LayerPass, states: Tensor) -> None:
        """The first layer's: it begins a pass."""
        self._left[:] = [states]
        self._layer.run(rows, states)
        self._left.append(states.clone())

    def run_next(self, rows: LayerPass) -> None:
        self._layer.run_next(rows)
        self._left.append(self._left[0].clone())


@dataclass
class Record:
    """The results for T tokens, token by token along the first dimension."""

    keys: Tensor
    values: Tensor
    features: Tensor
    logits: Tensor

    def differing(self, other: "Record") -> list[str]:
        """The parts whose bytes differ."""
        return [
            part
            for part in PARTS
            if not torch.equal(
                getattr(self, part).view(torch.int32), getattr(other, part).view(torch.int32)
            )
        ]

    def last(self, count: int) -> "Record":
        return Record(*(getattr(self, part)[-count:].contiguous() for part in PARTS))


class Subject:
    """A model on the kernels, and a text."""

    def __init__(self, model: LanguageModel, length: int) -> None:
        self._model = model
        self._left = _watch(model)
        self.text = token_row(length, model.vocabulary_size)

    def in_chunks(self, rows: int) -> Record:
        """The text, so many tokens a pass."""
        cache, passes = self._new_cache(0), []
        for start in range(0, len(self.text), rows):
            tokens = self.text[start : start + rows]
            passes.append(
                self._run(
                    tokens, range(start, start + len(tokens)), [Segment(cache, start, len(tokens))]
                )
            )
            cache.keep(range(start, start + len(tokens)), len(tokens))
        features, logits = (torch.cat(parts) for parts in zip(*passes, strict=True))
        return Record(*_slots(cache, range(len(self.text))), features, logits)

    def in_tree(self, seed: int) -> Record:
        """The last tokens of the text as a branch of a tree whose nodes lie in any slots, beside a
        second session's rows in the same pass."""
        chance = random.Random(seed)
        prefix = len(self.text) - CHAIN
        cache, other = self._filled(self.text[:prefix]), self._filled(self.text[: 7 + seed])
        tokens, parents = _grow(self.text[prefix:], chance, self._model.vocabulary_size)
        slots = chance.sample(range(prefix, prefix + len(tokens)), len(tokens))
        paths = [[slots[node] for node in _ancestors(parents, node)] for node in range(len(tokens))]
        order = sorted(range(len(tokens)), key=lambda node: slots[node])
        mine = Segment(
            cache, prefix, len(tokens), Paths.of(prefix, [paths[node] for node in order])
        )
        theirs = Segment(other, 7 + seed, NEIGHBOURS)
        positions = [prefix - 1 + len(paths[node]) for node in order]
        strangers = token_row(NEIGHBOURS, self._model.vocabulary_size)
        if seed % 2:
            segments, at = [theirs, mine], NEIGHBOURS
            features, logits = self._run(
                [*strangers, *(tokens[n] for n in order)],
                [*range(7 + seed, 7 + seed + NEIGHBOURS), *positions],
                segments,
            )
        else:
            segments, at = [mine, theirs], 0
            features, logits = self._run(
                [*(tokens[n] for n in order), *strangers],
                [*positions, *range(7 + seed, 7 + seed + NEIGHBOURS)],
                segments,
            )
        rows = torch.tensor([at + order.index(node) for node in range(CHAIN)])
        return Record(
            *_slots(cache, [slots[node] for node in range(CHAIN)]), features[rows], logits[rows]
        )

    def _filled(self, tokens: Sequence[int]) -> BlockedCache:
        cache = self._new_cache(NEIGHBOURS)
        self._run(tokens, range(len(tokens)), [Segment(cache, 0, len(tokens))])
        cache.keep(range(len(tokens)), len(tokens))
        return cache

    def _new_cache(self, more: int) -> BlockedCache:
        cache = self._model.new_cache(len(self.text) + more)
        assert isinstance(cache, BlockedCache)
        cache.keys.fill_(float("nan"))  # what nobody wrote must not matter
        cache.values.fill_(float("nan"))
        return cache

    def _run(
        self, tokens: Sequence[int], positions: Sequence[int], segments: Sequence[Segment]
    ) -> tuple[Tensor, Tensor]:
        logits = self._model.forward(torch.tensor(tokens), torch.tensor(positions), segments)
        return torch.stack(self._left[1:], dim=1), logits


def compare(
    subject: Subject,
    isas: Sequence[kernels.Isa],
    chunks: Sequence[int],
    threads: int,
    step: Callable[[str], None],
) -> Iterator[tuple[str, str, list[str]]]:
    """(instruction set, where the tokens are, the parts that differ) for every place under every
    instruction set."""
    kernels.use_isa(isas[0])
    kernels.set_threads(1)
    step(f"{isas[0].name} alone")
    alone = subject.in_chunks(1)
    kernels.set_threads(threads)
    for isa in isas:
        kernels.use_isa(isa)
        if isa is not isas[0]:
            step(f"{isa.name} alone")
            yield isa.name, "alone", alone.differing(subject.in_chunks(1))
        for rows in chunks:
            step(f"{isa.name} chunks of {rows}")
            yield isa.name, f"chunks of {rows}", alone.differing(subject.in_chunks(rows))
        step(f"{isa.name} trees")
        branch = alone.last(CHAIN)
        trees = [part for seed in range(TREES) for part in branch.differing(subject.in_tree(seed))]
        yield isa.name, "tree", [part for part in PARTS if part in trees]


def steps(isas: Sequence[kernels.Isa], chunks: Sequence[int]) -> int:
    """Return the number of times that `compare` calls `step`."""
    return len(isas) * (2 + len(chunks))


def _watch(model: LanguageModel) -> list[Tensor]:
    """A list that every pass fills anew: the states that the layers change in place, then [T,
    hidden] as each layer left them."""
    back_end, left = model._back_end, list[Tensor]()
    assert isinstance(back_end, Kernels)
    back_end._fused._layers = [Watched(layer, left) for layer in back_end._layers]  # type: ignore[misc]
    return left


def _grow(
    branch: Sequence[int], chance: random.Random, vocabulary: int
) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree: nodes 0..15 are `branch`, the others hang anywhere. -1: the
    committed rows."""
    tokens = [*branch, *(chance.randrange(vocabulary) for _ in range(NEIGHBOURS))]
    parents = [*range(-1, CHAIN - 1), *(chance.randrange(-1, CHAIN + i) for i in range(NEIGHBOURS))]
    return tokens, parents


def _ancestors(parents: Sequence[int], node: int) -> list[int]:
    """Return the node and its ancestors by depth, the node itself last."""
    return [] if node < 0 else [*_ancestors(parents, parents[node]), node]


def _slots(cache: BlockedCache, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys and values of these slots, [slots, layers, kv_heads, head_dim] each."""
    at = torch.tensor(list(slots))
    keys = cache.keys[:, :, at // LANES, :, at % LANES]
    return keys.contiguous(), cache.values[:, :, at].permute(2, 0, 1, 3).contiguous()
