"""Loading takes little more memory than what is kept, and a piece at a time gives what transformers
loads as a whole."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from dovetail.workers import kernels
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.loader import Types, load_transformers, open_skeleton
from support.models import FAMILIES, reference_logits, tiny_llama, write_tokenizer

SHARD_BYTES = 20 << 20
LOAD = """
import json, os, re, sys
from pathlib import Path
import torch
from dovetail.workers.models.loading import load_language_model

def status(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def load(small, large, backend, weights):
    torch.set_num_threads(1)
    load_language_model(small, weights=weights, device="cpu", backend=backend)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    model = load_language_model(large, weights=weights, device="cpu", backend=backend)
    found = {"peak": status("VmHWM") - before, "kept": status("VmRSS") - before, "kernels": model.kernels, "backend": model.backend}
    print(json.dumps({"way": f"{backend} {weights}", **found}), flush=True)

for way in sys.argv[3:]:
    if (child := os.fork()) == 0:
        load(*sys.argv[1:3], *way.split())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, way
"""  # noqa: E501
"""Loads in every way that is asked for, each in a process that has imported torch and nothing
else."""
WAYS = [
    *(["kernels fp32", "kernels half", "kernels int8"] if kernels.available() else []),
    "library fp32",
    "library half",
]
"""Back end and weights; the library has no lossless int8."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers whose linears have 184 MiB in fp32, stored in fp16 in files of 20 MiB."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).to(torch.float16).save_pretrained(
            folder, max_shard_size=SHARD_BYTES
        )
    write_tokenizer(folder, 512)
    return folder


@pytest.fixture(scope="module")
def loads(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the memory that loading `large` takes, by way."""
    small = tiny_llama(tmp_path_factory.mktemp("small"), dtype=torch.float16)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large), *WAYS],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {found["way"]: found for found in map(json.loads, run.stdout.splitlines())}


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc"
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_the_peak_while_loading_is_under_1_15_times_what_is_packed_and_one_file(
    large: Path, loads: dict[str, Any], way: str
) -> None:
    found, (backend, weights) = loads[way], way.split()
    linears = sum(
        stored.size_bytes // 2
        for name, stored in open_checkpoint(str(large)).tensors.items()
        if "proj" in name or "lm_head" in name
    )
    packed = (
        linears
        * {"fp32": 4, "half": 2, "int8": 1}[weights]
        * (2 if "mkl" in found["kernels"] else 1)
    )
    assert found["backend"] == backend
    assert found["kept"] >= 0.9 * packed, "what is kept is what was packed"
    assert found["peak"] <= 1.15 * packed + SHARD_BYTES, (
        f"{found['peak'] / 2**20:.0f} MiB for {packed / 2**20:.0f} MiB packed"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_is_filled_piece_by_piece_is_the_one_that_transformers_loads(
    family: str, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(FAMILIES[family](tmp_path, dtype=torch.bfloat16)))
    skeleton = open_skeleton(checkpoint)
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    skeleton.fill(skeleton.model, "", Types(torch.float32, torch.float32))
    tokens = torch.tensor([[3, 17, 9, 30]])
    skeleton.model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = skeleton.model(tokens, use_cache=False).logits[0]
    torch.testing.assert_close(
        logits, reference_logits(tmp_path, tokens[0].tolist()), rtol=1e-5, atol=1e-5
    )


def test_a_checkpoint_whose_names_transformers_changes_is_loaded_by_it(tmp_path: Path) -> None:
    """The base model alone, without the prefix of its head's model."""
    folder = FAMILIES["gpt2"](tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(folder)
    whole.base_model.save_pretrained(folder)
    checkpoint = open_checkpoint(str(folder))
    assert not any(name.startswith("transformer.") for name in checkpoint.tensors)
    skeleton = open_skeleton(checkpoint)
    assert not any(parameter.is_meta for parameter in skeleton.model.parameters())
    assert torch.equal(
        skeleton.model.transformer.h[1].mlp.c_fc.weight, whole.transformer.h[1].mlp.c_fc.weight.t()
    )


def test_the_same_tensor_is_read_whether_the_embedding_or_the_head_holds_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = FAMILIES["qwen2"](tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path))
    skeleton = open_skeleton(checkpoint)
    skeleton.fill(skeleton.model, "", Types(None, None))
    assert torch.equal(skeleton.model.model.embed_tokens.weight, tensors["lm_head.weight"])
    assert torch.equal(
        load_transformers(checkpoint, torch.float32).lm_head.weight, tensors["lm_head.weight"]
    )
