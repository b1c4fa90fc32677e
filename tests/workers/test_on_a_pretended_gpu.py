"""No operation meets tensors of two devices, and none reads numbers that it has not asked the
device for: on a pretended GPU that computes the real numbers."""

from pathlib import Path

import pytest
import torch

from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.states import LAST
from pretended.device import POSSIBLE, capture, device
from support.models import tiny_llama

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]


@pytest.fixture
def there() -> torch.device:
    if not POSSIBLE:
        pytest.skip("this version of torch cannot be told of a device from Python")
    return device()


def test_it_forbids_what_a_gpu_forbids(there: torch.device) -> None:
    a, b = torch.ones(2, 3, device=there), torch.ones(2, 3)
    assert (
        a.device == (a + 1.0).device == a[torch.tensor([1])].device == b.to(there).device == there
    )
    assert (a.cpu() + b).tolist() == [[2.0] * 3] * 2
    a[0] = b[0]
    a += 1
    assert a.tolist() == [[2.0] * 3] * 2
    for mixed in (
        lambda: a + b,
        lambda: torch.cat([a, b]),
        lambda: a @ b.t(),
        lambda: a.index_copy_(0, torch.tensor([0]), a[:1]),
    ):
        with pytest.raises(RuntimeError, match="meets tensors of the CPU"):
            mixed()
    with pytest.raises((TypeError, RuntimeError)):
        a.numpy()
    assert (capture(lambda: a * 2.0)() == a + a).all()
    for waiting in (
        lambda: a.sum().item(),
        lambda: a.cpu(),
        lambda: a + b.to(there),
        lambda: a[torch.tensor([1])],
    ):
        with pytest.raises(RuntimeError, match=r"is being captured"):
            capture(waiting)


def test_a_whole_model_there_computes_what_it_computes_here(
    tmp_path: Path, there: torch.device
) -> None:
    folder = tiny_llama(tmp_path)
    models = [
        load_language_model(str(folder), weights="fp32", device=str(where), backend="library")
        for where in (there, "cpu")
    ]
    assert models[0].device == there
    logits = []
    for model in models:
        cache = model.new_cache(16)
        prompt, states = model.forward_with_states(
            torch.tensor(TOKENS), torch.arange(10), [Segment(cache, 0, 10)], wanted=(1, LAST)
        )
        assert {state.device for state in (prompt, *states.values())} == {model.device}
        cache.keep(range(10), 10)
        tree = model.forward(
            torch.tensor([30, 7]),
            torch.tensor([10, 11]),
            [Segment(cache, 10, 2, Paths.of(10, [[10], [10, 11]]))],
            rows=torch.tensor([1]),
        )
        logits.append(torch.cat([prompt, tree]).cpu())
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
