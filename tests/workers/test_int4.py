"""Weights int4: blocks that are searched for, what they stand for beside the checkpoint, and what
is kept of them."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dovetail.protocol.errors import CheckpointError
from dovetail.protocol.files import cache_folder
from dovetail.workers import kernels
from dovetail.workers.kernels.blocks import search
from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.checkpoints.footprint import read_tensors, weights_bytes
from dovetail.workers.models.checkpoints.gguf.kinds import KINDS
from dovetail.workers.models.checkpoints.gguf.rows import Rows
from dovetail.workers.models.checkpoints.quantised.searched import Stack
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.parity.card import card_of
from support.architectures import write_tiny
from support.cases import everyday
from support.decoded import logits_of as text_logits
from support.gguf_files import write_gguf

pytestmark = [
    pytest.mark.skipif(not kernels.available(), reason="the C++ kernels are not built"),
    pytest.mark.usefixtures("kernels_as_before"),
]
OFF = {Type.Q4_K: 0.075, Type.Q5_0: 0.043, Type.Q6_K: 0.019, Type.Q8_0: 0.006}
"""The relative distance of normal numbers from their blocks, and a little more."""
WIDE = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 2}
"""Q4_K and Q6_K where rows have 256 numbers; Q5_0 where they have 96."""
TOKENS = torch.randint(48, (24,), generator=torch.Generator().manual_seed(1))
every_type = pytest.mark.parametrize("kind", OFF, ids=lambda kind: kind.name)


def found_for(numbers: Tensor, kind: Type) -> Tensor:
    """The blocks of rows."""
    size = KINDS[kind].size_of((numbers.shape[1],))
    content = torch.empty(len(numbers), size, dtype=torch.uint8)
    search(kind, numbers, content)
    return content


def numbers_of(content: Tensor, kind: Type) -> Tensor:
    return torch.from_numpy(gguf.quants.dequantize(content.numpy(), kind))


def awkward_rows() -> Tensor:
    """Rows that searches stumble over: nothing, all alike, one-sided, one that is large among small
    ones, and such that halves hardly hold, or cannot."""
    rows = torch.randn(13, 768, generator=torch.Generator().manual_seed(2))
    rows[0] = 0.0
    rows[1], rows[2] = 0.25, -3.0
    rows[3], rows[4] = rows[3].abs() + 1, -rows[4].abs()
    rows[5, 7] = 1e4
    for index, size in enumerate((1e-3, 1e-5, 1e-9, 1e-20, 1e-40, 1e5, 1e30), start=6):
        rows[index] *= size
    return rows


@every_type
def test_blocks_are_near_the_numbers_and_no_plain_rounding_is_nearer(kind: Type) -> None:
    numbers = torch.randn(64, 768, generator=torch.Generator().manual_seed(1)) * 0.02
    found = numbers_of(found_for(numbers, kind), kind)
    off = float((found - numbers).norm() / numbers.norm())
    assert 0 < off < OFF[kind]
    if kind in (Type.Q5_0, Type.Q8_0):  # which the `gguf` package has
        plain = gguf.quants.dequantize(gguf.quants.quantize(numbers.numpy(), kind), kind)
        assert off < 1.001 * float(np.linalg.norm(plain - numbers.numpy()) / numbers.norm())


@every_type
def test_blocks_are_the_same_bytes_for_every_instruction_set_and_beside_any_others(
    kind: Type,
) -> None:
    rows = awkward_rows()
    found = []
    for isa in kernels.isas():
        kernels.use_isa(isa)
        whole = found_for(rows, kind)
        parts = [found_for(rows[first:][:1].contiguous(), kind) for first in range(len(rows))]
        assert torch.equal(torch.cat(parts), whole), "a row alone"
        found.append(whole)
    assert all(torch.equal(other, found[0]) for other in found)


@every_type
def test_awkward_rows_become_finite_numbers_near_them(kind: Type) -> None:
    rows = awkward_rows()
    found = numbers_of(found_for(rows, kind), kind)
    assert bool(found.isfinite().all())
    assert not found[0].any()
    for index in (*range(1, 8), 11):
        off = float((found[index] - rows[index]).norm() / rows[index].norm())
        assert off < 1.6 * OFF[kind], f"row {index}"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and the folder of blocks in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder() / "int4"


def loaded(folder: Path, *, activations: str = "int8", proof: str = "off") -> Any:
    return load_language_model(
        str(folder), weights="int4", device="cpu", activations=activations, proof=proof
    )


def logits_of(model: Any) -> Tensor:
    return text_logits(model, TOKENS.tolist())


def kept_files(caches: Path) -> list[Path]:
    return sorted(caches.glob("*/*.safetensors"))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "qwen3": {**WIDE, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 256, "n_layer": 2},
    "gemma2": {**WIDE, "query_pre_attn_scalar": 16},
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 96, "num_local_experts": 4},
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**WIDE, "num_local_experts": 4},
    "gpt_oss": {**WIDE, "num_local_experts": 4},
    "granitemoe": WIDE,
    "llama4_text": WIDE,
    "qwen2_moe": {**WIDE, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64},
    "deepseek_v3": {**WIDE, "moe_intermediate_size": 64},
}


def as_transformers_has(numbers: Tensor, name: str, family: str) -> Tensor:
    """The matrix or the stack [.., out, in] of a parameter, gates first, as transformers has it."""
    if family == "gpt_oss" and name.endswith(".gate_up_proj"):
        numbers = torch.stack(numbers.chunk(2, dim=1), dim=2).flatten(1, 2)
    turned = numbers.ndim == 3 and family in ("gpt_oss", "llama4_text")
    return (numbers.mT if turned or ".c_" in name else numbers).contiguous()  # GPT-2's [in, out]


@pytest.mark.parametrize("family", everyday((*FAMILIES, *MIXTURES), "gpt2", "qwen3", "qwen3_moe"))
def test_a_model_is_transformers_of_what_its_blocks_stand_for(
    family: str, tmp_path: Path, caches: Path
) -> None:
    fields = (FAMILIES | MIXTURES)[family]
    write_tiny(family, tmp_path / "model", dtype=torch.bfloat16, **fields)
    exact = logits_of(loaded(tmp_path / "model", activations="fp32"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    parameters = dict(reference.named_parameters())
    types = set()
    for file in kept_files(caches):
        name, _, kind = file.stem.rpartition(".")
        number = next(number for number, known in KINDS.items() if known.name == kind)
        blocks = load_file(file)["blocks"].squeeze(0)
        numbers = Rows(number, blocks.flatten(0, -2)).numbers().view(*blocks.shape[:-1], -1)
        own, instead = parameters[name], as_transformers_has(numbers, name, family)
        assert own.shape == instead.shape
        own.data = instead
        types.add(kind)
    reference.tie_weights()
    assert types >= {"Q4_K", "Q6_K"}
    with torch.inference_mode():
        expected = reference(TOKENS[None]).logits[0]
    assert float((exact - expected).norm() / expected.norm()) < 1e-5
    rounded = logits_of(loaded(tmp_path / "model"))
    moved = (rounded - expected).norm(dim=1) / expected.norm(dim=1)
    assert 0 < float(moved.quantile(0.25)) < 5e-2  # some rows go through another expert


def test_the_second_start_reads_what_the_first_one_kept(
    tmp_path: Path, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("llama", tmp_path / "model", dtype=torch.float16, **WIDE)
    threads = torch.get_num_threads()
    first = logits_of(loaded(tmp_path / "model", proof="auto"))
    files = kept_files(caches)
    assert len(files) == 2 * 7 + 2
    assert all(folder.stat().st_mode & 0o077 == 0 for folder in caches.iterdir())
    made = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
    second = loaded(tmp_path / "model", proof="auto")
    assert second.proved
    assert torch.equal(logits_of(second), first)
    assert {file: file.stat().st_mtime_ns for file in files} == {f: t for f, (t, _) in made.items()}

    cut, empty, other, foreign, flipped, *_ = files
    cut.write_bytes(cut.read_bytes()[:-9])
    os.truncate(empty, 0)
    other.write_bytes(files[-1].read_bytes())
    foreign.write_bytes(
        next(f for f in files if f.name == foreign.name.replace("0", "1")).read_bytes()
    )
    changed = bytearray(flipped.read_bytes())
    changed[-50] ^= 1
    flipped.write_bytes(changed)
    torch.set_num_threads(1)
    try:
        with caplog.at_level(logging.WARNING):
            assert torch.equal(logits_of(loaded(tmp_path / "model", proof="auto")), first)
    finally:
        torch.set_num_threads(threads)
    for file in files[:5]:
        assert f"{file} is made again" in caplog.text
    assert {file: file.read_bytes() for file in files} == {f: c for f, (_, c) in made.items()}


def test_blocks_of_experts_are_kept_in_one_file_a_stack_and_made_again_where_it_is_damaged(
    tmp_path: Path, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("qwen3_moe", tmp_path / "model", dtype=torch.float16, **FAMILIES["qwen3_moe"])
    first = logits_of(loaded(tmp_path / "model", proof="auto"))
    made = {file: file.read_bytes() for file in kept_files(caches) if ".experts." in file.name}
    assert len(made) == 2 * 2
    cut, flipped, other, whole = made
    os.truncate(cut, len(made[cut]) - 9)
    flipped.write_bytes(
        made[flipped][:-200] + bytes([made[flipped][-200] ^ 1]) + made[flipped][-199:]
    )
    assert len(made[other]) == len(made[cut])
    other.write_bytes(made[cut])
    kept = whole.stat().st_mtime_ns
    with caplog.at_level(logging.WARNING):
        second = loaded(tmp_path / "model", proof="auto")
    assert second.proved
    assert torch.equal(logits_of(second), first)
    assert {file: file.read_bytes() for file in made} == made
    assert [f"{file} is made again" in caplog.text for file in made] == [True] * 3 + [False]
    assert whole.stat().st_mtime_ns == kept


def test_experts_are_searched_for_one_after_the_other_and_read_one_by_one(tmp_path: Path) -> None:
    asked: list[int] = []

    def find(index: int) -> Tensor:
        asked.append(index)
        return torch.full((3, 5), index, dtype=torch.uint8)

    def not_kept(folder: Path, error: OSError) -> None:
        raise error

    def stack(file: Path | None) -> Stack:
        return Stack(file, (4, 3, 5), find, stored_bytes=0, not_kept=not_kept)

    own, others = (tmp_path / name / "a.Q4_K" for name in ("checkpoint", "another"))
    for file in (own, others):
        file.parent.mkdir()
    for file, calls in (
        (own, [0, 1, 2, 3]),
        (own, []),
        (others, [0, 1, 2, 3]),  # where a copy of the other's lies
        (None, [2]),
    ):
        asked.clear()
        if file == others:
            shutil.copy(own, others)
        assert torch.equal(stack(file).content(2), torch.full((3, 5), 2, dtype=torch.uint8))
        assert asked == calls


def test_what_cannot_be_kept_is_said_and_computed_all_the_same(
    tmp_path: Path, caches: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny("qwen3_moe", tmp_path / "model", dtype=torch.float16, **FAMILIES["qwen3_moe"])
    kept = logits_of(loaded(tmp_path / "model"))
    for folder in caches.iterdir():
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    caches.rmdir()
    caches.write_text("a file where the folder is to be")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits_of(loaded(tmp_path / "model")), kept)
    assert "int4 weights cannot be saved in" in caplog.text


def test_what_has_no_blocks_of_4_bits_is_refused_in_one_sentence(
    tmp_path: Path, caches: Path
) -> None:
    write_tiny("llama", tmp_path / "model", dtype=torch.float32, **WIDE)
    file = tmp_path / "model.gguf"
    write_gguf(tmp_path / "model", file, lambda *_: Type.Q8_0)
    with pytest.raises(CheckpointError, match=r"its numbers are blocks already.*use weights file"):
        loaded(file)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    reference.model.layers[1].mlp.up_proj.weight.data[1] *= 1e8  # a row that nobody samples
    reference.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight are too large"):
        loaded(tmp_path / "model")


def test_a_layer_that_the_kernels_have_not_is_refused_in_one_sentence(
    tmp_path: Path, caches: Path
) -> None:
    write_tiny("cohere", tmp_path / "model", use_qk_norm=True)
    with pytest.raises(
        CheckpointError, match=r"int4 weights need the C\+\+ kernels.*use_qk_norm.*weights fp32"
    ):
        loaded(tmp_path / "model")


def test_a_card_has_a_line_for_every_type_that_a_checkpoint_can_have(
    llama_folder: Path, caches: Path
) -> None:
    checkpoint = open_checkpoint(str(llama_folder))
    lines = {line.weights: line for line in card_of(checkpoint, TOKENS.tolist(), 64, "int8")}
    assert "int4" in lines
    assert lines["fp32"].error < 1e-5
    assert lines["fp32"].same == 1.0
    assert lines["fp32"].error < lines["int8"].error < lines["int4"].error < 0.5
    assert 0.0 <= lines["int8"].divergence < lines["int4"].divergence
    assert lines["int4"].size_bytes == weights_bytes(read_tensors(llama_folder), "int4")
    assert lines["int4"].size_bytes < lines["int8"].size_bytes < lines["fp32"].size_bytes
