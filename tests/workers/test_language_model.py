"""Our pass computes what transformers computes, for every family and in every order of slots."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.models.backends import fused
from dovetail.workers.models.backends.blocked_cache import BlockedCache
from dovetail.workers.models.checkpoints.tables import PackedEmbedding
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model, random_language_model
from dovetail.workers.models.segment import Segment
from support.architectures import write_tiny
from support.decoded import TOKENS, logits_of
from support.models import CONTEXT, reference_logits, tiny_gemma2, tiny_llama, tiny_mistral

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # fp32 rounding in another order; logits are of size 10

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


@pytest.fixture
def without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the kernels, as if nobody had built them."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "LIBRARY", tmp_path / "none.so")
        kernels.load.cache_clear()
        yield
    kernels.load.cache_clear()


@pytest.mark.parametrize("positions", [[0, CONTEXT], [-1, 0]])
def test_positions_that_the_context_does_not_have_are_an_error(
    llama: LanguageModel, positions: list[int]
) -> None:
    segments = [Segment(llama.new_cache(2), 0, 2)]
    with pytest.raises(ValueError, match=rf"positions {positions[0]} to {positions[1]}, .*0 to 95"):
        llama.forward(torch.tensor([3, 17]), torch.tensor(positions), segments)
    with pytest.raises(ValueError, match="context has 0 to 95"):
        llama.forward_with_states(
            torch.tensor([3, 17]), torch.tensor(positions), segments, wanted=()
        )


def test_only_the_rows_that_are_asked_for_have_logits(
    llama: LanguageModel, llama_folder: Path
) -> None:
    logits = llama.forward(
        torch.tensor(TOKENS),
        torch.arange(10),
        [Segment(llama.new_cache(10), 0, 10)],
        rows=torch.tensor([9, 2]),
    )
    torch.testing.assert_close(logits, reference_logits(llama_folder, TOKENS)[[9, 2]], **TOLERANCE)


def test_sixteen_bit_checkpoints_are_widened_exactly(tmp_path: Path) -> None:
    tiny_llama(tmp_path, dtype=torch.float16)
    model = load_language_model(str(tmp_path), weights="fp32", device="cpu")
    logits = logits_of(model, TOKENS)
    torch.testing.assert_close(logits, reference_logits(tmp_path, TOKENS), **TOLERANCE)


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_a_draft_may_keep_sixteen_bits(llama_folder: Path, weights: str) -> None:
    model = load_language_model(str(llama_folder), weights=weights, device="cpu")
    logits = logits_of(model, TOKENS)
    assert logits.dtype == torch.float32
    error = (logits - reference_logits(llama_folder, TOKENS)).norm() / logits.norm()
    assert 0 < error < 0.1


def test_a_sliding_window_does_not_shorten_the_context(tmp_path: Path) -> None:
    assert (
        load_language_model(
            str(tiny_mistral(tmp_path, sliding_window=20)), weights="fp32", device="cpu"
        ).context
        == CONTEXT
    )


def test_unknown_weights_and_back_ends_are_refused(llama_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="fp32 or half or int8"):
        load_language_model(str(llama_folder), weights="fp8", device="cpu")
    with pytest.raises(CheckpointError, match="auto or kernels or library"):
        load_language_model(str(llama_folder), weights="fp32", device="cpu", backend="abacus")


def test_half_weights_of_a_checkpoint_that_has_none_are_refused_with_the_type_found_and_the_remedy(
    llama_folder: Path,
) -> None:
    with pytest.raises(
        CheckpointError, match="this one has F32: use weights fp32, or convert it to F16"
    ):
        load_language_model(str(llama_folder), weights="half", device="cpu")


@needs_kernels
@pytest.mark.parametrize(
    ("dtype", "found"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_weights_as_they_are_stored_are_the_same_function_in_less_memory(
    tmp_path: Path, dtype: torch.dtype, found: str
) -> None:
    model = load_language_model(
        str(tiny_llama(tmp_path, dtype=dtype)), weights="stored", device="cpu"
    )
    assert (model.weights, model.backend) == (found, "kernels")
    logits = logits_of(model, TOKENS)
    torch.testing.assert_close(logits, reference_logits(tmp_path, TOKENS), **TOLERANCE)


def test_without_the_kernels_weights_are_widened_where_nothing_else_is_asked_for(
    tmp_path: Path, without_kernels: None
) -> None:
    assert (
        load_language_model(
            str(tiny_llama(tmp_path, dtype=torch.bfloat16)), weights="stored", device="cpu"
        ).weights
        == "fp32"
    )


def test_half_weights_of_bf16_need_the_kernels(tmp_path: Path, without_kernels: None) -> None:
    tiny_llama(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(
        CheckpointError,
        match=r"half weights of a BF16 checkpoint need the C\+\+ kernels, and .*build.*use "
        r"weights fp32 or bf16",
    ):
        load_language_model(str(tmp_path), weights="half", device="cpu")


def test_half_weights_of_fp16_work_without_the_kernels(
    tmp_path: Path, without_kernels: None
) -> None:
    model = load_language_model(
        str(tiny_llama(tmp_path, dtype=torch.float16)), weights="half", device="cpu"
    )
    assert (model.backend, model.weights, model.kernels) == ("library", "fp16", "fbgemm-fp16")


def test_int8_without_the_kernels_is_refused_with_the_remedy(
    llama_folder: Path, without_kernels: None
) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"int8 weights need the C\+\+ kernels, and .*not built.*-m "
        r"dovetail.workers.kernels.build",
    ):
        load_language_model(str(llama_folder), weights="int8", device="cpu")


def test_without_the_kernels_auto_takes_the_library_and_says_why(
    llama_folder: Path, without_kernels: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        model = load_language_model(str(llama_folder), weights="fp32", device="cpu")
    assert model.backend == "library"
    assert "not built" in model.choice
    assert "not built" in caplog.text
    with pytest.raises(CheckpointError, match="not built"):
        load_language_model(str(llama_folder), weights="fp32", device="cpu", backend="kernels")


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "part"),
    [({"hidden_act": "relu"}, "activation"), ({"partial_rotary_factor": 0.5}, "")],
    ids=["activation", "rotary"],
)
def test_a_layer_that_the_kernels_cannot_compute_goes_to_the_library(
    tmp_path: Path, changes: dict[str, object], part: str
) -> None:
    """The second one only shows when the layer is compared with transformers' own."""
    file = tiny_llama(tmp_path) / "config.json"
    content = json.loads(file.read_text())
    rope = {
        **content["rope_parameters"],
        **{name: value for name, value in changes.items() if name.startswith("partial")},
    }
    file.write_text(json.dumps({**content, **changes, "rope_parameters": rope}))
    model = load_language_model(str(tmp_path), weights="fp32", device="cpu")
    if part:
        assert model.backend == "library"
        assert part in model.choice
    logits = logits_of(model, TOKENS)
    torch.testing.assert_close(logits, reference_logits(tmp_path, TOKENS), **TOLERANCE)


