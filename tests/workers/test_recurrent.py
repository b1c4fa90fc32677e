"""Layers with a state: the same bytes in any company, after any commit, after going back and from a
checkpoint; and what cannot be computed is said."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.recurrent import CHAIN, PENDING, STEP
from dovetail.workers.models.segment import Paths, Segment
from support.architectures import VARIED, VOCABULARY, write_tiny
from support.decoded import extend

pytestmark = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")

TEXT = 90
KINDS = [
    *("qwen3_5_text", "falcon_h1"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("nemotron_h", "lfm2_moe", "bamba")),
]


@pytest.fixture(scope="module", params=KINDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> LanguageModel:
    folder = tmp_path_factory.mktemp("recurrent") / "model"
    write_tiny(request.param, folder, **VARIED[request.param])
    return load_language_model(str(folder), weights="fp32", device="cpu", backend="kernels")


def text() -> list[int]:
    return torch.randint(
        3, VOCABULARY, (TEXT,), generator=torch.Generator().manual_seed(3)
    ).tolist()


def whole(model: LanguageModel) -> Tensor:
    return extend(model, model.new_cache(TEXT), text())


def in_a_tree(model: LanguageModel) -> Tensor:
    """The logits of the text from row 30 on as a path of a tree, each of whose nodes has a sibling
    with a child."""
    cache, ids = model.new_cache(30 + 3 * TEXT), text()
    extend(model, cache, ids[:30])
    tokens, depths, paths, above = [], [], [], list[int]()
    for depth, token in enumerate(ids[30:]):
        slot = 30 + 3 * depth
        tokens += [token - 1, (token + 9) % 40 + 3, token]
        depths += [30 + depth, 31 + depth, 30 + depth]
        paths += [[*above, slot], [*above, slot, slot + 1], [*above, slot + 2]]
        above.append(slot + 2)
    positions = torch.tensor(depths).clamp(max=model.context - 1)
    tree = Segment(cache, 30, len(tokens), Paths.of(30, paths))
    return model.forward(torch.tensor(tokens), positions, [tree])[2::3]


class Growth:
    """A session whose tree grows over several passes, at random, along a text."""

    def __init__(self, model: LanguageModel, seed: int) -> None:
        self.model, self.random = model, Random(seed)
        self.cache, self.ids = model.new_cache(TEXT + 64), text()
        self.wanted = whole(model)

    def check(self, found: Tensor, position: int) -> None:
        assert torch.equal(found, self.wanted[position]), f"row {position}"

    def round(self) -> None:
        """Grow a tree whose nodes on one path are the text, in up to three passes of random
        nodes, then commit a part of that path and keep what is behind it for the next round."""
        cache, random = self.cache, self.random
        first = cache.length
        nodes: list[tuple[list[int], int]] = []  # path of slots, depth along the text or -1
        spine: list[int] = []
        for _ in range(random.randint(1, 3)):
            start = first + len(nodes)
            tokens, positions, paths, on_text = [], [], [], []
            for _ in range(random.randint(1, 7)):
                slot = start + len(tokens)
                follow = random.random() < 0.5 and first + len(spine) < TEXT
                if follow or not nodes:
                    above, token, depth = list(spine), self.ids[first + len(spine)], len(spine)
                    spine.append(slot)
                else:
                    parent = random.choice(nodes)
                    above, token, depth = parent[0], random.randrange(3, VOCABULARY), -1
                path = [*above, slot]
                nodes.append((path, depth))
                tokens.append(token)
                positions.append(first + len(path) - 1)
                paths.append(path)
                on_text.append(depth)
            segment = Segment(cache, start, len(tokens), Paths.of(first, paths))
            found = self.model.forward(torch.tensor(tokens), torch.tensor(positions), [segment])
            for logits, depth in zip(found, on_text, strict=True):
                if depth >= 0:
                    self.check(logits, first + depth)
        cache.keep(spine, random.randint(0, len(spine)))


def test_a_tree_that_grows_and_is_committed_at_random_gives_the_bytes_of_the_text(
    model: LanguageModel,
) -> None:
    for seed in range(4):
        growth = Growth(model, seed)
        if seed:
            extend(model, growth.cache, growth.ids[: seed * 9])
        while growth.cache.length < TEXT - 12:
            growth.round()


def test_sessions_in_a_pass_do_not_see_each_other(model: LanguageModel) -> None:
    ids, alone = text(), whole(model)
    caches = [model.new_cache(TEXT) for _ in range(3)]
    for cache, length in zip(caches, (0, 5, 40), strict=True):
        if length:
            extend(model, cache, ids[:length])
    segments = [Segment(cache, cache.length, 20) for cache in caches]
    rows = torch.cat([torch.arange(part.start, part.start + 20) for part in segments])
    found = model.forward(torch.tensor(ids)[rows], rows, segments)
    assert torch.equal(found, alone[rows])


def test_threads_and_instruction_sets_give_the_same_bytes(model: LanguageModel) -> None:
    expected, before = whole(model), kernels.isa()
    try:
        for isa in kernels.isas():
            kernels.use_isa(isa)
            for threads in (1, 3):
                kernels.set_threads(threads)
                assert torch.equal(whole(model), expected), (isa, threads)
                assert torch.equal(in_a_tree(model), expected[30:]), (isa, threads)
    finally:
        kernels.use_isa(before)
        kernels.set_threads(torch.get_num_threads())


def test_a_tree_is_forgotten_and_a_failed_pass_changes_nothing(model: LanguageModel) -> None:
    ids, alone, cache = text(), whole(model), model.new_cache(TEXT)
    extend(model, cache, ids[:30])
    for _ in range(3):
        paths = Paths.of(30, [[30], [30, 31], [30, 32], [30, 31, 33]])
        model.forward(
            torch.tensor([7, 8, 9, 10]),
            torch.tensor([30, 31, 31, 32]),
            [Segment(cache, 30, 4, paths)],
        )
    assert torch.equal(extend(model, cache, ids[30:]), alone[30:])


def test_a_session_goes_back_to_checkpoints_and_to_what_is_not_in_its_states(
    model: LanguageModel,
) -> None:
    ids, alone, cache = text(), whole(model), model.new_cache(TEXT)
    extend(model, cache, ids[:40])
    cache.checkpoint()
    extend(model, cache, ids[40:70])
    assert [cache.restorable(n) for n in (39, 40, 69, 70)] == [0, 40, 40, 70]
    with pytest.raises(ValueError, match="no state of the first 55"):
        cache.truncate(55)
    cache.truncate(cache.restorable(69))
    assert torch.equal(extend(model, cache, ids[40 : 40 + PENDING]), alone[40 : 40 + PENDING])
    assert cache.restorable(43) == 43
    cache.truncate(43)
    assert torch.equal(extend(model, cache, ids[43:]), alone[43:])
    cache.truncate(0)
    assert torch.equal(extend(model, cache, ids), alone)


def test_rows_of_a_chain_whose_pass_failed_are_not_read_again(model: LanguageModel) -> None:
    cache, ids = model.new_cache(TEXT), text()
    rows = torch.arange(CHAIN)
    model.forward(torch.tensor(ids[:CHAIN]), rows, [Segment(cache, 0, CHAIN)])
    with pytest.raises(RuntimeError, match="read the session again"):
        extend(model, cache, ids)
    cache.truncate(0)
    assert torch.equal(extend(model, cache, ids), whole(model))


def test_a_tree_takes_little_beside_a_copy_of_the_states(model: LanguageModel) -> None:
    cache = model.new_cache(TEXT)
    assert cache.base_bytes > 0
    assert cache.row_bytes >= cache.base_bytes // STEP // 3


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("bamba", {"time_step_limit": (0.0, 0.5)}, "limits the steps of Mamba-2"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "no convolution with 'gelu'"),
        ("falcon_h1", {"hidden_act": "relu"}, "no convolution with 'relu'"),
    ],
)
def test_a_state_that_the_kernels_do_not_compute_is_named(
    kind: str, fields: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_tiny(kind, tmp_path / "model", **(VARIED[kind] | fields))
    with pytest.raises(CheckpointError, match=words):
        load_language_model(str(tmp_path / "model"), weights="fp32", device="cpu")
