"""The noise over tensors is the noise that the protocol defines."""

import pytest
import torch

from dovetail.protocol.noise import gumbel
from dovetail.workers.speculation.noise import NoiseCache, gumbel_noise

KEYS = (bytes(16), b"\xff" * 16, bytes(range(16)))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("position", [0, 1, 511, 1 << 20])
def test_every_value_equals_the_definition_in_plain_numbers(key: bytes, position: int) -> None:
    assert gumbel_noise(key, position, 400).tolist() == [
        gumbel(key, position, v) for v in range(400)
    ]


def test_noise_is_finite_and_has_the_law_of_gumbel() -> None:
    noise = gumbel_noise(KEYS[2], 7, 200_000).double()
    assert torch.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, abs=0.03)


def test_the_vocabulary_size_changes_no_value() -> None:
    assert torch.equal(gumbel_noise(KEYS[2], 3, 100)[:10], gumbel_noise(KEYS[2], 3, 10))


def test_rows_are_computed_ahead_one_by_one_and_dropped_behind() -> None:
    cache = NoiseCache(KEYS[2], 8)
    assert [cache.prepare(5, 3) for _ in range(4)] == [True, True, True, False]
    ready = cache.at(6).row
    assert cache.at(6).row is ready
    assert torch.equal(ready, gumbel_noise(KEYS[2], 6, 8))
    cache.drop_before(7)
    assert len(cache) == 1
