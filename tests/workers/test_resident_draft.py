"""A small draft all layers of which a GPU computes: the model's function up to rounding, levels of
its trees in one copy and one launch."""

import itertools
from pathlib import Path

import pytest
import torch

from dovetail.workers.devices.opening import open_device
from dovetail.workers.models.backends.staged import ResidentDraft
from dovetail.workers.models.loading import load_language_model
from support.architectures import write_varied
from support.cases import everyday
from support.decoded import TOKENS, TREE, decode, far, level, read
from support.kernels import needs_kernels
from support.models import FAMILIES, tiny_llama

pytestmark = needs_kernels

ROUNDED = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 3e-2, "int8": 3e-2}
"""The largest difference from the model on the CPU, relative to the norm of the logits; in fp32
there, and in int8 for int8."""


@pytest.mark.parametrize(
    ("weights", "family"),
    everyday(
        itertools.product(
            ["fp32", "fp16", "bf16", "int8"], ["llama", "qwen3", "mistral-sliding", "gemma2"]
        ),
        *(("int8", "llama"), ("fp16", "gemma2")),
    ),
)
def test_a_draft_on_a_device_is_the_model_and_its_levels_are_captured(
    tmp_path: Path, family: str, weights: str
) -> None:
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(weights, torch.float16)
    folder = str(FAMILIES[family](tmp_path, dtype=stored))
    device = open_device("pretended", 1)
    same = "int8" if weights == "int8" else "fp32"
    expected = load_language_model(folder, weights=same, device="cpu")
    model = load_language_model(folder, weights=weights, device=device.name, draft=device)
    assert isinstance(model.back_end, ResidentDraft)
    assert model.back_end.captures
    assert far(decode(model), decode(expected)) < ROUNDED[weights]


def test_a_draft_with_states_is_computed_as_it_comes(tmp_path: Path) -> None:
    """transformers' own form of it cannot decode trees, and was all that a GPU had."""
    folder = str(write_varied("qwen3_5_text", tmp_path, torch.float16))
    device = open_device("pretended", 1)
    expected = load_language_model(folder, weights="fp32", device="cpu")
    model = load_language_model(folder, weights="fp16", device=device.name, draft=device)
    assert isinstance(model.back_end, ResidentDraft)
    assert not model.back_end.captures
    assert far(decode(model), decode(expected)) < ROUNDED["fp16"]


def test_what_the_kernels_do_not_describe_is_the_librarys_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers of 32 bits are not those of 16, which the kernels would have to multiply."""
    folder = str(tiny_llama(tmp_path, dtype=torch.float32))
    device = open_device("pretended", 1)
    model = load_language_model(folder, weights="fp16", device=device.name, draft=device)
    assert model.backend == "library"
    assert "one operation at a time, because model type llama" in caplog.text


def test_a_session_that_grows_and_shrinks_keeps_what_is_committed(tmp_path: Path) -> None:
    """The memory of an ended session goes to the next one, which finds nothing in it."""
    folder = str(tiny_llama(tmp_path, dtype=torch.float16))
    device = open_device("pretended", 1)
    model = load_language_model(folder, weights="fp16", device=device.name, draft=device)
    expected = decode(model)
    cache, count = model.new_cache(12), len(TOKENS)
    read(model, cache)
    for capacity in (2000, count, 40):
        cache.resize(capacity)
    found = level(model, cache).cpu()
    assert torch.equal(found, expected[count : count + len(TREE)])
    assert torch.equal(decode(model), expected)
