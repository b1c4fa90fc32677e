"""Every family on every back end: what transformers computes, the same with any tree, and with the
kernels the same bytes wherever a token is computed."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.protocol.tree import TokenTree
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.verifier import Verifier
from support.decoded import logits_of
from support.models import (
    FAMILIES,
    VOCABULARY,
    cache_row,
    reference_logits,
    reference_tokens,
    spoil,
)
from support.opening import opening

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11, 40, 2, 7, 7, 19]
WAYS = {
    "library fp32": ("library", "fp32", torch.float32, 1e-4),
    "library half": ("library", "half", torch.float16, 1e-4),
    "library bf16": ("library", "bf16", torch.float32, 0.1),
    "kernels fp32": ("kernels", "fp32", torch.float32, 1e-4),
    "kernels half": ("kernels", "half", torch.float16, 1e-4),
    "kernels half of bf16": ("kernels", "half", torch.bfloat16, 1e-4),
    "kernels int8": ("kernels", "int8", torch.float32, 0.2),
}
"""Back end, weights, type of the checkpoint, and how far logits may lie from transformers' eager
fp32 ones, relative to their norm."""
RARE = ("library half", "kernels half of bf16")
"""Ways of which others here have the back end, and others the weights."""
DRAWN = ("llama", "gemma2")  # families that are computed in all ways
ON_KERNELS = [way for way, (backend, *_) in WAYS.items() if backend == "kernels"]
KEY = bytes(range(16))
LONG = 640
LENGTHS = {"short": (150, (1, 7, 128)), "long": (530, (1, 7, 64, 256, 512))}
"""Tokens of a sequence, and of the chunks in which it is read; it takes hundreds of passes to read
a long one token by token."""

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
COMMON = ("library fp32", "kernels half")  # ways in which every family is computed


def pairs(ways: Sequence[str]) -> list[Any]:
    """Every family in the common ways, and some in each; the rare ways are slow."""
    return [
        pytest.param(
            family,
            way,
            marks=[
                *([needs_kernels] if way in ON_KERNELS else []),
                *([SLOW] if way in RARE else []),
            ],
        )
        for family in FAMILIES
        for way in ways
        if way in COMMON or family in DRAWN
    ]


SLOW = pytest.mark.slow
ALL_PAIRS, PAIRS_ON_KERNELS = pairs([*WAYS]), pairs(ON_KERNELS)
WAYS_ON_KERNELS = [pytest.param(way, marks=[SLOW] if way in RARE else []) for way in ON_KERNELS]


class Models:
    """Models by family and way, each written and loaded once."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._folders: dict[tuple[str, torch.dtype], Path] = {}
        self._models: dict[tuple[str, str], LanguageModel] = {}

    def get(self, family: str, way: str) -> LanguageModel:
        backend, weights, dtype, _ = WAYS[way]
        if (place := (family, dtype)) not in self._folders:
            self._folders[place] = FAMILIES[family](
                self._factory.mktemp(family), dtype=dtype, context=LONG
            )
        if (key := (family, way)) not in self._models:
            self._models[key] = load_language_model(
                str(self._folders[place]), weights=weights, device="cpu", backend=backend
            )
        return self._models[key]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory)


@pytest.fixture
def model(family: str, way: str, models: Models) -> LanguageModel:
    return models.get(family, way)


@pytest.mark.parametrize(("family", "way"), ALL_PAIRS)
def test_logits_are_those_of_transformers_eager(model: LanguageModel, way: str) -> None:
    expected = reference_logits(model.checkpoint.folder, TOKENS)
    error = float((logits_of(model, TOKENS) - expected).norm() / expected.norm())
    assert error <= WAYS[way][3]
    assert model.backend == way.split()[0]


