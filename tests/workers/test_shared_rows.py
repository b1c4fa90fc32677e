"""Sessions that begin alike have the rows of that beginning once, and compute the same bytes."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dovetail.protocol.settings import TargetSettings
from dovetail.runtime.fleet.prefix_cache import SharedRows
from dovetail.workers import kernels
from dovetail.workers.kernels import Isa
from dovetail.workers.models.backends import blocked_cache
from dovetail.workers.models.backends.blocked_cache import LEAST_SHARED, BlockedCache, MixedCache
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Cache, Paths, Segment
from dovetail.workers.serving.open_target import open_target_worker
from support.architectures import write_varied
from support.cases import everyday
from support.decoded import extend
from support.kernels import needs_kernels, use
from support.models import tiny_llama

FAMILIES = ("llama", "gemma2", "deepseek_v2", "gpt_oss", "gemma4_text small")
"""Windows and caps, latents, sinks, layers whose heads differ."""
TREE = ([0], [0, 1], [0, 2], [0, 2, 3])  # the paths of the rows of a tree
ISAS = kernels.isas()  # the last is the fastest


def verify(model: LanguageModel, caches: list[Cache], tokens: Tensor) -> Tensor:
    """Return the logits of the same tree behind each of these caches, in one pass."""
    segments, positions = [], []
    for cache in caches:
        length = cache.length
        paths = Paths.of(length, [[length + node for node in path] for path in TREE])
        segments.append(Segment(cache, length, len(TREE), paths))
        positions += [length + len(path) - 1 for path in TREE]
    return model.forward(tokens.repeat(len(caches)), torch.tensor(positions), segments)


@needs_kernels
@pytest.mark.parametrize("dtype", everyday(["fp32", "half", "q8"], "q8"))
@pytest.mark.parametrize("family", everyday(FAMILIES, "gemma2", "deepseek_v2"))
def test_a_session_that_begins_with_rows_of_another_computes_the_same_bytes(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_cache, "LEAST_SHARED", 16)
    folder = write_varied(family, tmp_path / "model")
    model = load_language_model(str(folder), weights="fp32", device="cpu", cache=dtype)
    check_branches(model, tokens=60, others=25, kept=(60, 48, 37, 16, 3))


@needs_kernels
@pytest.mark.parametrize("isa", everyday(ISAS, ISAS[-1]))
def test_it_does_in_long_texts_on_every_instruction_set(isa: Isa, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = tiny_llama(tmp_path / "model", max_position_embeddings=2048, head_dim=72, **sizes)
    use(isa)
    for cache in ("fp32", "half", "q8"):
        model = load_language_model(str(folder), weights="fp32", device="cpu", cache=cache)
        check_branches(model, tokens=700, others=90, kept=(700, 640, 401))


def check_branches(model: LanguageModel, tokens: int, others: int, kept: tuple[int, ...]) -> None:
    """A session goes on, and others from some of its rows, as each would alone."""
    text = torch.randint(1, model.vocabulary_size, (tokens,))
    end = torch.randint(1, model.vocabulary_size, (others,))
    source = model.new_cache(tokens + others)
    extend(model, source, text.tolist(), 37)
    for length in kept:
        branch = source.branch(length)
        branch.resize(length + others)
        alone = model.new_cache(length + others + len(TREE))
        extend(model, alone, text[:length].tolist(), 64)
        found = extend(model, branch, end.tolist(), 23)
        assert torch.equal(found, extend(model, alone, end.tolist(), 19)), length
        again = branch.branch(branch.length)
        again.resize(again.length + len(TREE))
        branch.resize(again.capacity)
        found = verify(model, [branch, again, alone], torch.arange(1, 1 + len(TREE)))
        assert all(torch.equal(part, found[-len(TREE) :]) for part in found.split(len(TREE)))
    beyond = model.new_cache(tokens + others)
    whole = extend(model, beyond, torch.cat([text, end]).tolist(), 64)
    assert torch.equal(extend(model, source, end.tolist()), whole[tokens:])


def row(cache: KVCache | BlockedCache, slot: int) -> list[Tensor]:
    """The keys and values of a slot in all layers."""
    if isinstance(cache, KVCache):
        return [cache.rows[..., slot, :]]
    shared = cache.shared
    if shared is not None and slot < shared.rows:
        held, at = (shared.keys, shared.values), slot
    else:
        held, at = (cache.keys, cache.values), slot - cache.first
    return [
        part
        for keys, values in cache._views(*held)
        for part in (keys[..., at // 16, :, at % 16], values[..., at, :])
    ]


def write(cache: KVCache | BlockedCache, slot: int, number: float) -> None:
    """Have a row of a number in a slot that is not committed."""
    for part in row(cache, slot):
        part.fill_(number)


def new(kind: str, capacity: int) -> KVCache | BlockedCache:
    """An empty cache."""
    if kind == "mixed":
        return MixedCache([(2, 4), (1, 6)], capacity=capacity)
    if kind == "plain":
        like = {"dtype": torch.float32, "device": torch.device("cpu")}
        return KVCache(layers=2, kv_heads=2, head_dim=4, capacity=capacity, **like)  # type: ignore[arg-type]
    return BlockedCache(
        layers=2, kv_heads=1, head_dim=4, capacity=capacity, latent=kind == "latent"
    )


@needs_kernels
@pytest.mark.parametrize("kind", ["blocked", "mixed", "latent", "plain"])
def test_whatever_sessions_do_that_share_rows_each_has_its_own(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions branch from each other, grow, go back and move; each row holds the number that its
    session wrote."""
    monkeypatch.setattr(blocked_cache, "LEAST_SHARED", 16)
    chance = random.Random(5)
    number = 0.0
    sessions: list[tuple[KVCache | BlockedCache, list[float]]] = [(new(kind, 100), [])]
    for _ in range(400):
        cache, rows = chance.choice(sessions)
        match chance.randrange(6):
            case 0:
                length = chance.randrange(len(rows) + 1)
                other = cache.branch(length, used=0)
                assert isinstance(other, KVCache | BlockedCache)
                other.resize(length + chance.randrange(100))
                sessions.append((other, rows[:length]))
            case 1:
                length = chance.randrange(max(0, len(rows) - 20), len(rows) + 1)
                cache.truncate(length)
                del rows[length:]
            case 2:
                cache.resize(len(rows) + chance.randrange(200))
            case 3 if len(sessions) > 4:
                sessions.remove((cache, rows))
            case _:
                count = min(chance.randrange(40), cache.capacity - len(rows))
                slots = chance.sample(range(len(rows), cache.capacity), count)
                for slot in slots:
                    number += 1.0
                    write(cache, slot, number)
                    rows.append(number)
                cache.keep(slots, count)
        for held, wanted in sessions:
            assert held.length == len(wanted)
            for slot in {0, 15, 16, len(wanted) // 2, len(wanted) - 1} & {*range(len(wanted))}:
                assert all(bool((part == wanted[slot]).all()) for part in row(held, slot))


@needs_kernels
def test_rows_that_are_shared_are_there_once() -> None:
    source = BlockedCache(layers=1, kv_heads=1, head_dim=4, capacity=300)
    source.keep(range(300), 300)
    assert source.branch(LEAST_SHARED - 1).shared is source.shared is None
    branches = [source.branch(length) for length in (300, 299, 50)]
    shared = source.shared
    assert shared is not None
    assert [branch.shared.rows for branch in branches if branch.shared] == [288, 288, 48]
    held = {branch.shared.keys.data_ptr() for branch in [source, *branches] if branch.shared}
    assert held == {shared.keys.data_ptr()}
    assert source.values.shape[2] < 300


@needs_kernels
def test_rows_behind_the_committed_ones_stay_where_they_are_in_use() -> None:
    source = BlockedCache(layers=1, kv_heads=1, head_dim=4, capacity=200)
    for slot in range(160):
        write(source, slot, slot + 1.0)
    source.keep(range(150), 150)
    source.branch(140, used=10)
    assert source.shared is not None
    for slot in range(160):
        assert all(bool((part == slot + 1.0).all()) for part in row(source, slot))


@needs_kernels
def test_a_window_that_moves_on_leaves_the_shared_rows_to_the_others() -> None:
    cache = new("blocked", 200)
    for slot in range(160):
        write(cache, slot, slot + 1.0)
    cache.keep(range(160), 160)
    other = cache.branch(144)
    other.resize(200)
    for slot in range(144, 160):
        write(other, slot, slot + 1.0)
    for held, first in ((other, 20), (cache, 0)):
        held.length = 0
        held.keep(range(first, 160), 160 - first)
        assert all(
            bool((part == slot + 1.0).all())
            for slot in range(first, 160)
            for part in row(held, slot - first)
        )


@needs_kernels
def test_the_coordinator_counts_the_rows_that_caches_share() -> None:
    """Sessions begin with rows of others, are taken over by the next turn, and end, in any
    order."""
    chance, counted = random.Random(3), SharedRows()
    caches = {0: BlockedCache(layers=1, kv_heads=1, head_dim=4, capacity=2000)}
    caches[0].keep(range(1000), 1000)
    for number in range(1, 300):
        base = chance.choice([*caches])
        tokens = chance.randrange(1, caches[base].length + 1)
        match chance.randrange(4):
            case 0 if len(caches) > 1:
                del caches[base]
                counted.end(base)
            case 1:
                caches[number] = caches.pop(base)
                caches[number].truncate(tokens)
                counted.follow(number, base, tokens)
            case _:
                caches[number] = caches[base].branch(tokens)
                counted.begin(number, base, tokens)
                grown = chance.randrange(300)
                caches[number].resize(tokens + grown)
                caches[number].keep(range(tokens, tokens + grown), grown)
        held: dict[int, int] = {}
        every = 0
        for cache in caches.values():
            if cache.shared is not None:
                place = cache.shared.values.data_ptr()
                held[place] = max(held.get(place, 0), cache.shared.rows)
                every += cache.shared.rows
        assert counted.saved(caches) == every - sum(held.values())


@needs_kernels
def test_a_model_with_states_says_that_its_sessions_share_no_rows(tmp_path: Path) -> None:
    for family, shares in (("qwen3_5_text", False), ("llama", True)):
        folder = write_varied(family, tmp_path / family)
        settings = TargetSettings(model=str(folder), device="cpu", weights="fp32")
        hello = open_target_worker(settings, name="t", threads=1).hello(1)
        assert hello.limits is not None
        assert (hello.limits.kept > 0, hello.limits.shares) == (True, shares)
