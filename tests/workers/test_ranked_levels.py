"""Levels of a tree whose children are ranked where their logits are computed."""

import numpy as np
import pytest
import torch

from dovetail.workers.models.backends.device import levels
from dovetail.workers.models.backends.device.fixed import Form
from dovetail.workers.models.backends.device.levels import (
    DeviceRanking,
    Fetched,
    RankedInputs,
    RankingShape,
    largest,
)
from dovetail.workers.models.cache import KVCache
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.speculation.growth import likeliest
from dovetail.workers.speculation.sampling import tempered

CPU = torch.device("cpu")


@pytest.mark.parametrize("count", [levels.LEAST_CHUNKED - 1, levels.LEAST_CHUNKED, 40_000])
def test_the_largest_of_long_rows_are_those_of_one_search(count: int) -> None:
    z = torch.randn(3, count, generator=torch.Generator().manual_seed(count))
    z[1, -1], z[2, : count // 2] = 9.0, -torch.inf
    values, ids = largest(z, 16)
    expected = z.topk(16)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize("noisy", [False, True])
def test_children_are_those_that_the_host_finds_by_the_same_logits(noisy: bool) -> None:
    """They are those of the last two rows of three, in a pass that is padded to four."""
    generator, vocabulary, first = torch.Generator().manual_seed(1), 500, 1
    logits = torch.randn(4, vocabulary, generator=generator)
    noise = torch.randn(2, vocabulary, generator=generator)
    ranking = DeviceRanking(
        5,
        vocabulary,
        np.full(2, 0.7, np.float32),
        np.full(2, 0.5, np.float32),
        list(noise) if noisy else None,
    )
    shape = RankingShape.of([ranking])
    assert shape is not None
    inputs = RankedInputs(Form(4, 512, 16), {}, shape, CPU)
    cache = KVCache(layers=1, kv_heads=1, head_dim=4, capacity=8, dtype=torch.float32, device=CPU)
    segment = Segment(cache, 0, 3, Paths.growing(0, 3))
    inputs.ask([segment], {"positions": np.arange(3)}, [(slice(first, 3), ranking)])
    inputs.rank(logits, shape)
    fetched = Fetched(inputs.fetch(), slice(first, first + 2))
    inputs.rank(logits.flip(1), shape)  # what comes later changes nothing of what was fetched
    inputs.ask([segment], {"positions": np.arange(3)}, [(slice(first, 3), ranking)])
    tokens, gains = fetched.take()
    z = tempered(logits[1:3], 0.7) if noisy else logits[1:3]
    expected = likeliest(z, 5, noise=ranking.noise, sharpening=0.5)
    assert tokens[:, :5].tolist() == expected[0].tolist()
    np.testing.assert_allclose(gains[:, :5], expected[1], rtol=1e-5)
