"""The logits that `selftest` compares with are transformers' own, in whatever parts a text is
read."""

from pathlib import Path

import pytest
import torch

from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.parity import card
from support.architectures import VARIED, write_tiny
from support.models import reference_logits

TOKENS = torch.randint(2, 40, (40,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize(
    "kind",
    [
        "lfm2",
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("falcon_h1", marks=pytest.mark.slow),
        pytest.param("nemotron_h", marks=pytest.mark.slow),
    ],
)
def test_states_go_on_from_one_part_of_a_text_to_the_next(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(kind, tmp_path / "model", **VARIED.get(kind, {}))
    monkeypatch.setattr(card, "PART", 7)
    checkpoint = open_checkpoint(str(tmp_path / "model"))
    found = torch.cat(list(card.reference_logits(checkpoint, TOKENS, 96)))
    expected = reference_logits(tmp_path / "model", TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
