"""A model of any family computes what transformers does at every position, or is refused in one true sentence."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.models.language_model import LanguageModel, load_language_model
from dovetail.workers.models.oracle import Oracle, UnprovableError, runs_of
from dovetail.workers.models.segment import Segment
from support.models import CONTEXT, SHAPE, reference_logits, save_random

ORIGINAL = 16
"""The context that a stretched model was trained with."""
RIGHT = 1e-4
"""Share of the logits' norm that rounding stays below in fp32."""
TOKENS = torch.randint(2, 48, (CONTEXT - 2,), generator=torch.Generator().manual_seed(3)).tolist()
PARTS = (17, 1, 22)
"""Rows of the passes in which a text is read, over and over."""

needs_kernels = pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")


def rope(kind: str, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


def longrope(long: float) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 8, "long_factor": [long] * 8}
    return rope("longrope", factor=6.0, original_max_position_embeddings=ORIGINAL, **factors)


YARN = rope("yarn", factor=6.0, original_max_position_embeddings=ORIGINAL)
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)
SCALED = rope("yarn", factor=6.0, original_max_position_embeddings=ORIGINAL, llama_4_scaling_beta=0.1)
WINDOWED = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
NO_ROPE_AT = {"no_rope_layers": [1, 0, 0, 1]}
BY_LAYERS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}

COMPUTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "smollm3": ("SmolLM3", {}, "library"),
    "smollm3 by a list": ("SmolLM3", NO_ROPE_AT, "library"),
    "smollm3 with windows": ("SmolLM3", WINDOWED, "library"),
    "ministral3": ("Ministral3", {"sliding_window": None, **SCALED}, "library"),
    "llama linear": ("Llama", rope("linear", factor=4.0), "kernels"),
    "llama dynamic": ("Llama", rope("dynamic", factor=4.0), "kernels"),
    "llama yarn": ("Llama", YARN, "kernels"),
    "llama llama3": ("Llama", LLAMA3, "kernels"),
    "llama longrope of one table": ("Llama", longrope(1.0), "kernels"),
    "llama rotated in part": ("Llama", rope("default", partial_rotary_factor=0.5), "kernels"),
    "gemma2 window 1": ("Gemma2", {"sliding_window": 1}, "kernels"),
    "gemma2 window beyond the context": ("Gemma2", {"sliding_window": 1000}, "kernels"),
    "gemma3": ("Gemma3", {"sliding_window": 6, "num_hidden_layers": 6}, "library"),
    "qwen2 by layers": ("Qwen2", BY_LAYERS, "kernels"),
    "mistral window 1": ("Mistral", {"sliding_window": 1}, "kernels"),
    "mistral window 40": ("Mistral", {"sliding_window": 40}, "kernels"),
    "cohere2": ("Cohere2", {"sliding_window": 6}, "library"),
    "exaone4": ("Exaone4", {"sliding_window": 6, "sliding_window_pattern": 4}, "library"),
    "olmo2": ("Olmo2", {}, "library"),
    "olmo3": ("Olmo3", {"sliding_window": 6}, "library"),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 6}, "library"),
    "granite": ("Granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.3}, "library"),
    "starcoder2": ("Starcoder2", {"sliding_window": 6}, "kernels"),
}
"""Family, what is changed of its configuration, and what computes it where the kernels are built."""

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "doge": ("Doge", {}, "layer 0 .DogeDecoderLayer. .*attention with a mask of its own is not supported"),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "layer 0 .*attention with s_aux is not supported"),
    "llama4": ("Llama4", {"attention_chunk_size": 8, "num_local_experts": 2}, "layers of type chunked_attention"),
    "llama longrope": ("Llama", longrope(4.0), "rotary embeddings of type longrope .llama. .*longest sequence of a pass"),
    "phi3 longrope": ("Phi3", {"original_max_position_embeddings": ORIGINAL, **longrope(4.0)}, "rotary embeddings of type longrope"),
    "stablelm": ("StableLm", {}, "layer 0 .*what the model is given does not reach its attention"),
    "diffllama": ("DiffLlama", {}, "layer 0 .*computes 2 attentions|layer 0"),
}
"""Family, changes and what the refusal says."""


def write(folder: Path, family: str, changes: dict[str, Any], dtype: torch.dtype = torch.float32) -> Path:
    """A tiny random checkpoint of a family."""
    configuration = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}.get(family, f"{family}Config")
    shape = {**SHAPE, "vocab_size": 48, "num_hidden_layers": 4, "head_dim": 16, **changes}
    config = getattr(transformers, configuration)(**shape)
    return save_random(folder, getattr(transformers, f"{family}ForCausalLM"), config, 0, dtype)


