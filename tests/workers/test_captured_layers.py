"""Layers of a target that stay on a GPU are captured for passes of a few rows, of one session or of
several. They give the bytes that they give operation by operation, however many rows a pass is
padded to."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.workers.models.backends import fused
from dovetail.workers.models.backends.placement import Place
from dovetail.workers.models.backends.staged import Staging
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Paths, Segment
from pretended.device import POSSIBLE, PretendedTransfer, capture, counted
from support.cases import everyday
from support.emulated import given_to_pretended
from support.kernels import needs_kernels
from support.models import FAMILIES, tiny_llama

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]

C, R, S = Place.CPU, Place.RESIDENT, Place.STREAMED
TOKENS = torch.tensor([3, 17, 9, 30, 8, 22, 41, 5, 9, 11])
LAYERS, FEW, ALL = 3, (3,), (1, 2, 3, 5, 8, 6)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give the pretended GPU our functions for as long as a test takes."""
    yield from given_to_pretended(monkeypatch)


class Captures:
    """Captures, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, function: Callable[[], Any]) -> Callable[[], Any]:
        self.count += 1
        return capture(function)


def placed(
    folder: Path, places: Sequence[Place], making: Any, weights: str = "half", cache: str = "half"
) -> LanguageModel:
    staging = Staging(places, PretendedTransfer(), capture=making)
    return load_language_model(
        str(folder), weights=weights, device="cpu", stage=lambda *_: staging, cache=cache
    )


def decode(model: LanguageModel, rows: Sequence[int] = FEW) -> list[Tensor]:
    """Return logits and states of a prompt, and of trees of so many rows behind it."""
    cache, found = model.new_cache(40), []
    first = model.forward(TOKENS, torch.arange(10), [Segment(cache, 0, 10)])
    cache.keep(range(10), 10)
    for count in rows:
        length = cache.length
        paths = [[length], *([length, length + row] for row in range(1, count))]
        segment = Segment(cache, length, count, Paths.of(length, paths) if count > 1 else None)
        positions = torch.tensor([length, *[length + 1] * (count - 1)])
        tokens = TOKENS[:count].roll(count)
        logits, states = model.forward_with_states(tokens, positions, [segment], wanted=(1, 2))
        found += [logits.cpu(), *(states[place].cpu() for place in (1, 2))]
        cache.keep([length, *([length + count - 1] if count > 1 else [])], min(count, 2))
    return [first.cpu(), *found]


@pytest.mark.parametrize(
    ("family", "places", "rows"),
    everyday(
        [("llama", [C, R, R], ALL), ("llama", [S, R, R], ALL), ("mistral-sliding", [R, S, R], ALL)]
    ),
)
def test_captured_layers_give_the_bytes_of_layers_that_are_computed_operation_by_operation(
    tmp_path: Path, launches: list[str], family: str, places: Sequence[Place], rows: Sequence[int]
) -> None:
    folder, making = FAMILIES[family](tmp_path, layers=LAYERS, dtype=torch.float16), Captures()
    expected = decode(placed(folder, places, None), rows)
    found = decode(placed(folder, places, making), rows)
    assert making.count
    assert all(map(torch.equal, found, expected))


def test_layers_are_one_launch_and_captured_once_for_rows_up_to_a_power_of_two(
    tmp_path: Path, launches: list[str]
) -> None:
    folder, making = tiny_llama(tmp_path, layers=LAYERS, dtype=torch.float16), Captures()
    counts = []
    for own in (making, None):
        model = placed(folder, [C, R, R], own)
        making.count = 0
        cache = model.new_cache(40)
        for rows in (19, 20):
            segment = Segment(cache, 0, rows, Paths.growing(0, rows))
            with counted() as asked:
                model.forward(torch.arange(rows), torch.arange(rows), [segment])
        counts.append(asked)
        assert making.count == (own is not None)
    captured, launched = counts
    assert captured.launches <= launched.launches - 2 * 15
    assert captured.copies_in == 1


@pytest.mark.parametrize("family", everyday(["llama", "mistral-sliding", "qwen3"], "llama"))
def test_passes_over_several_sessions_are_one_launch_and_give_each_what_it_gets_alone(
    tmp_path: Path, launches: list[str], family: str
) -> None:
    """Caches of several sizes, one of which ends and leaves its memory to another."""
    folder, making = FAMILIES[family](tmp_path, layers=LAYERS, dtype=torch.float16), Captures()
    found = []
    for model in (placed(folder, [C, R, R], None), placed(folder, [C, R, R], making)):
        caches = {number: model.new_cache(capacity) for number, capacity in enumerate((40, 700))}
        passes, counts = [], []
        for number, sessions in enumerate([(0, 1), (1,), (0, 1), (2, 1), (1, 2)]):
            if 2 in sessions and 0 in caches:
                del caches[0]
                caches[2] = model.new_cache(44)
            parts, tokens, positions = [], list[int](), list[int]()
            for session in sessions:
                cache = caches[session]
                length, rows = cache.length, 1 + (session + number) % 3
                paths = [[length], *([length, length + row] for row in range(1, rows))]
                parts.append(Segment(cache, length, rows, Paths.of(length, paths)))
                tokens += [1 + session + 7 * row for row in range(rows)]
                positions += [length, *[length + 1] * (rows - 1)]
            before = making.count
            with counted() as asked:
                logits, states = model.forward_with_states(
                    torch.tensor(tokens), torch.tensor(positions), parts, wanted=(2,)
                )
            passes += [logits.cpu(), states[2].cpu()]
            if making.count == before:
                counts.append(asked)
            for part in parts:
                part.cache.keep([part.start], 1)
        found.append(passes)
    assert making.count
    assert len(counts) > 1
    assert len({count.all() for count in counts}) == 1
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("weights", "cache"), [("half", "fp32")])
def test_layers_whose_rows_depend_on_others_are_not_captured(
    tmp_path: Path, launches: list[str], weights: str, cache: str
) -> None:
    dtype = torch.float16 if weights == "half" else torch.float32
    folder, making = tiny_llama(tmp_path, layers=LAYERS, dtype=dtype), Captures()
    decode(placed(folder, [C, R, R], making, weights, cache))
    assert not making.count


def test_the_proof_of_a_cache_compares_captured_layers_with_layers_over_fp32(
    tmp_path: Path, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured layers know keys and values of 16 bits alone."""
    folder = tiny_llama(tmp_path, layers=LAYERS, dtype=torch.float16)
    compared = list[tuple[Tensor, Tensor]]()
    monkeypatch.setattr(fused, "prove_cache", lambda *logits: compared.append(logits[:2]))
    for making in (None, Captures()):
        placed(folder, [C, R, R], making)
    (exact, half), (beside_captured, captured) = compared
    assert torch.equal(beside_captured, exact)
    assert torch.equal(captured, half)
    assert not torch.equal(half, exact)
