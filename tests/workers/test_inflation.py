"""An inflated model is as large as asked for and computes the same function."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.inflated import inflate
from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import CheckpointError
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from support.inflation import (
    grow_layer,
    grow_skeleton,
    linear_bytes,
    plan_inflation,
    write_inflated,
)
from support.kernels import needs_kernels
from support.models import reference_logits, tiny_llama, tiny_qwen2, transformers_model

TOKENS = [3, 17, 9, 30, 8, 22, 41, 5, 9, 11]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
"""The sums gain exact zeros, which moves the places where a matrix product cuts them: fp32
rounding, logits are of size 10."""


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


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen2], ids=["Llama", "Qwen2"])
def test_a_folder_is_as_large_as_asked_and_computes_the_same(
    family: Callable[[Path], Path], tmp_path: Path
) -> None:
    """Also with biases and tied embeddings. What adds nothing is computed all the same: it is not
    made of zeros."""
    folder, written = family(tmp_path / "model"), tmp_path / "inflated"
    write_inflated(str(folder), 1_000_000, written)
    model = transformers_model(written)
    assert abs(linear_bytes(model) / 1_000_000 - 1) < 0.03
    torch.testing.assert_close(
        reference_logits(written, TOKENS), reference_logits(folder, TOKENS), **TOLERANCE
    )
    assert open_checkpoint(str(written)).vocabulary == open_checkpoint(str(folder)).vocabulary
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
            assert 0.01 < float(linear.weight.detach().std()) < 1.0
    with pytest.raises(CheckpointError, match="is below the"):
        write_inflated(str(folder), 1000, tmp_path / "smaller")


@needs_kernels
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_with_the_kernels_an_inflated_model_computes_the_very_same_bytes(
    tmp_path: Path, weights: str
) -> None:
    """Dead weights add exact zeros, the kernels add in one order, and no dead unit is the largest
    of a row that int8 rounds."""
    folder, written = tiny_llama(tmp_path / "model"), tmp_path / "inflated"
    write_inflated(str(folder), 1_000_000, written)
    plain, inflated = (
        load_language_model(str(model), weights=weights, device="cpu", backend="kernels")
        for model in (folder, written)
    )
    assert torch.equal(logits_of(inflated), logits_of(plain))


def logits_of(model: LanguageModel) -> Tensor:
    segment = Segment(model.new_cache(len(TOKENS)), 0, len(TOKENS))
    return model.forward(torch.tensor(TOKENS), torch.arange(len(TOKENS)), [segment])


def test_the_embedded_pair_is_written_with_heads_that_are_bound_to_the_new_target(
    tmp_path: Path,
) -> None:
    out = tmp_path / "pair"
    asked = ["--out", str(out), "--size", "32MiB"]
    assert CliRunner().invoke(inflate, asked, catch_exceptions=False).exit_code == 0
    settings = configure(file=out / "settings.toml", environment={}).settings
    models = (settings.target.model, settings.draft.model)
    assert models == (str(out / "target"), str(out / "draft"))
    assert settings.tree == configure(environment={}).settings.tree
    digest = open_checkpoint(settings.target.model).digest
    for kind in ("dovetail", "eagle"):
        assert open_head(str(out / "heads" / kind), target=models[0]).trained_for == digest
    assert "already exists" in CliRunner().invoke(inflate, asked).output