def logits_of(model: LanguageModel, tokens: Sequence[int]) -> Tensor:
    """Logits of a text that is read in parts."""
    cache, found, start = model.new_cache(len(tokens)), [], 0
    while start < len(tokens):
        count = min(PARTS[len(found) % len(PARTS)], len(tokens) - start)
        part = torch.tensor(tokens[start : start + count])
        found.append(model.forward(part, torch.arange(start, start + count), [Segment(cache, start, count)]))
        cache.keep(range(start, start + count), count)
        start += count
    return torch.cat(found)


def share_of(found: Tensor, expected: Tensor) -> float:
    """The largest distance of a position's logits from the expected ones."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)).max())


@needs_kernels
@pytest.mark.parametrize("name", COMPUTED)
def test_every_position_is_transformers_own_on_whichever_back_end_computes_it(tmp_path: Path, name: str) -> None:
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
@pytest.mark.parametrize("backend", ["auto", "library"])
def test_what_no_back_end_computes_is_refused_in_one_sentence(tmp_path: Path, name: str, backend: str) -> None:
    family, changes, words = REFUSED[name]
    with pytest.raises(CheckpointError, match=words) as refused:
        load_language_model(str(write(tmp_path, family, changes)), weights="fp32", device="cpu", backend=backend)
    assert "\n" not in str(refused.value)


@needs_kernels
@pytest.mark.parametrize(("family", "changes", "place"), [("SmolLM3", {}, (3, 1)), ("Ministral3", SCALED, (0, ORIGINAL))])
def test_a_layer_that_fails_its_proof_is_named_with_the_position_where_it_differs(
    tmp_path: Path, family: str, changes: dict[str, Any], place: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, family, {"sliding_window": None, **changes}, torch.bfloat16)
    said = rf"queries of layer {place[0]} \({family}DecoderLayer\) differ from transformers' at position {place[1]} by \d\.\de-0\d"
    with caplog.at_level("WARNING"):
        assert load_language_model(str(folder), weights="fp32", device="cpu").backend == "library"
    assert any("the library computes it" in record.message for record in caplog.records)
    for weights in ("int8", "half"):
        with pytest.raises(CheckpointError, match=f"{weights} weights .*need the C.. kernels, and .*{said}"):
            load_language_model(str(folder), weights=weights, device="cpu")
    with pytest.raises(CheckpointError, match=said):
        load_language_model(str(folder), weights="fp32", device="cpu", backend="kernels")


def test_the_positions_of_a_proof_are_the_beginning_the_end_and_both_sides_of_what_a_configuration_names() -> None:
    config = {
        "sliding_window": 4096,
        "vocab_size": 500,
        "rope_parameters": {"full_attention": {"original_max_position_embeddings": 8192.0}, "factor": 32.0},
        "floor_scale": 100,
        "layer_types": ["full_attention"],
    }
    found = {position for run in runs_of(config, 131072) for position in range(run.first, run.stop)}
    assert {*range(8), 4095, 4096, 8191, 8192, 99, 100, 131070, 131071} <= found
    assert not {499, 500} & found
    assert len(found) < 32
    assert [(run.first, run.count) for run in runs_of(config, 5)] == [(0, 5)]


@needs_kernels
@pytest.mark.parametrize("position", [9, 40, 90])
def test_a_scale_that_a_whole_layer_would_hide_is_noticed_at_the_position_where_it_begins(tmp_path: Path, position: int) -> None:
    scaled = rope("yarn", factor=2.0, original_max_position_embeddings=position, llama_4_scaling_beta=0.001)
    folder = write(tmp_path, "Ministral3", {"sliding_window": None, "initializer_range": 0.02, **scaled})
    model = load_language_model(str(folder), weights="fp32", device="cpu")
    assert f"queries of layer 0 (Ministral3DecoderLayer) differ from transformers' at position {position} by" in model.choice
    assert share_of(logits_of(model, TOKENS), reference_logits(folder, TOKENS)) <= RIGHT


def test_a_layer_that_counts_the_rows_of_a_cache_is_refused(tmp_path: Path) -> None:
    changes = {"attention_chunk_size": 8, "num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0, 1, 0]}
    config = transformers.Llama4TextConfig(**{**SHAPE, "vocab_size": 48, "num_hidden_layers": 4, "head_dim": 16, "floor_scale": 4, **changes})
    model = transformers.Llama4ForCausalLM(config).eval().requires_grad_(False)
    oracle = Oracle(model, model.model.layers, CONTEXT)
    with pytest.raises(UnprovableError, match=r"layer 1 .* counts the rows of transformers' cache"):
        oracle.run_eager(model.model.layers[1], 1, oracle.states(1))
    with pytest.raises(UnprovableError, match=r"layer 0 .* position 8 sees others than all before it"):
        oracle.check_window(0, None)


def test_a_configuration_that_names_a_stretch_of_the_context_is_proved_there(tmp_path: Path) -> None:
    """A configuration written by hand: a table that is long from a position on."""
    folder = write(tmp_path, "Llama", {})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **longrope(4.0)}))
    with pytest.raises(CheckpointError, match="longrope"):
        load_language_model(str(folder), weights="fp32", device="cpu")
