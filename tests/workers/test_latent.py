"""Attention over latents: that of keys and values made of them, the same bytes in any company, on
every instruction set and in caches of either type; and what is not computed is said."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.workers import kernels
from dovetail.workers.kernels import Kind, PackedMatrix
from dovetail.workers.kernels.experts import stacked_matrices
from dovetail.workers.kernels.layer import DecoderLayer, LayerPass, rotary_table
from dovetail.workers.kernels.layer_plan import (
    CODES,
    CacheRows,
    LatentPlan,
    LayerPlan,
    new_cache,
    stored_width,
)
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from support.architectures import VOCABULARY, write_tiny
from support.decoded import extend
from support.kernels import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_as_before")]

TEXT = 60
SIZES = {"q_lora_rank": 20, "kv_lora_rank": 28, "v_head_dim": 12, "qk_nope_head_dim": 10}
CACHED = 28 + 8


def load(folder: Path, kind: str = "youtu", **given: Any) -> LanguageModel:
    write_tiny(kind, folder, **SIZES)
    given = {"weights": "fp32", "device": "cpu"} | given
    return load_language_model(str(folder), **given)


@pytest.fixture(scope="module", params=["fp32", "half", "q8"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    folder = tmp_path_factory.mktemp("latent") / "model"
    return load(folder, backend="kernels", cache=request.param)


def text() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, VOCABULARY, (TEXT,), generator=generator).tolist()


def whole(model: LanguageModel) -> Tensor:
    return extend(model, model.new_cache(TEXT), text())


# ---- the kernels against keys and values that are made of latents ----

HEADS, RANK, PLAIN, ROTATED, VALUE, HIDDEN, LOW = 5, 44, 9, 6, 13, 32, 21
CONTEXT = 200


def matrix(weight: Tensor) -> PackedMatrix:
    packed = PackedMatrix(Kind.FP32, *weight.shape)
    packed.pack(weight.contiguous())
    return packed


def stack(weights: Tensor) -> list[PackedMatrix]:
    matrices = stacked_matrices(Kind.FP32, *weights.shape)
    for packed, weight in zip(matrices, weights, strict=True):
        packed.pack_alone(weight.contiguous())
    return matrices


class Made:
    """A layer of random numbers, and what it computes by keys and values in float64."""

    def __init__(self, *, low: bool, growth: bool = False) -> None:
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.generator, self.low = generator, low
        self.keys_up, self.values_up = random(HEADS, PLAIN, RANK), random(HEADS, VALUE, RANK)
        self.query_up = random(HEADS * (PLAIN + ROTATED), LOW)
        self.norms = 1 + random(RANK), 1 + random(LOW)
        self.rotary = rotary_table(torch.rand(ROTATED // 2, generator=generator), CONTEXT)
        if growth:
            self.rotary = replace(self.rotary, factors=1 + torch.arange(CONTEXT) / 100)
        first = LOW if low else HEADS * (PLAIN + ROTATED)
        latent = LatentPlan(
            RANK,
            PLAIN,
            ROTATED,
            self.norms[0],
            stack(self.keys_up.transpose(1, 2)),
            stack(self.values_up),
            matrix(self.query_up) if low else None,
            self.norms[1] if low else None,
            epsilon=1e-5,
        )
        self.layer = DecoderLayer(
            LayerPlan(
                index=0,
                heads=HEADS,
                kv_heads=1,
                head_dim=RANK + ROTATED,
                qkv=matrix(random(first + RANK + ROTATED, HIDDEN)),
                output=matrix(random(HIDDEN, HEADS * VALUE)),
                gate_up=matrix(random(2 * 16, HIDDEN)),
                down=matrix(random(HIDDEN, 16)),
                attention_norm=None,
                mlp_norm=None,
                rotary=self.rotary,
                latent=latent,
                scale=0.3,
            )
        )

    def given(self, count: int) -> Tensor:
        return torch.randn(count, self.layer.plan.qkv.n, generator=self.generator)

    def expected(self, given: Tensor, sees: Sequence[Sequence[int]]) -> Tensor:
        """Attention [rows, heads value_dim] of rows at the positions that they see last."""
        first, latent, key = given.double().split(
            [given.shape[1] - RANK - ROTATED, RANK, ROTATED], dim=1
        )
        latents = normed(latent, self.norms[0])
        queries = (
            first if not self.low else normed(first, self.norms[1]) @ self.query_up.double().t()
        )
        queries = queries.view(len(given), HEADS, PLAIN + ROTATED)
        positions = torch.tensor([len(row) - 1 for row in sees])
        plain, turned = queries[..., :PLAIN], self.turn(queries[..., PLAIN:], positions)
        if self.rotary.factors is not None:
            factors = self.rotary.factors[positions].double().view(-1, 1, 1)
            plain, turned = plain * factors, turned * factors
        keys = torch.einsum("hpr,tr->thp", self.keys_up.double(), latents)
        values = torch.einsum("hvr,tr->thv", self.values_up.double(), latents)
        shared = self.turn(key.unsqueeze(1), positions)[:, 0]
        rows = []
        for row, seen in enumerate(sees):
            scores = torch.einsum("hp,thp->ht", plain[row], keys[seen])
            scores = (scores + torch.einsum("hd,td->ht", turned[row], shared[seen])) * 0.3
            rows.append(torch.einsum("ht,thv->hv", scores.softmax(-1), values[seen]).flatten())
        return torch.stack(rows)

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        cosines, sines = (
            table[positions].double().unsqueeze(1)
            for table in (self.rotary.cosines, self.rotary.sines)
        )
        one, two = x.chunk(2, dim=-1)
        return torch.cat([one * cosines - two * sines, two * cosines + one * sines], dim=-1)

    def attend(self, given: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Attention of a tree: 70 rows in order, and then two branches of ten from row 64 on."""
        count, sees = len(given), tree(len(given))
        width = stored_width(RANK + ROTATED, dtype)
        keys, values = new_cache(
            layers=1, kv_heads=1, head_dim=width, capacity=count, dtype=dtype, latent=True
        )
        paths = Paths.of(0, sees)
        positions = torch.tensor([len(row) - 1 for row in sees])
        rows = LayerPass(positions, [CacheRows(keys, values, 0, count, paths)])
        return self.layer.attend_latents(rows, given.clone())[1]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def tree(count: int) -> list[list[int]]:
    trunk, branch = count - 20, count - 26
    paths = [list(range(row + 1)) for row in range(trunk)]
    for start in (trunk, trunk + 10):
        paths += [[*range(branch), *range(start, start + n + 1)] for n in range(10)]
    return paths


