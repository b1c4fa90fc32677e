"""The ranking kernel against torch's operations, on every instruction set."""

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.workers import kernels
from dovetail.workers.kernels import Isa, ranking
from dovetail.workers.speculation import growth
from support.cases import everyday
from support.kernels import every_isa, needs_kernels, use

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_as_before")]


def draw(rows: int, size: int, *, seed: int = 0) -> Tensor:
    """Logits of rows that lie further apart than they are long; of the second row every third token
    is masked."""
    logits = (
        3.0 * torch.randn(rows, size + 3, generator=torch.Generator().manual_seed(seed))[:, :size]
    )
    logits[1, 1::3] = -torch.inf
    return logits


@every_isa
@pytest.mark.parametrize("size", everyday([1, 5, 16, 17, 300, 4096], 1, 17, 4096))
@pytest.mark.parametrize("temperature", everyday([0.0, 1e-50, 0.3, 1.0], 0.0, 1e-50, 0.3))
@pytest.mark.parametrize("sharpening", everyday([0.3, 1.0], 0.3))
@pytest.mark.parametrize("noisy", [False, True])
def test_it_ranks_as_torch_does(
    isa: Isa, size: int, temperature: float, sharpening: float, noisy: bool
) -> None:
    use(isa)
    logits = draw(3, size)
    noise = list(draw(3, size, seed=1).nan_to_num(neginf=0.0).contiguous()) if noisy else None
    tokens, gains = ranking.likeliest(
        logits, 10, temperature=temperature, noise=noise, sharpening=sharpening
    )
    expected, expected_gains = growth.likeliest(
        logits, 10, temperature=temperature, noise=noise, sharpening=sharpening
    )
    possible = np.isfinite(expected_gains)
    assert np.array_equal(np.isfinite(gains), possible)
    assert np.array_equal(tokens[possible], expected[possible])
    np.testing.assert_allclose(gains, expected_gains, rtol=2e-6, atol=5e-6)
    assert gains.max() <= 0.0


@every_isa
def test_of_equals_the_lower_id_comes_first(isa: Isa) -> None:
    use(isa)
    logits = torch.randint(0, 3, (4, 100), generator=torch.Generator().manual_seed(0)).float()
    expected = logits.sort(descending=True, stable=True).indices[:, :40]
    assert ranking.likeliest(logits, 40)[0].tolist() == expected.tolist()


@every_isa
@pytest.mark.parametrize("place", [0, 7, 39])
def test_what_is_not_a_number_is_told_by_the_gains_of_its_row(isa: Isa, place: int) -> None:
    use(isa)
    logits = draw(3, 40)
    logits[2, place] = torch.nan
    gains = ranking.likeliest(logits, 5)[1]
    assert np.isnan(gains).tolist() == [[False] * 5, [False] * 5, [True] * 5]


def test_every_instruction_set_and_thread_count_gives_the_same_bytes() -> None:
    logits, noise = draw(16, 4001), list(draw(16, 4001, seed=1).nan_to_num(neginf=0.0).contiguous())
    found = set()
    for isa in kernels.isas():
        for threads in (1, 2):
            kernels.use_isa(isa)
            kernels.set_threads(threads)
            tokens, gains = ranking.likeliest(
                logits, 10, temperature=0.7, noise=noise, sharpening=0.9
            )
            found.add((tokens.tobytes(), gains.tobytes()))
    assert len(found) == 1


def test_noise_of_another_shape_or_type_is_refused() -> None:
    logits = draw(2, 8)
    for noise in (
        [torch.zeros(8)],
        [torch.zeros(7)] * 2,
        [torch.zeros(8, dtype=torch.float64)] * 2,
    ):
        with pytest.raises(ValueError, match="expected"):
            ranking.likeliest(logits, 2, noise=noise)
    with pytest.raises(ValueError, match="expected"):
        ranking.likeliest(logits.double(), 2)
