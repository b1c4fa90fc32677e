"""An inflated model is as large as asked for and computes the same function."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dovetail.protocol.errors import CheckpointError
from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.inflate import (
    grow_layer,
    grow_skeleton,
    linear_bytes,
    plan_inflation,
    write_inflated,
)
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from support.models import reference_logits, tiny_llama, tiny_qwen2, transformers_model

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
"""The sums gain exact zeros, which moves the places where a matrix product cuts them: fp32
rounding, logits are of size 10."""


def logits_of(model: LanguageModel, tokens: list[int]) -> Tensor:
    return model.forward(
        torch.tensor(tokens),
        torch.arange(len(tokens)),
        [Segment(model.new_cache(len(tokens)), 0, len(tokens))],
    )


def greedy(model: LanguageModel, tokens: list[int], count: int) -> list[int]:
    log = list(tokens)
    for _ in range(count):
        log.append(int(logits_of(model, log)[-1].argmax()))
    return log[len(tokens) :]


@pytest.mark.parametrize("size_bytes", [500_000, 1_000_000, 5_000_000])
def test_inflated_logits_are_those_of_the_original(
    llama_folder: Path, llama: LanguageModel, size_bytes: int
) -> None:
    inflated = load_language_model(
        str(llama_folder), weights="fp32", device="cpu", inflate_bytes=size_bytes
    )
    torch.testing.assert_close(logits_of(inflated, TOKENS), logits_of(llama, TOKENS), **TOLERANCE)
    assert greedy(inflated, TOKENS, 20) == greedy(llama, TOKENS, 20)


@pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built")
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [
        ("fp32", torch.float32),
        ("half", torch.float16),
        ("half", torch.bfloat16),
        ("int8", torch.float32),
    ],
)
def test_with_the_kernels_an_inflated_model_computes_the_very_same_bytes(
    tmp_path: Path, weights: str, dtype: torch.dtype
) -> None:
    """Dead weights add exact zeros, the kernels add in one order, and no dead unit is the largest
    of a row that int8 rounds."""
    folder = str(tiny_llama(tmp_path, dtype=dtype))
    plain = load_language_model(folder, weights=weights, device="cpu", backend="kernels")
    inflated = load_language_model(
        folder, weights=weights, device="cpu", backend="kernels", inflate_bytes=1_000_000
    )
    assert torch.equal(logits_of(inflated, TOKENS), logits_of(plain, TOKENS))


@pytest.mark.parametrize(
    ("weights", "backend", "error"),
    [("int8", "kernels", 0.1), ("half", "library", 1e-4), ("bf16", "library", 0.1)],
)
def test_every_type_of_weights_can_be_inflated(
    tmp_path: Path, weights: str, backend: str, error: float
) -> None:
    if backend == "kernels" and not kernels.available():
        pytest.skip("the C++ kernels are not built")
    folder = tiny_llama(tmp_path, dtype=torch.float16)
    model = load_language_model(
        str(folder), weights=weights, device="cpu", backend=backend, inflate_bytes=1_000_000
    )
    expected = reference_logits(folder, TOKENS)
    assert float((logits_of(model, TOKENS) - expected).norm() / expected.norm()) < error


def test_biases_and_tied_embeddings_survive(tmp_path: Path) -> None:
    tiny_qwen2(tmp_path)
    inflated = load_language_model(
        str(tmp_path), weights="fp32", device="cpu", inflate_bytes=1_000_000
    )
    torch.testing.assert_close(
        logits_of(inflated, TOKENS), reference_logits(tmp_path, TOKENS), **TOLERANCE
    )


@pytest.mark.parametrize("size_bytes", [500_000, 1_000_000, 5_000_000, 20_000_000])
def test_the_size_is_met_within_three_percent_by_layers_first_and_width_then(
    llama_folder: Path, size_bytes: int
) -> None:
    plan = plan_inflation(transformers_model(llama_folder), size_bytes)
    assert abs(plan.linear_bytes / size_bytes - 1) < 0.03
    assert 2 <= plan.layers <= 4
    assert plan.units >= 96


def bare(*, hidden: int, units: int, layers: int, vocabulary: int) -> Any:
    """A Llama of this shape without numbers."""
    shape = {
        "hidden_size": hidden,
        "intermediate_size": units,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=4))


SHAPES = {
    "embedded": {"hidden": 256, "units": 704, "layers": 8, "vocabulary": 4096},
    "odd width": {"hidden": 320, "units": 1000, "layers": 3, "vocabulary": 999},
    "tiny": {"hidden": 64, "units": 96, "layers": 2, "vocabulary": 48},
    "large": {"hidden": 2048, "units": 5632, "layers": 22, "vocabulary": 32000},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_at_any_size_a_width_divides_by_the_blocks_that_quantisers_cut_rows_into(
    shape: str,
) -> None:
    """The width of an inflated MLP divides by 32 always, which Q8_0 needs, and by 256, as K-quants
    do, where that is near enough; a plan is as large as it says and no narrower than the model."""
    model = bare(**SHAPES[shape])
    now = linear_bytes(model)
    by_256 = []
    for number in range(120):
        size_bytes = int(now * 1.11**number) + 7 * number
        plan = plan_inflation(model, size_bytes)
        off = abs(plan.linear_bytes / size_bytes - 1)
        assert plan.units % 32 == 0, size_bytes
        assert plan.units >= SHAPES[shape]["units"]
        assert SHAPES[shape]["layers"] <= plan.layers <= 2 * SHAPES[shape]["layers"]
        assert off < (0.03 if size_bytes > 3.1 * now or shape != "tiny" else 0.1), size_bytes
        if size_bytes > 16 * now:
            by_256.append(plan.units % 256 == 0)
    assert all(by_256)
    assert len(by_256) > 80


def test_the_plan_is_the_model_that_is_made(llama_folder: Path) -> None:
    for size_bytes in (400_000, 777_777, 3_333_333):
        model = transformers_model(llama_folder)
        plan = plan_inflation(model, size_bytes)
        grow_skeleton(model, plan)
        for index, layer in enumerate(model.model.layers):
            grow_layer(layer, index, plan)
        assert linear_bytes(model) == plan.linear_bytes


def test_the_folder_that_is_written_is_the_very_model_that_inflation_makes(
    llama_folder: Path, tmp_path: Path
) -> None:
    size_bytes = 1_000_000
    write_inflated(str(llama_folder), size_bytes, tmp_path)
    assert abs(linear_bytes(transformers_model(tmp_path)) / size_bytes - 1) < 0.03
    written = load_language_model(str(tmp_path), weights="fp32", device="cpu")
    inflated = load_language_model(
        str(llama_folder), weights="fp32", device="cpu", inflate_bytes=size_bytes
    )
    assert torch.equal(logits_of(written, TOKENS), logits_of(inflated, TOKENS))
    torch.testing.assert_close(
        reference_logits(tmp_path, TOKENS), reference_logits(llama_folder, TOKENS), **TOLERANCE
    )
    assert (
        open_checkpoint(str(tmp_path)).vocabulary == open_checkpoint(str(llama_folder)).vocabulary
    )


def test_the_dead_weights_are_no_zeros(llama_folder: Path, tmp_path: Path) -> None:
    write_inflated(str(llama_folder), 1_000_000, tmp_path)
    for layer in transformers_model(tmp_path).model.layers:
        for linear in (
            layer.self_attn.q_proj,
            layer.self_attn.k_proj,
            layer.self_attn.v_proj,
            layer.mlp.gate_proj,
            layer.mlp.up_proj,
        ):
            assert 0.01 < float(linear.weight.detach().std()) < 1.0


def test_the_digest_tells_inflations_apart(llama_folder: Path, llama: LanguageModel) -> None:
    digests = {
        load_language_model(
            str(llama_folder), weights="fp32", device="cpu", inflate_bytes=size
        ).checkpoint_digest
        for size in (500_000, 600_000)
    }
    assert len(digests | {llama.checkpoint_digest}) == 3


def test_a_size_below_the_models_own_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    with pytest.raises(CheckpointError, match="is below the"):
        load_language_model(str(tmp_path), weights="fp32", device="cpu", inflate_bytes=1000)