def decode(
    model: LanguageModel,
    sampling: Sampling,
    count: int,
    trees: random.Random | None,
    hints: list[int],
) -> list[int]:
    """Tokens after the prompt, verified with random trees, half of which follow `hints`."""
    verifier = Verifier(model, Spans())
    prompt, shape = tuple(TOKENS), TreeSettings(policy="dynamic", gamma=12, depth=6)
    (first,) = verifier.open(
        opening(
            1, prompt, key=KEY, capacity=len(prompt) + count + 13, sampling=sampling, tree=shape
        )
    )
    assert isinstance(first, First)
    log = [*prompt, first.token]
    for number in range(1, 1000):
        if len(log) >= len(prompt) + count:
            break
        tree = TokenTree() if trees is None else guess(trees, hints[len(log) - len(prompt) :])
        item = VerifyItem(
            session=1, round=number, prefix=len(log), tokens=tree.tokens, parents=tree.parents
        )
        (verdict,) = verifier.verify([item])
        assert isinstance(verdict, Verdict)
        log += [*(tree.tokens[node] for node in verdict.item.accepted), verdict.item.bonus]
    return log[len(prompt) : len(prompt) + count]


def guess(trees: random.Random, hints: list[int]) -> TokenTree:
    """A tree of up to 12 nodes: a chain of some hints, siblings that are wrong before and behind
    its nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    above = -1
    for hint in hints[: trees.randrange(5)]:
        siblings = [
            hint,
            *(
                t
                for t in (trees.randrange(VOCABULARY) for _ in range(trees.randrange(2)))
                if t != hint
            ),
        ]
        trees.shuffle(siblings)
        for token in siblings:
            tokens.append(token)
            parents.append(above)
        above = len(tokens) - len(siblings) + siblings.index(hint)
    return TokenTree(tuple(tokens), tuple(parents))


@pytest.mark.parametrize(("family", "way"), ALL_PAIRS)
def test_any_tree_gives_the_tokens_that_one_at_a_time_gives_and_transformers_too(
    model: LanguageModel, way: str
) -> None:
    sampling = Sampling(temperature=1.0)
    alone = decode(model, sampling, 24, None, [])
    for seed in range(3):
        assert decode(model, sampling, 24, random.Random(seed), alone) == alone
    if WAYS[way][3] <= 1e-4:
        assert alone[:16] == reference_tokens(
            model.checkpoint.folder, TOKENS, 16, key=KEY, sampling=sampling
        )


@pytest.fixture
def every_isa() -> Iterator[list[kernels.Isa]]:
    """The instruction sets of this machine; afterwards the best one is in use again."""
    before = kernels.isa()
    yield list(kernels.isas())
    kernels.use_isa(before)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


class Bytes:
    """The results of a model for a sequence: logits and last hidden states by token, keys and
    values by slot."""

    def __init__(self, model: LanguageModel, tokens: list[int], chunks: list[int]) -> None:
        self.cache = model.new_cache(len(tokens))
        logits, self._states = [], list[Tensor]()
        norm = model._back_end._norm  # type: ignore[attr-defined]
        hook = norm.register_forward_pre_hook(
            lambda module, given: self._states.append(
                given[0].reshape(-1, given[0].shape[-1]).clone()
            )
        )
        start = 0
        for count in chunks:
            part = torch.tensor(tokens[start : start + count])
            logits.append(
                model.forward(
                    part, torch.arange(start, start + count), [Segment(self.cache, start, count)]
                )
            )
            self.cache.keep(range(start, start + count), count)
            start += count
        hook.remove()
        self.logits, self.states = torch.cat(logits), torch.cat(self._states)

    def equals(self, other: "Bytes", count: int) -> bool:
        """Return whether the first `count` tokens have the same bytes."""
        mine, theirs = (
            (of.logits[:count], of.states[:count], *of.rows(count)) for of in (self, other)
        )
        return all(same_bytes(*pair) for pair in zip(mine, theirs, strict=True))

    def rows(self, count: int) -> tuple[Tensor, ...]:
        """Keys and values of the first slots."""
        return tuple(cache_row(self.cache, slot) for slot in range(count))


def chunks_of(size: int, total: int) -> list[int]:
    return [min(size, total - start) for start in range(0, total, size)]


@needs_kernels
@pytest.mark.parametrize(
    ("family", "way", "length"),
    [
        *(pytest.param(*pair.values, "short", marks=pair.marks) for pair in PAIRS_ON_KERNELS),
        pytest.param("llama", "kernels int8", "long", marks=SLOW),
        pytest.param("gemma2", "kernels half", "long", marks=SLOW),
    ],
)
def test_a_token_has_the_same_bytes_alone_and_in_any_chunk_on_every_instruction_set(
    family: str, way: str, length: str, models: Models, every_isa: list[kernels.Isa]
) -> None:
    model, (total, chunks) = models.get(family, way), LENGTHS[length]
    numbers = random.Random(4)
    tokens = [numbers.randrange(VOCABULARY) for _ in range(total)]
    alone = Bytes(model, tokens, chunks_of(1, total))
    for isa in every_isa:
        kernels.use_isa(isa)
        for size in chunks:
            count = total if size > 7 else 40
            assert Bytes(model, tokens[:count], chunks_of(size, count)).equals(alone, count), (
                isa,
                size,
            )


@needs_kernels
@pytest.mark.parametrize(("family", "way"), PAIRS_ON_KERNELS)
def test_a_token_has_the_same_bytes_in_any_slot_of_a_tree_with_any_neighbours_and_sessions_beside_it(  # noqa: E501
    model: LanguageModel, way: str, every_isa: list[kernels.Isa]
) -> None:
    path = TOKENS[9:14]
    alone = Bytes(model, TOKENS[:14], chunks_of(1, 14))
    for isa in every_isa:
        kernels.use_isa(isa)
        for seed in range(4):
            check_tree(model, alone, path, random.Random(seed))


def check_tree(model: LanguageModel, alone: Bytes, path: list[int], rng: random.Random) -> None:
    """The path's tokens among strangers, in slots of any distance, after nine committed tokens and
    beside another session."""
    start, slots = 9, [9]
    for _ in path[1:]:
        slots.append(slots[-1] + rng.randrange(1, 5))
    count = slots[-1] + 1 - start
    paths, tokens, positions = [], [], []
    for slot in range(start, start + count):
        if slot in slots:
            above = [s for s in slots if s < slot]
            tokens.append(path[slots.index(slot)])
        else:
            above = [s for s in slots if s < slot][: rng.randrange(1, 4)]
            tokens.append(rng.randrange(VOCABULARY))
        paths.append([*above, slot])
        positions.append(start + len(above))
    caches = [model.new_cache(64), model.new_cache(32)]
    for cache in caches:
        spoil(cache)
        model.forward(torch.tensor(TOKENS[:9]), torch.arange(9), [Segment(cache, 0, 9)])
        cache.keep(range(9), 9)
    other = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
    segments = [
        Segment(caches[1], 9, len(other)),
        Segment(caches[0], start, count, Paths.of(start, paths)),
    ]
    logits = model.forward(
        torch.tensor(other + tokens),
        torch.tensor([*range(9, 9 + len(other)), *positions]),
        segments,
    )[len(other) :]
    found = logits[[slot - start for slot in slots]]
    assert same_bytes(found, alone.logits[9:14])
    caches[0].keep(slots, len(slots))
    assert all(
        same_bytes(cache_row(caches[0], slot), cache_row(alone.cache, slot)) for slot in range(14)
    )


@needs_kernels
@pytest.mark.parametrize("way", WAYS_ON_KERNELS)
def test_a_token_has_the_same_bytes_with_any_number_of_threads(way: str, models: Models) -> None:
    model = models.get("qwen3", way)
    numbers = random.Random(5)
    tokens = [numbers.randrange(VOCABULARY) for _ in range(80)]
    alone = Bytes(model, tokens, chunks_of(1, 80))
    before = kernels.threads()
    try:
        for threads in (2, 3):
            kernels.set_threads(threads)
            assert Bytes(model, tokens, [1, 1, 14, 64]).equals(alone, 80)
    finally:
        kernels.set_threads(before)
