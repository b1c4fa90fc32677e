"""No operation meets tensors of two devices, and none reads numbers that it has not asked the
device for: on a pretended GPU that computes the real numbers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.protocol.messages import VerifyItem
from dovetail.protocol.settings import Sampling, TreeSettings
from dovetail.protocol.spans import Spans
from dovetail.workers.drafters.head_levels import Level, compute_level, open_levels
from dovetail.workers.drafters.shared import Lent, SharedDrafter
from dovetail.workers.heads.head import open_head
from dovetail.workers.kernels.coded import GROUP
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from dovetail.workers.models.states import LAST
from dovetail.workers.models.substitutes.device_codes import load_device_substitute
from dovetail.workers.models.substitutes.quantised import CodedProduct
from dovetail.workers.models.substitutes.quantize import Codes
from dovetail.workers.models.substitutes.substitute import shared_cache
from dovetail.workers.sessions.results import First, Verdict
from dovetail.workers.speculation.proposal import Shape
from dovetail.workers.verifier import Verifier
from pretended.device import POSSIBLE, Elsewhere, PretendedTransfer, capture, device
from support.cases import everyday
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import FAMILIES, tiny_llama
from support.opening import opening

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TYPES = {"fp32": torch.float32, "half": torch.float16, "int8": torch.float32}
TOLERANCE = {"fp32": 1e-5, "half": 1e-5, "int8": 3e-2}
"""The largest difference of logits, as a share of the largest logit; see `test_staged.py`."""


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


def decode(model: LanguageModel) -> Tensor:
    cache = model.new_cache(16)
    prompt = model.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(cache, 0, 10)])
    cache.keep(range(10), 10)
    paths = Paths.of(10, [[10], [10, 11], [10, 12], [10, 12, 13]])
    rows = torch.tensor([0, 3])
    tree, states = model.forward_with_states(
        torch.tensor([30, 7, 8, 22]),
        torch.tensor([10, 11, 11, 12]),
        [Segment(cache, 10, 4, paths)],
        wanted=(0, 1),
    )
    assert all(state.device.type == "cpu" for state in states.values())
    cache.keep([10, 12, 13], 3)
    cache.resize(64)
    last = model.forward(
        torch.tensor([4, 5]), torch.tensor([13, 14]), [Segment(cache, 13, 2)], rows=rows[:1]
    )
    return torch.cat([prompt, tree, last])


@needs_kernels
@pytest.mark.parametrize(
    ("family", "weights", "places"),
    [("llama", "half", "mixed"), ("llama", "int8", "streamed"), ("gemma2", "fp32", "resident")],
)
def test_layers_on_it_compute_the_kernels_function(
    tmp_path: Path, there: torch.device, family: str, weights: str, places: str
) -> None:
    folder = FAMILIES[family](tmp_path, dtype=TYPES[weights])
    whole = load_language_model(str(folder), weights=weights, device="cpu", backend="kernels")
    rest = whole.layers - 1
    chosen: dict[str, Sequence[Place]] = {
        "streamed": [Place.STREAMED] * whole.layers,
        "resident": [Place.RESIDENT] * whole.layers,
        "mixed": [Place.CPU, *[Place.STREAMED] * (rest - 1), Place.RESIDENT],
    }
    staging = Staging(chosen[places], PretendedTransfer())
    found, expected = (
        decode(
            load_language_model(
                str(folder), weights=weights, device="cpu", stage=lambda *_: staging
            )
        ),
        decode(whole),
    )
    assert found.device.type == "cpu"
    assert float((found - expected).abs().max()) <= TOLERANCE[weights] * float(expected.abs().max())


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


@needs_kernels
def test_a_prompt_that_it_has_read_goes_on_on_the_cpu(tmp_path: Path, there: torch.device) -> None:
    folder, tokens, logits = tiny_llama(tmp_path, layers=3, context=64), torch.arange(36) % 40, []
    for reader in (None, PretendedTransfer()):
        model = load_language_model(
            str(folder),
            weights="fp32",
            device="cpu",
            stage=lambda *_, reader=reader: Staging([Place.CPU] * 3, reader=reader),
        )
        cache, last = model.new_cache(36), torch.tensor([32])
        if reader is None:
            model.forward(tokens[:33], torch.arange(33), [Segment(cache, 0, 33)], rows=last)
        else:
            model.read_apart(tokens[:33], Segment(cache, 0, 33), wanted=(1,), rows=last)
        cache.keep(range(33), 33)
        logits.append(model.forward(tokens[33:], torch.arange(33, 36), [Segment(cache, 33, 3)]))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


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


@needs_kernels
@pytest.mark.parametrize("temperature", everyday([0.0, 1.0], 1.0))
@pytest.mark.parametrize("resident", everyday([0, 1], 1))
def test_a_substitute_shares_with_a_target_there_and_drafts_what_it_verifies(
    tmp_path: Path, there: torch.device, resident: int, temperature: float
) -> None:
    """A round: the prompt is read, a tree drafted in levels of fixed shapes over the target's rows,
    and verified."""
    folder = tiny_llama(tmp_path / "model", intermediate_size=128, dtype=torch.float16)
    places = [Place.RESIDENT] * resident + [Place.STREAMED] * (2 - resident)
    target = load_language_model(
        str(folder),
        weights="half",
        device="cpu",
        stage=lambda *_: Staging(places, PretendedTransfer()),
    )
    substitute = load_device_substitute(target, capture, weights="int4", folder=tmp_path / "kept")[
        0
    ]
    verifier, drafter = Verifier(target, Spans()), SharedDrafter(substitute, Spans())
    drafter.borrow = lambda number: Lent(
        verifier.lend(number)[0], shared_cache(verifier.lend(number)[1]), verifier.lend(number)[2]
    )
    verifier.rows_beside = drafter.rows_beside
    tree, sampling, key = (
        TreeSettings(policy="beam", gamma=8, depth=3, width=3),
        Sampling(temperature=temperature),
        bytes(16),
    )
    (first,) = (
        event
        for event in verifier.open(
            opening(1, TOKENS, key=key, capacity=32, sampling=sampling, tree=tree)
        )
        if isinstance(event, First)
    )
    session = drafter.open(
        opening(
            1,
            TOKENS,
            capacity=32,
            vocabulary_size=target.vocabulary_size,
            key=key,
            sampling=sampling,
            tree=tree,
        )
    )
    session.number = 1
    proposal = drafter.draft(session, (), first.token, Shape(8, 3, 3))
    assert len(proposal.tree.tokens) == 8
    item = VerifyItem(
        session=1,
        round=1,
        prefix=len(TOKENS) + 1,
        tokens=proposal.tree.tokens,
        parents=proposal.tree.parents,
    )
    (verdict,) = verifier.verify([item])
    assert isinstance(verdict, Verdict)
    again = drafter.draft(session, verdict.item.accepted, verdict.item.bonus, Shape(8, 3, 3))
    assert len(again.tree.tokens) == 8
