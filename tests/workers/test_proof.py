"""A model of any family computes what transformers does at every position, or is refused in one
true sentence."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.settings import TargetSettings
from dovetail.workers import kernels
from dovetail.workers.models.backends import fused
from dovetail.workers.models.families.registry import FAMILIES
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.parity.following import UnprovableError, runs_of
from dovetail.workers.models.parity.oracle import Oracle
from dovetail.workers.serving.open_target import open_target_worker
from support.cases import everyday
from support.decoded import extend
from support.models import CONTEXT, SHAPE, reference_logits, tiny_llama
from support.zoo import COMPUTED, ORIGINAL, REFUSED, SCALED, TOKENS, longrope, rope, write

RIGHT = 1e-4  # share of the logits' norm that rounding stays below in fp32
PARTS = (17, 1, 22)  # rows of the passes in which a text is read, over and over

VARIANTS = (
    *("smollm3 with windows", "ministral3", "llama dynamic", "llama longrope of one table"),
    *("llama rotated in part", "gemma2 window 1"),
)
"""Families, each with an unusual configuration; `test_described_families.py` has the usual ones."""
WITHOUT_GROWTH = {"ministral3": FAMILIES["mistral"]}
"""A wrong description of Ministral 3: its queries do not grow."""
needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


def logits_of(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits of a text that is read in parts."""
    cache, found = model.new_cache(len(tokens)), []
    while cache.length < len(tokens):
        part = tokens[cache.length :][: PARTS[len(found) % len(PARTS)]]
        found.append(extend(model, cache, part))
    return torch.cat(found)


def share_of(found: Tensor, expected: Tensor) -> float:
    """The largest distance of a position's logits from the expected ones."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)).max())


@needs_kernels
@pytest.mark.parametrize("name", everyday(COMPUTED, *VARIANTS))
def test_every_position_is_transformers_own_on_whichever_back_end_computes_it(
    tmp_path: Path, name: str
) -> None:
    family, changes, backend = COMPUTED[name]
    folder = write(tmp_path, family, changes)
    expected = reference_logits(folder, TOKENS)
    model = load_language_model(str(folder), weights="fp32", device="cpu")
    assert model.backend == backend, model.choice
    found = logits_of(model, TOKENS)
    assert share_of(found, expected) <= RIGHT
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    if backend == "kernels":
        library = load_language_model(str(folder), weights="fp32", device="cpu", backend="library")
        assert share_of(logits_of(library, TOKENS), expected) <= RIGHT


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_back_end_computes_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    family, changes, words = REFUSED[name]
    folder = str(write(tmp_path, family, changes))
    for backend in ("auto", "library"):
        with pytest.raises(CheckpointError, match=words) as refused:
            load_language_model(folder, weights="fp32", device="cpu", backend=backend)
        assert "\n" not in str(refused.value)


@needs_kernels
@pytest.mark.parametrize(
    ("family", "changes", "place"), [("SmolLM3", {}, (3, 1)), ("Ministral3", SCALED, (0, ORIGINAL))]
)
def test_a_layer_that_fails_its_proof_is_named_with_the_position_where_it_differs(
    tmp_path: Path,
    family: str,
    changes: dict[str, Any],
    place: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are told to be Llama."""
    monkeypatch.setattr(fused, "FAMILIES", {family.lower(): FAMILIES["llama"]})
    folder = write(tmp_path, family, {"sliding_window": None, **changes}, torch.bfloat16)
    said = (
        rf"queries of layer {place[0]} \({family}DecoderLayer\) differ from transformers' "
        rf"at position {place[1]} by \d\.\de-0\d"
    )
    with caplog.at_level("WARNING"):
        assert load_language_model(str(folder), weights="fp32", device="cpu").backend == "library"
    assert any("the library computes it" in record.message for record in caplog.records)
    for weights in ("int8", "half"):
        with pytest.raises(
            CheckpointError, match=f"{weights} weights .*need the C.. kernels, and .*{said}"
        ):
            load_language_model(str(folder), weights=weights, device="cpu")
    with pytest.raises(CheckpointError, match=said):
        load_language_model(str(folder), weights="fp32", device="cpu", backend="kernels")


def test_the_positions_of_a_proof_are_the_beginning_the_end_and_both_sides_of_what_a_configuration_names() -> (  # noqa: E501
    None
):
    config = {
        "sliding_window": 4096,
        "vocab_size": 500,
        "rope_parameters": {
            "full_attention": {"original_max_position_embeddings": 8192.0},
            "factor": 32.0,
        },
        "floor_scale": 100,
        "layer_types": ["full_attention"],
    }
    found = {position for run in runs_of(config, 131072) for position in range(run.first, run.stop)}
    assert {*range(8), 4095, 4096, 8191, 8192, 99, 100, 131070, 131071} <= found
    assert not {499, 500} & found
    assert len(found) < 32
    assert [(run.first, run.count) for run in runs_of(config, 5)] == [(0, 5)]


@needs_kernels
@pytest.mark.parametrize("position", [9, 90])
def test_a_scale_that_a_whole_layer_would_hide_is_noticed_at_the_position_where_it_begins(
    tmp_path: Path, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "FAMILIES", WITHOUT_GROWTH)
    scaled = rope(
        "yarn", factor=2.0, original_max_position_embeddings=position, llama_4_scaling_beta=0.001
    )
    folder = write(
        tmp_path, "Ministral3", {"sliding_window": None, "initializer_range": 0.02, **scaled}
    )
    model = load_language_model(str(folder), weights="fp32", device="cpu")
    assert (
        "queries of layer 0 (Ministral3DecoderLayer) differ from transformers' at position "
        f"{position} by" in model.choice
    )
    assert share_of(logits_of(model, TOKENS), reference_logits(folder, TOKENS)) <= RIGHT


