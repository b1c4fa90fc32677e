"""Our pass computes what transformers computes, for every family and in every order of slots."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.attention import Segment
from dovetail.workers.models.language_model import LanguageModel, load_language_model
from dovetail.workers.models.linear import SMALLEST_PACKED
from support.models import CONTEXT, VOCABULARY, reference_logits, tiny_llama, tiny_mistral, tiny_qwen2

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
"""fp32 rounding in another order; logits are of size 10."""


def wide_llama(folder: Path) -> Path:
    """Matrices large enough to be packed."""
    return tiny_llama(folder, intermediate_size=SMALLEST_PACKED // 64)


@pytest.mark.parametrize("write", [tiny_llama, wide_llama, tiny_qwen2, tiny_mistral])
def test_logits_equal_those_of_transformers(write: Callable[[Path], Path], tmp_path: Path) -> None:
    model = load_language_model(str(write(tmp_path)), weights="fp32", device="cpu")
    logits = model.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(model.new_cache(10), 0, 10)])
    torch.testing.assert_close(logits, reference_logits(tmp_path, TOKENS), **TOLERANCE)


def test_rows_can_come_a_few_at_a_time(llama: LanguageModel, llama_folder: Path) -> None:
    cache, logits = llama.new_cache(10), []
    for start, stop in ((0, 4), (4, 5), (5, 10)):
        logits.append(llama.forward(torch.tensor(TOKENS[start:stop]), torch.arange(start, stop), [Segment(cache, start, stop - start)]))
        cache.keep(range(start, stop), stop - start)
    torch.testing.assert_close(torch.cat(logits), reference_logits(llama_folder, TOKENS), **TOLERANCE)


def test_only_the_rows_that_are_asked_for_have_logits(llama: LanguageModel, llama_folder: Path) -> None:
    logits = llama.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(llama.new_cache(10), 0, 10)], rows=torch.tensor([9, 2]))
    torch.testing.assert_close(logits, reference_logits(llama_folder, TOKENS)[[9, 2]], **TOLERANCE)


def test_a_node_of_a_tree_has_the_logits_of_its_own_path(llama: LanguageModel, llama_folder: Path) -> None:
    """Two siblings and a child of the second, in the slots behind three committed rows."""
    cache = llama.new_cache(8)
    llama.forward(torch.tensor(TOKENS[:3]), torch.arange(3), [Segment(cache, 0, 3)])
    cache.keep(range(3), 3)
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    logits = llama.forward(torch.tensor([30, 7, 8, 22]), torch.tensor([3, 4, 4, 5]), [Segment(cache, 3, 4, mask)])
    for row, path in enumerate(([30], [30, 7], [30, 8], [30, 8, 22])):
        torch.testing.assert_close(logits[row], reference_logits(llama_folder, TOKENS[:3] + path)[-1], **TOLERANCE)


def test_sixteen_bit_checkpoints_are_widened_exactly(tmp_path: Path) -> None:
    tiny_llama(tmp_path, dtype=torch.float16)
    model = load_language_model(str(tmp_path), weights="fp32", device="cpu")
    logits = model.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(model.new_cache(10), 0, 10)])
    torch.testing.assert_close(logits, reference_logits(tmp_path, TOKENS), **TOLERANCE)


@pytest.mark.parametrize("weights", ["fp16", "bf16"])
def test_a_draft_may_keep_sixteen_bits(llama_folder: Path, weights: str) -> None:
    model = load_language_model(str(llama_folder), weights=weights, device="cpu")
    logits = model.forward(torch.tensor(TOKENS), torch.arange(10), [Segment(model.new_cache(10), 0, 10)])
    assert logits.dtype == torch.float32
    error = (logits - reference_logits(llama_folder, TOKENS)).norm() / logits.norm()
    assert 0 < error < 0.1


def test_a_sliding_window_shortens_the_context_to_where_it_changes_nothing(tmp_path: Path) -> None:
    assert load_language_model(str(tiny_mistral(tmp_path / "whole")), weights="fp32", device="cpu").context == CONTEXT
    assert load_language_model(str(tiny_mistral(tmp_path / "window", window=20)), weights="fp32", device="cpu").context == 20


def test_a_family_with_another_attention_is_refused(tmp_path: Path, llama_folder: Path) -> None:
    """Gemma 2 caps its attention scores."""
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((llama_folder / "tokenizer.json").read_bytes())
    with pytest.raises(CheckpointError, match="softcap"):
        load_language_model(str(tmp_path), weights="fp32", device="cpu")


def test_unknown_weights_are_refused(llama_folder: Path) -> None:
    with pytest.raises(CheckpointError, match="fp32 or fp16 or bf16"):
        load_language_model(str(llama_folder), weights="fp8", device="cpu")