@needs_kernels
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2], ids=["llama", "gemma2"])
def test_keys_and_values_in_16_and_8_bits_move_logits_by_a_rounding(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    folder, tokens = make(tmp_path), torch.tensor(TOKENS * 4)
    models = [
        load_language_model(
            str(folder), weights="fp32", device="cpu", backend="kernels", cache=cache
        )
        for cache in ("fp32", "half", "q8")
    ]
    caches = [model.new_cache(40) for model in models]
    whole, half, codes = (
        model.forward(tokens, torch.arange(40), [Segment(cache, 0, 40)])
        for model, cache in zip(models, caches, strict=True)
    )
    moved = float(((half - whole).norm(dim=-1) / whole.norm(dim=-1)).max())
    assert 1e-6 < moved < 5e-3
    assert 2 * caches[1].row_bytes == caches[0].row_bytes
    moved = float(((codes - whole).norm(dim=-1) / whole.norm(dim=-1)).median())
    assert 1e-4 < moved < 5e-2
    assert [model.cache for model in models] == ["fp32", "half", "q8"]


@needs_kernels
def test_keys_that_16_bits_cannot_hold_are_refused_with_the_setting_that_can(
    tmp_path: Path,
) -> None:
    folder = tiny_llama(tmp_path)
    stored = load_file(folder / "model.safetensors")
    for name, factor in (("k_proj", 1e6), ("q_proj", 1e-6)):
        stored |= {key: factor * part for key, part in stored.items() if name in key}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    given = {"weights": "fp32", "device": "cpu", "backend": "kernels"}
    load_language_model(str(folder), **given, cache="fp32")
    with pytest.raises(CheckpointError, match=r"move the logits .*: use target\.cache fp32"):
        load_language_model(str(folder), **given, cache="half")


@needs_kernels
def test_a_tied_table_in_16_bits_is_looked_up_in_the_packed_head_whatever_its_factor(
    tmp_path: Path,
) -> None:
    """Gemma's factor, the root of the hidden size, is no power of two here."""
    write_tiny("gemma3_text", tmp_path / "m", dtype=torch.bfloat16, hidden_size=40)
    model = load_language_model(
        str(tmp_path / "m"), weights="half", device="cpu", backend="kernels"
    )
    assert isinstance(model.back_end._model.get_input_embeddings(), PackedEmbedding)  # type: ignore[attr-defined]


@needs_kernels
def test_a_family_that_is_not_described_is_left_to_the_library(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "FAMILIES", {})
    model = load_language_model(str(llama_folder), weights="fp32", device="cpu")
    assert model.backend == "library"
    assert "model type llama: no family with that name" in model.choice


@pytest.mark.parametrize("weights", ["fp32", "half", "int8"])
@needs_kernels
def test_a_configuration_alone_makes_a_model_of_random_weights_and_as_many_layers_as_asked_for(
    tmp_path: Path, weights: str
) -> None:
    stored = torch.bfloat16 if weights == "half" else torch.float32
    (tmp_path / "config.json").write_bytes(
        (tiny_gemma2(tmp_path / "whole", dtype=stored) / "config.json").read_bytes()
    )
    logits = []
    for layers in (None, 1, 7):
        model = random_language_model(tmp_path, weights=weights, layers=layers)
        cache = model.new_cache(10)
        assert isinstance(cache, BlockedCache)
        assert len(cache.values) == layers or layers is None
        logits.append(
            model.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(cache, 0, 10)])
        )
    assert all(torch.isfinite(found).all() for found in logits)
    assert not torch.equal(logits[0], logits[1])


def test_half_weights_of_a_configuration_are_those_that_it_names(tmp_path: Path) -> None:
    for stored, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(
            (tiny_gemma2(tmp_path / f"{name}-whole", dtype=stored) / "config.json").read_bytes()
        )
        if kernels.available() or name == "fp16":
            assert random_language_model(folder, weights="half").weights == name
    with pytest.raises(CheckpointError, match="half weights need a checkpoint of 16-bit weights"):
        random_language_model(tiny_gemma2(tmp_path / "wide"), weights="half")


@needs_kernels
def test_weights_that_bf16_rounds_are_left_to_the_library_and_it_is_said_why(
    tmp_path: Path,
) -> None:
    for stored in (torch.float16, torch.float32):
        folder = tiny_gemma2(tmp_path / str(stored), dtype=stored)
        model = load_language_model(str(folder), weights="bf16", device="cpu")
        assert model.backend == "library"
        assert "bf16" in model.choice
        assert "cannot" not in model.choice
