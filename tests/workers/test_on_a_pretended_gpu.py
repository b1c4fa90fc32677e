"""No operation meets tensors of two devices, and none reads numbers that it has not asked the
device for: on a pretended GPU that computes the real numbers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dovetail.workers.drafters.head_levels import Level, compute_level, open_levels
from dovetail.workers.heads.head import open_head
from dovetail.workers.kernels.coded import GROUP
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.models.substitutes.quantised import CodedProduct
from dovetail.workers.models.substitutes.quantize import Codes
from pretended.device import POSSIBLE, Elsewhere, capture, device
from support.heads import write_head
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


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dovetail", "jakiro"])
def test_a_heads_levels_in_fixed_shapes_are_what_they_are_one_by_one(
    tmp_path: Path, there: torch.device, kind: str
) -> None:
    target = tiny_llama(tmp_path / "target")
    head = open_head(
        str(write_head(tmp_path / "head", kind)),
        target=str(target),
        weights="fp16",
        device=str(there),
    )
    generator, found = torch.Generator().manual_seed(1), []
    features, given = (
        torch.randn(5, head.spec.feature_width, generator=generator),
        torch.randn(3, head.spec.hidden, generator=generator),
    )
    paths, positions, contrast = (
        Paths.of(5, [[5], [6], [5, 7]]),
        torch.tensor([5, 5, 6]),
        head.spec.contrast,
    )
    for making in (None, capture):
        cache, levels = open_levels(head, 12, making, of_tree=6)
        levels.states[:3] = given.to(there)
        head.forward(
            torch.tensor(TOKENS[:5]),
            features.to(there),
            torch.arange(5),
            [Segment(cache, 0, 5)],
            true=True,
        )
        cache.keep(range(5), 5)
        level = Level(
            torch.tensor(TOKENS[5:8]),
            positions,
            Segment(cache, 5, 3, paths),
            np.arange(3),
            into=3,
            contrast=contrast,
        )
        predicted = compute_level(head, levels, level)
        found.append((predicted, levels.states[3:6].clone()))
    assert found[0][0].logits.device == there
    for one, other in (
        (found[0][0].logits, found[1][0].logits),
        (found[0][0].contrast, found[1][0].contrast),
        (found[0][1], found[1][1]),
    ):
        if one is not None:
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_codes_lie_there_as_cudas_int4_products_have_them(there: torch.device, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = Codes(
        bits,
        100,
        torch.randint(0, 1 << bits, (40, 2 * GROUP), generator=generator, dtype=torch.uint8),
        *torch.rand(2, 40, 2).half(),
    )
    x = torch.randn(5, 100, generator=generator)
    found = CodedProduct(codes, torch.ones(40), there)(x.to(there))
    assert isinstance(found, Elsewhere)
    expected = x @ codes.weight().t() + 1.0
    assert float((found.cpu() - expected).norm() / expected.norm()) < 0.01
