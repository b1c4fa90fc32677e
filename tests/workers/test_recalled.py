"""A proof that is remembered loads the same bytes as one that is made, and hides nothing."""

import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dovetail.launch.settings.models import DEMO_FOLDER
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.language_model import LanguageModel
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.remembered import Proof, Proofs
from dovetail.workers.models.segment import Segment
from support.architectures import VARIED, write_tiny
from support.models import tiny_llama

ONE_HALF = {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}
GRANITE = {"num_local_experts": 0, "embedding_multiplier": 12, "logits_scaling": 6.0}
SPARSE = ("qwen3_moe", "gpt_oss", "llama4_text", "lfm2_moe", "nemotron_h", "granitemoe")
"""Model types with experts."""
LOADED = """
import sys
import dovetail.workers.loop
from dovetail.protocol.settings import TargetSettings
from dovetail.workers.serving.open_target import open_target_worker
for proof in sys.argv[2:]:
    open_target_worker(TargetSettings(model=sys.argv[1], proof=proof), name="t", threads=1)
    print("transformers" in sys.modules)
"""


def load(folder: Path, proof: str, weights: str = "fp32", cache: str = "fp32") -> LanguageModel:
    """Return the model of a folder."""
    return load_language_model(str(folder), weights=weights, device="cpu", cache=cache, proof=proof)


def logits(model: LanguageModel) -> torch.Tensor:
    """Return the logits of some tokens."""
    tokens = torch.arange(7) % model.vocabulary_size
    return model.forward(tokens, torch.arange(7), [Segment(model.new_cache(7), 0, 7)])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that nobody has proved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_llama(tmp_path / "model")


@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_a_model_that_was_proved_before_is_the_same_bytes(folder: Path, weights: str) -> None:
    made = load(folder, "auto", weights)
    recalled = load(folder, "auto", weights)
    assert (made.proved, bool(recalled.proved)) == ("", True)
    assert torch.equal(logits(made), logits(recalled))
    assert load(folder, "anew", weights).proved == ""


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("falcon_h1", {}),
        pytest.param("bamba", {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", {}, marks=pytest.mark.slow),
        pytest.param("lfm2", {}, marks=pytest.mark.slow),
        pytest.param("granite", {}, marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", GRANITE, marks=pytest.mark.slow),
        pytest.param("nemotron_h", ONE_HALF, marks=pytest.mark.slow),
        ("deepseek_v3", {}),
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in SPARSE),
    ],
)
def test_a_model_of_a_family_that_was_proved_before_is_the_same_bytes(
    kind: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tiny(kind, tmp_path / "model", **(VARIED.get(kind, {}) | fields))
    made, recalled = (load(tmp_path / "model", "auto") for _ in range(2))
    assert (made.proved, bool(recalled.proved)) == ("", True)
    assert torch.equal(logits(made), logits(recalled))


def test_other_weights_are_proved_anew(folder: Path) -> None:
    load(folder, "auto")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load(folder, "auto").proved == ""


def test_nothing_is_remembered_where_that_is_switched_off(folder: Path) -> None:
    load(folder, "off")
    assert not Proofs((folder / "config.json").read_bytes()).known
    assert load(folder, "auto").proved == ""
    assert load(folder, "off").proved == ""


@pytest.mark.parametrize(
    "field", ["logits", "angles", "attention", "stored", "transposed", "config", "fewer"]
)
def test_a_proof_that_does_not_hold_is_dropped_and_said(
    folder: Path, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    made = load(folder, "auto")
    proofs = Proofs((folder / "config.json").read_bytes())
    key = f"{open_checkpoint(str(folder)).digest} FP32 torch.float32 None"
    proof = proofs.find(key)
    assert proof is not None
    proofs.keep(key, dataclasses.replace(proof, **changed(proof, field)))
    with caplog.at_level(logging.WARNING):
        again = load(folder, "auto")
    assert again.proved == ""
    assert torch.equal(logits(made), logits(again))
    assert "its remembered proof is dropped" in caplog.text
    assert load(folder, "auto").proved


def changed(proof: Proof, field: str) -> dict[str, Any]:
    """Return a field with another value, such as it might have of another model."""
    if field == "fewer":
        return {"config": {k: v for k, v in proof.config.items() if k != "num_attention_heads"}}
    return {field: other_value(proof, field)}


def other_value(proof: Proof, field: str) -> object:
    match field:
        case "logits":
            return "0" * 64
        case "angles":
            return {"": ([2 * f for f in proof.angles[""][0]], 1.0)}
        case "attention":
            return [{**noted, "scaling": 2 * noted["scaling"]} for noted in proof.attention]
        case "transposed":
            return [name for name in proof.stored if "gate_proj" in name]
        case "config":
            return {**proof.config, "hidden_act": "nobody knows it"}
    names = {name: "model.layers.0.mlp.up_proj.weight" for name in proof.stored if "gate" in name}
    return {**proof.stored, **names}


def test_a_proof_holds_for_one_type_of_keys_and_values(folder: Path) -> None:
    whole = load(folder, "auto")
    assert not load(folder, "auto", cache="half").proved
    half = load(folder, "auto", cache="half")
    assert half.proved
    assert not torch.equal(logits(half), logits(whole))


def test_a_damaged_file_counts_as_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(folder, "auto")
    proofs = Proofs((folder / "config.json").read_bytes())
    file = next(proofs.folder.glob(f"{proofs.group}-*.json"))
    file.write_text(file.read_text().replace("embed_tokens", "embed_tokenz"))
    assert load(folder, "auto").proved == ""
    assert "cannot be read" in caplog.text
    assert json.loads(file.read_text().partition("\n")[2])["embedding"].endswith("embed_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["embedded", "qwen3_5_moe_text"])
def test_a_worker_whose_proof_is_remembered_imports_no_transformers(
    kind: str, tmp_path: Path
) -> None:
    target = str(DEMO_FOLDER / "target")
    if kind != "embedded":
        target = str(tmp_path / "model")
        write_tiny(kind, tmp_path / "model", **VARIED[kind])
    command = [sys.executable, "-P", "-W", "ignore", "-c", LOADED, target]
    subprocess.run([*command, "auto"], check=True, capture_output=True)
    told = subprocess.run([*command, "auto", "anew"], check=True, capture_output=True, text=True)
    assert told.stdout.split() == ["False", "True"]