@pytest.mark.parametrize(
    ("low", "growth"), [(True, False), (False, False), (True, True)], ids=["low", "wide", "growth"]
)
def test_attention_over_latents_is_that_over_the_keys_and_values_made_of_them(
    low: bool, growth: bool
) -> None:
    made = Made(low=low, growth=growth)
    given = made.given(90)
    expected = made.expected(given, tree(90))
    assert float((made.attend(given) - expected).abs().max()) < 2e-5 * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, CODES], ids=str)
def test_every_instruction_set_and_thread_count_gives_the_same_bytes(dtype: torch.dtype) -> None:
    made = Made(low=True)
    given = made.given(90)
    found = made.attend(given, dtype)
    for isa in kernels.isas():
        kernels.use_isa(isa)
        for threads in (1, 2, 3):
            kernels.set_threads(threads)
            assert torch.equal(made.attend(given, dtype), found), (isa, threads)


def test_matrices_of_other_heads_are_refused() -> None:
    plan = Made(low=True).layer.plan
    assert plan.latent is not None
    short = replace(plan.latent, key_up=plan.latent.key_up[1:])
    for wrong in (replace(plan, latent=short), replace(plan, kv_heads=5), replace(plan, heads=4)):
        with pytest.raises(ValueError, match=r"heads, of which|rows of|needs"):
            DecoderLayer(wrong)


# ---- models ----


def test_a_token_of_the_cache_is_one_latent_and_one_key(model: LanguageModel) -> None:
    size = {"fp32": 4 * CACHED, "half": 2 * CACHED, "q8": CACHED + 4}[model.cache]
    assert model.new_cache(10).row_bytes == 4 * size


def test_sessions_and_chunks_give_the_bytes_of_the_text(model: LanguageModel) -> None:
    ids, alone = text(), whole(model)
    caches = [model.new_cache(TEXT) for _ in range(3)]
    for cache, length in zip(caches, (0, 5, 31), strict=True):
        for first in range(0, length, 13):
            assert torch.equal(
                extend(model, cache, ids[first : min(length, first + 13)]),
                alone[first : min(length, first + 13)],
            )
    segments = [Segment(cache, cache.length, 20) for cache in caches]
    rows = torch.cat([torch.arange(part.start, part.start + 20) for part in segments])
    assert torch.equal(model.forward(torch.tensor(ids)[rows], rows, segments), alone[rows])


def test_trees_that_are_committed_and_taken_back_at_random_give_the_bytes_of_the_text(
    model: LanguageModel,
) -> None:
    ids, alone = text(), whole(model)
    random, cache = Random(4), model.new_cache(8)
    while cache.length < TEXT - 10:
        first = cache.length
        cache.resize(first + 20)
        rows = range(first, first + 20)
        chain = sorted(random.sample(rows, 8))  # the text, among nodes that are not
        places = {slot: place for place, slot in enumerate(chain)}
        paths = [chain[: places[s] + 1] if s in places else [s] for s in rows]
        tokens = [
            ids[first + places[s]] if s in places else random.randrange(3, VOCABULARY) for s in rows
        ]
        positions = torch.tensor([first + len(path) - 1 for path in paths])
        segment = Segment(cache, first, 20, Paths.of(first, paths))
        found = model.forward(torch.tensor(tokens), positions, [segment])
        for slot, place in places.items():
            assert torch.equal(found[slot - first], alone[first + place])
        cache.keep(chain, random.randint(1, len(chain)))
        if random.random() < 0.3:
            cache.truncate(cache.length - random.randint(0, 3))
