"""Attention over slots equals softmax attention written out, for every row by itself."""

import pytest
import torch
from torch import Tensor, nn

from dovetail.workers.models.attention import Segment, arrange, attend
from dovetail.workers.models.cache import KVCache

HEADS, KV_HEADS, SIZE = 6, 2, 8
SCALE = 0.3


class Layer(nn.Module):
    layer_idx = 1


def cache_with(rows: int, seed: int) -> KVCache:
    cache = KVCache(layers=2, kv_heads=KV_HEADS, head_dim=SIZE, capacity=32, dtype=torch.float32, device=torch.device("cpu"))
    cache.rows.fill_(float("nan"))  # whatever reads a free slot shows
    cache.rows[:, :, :, :rows] = torch.randn(2, 2, KV_HEADS, rows, SIZE, generator=torch.Generator().manual_seed(seed))
    cache.keep(range(rows), rows)
    return cache


def random_rows(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, count, SIZE, generator=generator)
    return query, torch.randn(1, KV_HEADS, count, SIZE, generator=generator), torch.randn(1, KV_HEADS, count, SIZE, generator=generator)


def run(query: Tensor, key: Tensor, value: Tensor, segments: list[Segment]) -> Tensor:
    blocks = arrange(segments, groups=HEADS // KV_HEADS, dtype=torch.float32, device=torch.device("cpu"))
    return attend(Layer(), query, key, value, None, blocks=blocks, scaling=SCALE)[0][0]


def by_hand(query: Tensor, cache: KVCache, row: int, seen: list[int]) -> Tensor:
    """One row's output [heads, head_dim] from the slots that it sees."""
    outputs = []
    for head in range(HEADS):
        keys, values = (cache.rows[1, which, head // (HEADS // KV_HEADS)][seen] for which in (0, 1))
        outputs.append((keys @ query[0, head, row] * SCALE).softmax(0) @ values)
    return torch.stack(outputs)


@pytest.mark.parametrize(("prefix", "count"), [(0, 5), (4, 1), (7, 3), (0, 1)])
def test_rows_without_a_mask_see_the_slots_up_to_their_own(prefix: int, count: int) -> None:
    cache, (query, key, value) = cache_with(prefix, 1), random_rows(count, 2)
    output = run(query, key, value, [Segment(cache, prefix, count)])
    for row in range(count):
        torch.testing.assert_close(output[row], by_hand(query, cache, row, list(range(prefix + row + 1))))


def test_a_mask_says_which_of_the_last_slots_a_row_sees() -> None:
    """Two rows of a tree are in the cache already; three more see some of them."""
    cache, (query, key, value) = cache_with(5, 1), random_rows(5, 2)
    run(query[:, :, :2], key[:, :, :2], value[:, :, :2], [Segment(cache, 5, 2)])
    mask = torch.tensor([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 1, 0, 1]], dtype=torch.bool)
    output = run(query[:, :, 2:], key[:, :, 2:], value[:, :, 2:], [Segment(cache, 7, 3, mask)])
    for row, behind in enumerate(([0, 2], [1, 3], [0, 2, 4])):
        torch.testing.assert_close(output[row], by_hand(query, cache, row + 2, [*range(5), *(5 + b for b in behind)]))


def test_a_mask_over_all_slots_means_the_same_as_one_over_the_last() -> None:
    query, key, value = random_rows(3, 2)
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    short = run(query, key, value, [Segment(cache_with(5, 1), 5, 3, mask)])
    whole = run(query, key, value, [Segment(cache_with(5, 1), 5, 3, torch.cat([torch.ones(3, 5, dtype=torch.bool), mask], dim=1))])
    assert torch.equal(short, whole)


def test_sessions_in_one_pass_see_only_themselves() -> None:
    query, key, value = random_rows(6, 2)
    segments = [Segment(cache_with(5, 1), 5, 2), Segment(cache_with(9, 3), 9, 1), Segment(cache_with(0, 4), 0, 3)]
    together = run(query, key, value, segments)
    first = 0
    for segment, length, seed in zip(segments, (5, 9, 0), (1, 3, 4), strict=True):
        rows = slice(first, first + segment.count)
        alone = run(query[:, :, rows], key[:, :, rows], value[:, :, rows], [Segment(cache_with(length, seed), length, segment.count)])
        assert torch.equal(together[rows], alone)
        first += segment.count


@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_what_it_cannot_compute_is_refused_by_name(extra: str) -> None:
    query, key, value = random_rows(1, 2)
    with pytest.raises(ValueError, match=extra):
        attend(Layer(), query, key, value, None, blocks=(), scaling=SCALE, **{extra: 30.0})
