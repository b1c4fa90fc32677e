"""The language model of a checkpoint of several parts is loaded alone, and is what transformers
computes with all of them for a text."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from dovetail.launch.planning.designs import design_of, read_config
from dovetail.protocol.errors import CheckpointError
from dovetail.workers.models.checkpoints.composite import KINDS
from dovetail.workers.models.loading import load_language_model
from support.architectures import VOCABULARY, randomise, shrunk, write_varied
from support.decoded import logits_of as text_logits
from support.kernels import needs_kernels
from support.models import write_tokenizer
from support.sentences import check_sentence

EVERYDAY = ("gemma3", "mistral3", "smolvlm")
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 32,
}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "gemma4": {
        "text_config": {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "head_dim": 8,
            "global_head_dim": 16,
        },
        "vision_config": {"model_type": "gemma4_vision", **VISION},
    },
    "gemma4_unified": {
        "text_config": {"head_dim": 8, "global_head_dim": 16},
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        },
    },
}
"""Fields of parts that are not the smallest of their kind, or that are not there by themselves."""
LISTED = ("qwen3_5", "qwen3_5_moe")
"""Kinds whose language model lists the other parts in transformers, as what it leaves out."""
TOKENS = torch.randint(3, VOCABULARY, (24,), generator=torch.Generator().manual_seed(5))


def write(folder: Path, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tiny checkpoint of several parts; transformers' logits [T, V] of `TOKENS`."""
    fields = shrunk(CONFIG_MAPPING[kind]().to_dict())
    for part, own in PARTS.get(kind, {}).items():
        fields[part] = {**(fields.get(part) or {}), **own}
    config = CONFIG_MAPPING[kind](**fields)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
        randomise(model)
        model.to(dtype).save_pretrained(folder)
        # transformers 5.24 reads fields of Llama 4's output that its class does not have
        part = model.language_model if kind == "llama4" else model
        logits: Tensor = part.float()(TOKENS[None], use_cache=False).logits[0]
    write_tokenizer(folder, VOCABULARY)
    return logits


def logits_of(folder: Path, weights: str = "fp32", backend: str = "auto") -> Tensor:
    model = load_language_model(str(folder), weights=weights, device="cpu", backend=backend)
    return text_logits(model, TOKENS.tolist()).float()


def rename(folder: Path, beginnings: Mapping[str, str]) -> None:
    """Give the tensors of a checkpoint other names."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in beginnings.items():
        tensors = {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in EVERYDAY else pytest.param(kind, marks=pytest.mark.slow)
        for kind in sorted({*KINDS} - {"gemma3n"})  # its vision needs a package of its own
    ],
)
def test_the_language_model_of_several_parts_is_what_transformers_computes_of_a_text(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = write(tmp_path / "model", kind)
    capfd.readouterr()
    torch.testing.assert_close(logits_of(tmp_path / "model"), expected, atol=1e-4, rtol=1e-4)
    said = "tensors that the model does not use" in caplog.text
    assert said != (kind in LISTED), "what is left out is said"
    assert capfd.readouterr().out == ""


@needs_kernels
def test_gemma_3n_is_read_from_a_checkpoint_with_other_parts(tmp_path: Path) -> None:
    write_varied("gemma3n_text", tmp_path / "model")
    alone = logits_of(tmp_path / "model")
    rename(tmp_path / "model", {"model.": "model.language_model."})
    file = tmp_path / "model" / "config.json"
    content = {"model_type": "gemma3n", "text_config": json.loads(file.read_text())}
    file.write_text(json.dumps(content))
    assert torch.equal(logits_of(tmp_path / "model"), alone)


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "weights", "most"),
    [("gemma3", "half", 1e-3), ("mistral3", "int8", 0.1)],
)
def test_it_runs_on_the_kernels(kind: str, weights: str, most: float, tmp_path: Path) -> None:
    expected = write(
        tmp_path / "model", kind, torch.float16 if weights == "half" else torch.float32
    )
    found = logits_of(tmp_path / "model", weights, "kernels")
    shares = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(shares.mean()) < most


def test_older_and_newer_names_are_the_same_model(tmp_path: Path) -> None:
    expected = write(tmp_path / "model", "gemma3")
    rename(tmp_path / "model", {"language_model.model.": "model.language_model."})
    torch.testing.assert_close(logits_of(tmp_path / "model"), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("field", "name"), [(True, "lm_head.weight"), (False, "language_model.lm_head.weight")]
)
def test_an_output_head_of_its_own_is_used_whatever_the_parts_say(
    tmp_path: Path, field: bool, name: str
) -> None:
    write(tmp_path / "model", "mistral3")
    tied = logits_of(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": field}))
    weights = tmp_path / "model" / "model.safetensors"
    tensors = load_file(weights)
    head = 2.0 * tensors["language_model.model.embed_tokens.weight"]
    save_file({**tensors, name: head}, weights, metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(tmp_path / "model"), 2.0 * tied)


def test_what_plans_and_measures_counts_the_language_model_alone(tmp_path: Path) -> None:
    write(tmp_path / "model", "mistral3")
    config = read_config(tmp_path / "model", "target")
    assert config["model_type"] == "mistral"
    assert config["num_hidden_layers"] == 4
    model = load_language_model(str(tmp_path / "model"), weights="fp32", device="cpu")
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["head_dim"] * config["num_attention_heads"]
    keys = config["head_dim"] * config["num_key_value_heads"]
    layer = 2 * hidden * heads + 2 * hidden * keys + 3 * hidden * inner
    design = design_of(config, tmp_path / "model")
    matrices = [one for one in design.tensors if one.is_matrix and not one.is_table]
    assert sum(one.numbers for one in matrices) == 4 * layer
    assert design.parameters == pytest.approx(4 * layer + hidden * VOCABULARY, rel=0.05)
    assert design.layers == model.layers == 4


def test_a_language_model_that_reads_a_prompt_in_both_directions_is_not_taken_out(
    tmp_path: Path,
) -> None:
    write(tmp_path / "model", "paligemma")
    with pytest.raises(
        CheckpointError, match=r"paligemma is a language model \(gemma\) with other parts"
    ):
        logits_of(tmp_path / "model")


HOSTILE: tuple[dict[str, Any], ...] = (
    {"model_type": None},
    {"model_type": {"a": 1}},
    {"vocab_size": None},
    {"hidden_size": "wide"},
    {"num_hidden_layers": 0},
    {"model_type": "t5"},
    {"model_type": "mamba"},
    {"model_type": "gemma3", "text_config": {}},
    {"quantization_config": {"quant_method": "spqr"}},
)
"""Fields of the language model's configuration that make it none that can be decoded."""


def test_a_part_that_is_no_language_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path / "model", "gemma3")
    file = tmp_path / "model" / "config.json"
    content = json.loads(file.read_text())
    for wrong in HOSTILE:
        text = {**content["text_config"], **wrong}
        file.write_text(json.dumps({**content, "text_config": text}))
        with pytest.raises(CheckpointError) as raised:
            logits_of(tmp_path / "model")
        check_sentence(str(raised.value), str(tmp_path))


def test_a_checkpoint_whose_tensors_have_other_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model", "gemma3")
    rename(tmp_path / "model", {"language_model.model.": "decoder."})
    with pytest.raises(
        CheckpointError, match=r"lacks tensor .* and \d+ others, which its config.json calls for"
    ):
        logits_of(tmp_path / "model")


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model", "gemma3")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    again = {"model.norm.weight": tensors["language_model.model.norm.weight"] + 1.0}
    save_file({**tensors, **again}, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight .* is there twice"):
        logits_of(tmp_path / "model")
