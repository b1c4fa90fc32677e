"""The cache moves the rows that are kept, and no others."""

import random

import psutil
import pytest
import torch

from dovetail.workers import kernels
from dovetail.workers.kernels.layer_plan import CODES
from dovetail.workers.models.backends.blocked_cache import BlockedCache, MixedCache, cache_of
from dovetail.workers.models.cache import KVCache
from support.models import cache_row


def filled(length: int, capacity: int = 12) -> KVCache:
    """A cache whose row in slot s holds s everywhere, the first `length` of them committed."""
    cache = KVCache(
        layers=2,
        kv_heads=3,
        head_dim=4,
        capacity=capacity,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.rows[:] = torch.arange(float(capacity))[:, None]
    cache.keep(range(length), length)
    return cache


def slots(cache: KVCache) -> list[int]:
    """Return what each slot holds, if all layers, keys and values and heads agree."""
    first = cache.rows[0, 0, 0, :, 0]
    assert torch.equal(cache.rows, first[:, None].expand_as(cache.rows))
    return [int(v) for v in first]


def test_kept_slots_move_behind_the_committed_ones_in_the_order_given() -> None:
    cache = filled(4)
    cache.keep([4, 7, 6, 10], committed=3)
    assert slots(cache) == [0, 1, 2, 3, 4, 7, 6, 10, 8, 9, 10, 11]
    assert cache.length == 7


def test_rows_that_stay_where_they_are_are_not_touched() -> None:
    cache = filled(4)
    version = cache.rows._version
    cache.keep([4, 5, 6], committed=2)
    assert cache.rows._version == version
    assert cache.length == 6


def test_overlapping_moves_read_before_they_write() -> None:
    cache = filled(2)
    cache.keep([5, 4, 3, 2], committed=4)
    assert slots(cache)[:6] == [0, 1, 5, 4, 3, 2]


@pytest.mark.parametrize(
    ("kept", "committed"), [([3], 1), ([12], 1), ([-1], 1), ([4], 2), ([4], -1)]
)
def test_slots_that_are_committed_or_beyond_the_end_are_refused(
    kept: list[int], committed: int
) -> None:
    with pytest.raises(ValueError, match="cannot commit"):
        filled(4).keep(kept, committed)


def test_rows_are_written_and_viewed_without_a_copy() -> None:
    cache = filled(2)
    key, value = torch.full((3, 2, 4), 50.0), torch.full((3, 2, 4), 60.0)
    cache.write(1, key, value, start=5)
    keys, values = cache.view(1, 0, 7)
    assert keys.shape == (3, 7, 4)
    assert torch.equal(keys[:, 5:], key)
    assert torch.equal(values[:, 5:], value)
    assert keys.data_ptr() == cache.rows[1, 0].data_ptr()
    assert slots(filled(0))[:7] == [int(v) for v in cache.rows[0, 0, 0, :7, 0]]


@pytest.mark.parametrize("start", [1, 11])
def test_committed_rows_and_the_end_cannot_be_overwritten(start: int) -> None:
    with pytest.raises(ValueError, match="are not within"):
        filled(2).write(0, torch.zeros(3, 2, 4), torch.zeros(3, 2, 4), start)


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
@pytest.mark.parametrize("seed", range(8))
def test_the_layout_of_the_kernels_keeps_the_same_rows(seed: int) -> None:
    rng = random.Random(seed)
    plain = filled(0, capacity=40)
    blocked = BlockedCache(layers=2, kv_heads=3, head_dim=4, capacity=40)
    for slot in range(40):
        blocked.keys[:, :, slot // 16, :, slot % 16] = blocked.values[:, :, slot] = slot
    while plain.length < 30:
        slots = rng.sample(range(plain.length, 40), rng.randrange(1, 8))
        committed = rng.randrange(len(slots) + 1)
        for cache in (plain, blocked):
            cache.keep(slots, committed)
        assert blocked.length == plain.length
        assert all(
            torch.equal(cache_row(blocked, slot), cache_row(plain, slot)) for slot in range(40)
        )
    with pytest.raises(ValueError, match="cannot commit"):
        blocked.keep([blocked.length - 1], 1)


def both_layouts(length: int, capacity: int) -> list[KVCache | BlockedCache]:
    """A cache of every layout that there is here, whose row in slot s holds s + 1 everywhere."""
    plain = KVCache(
        layers=2,
        kv_heads=3,
        head_dim=4,
        capacity=capacity,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    plain.rows[:] = torch.arange(1.0, capacity + 1)[:, None]
    caches: list[KVCache | BlockedCache] = [plain]
    if kernels.available():
        blocked = BlockedCache(layers=2, kv_heads=3, head_dim=4, capacity=capacity)
        for slot in range(capacity):
            blocked.keys[:, :, slot // 16, :, slot % 16] = blocked.values[:, :, slot] = slot + 1
        caches.append(blocked)
    for cache in caches:
        cache.keep(range(length), length)
    return caches


def address(cache: KVCache | BlockedCache) -> int:
    return (cache.rows if isinstance(cache, KVCache) else cache.values).data_ptr()


@pytest.mark.parametrize(
    ("capacity", "plain_moves", "blocked_moves"),
    [
        (500, True, True),
        (49, True, True),
        (48, True, False),
        (33, True, False),
        (32, False, False),
        (23, False, True),
        (16, False, True),
        (11, True, True),
    ],
)
def test_a_cache_that_is_resized_has_its_committed_rows_and_moves_only_where_it_is_too_small_or_much_too_large(  # noqa: E501
    capacity: int, plain_moves: bool, blocked_moves: bool
) -> None:
    """The caches are opened for 32 rows: a plain one has memory for them, one in blocks for half as
    many again; up to twice what is asked for is kept."""
    for cache in both_layouts(11, 32):
        before, was = [cache_row(cache, slot).clone() for slot in range(11)], address(cache)
        cache.resize(capacity)
        moves = blocked_moves if isinstance(cache, BlockedCache) else plain_moves
        assert (cache.capacity, cache.length, address(cache) != was) == (capacity, 11, moves)
        assert all(torch.equal(cache_row(cache, slot), row) for slot, row in enumerate(before))
        cache.keep([capacity - 1], 0) if capacity > 11 else None
        with pytest.raises(ValueError, match="cannot commit"):
            cache.keep([capacity], 0)
        with pytest.raises(ValueError, match="a capacity of 10 rows, but 11 are committed"):
            cache.resize(10)


def test_a_cache_without_rows_can_grow_and_vanish() -> None:
    for cache in both_layouts(0, 32):
        cache.resize(0)
        assert cache.capacity == 0
        cache.resize(5)
        cache.keep([3], 1)
        assert (cache.capacity, cache.length) == (5, 1)


def test_rows_behind_a_truncation_are_free_again() -> None:
    for cache in both_layouts(11, 32):
        with pytest.raises(ValueError, match="cannot keep 12 of 11"):
            cache.truncate(12)
        cache.truncate(4)
        cache.keep([8], 1)
        assert [float(cache_row(cache, slot).flatten()[0]) for slot in range(5)] == [
            1.0,
            2.0,
            3.0,
            4.0,
            9.0,
        ]


def test_the_bytes_of_a_row_are_told_even_of_an_empty_cache() -> None:
    for cache in both_layouts(0, 32):
        expected = cache_row(cache, 0).numel() * 4
        assert cache.row_bytes == expected
        cache.resize(0)
        assert cache.row_bytes == expected


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
@pytest.mark.parametrize("heads", [[(3, 32), (3, 32)], [(2, 64), (1, 96)]], ids=str)
def test_keys_and_values_in_16_and_8_bits_keep_and_move_their_rows_in_less_memory(
    heads: list[tuple[int, int]],
) -> None:
    whole, half, codes = (
        cache_of(heads, 20, dtype) for dtype in (torch.float32, torch.float16, CODES)
    )
    assert 32 * codes.row_bytes == 17 * half.row_bytes  # 32 numbers and their scale
    for cache in (whole, half):
        for keys, values in cache._views(cache.keys, cache.values):
            for part in (keys, values):
                part.copy_(torch.arange(part.numel()).view(part.shape) % 1999)
        cache.keep([0, 1, 5, 19], 4)
        cache.resize(5000)
        assert cache.row_slots > 5000
    assert 2 * half.row_bytes == whole.row_bytes
    pairs = zip(
        half._views(half.keys, half.values), whole._views(whole.keys, whole.values), strict=True
    )
    for found, expected in pairs:
        assert torch.equal(found[0][..., 0, :, :4].float(), expected[0][..., 0, :, :4])
        assert torch.equal(found[1][..., :4, :].float(), expected[1][..., :4, :])


def test_a_cache_of_halves_is_given_the_nearest_and_none_that_is_infinite() -> None:
    cache = KVCache(
        layers=1,
        kv_heads=1,
        head_dim=4,
        capacity=1,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    numbers = torch.tensor([[[1 / 3, 1e9, -1e9, 65519.0]]])
    cache.write(0, numbers, -numbers, 0)
    expected = torch.tensor([1 / 3, 65504.0, -65504.0, 65504.0]).half()
    assert torch.equal(cache.rows[0, 0, 0, 0], expected)
    assert torch.equal(cache.rows[0, 1, 0, 0], -expected)


def test_layers_whose_heads_differ_keep_and_move_their_rows_each_for_itself() -> None:
    heads = [(2, 8), (1, 24), (2, 8)]
    mixed = MixedCache(heads, capacity=20)
    alone = [BlockedCache(layers=1, kv_heads=n, head_dim=d, capacity=20) for n, d in heads]
    for (keys, values), cache in zip(mixed._views(mixed.keys, mixed.values), alone, strict=True):
        keys.copy_(cache.keys[0].normal_())
        values.copy_(cache.values[0].normal_())
    for cache in (mixed, *alone):
        cache.keep([0, 1, 5, 19], 4)
        cache.resize(5000)
    for (keys, values), cache in zip(mixed._views(mixed.keys, mixed.values), alone, strict=True):
        assert torch.equal(values[:, :4], cache.values[0, :, :4])
        assert torch.equal(keys[:, 0, :, :4], cache.keys[0, :, 0, :, :4])
    assert mixed.row_bytes == sum(cache.row_bytes for cache in alone)


def test_a_cache_takes_memory_as_its_rows_are_written() -> None:
    process = psutil.Process()
    cache = BlockedCache(layers=8, kv_heads=8, head_dim=64, capacity=4096)
    whole = cache.row_slots * cache.row_bytes
    before = process.memory_info().rss
    for layer in range(8):
        cache.write(layer, torch.ones(8, 16, 64), torch.ones(8, 16, 64), 0)
    taken = process.memory_info().rss - before
    assert 16 * cache.row_bytes / 2 < taken < whole / 10
