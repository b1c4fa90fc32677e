"""Attention over slots equals softmax attention written out, for every row by itself."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dovetail.workers.models.attention import Masks, Noted, arrange, attend
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Paths, Segment

HEADS, KV_HEADS, SIZE = 6, 2, 8
SCALE = 0.3


class Layer(nn.Module):
    layer_idx = 1


def cache_with(rows: int, seed: int) -> KVCache:
    cache = KVCache(
        layers=2,
        kv_heads=KV_HEADS,
        head_dim=SIZE,
        capacity=32,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    cache.rows.fill_(float("nan"))  # whatever reads a free slot shows
    cache.rows[:, :, :, :rows] = torch.randn(
        2, 2, KV_HEADS, rows, SIZE, generator=torch.Generator().manual_seed(seed)
    )
    cache.keep(range(rows), rows)
    return cache


def random_rows(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS, count, SIZE, generator=generator)
    return (
        query,
        torch.randn(1, KV_HEADS, count, SIZE, generator=generator),
        torch.randn(1, KV_HEADS, count, SIZE, generator=generator),
    )


def new_masks() -> Masks:
    return Masks(groups=HEADS // KV_HEADS, device=torch.device("cpu"), dtype=torch.float32)


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: list[Segment],
    masks: Masks | None = None,
    **options: float,
) -> Tensor:
    return attend(
        Layer(),
        query,
        key,
        value,
        None,
        blocks=arrange(segments, masks or new_masks()),
        scaling=SCALE,
        **options,
    )[0][0]


def by_hand(
    query: Tensor, cache: KVCache, row: int, seen: list[int], *, cap: float | None = None
) -> Tensor:
    """One row's output [heads, head_dim] from the slots that it sees."""
    outputs = []
    for head in range(HEADS):
        keys, values = (cache.rows[1, which, head // (HEADS // KV_HEADS)][seen] for which in (0, 1))
        scores = keys @ query[0, head, row] * SCALE
        outputs.append((scores if cap is None else cap * (scores / cap).tanh()).softmax(0) @ values)
    return torch.stack(outputs)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize(("prefix", "count"), [(0, 5), (4, 1), (7, 3), (0, 1), (9, 12)])
def test_rows_without_paths_see_the_slots_up_to_their_own_as_far_back_as_the_window_reaches(
    prefix: int, count: int, window: int | None, cap: float
) -> None:
    cache, (query, key, value) = cache_with(prefix, 1), random_rows(count, 2)
    output = run(
        query, key, value, [Segment(cache, prefix, count)], sliding_window=window, softcap=cap
    )
    for row in range(count):
        seen = list(range(prefix + row + 1))[-(window or 1000) :]
        torch.testing.assert_close(output[row], by_hand(query, cache, row, seen, cap=cap))


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 6, 8])
def test_a_path_says_which_slots_a_row_sees_behind_the_prefix_and_a_window_counts_along_it(
    window: int | None,
) -> None:
    """Two rows of a tree are in the cache already; three more see some of them."""
    cache, (query, key, value) = cache_with(5, 1), random_rows(5, 2)
    run(query[:, :, :2], key[:, :, :2], value[:, :, :2], [Segment(cache, 5, 2)])
    paths = [[5, 7], [6, 8], [5, 7, 9]]
    output = run(
        query[:, :, 2:],
        key[:, :, 2:],
        value[:, :, 2:],
        [Segment(cache, 7, 3, Paths.of(5, paths))],
        sliding_window=window,
    )
    for row, path in enumerate(paths):
        torch.testing.assert_close(
            output[row], by_hand(query, cache, row + 2, [*range(5), *path][-(window or 1000) :])
        )


def test_masks_are_kept_from_pass_to_pass_and_nothing_of_the_last_one_shows() -> None:
    masks, trees = new_masks(), ([[5], [5, 6], [5, 7]], [[5], [5, 6], [5, 6, 7]], [[5], [6], [7]])
    for paths in (*trees, *reversed(trees)):
        for window in (None, 4):
            cache, (query, key, value) = cache_with(5, 1), random_rows(3, 2)
            segment = [Segment(cache, 5, 3, Paths.of(5, paths))]
            kept = run(query, key, value, segment, masks, sliding_window=window)
            assert torch.equal(kept, run(query, key, value, segment, sliding_window=window))


def test_paths_of_rows_behind_the_prefix_are_those_of_their_slots() -> None:
    found = Paths.behind(5, np.array([0, 1, 3, 5], np.int32), np.array([0, 0, 1, 0, 2], np.int32))
    expected = Paths.of(5, [[5], [5, 6], [5, 7]])
    assert found.offsets.tolist() == expected.offsets.tolist() == [0, 1, 3, 5]
    assert found.slots.tolist() == expected.slots.tolist() == [5, 5, 6, 5, 7]
    assert found.row(2).tolist() == [5, 7]


def test_sessions_in_one_pass_see_only_themselves() -> None:
    query, key, value = random_rows(6, 2)
    segments = [
        Segment(cache_with(5, 1), 5, 2),
        Segment(cache_with(9, 3), 9, 1),
        Segment(cache_with(0, 4), 0, 3),
    ]
    together = run(query, key, value, segments)
    first = 0
    for segment, length, seed in zip(segments, (5, 9, 0), (1, 3, 4), strict=True):
        rows = slice(first, first + segment.count)
        alone = run(
            query[:, :, rows],
            key[:, :, rows],
            value[:, :, rows],
            [Segment(cache_with(length, seed), length, segment.count)],
        )
        assert torch.equal(together[rows], alone)
        first += segment.count


def test_what_is_asked_for_is_noted() -> None:
    notes: list[Noted] = []
    attend(
        Layer(),
        *random_rows(1, 2),
        None,
        blocks=arrange([Segment(cache_with(0, 1), 0, 1)], new_masks()),
        softcap=30.0,
        sliding_window=4,
        notes=lambda noted, *_: notes.append(noted),
    )
    assert notes == [Noted(HEADS, KV_HEADS, SIZE, SIZE**-0.5, 4, 30.0, SIZE)]


def test_what_it_cannot_compute_is_refused_by_name() -> None:
    query, key, value = random_rows(1, 2)
    with pytest.raises(ValueError, match="position_bias"):
        attend(Layer(), query, key, value, None, blocks=(), scaling=SCALE, position_bias=30.0)
