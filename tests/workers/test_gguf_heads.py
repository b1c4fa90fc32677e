"""Draft heads in GGUF files: each computes what a folder with the same numbers does, and
unsupported files are refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.heads.head import Head, classify, open_head
from dovetail.workers.models.loading import load_language_model
from dovetail.workers.models.segment import Segment
from support.gguf_heads import write_gguf_head
from support.heads import Variant, write_head

Write = Callable[..., tuple[Path, Path]]
HEAD = Variant(
    "eagle3",
    hidden=256,
    target_width=64,
    draft_vocabulary=20,
    intermediate=256,
    head_dim=64,
    taps=(0, 1, 2),
    own_embedding=True,
    config={"target_hidden_size": 64},
)
"""Rows of whole blocks; its last tap is the stream that enters the target's final norm."""


def predicted(head: Head, length: int = 6) -> Tensor:
    """Logits of rows of true features."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, head.vocabulary_size, (length,), generator=generator)
    features = torch.randn(length, head.spec.feature_width, generator=generator)
    segment = Segment(head.new_cache(length), 0, length)
    return head.forward(tokens, features, torch.arange(length), [segment], true=True).logits


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a GGUF file of a head for `tiny_llama`, and the folder of the same numbers."""

    def write(kind: Type = Type.F32, variant: Variant = HEAD, **more: Any) -> tuple[Path, Path]:
        folder, file = write_head(tmp_path / "head", variant), tmp_path / "head.gguf"
        return file, write_gguf_head(folder, file, kind, **more)

    return write


@pytest.mark.parametrize(
    "kind", [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K]
)
def test_a_head_in_a_gguf_file_computes_what_its_folder_does(
    kind: Type, write: Write, llama_folder: Path
) -> None:
    file, twin = write(kind)
    assert classify(str(file)) == "eagle3"
    found, expected = (
        open_head(str(source), target=str(llama_folder), weights="fp32") for source in (file, twin)
    )
    assert (found.spec.taps, found.spec.draft_vocabulary) == ((0, 1, 2), 20)
    assert torch.equal(predicted(found), predicted(expected))


def test_by_default_blocks_are_computed_as_int8(write: Write, llama_folder: Path) -> None:
    file, twin = write(Type.Q8_0)
    found = open_head(str(file), target=str(llama_folder))
    expected = open_head(str(twin), target=str(llama_folder), weights="int8")
    assert torch.equal(predicted(found), predicted(expected))


def test_factors_of_frequencies_in_the_file_divide_them(write: Write, llama_folder: Path) -> None:
    file, twin = write(rope_freqs=[2.0] * 32)
    doubled = write_head(
        twin.parent / "linear",
        HEAD,
        config={**HEAD.config, "rope_scaling": {"type": "linear", "factor": 2.0}},
    )
    found, expected = (
        predicted(open_head(str(source), target=str(llama_folder), weights="fp32"))
        for source in (file, doubled)
    )
    torch.testing.assert_close(found, expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a draft that reads keys": (
        {"architecture": "gemma4-assistant"},
        "target's keys and values: only safetensors are read, with --draft.share true",
    ),
    "two layers": ({"block_count": 2}, "it has 2 layers that read 3 of its target's"),
    "two taps": ({"target_layers": [1, 2]}, "it has 1 layers that read 2 of its target's"),
    "no taps": ({"target_layers": None}, r"key eagle3\.target_layers is missing"),
    "a tap that is not there": ({"target_layers": [0, 1, 9]}, "has 2 layers: use the head"),
    "an unknown key": ({"magic": 7}, r"key eagle3\.magic is not known"),
    "an unknown tensor": (
        {"tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}},
        r"tensor blk\.0\.attn_sinks\.weight is not known",
    ),
    "ids as weights": (
        {"tensors": {"output_norm.weight": np.zeros(256, np.int64)}},
        r"tensor output_norm\.weight is of type I64, which is not read here",
    ),
    "ids beyond the vocabulary": (
        {"tensors": {"d2t": np.arange(30, 50, dtype=np.int64)}},
        "ids do not ascend within the target's vocabulary of 48",
    ),
    "the ids of offsets": (
        {"tensors": {"d2t": np.zeros(20, dtype=np.int64)}},
        "ids do not ascend within the target's vocabulary of 48",
    ),
    "a matrix of another shape": (
        {"tensors": {"fc.weight": np.zeros((256, 100), np.float32)}},
        r"(hidden width 33|wrong shape for fc\.weight)",
    ),
    "numbers that are none": (
        {"tensors": {"output_norm.weight": np.full(256, np.nan, np.float32)}},
        r"tensor output_norm\.weight holds NaN",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_head_that_cannot_be_read_is_refused_by_the_name_of_its_file(
    case: str, write: Write, llama_folder: Path
) -> None:
    more, text = REFUSED[case]
    file, _ = write(**more)
    with pytest.raises(CheckpointError, match=text) as refusal:
        open_head(str(file), target=str(llama_folder))
    assert str(file) in str(refusal.value)
    assert "config.json" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_head_is_no_target(write: Write) -> None:
    file, _ = write()
    with pytest.raises(CheckpointError, match="it is a draft head, which --draft takes") as refusal:
        load_language_model(str(file), weights="fp32", device="cpu")
    assert str(file) in str(refusal.value)
