"""The shares of a pass that go into matrices, attention and head."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dovetail.protocol.spans import Spans
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from dovetail.workers.models.timing import PLACES, asked, timed
from dovetail.workers.sessions.timing import timed_pass

FAMILIES = [
    pytest.param(
        "kernels",
        marks=pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built"),
    ),
    "library",
]
PASS = ["linears", "attention", "other", "head"]


def logits(model: LanguageModel) -> torch.Tensor:
    rows = 10
    return model.forward(
        torch.arange(rows), torch.arange(rows), [Segment(model.new_cache(rows), 0, rows)]
    )


@pytest.mark.parametrize("backend", FAMILIES)
def test_the_parts_of_a_pass_are_parts_of_it_and_it_computes_the_same_bytes(
    llama_folder: Path, backend: str
) -> None:
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend=backend)
    expected = logits(model)
    began_ns = time.perf_counter_ns()
    with timed() as parts:
        found = logits(model)
    duration_ns = time.perf_counter_ns() - began_ns
    taken = [parts.ns(part) for part in PLACES]
    assert min(taken) > 0
    assert sum(taken) < duration_ns
    assert torch.equal(found, expected)
    assert torch.equal(logits(model), expected)
    assert [parts.ns(part) for part in PLACES] == taken, "nobody asks any more"
    assert asked() is None


@pytest.mark.parametrize("backend", FAMILIES)
def test_the_parts_grow_with_the_work(llama_folder: Path, backend: str) -> None:
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu", backend=backend)
    logits(model)
    with timed() as parts:
        before = [parts.ns(part) for part in PLACES]
        for _ in range(8):
            logits(model)
            after = [parts.ns(part) for part in PLACES]
            assert all(now > then for now, then in zip(after, before, strict=True))
            before = after


def test_fine_spans_of_a_pass_fill_it_one_behind_the_other(llama: LanguageModel) -> None:
    spans = Spans()
    with timed_pass(spans):
        logits(llama)
    assert spans.take(100) == ()
    spans.fine = True
    began_ns = time.monotonic_ns()
    with timed_pass(spans):
        logits(llama)
    ended_ns = time.monotonic_ns()
    found = spans.take(100)
    assert [name for name, _, _ in found] == PASS
    assert began_ns <= found[0][1]
    for (_, start, duration), (_, following, _) in pairwise(found):
        assert start + duration == following
    assert found[-1][1] + found[-1][2] <= ended_ns