def test_a_layer_that_counts_the_rows_of_a_cache_is_refused(tmp_path: Path) -> None:
    changes = {
        "attention_chunk_size": 8,
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 0, 1, 0],
    }
    config = transformers.Llama4TextConfig(
        **{
            **SHAPE,
            "vocab_size": 48,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "floor_scale": 4,
            **changes,
        }
    )
    model = transformers.Llama4ForCausalLM(config).eval().requires_grad_(False)
    oracle = Oracle(model, model.model.layers, CONTEXT)
    with pytest.raises(UnprovableError, match=r"layer 1 .* counts the rows of transformers' cache"):
        oracle.run_eager(model.model.layers[1], 1, oracle.states(1))
    with pytest.raises(UnprovableError, match=r"layer 0 .* position 8 .* without a window"):
        oracle.check_window(0, None)


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_a_model_with_two_rotary_tables_has_the_context_of_the_first(
    family: str, tmp_path: Path
) -> None:
    fields = {"original_max_position_embeddings": ORIGINAL} if family == "Phi3" else {}
    folder = write(tmp_path, family, {**fields, **longrope(4.0)})
    model = load_language_model(str(folder), weights="fp32", device="cpu")
    assert model.context == ORIGINAL
    expected = reference_logits(folder, TOKENS[:ORIGINAL])
    torch.testing.assert_close(logits_of(model, TOKENS[:ORIGINAL]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_a_longer_context_has_the_second_rotary_table_for_texts_of_every_length(
    family: str, tmp_path: Path
) -> None:
    fields = {"original_max_position_embeddings": ORIGINAL} if family == "Phi3" else {}
    folder = write(tmp_path / "two", family, {**fields, **longrope(4.0)})
    model = load_language_model(str(folder), weights="fp32", device="cpu", context=CONTEXT - 1)
    first = load_language_model(str(folder), weights="fp32", device="cpu", context=ORIGINAL)
    assert (model.context, first.context) == (CONTEXT - 1, ORIGINAL)
    assert model.checkpoint_digest != first.checkpoint_digest == first.checkpoint.digest
    expected = reference_logits(folder, TOKENS)  # longer than the first table is for
    torch.testing.assert_close(logits_of(model, TOKENS), expected, rtol=1e-4, atol=1e-4)
    few = ORIGINAL // 2
    found = logits_of(model, TOKENS[:few])
    torch.testing.assert_close(found, expected[:few], rtol=1e-4, atol=1e-4)
    assert share_of(logits_of(first, TOKENS[:few]), found) > RIGHT


@pytest.mark.parametrize(
    ("kind", "length", "said", "most"),
    [
        ("yarn", ORIGINAL, {"original_max_position_embeddings": ORIGINAL}, CONTEXT),
        ("yarn", ORIGINAL, {}, CONTEXT),
        ("yarn", 2 * CONTEXT, {"original_max_position_embeddings": ORIGINAL}, 2 * CONTEXT),
        ("linear", ORIGINAL, {}, ORIGINAL),
        ("dynamic", ORIGINAL, {}, ORIGINAL),
    ],
)
def test_a_rotation_as_a_model_card_adds_it_has_the_positions_of_its_factor(
    tmp_path: Path, kind: str, length: int, said: dict[str, int], most: int
) -> None:
    scaling = {"rope_type": kind, "factor": CONTEXT / ORIGINAL, "rope_theta": 1e4, **said}
    fields = {"max_position_embeddings": length, "rope_parameters": scaling}
    folder = write(tmp_path, "Llama", fields)
    model = load_language_model(str(folder), weights="fp32", device="cpu")
    assert model.context == most
    expected = reference_logits(folder, TOKENS[:most])
    assert share_of(logits_of(model, TOKENS[:most]), expected) <= RIGHT
    asked = {"linear": CONTEXT}.get(kind, most)
    longer = load_language_model(str(folder), weights="fp32", device="cpu", context=asked)
    found, expected = logits_of(longer, TOKENS[:asked]), reference_logits(folder, TOKENS[:asked])
    assert share_of(found, expected) <= RIGHT
    with pytest.raises(CheckpointError, match=rf"{asked} positions .* factor of rope_parameters"):
        load_language_model(str(folder), weights="fp32", device="cpu", context=asked + 1)


def test_a_context_beyond_the_positions_of_the_model_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, "Llama", {})
    with pytest.raises(
        CheckpointError, match=rf"context = {CONTEXT + 1} is more than .* {CONTEXT}"
    ):
        load_language_model(str(folder), weights="fp32", device="cpu", context=CONTEXT + 1)


@needs_kernels
def test_a_target_that_torch_computes_says_why_where_its_models_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "FAMILIES", WITHOUT_GROWTH)
    folder = str(write(tmp_path, "Ministral3", {"sliding_window": None, **SCALED}))
    told = open_target_worker(TargetSettings(model=folder), name="target", threads=1).hello(1)
    assert "by torch's own operations, because the C++ kernels cannot compute" in told.placement
    assert f"differ from transformers' at position {ORIGINAL}" in told.placement


@needs_kernels
def test_a_model_that_int8_is_too_coarse_for_is_refused_with_weights_that_are_not(
    tmp_path: Path,
) -> None:
    file = tiny_llama(tmp_path / "llama") / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "up_proj" in name:  # one input of the matrix behind it is so large that others are lost
            tensor[0] *= 100.0
        if "down_proj" in name:
            tensor[:, 0] /= 100.0
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        CheckpointError,
        match=r"int8 weights are too coarse for this model: they change the product with its down "
        r"matrix by [1-9]\d %, more than the 10 % allowed: use weights fp32",
    ):
        load_language_model(str(file.parent), weights="int8", device="cpu")
