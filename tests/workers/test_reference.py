"""The reference: transformers' own logits, a layer at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.workers.models.checkpoints.checkpoint import open_checkpoint
from dovetail.workers.models.parity import reference
from support.models import CONTEXT, reference_logits
from support.zoo import COMPUTED, TOKENS, write


@pytest.mark.parametrize("name", ["smollm3", "ministral3", "gemma3", "mixtral", "qwen2 by layers"])
def test_a_text_that_is_read_in_parts_has_transformers_logits(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "PART", 17)
    family, changes, _ = COMPUTED[name]
    folder = write(tmp_path, family, changes, torch.bfloat16)
    found = torch.cat(
        list(reference.reference_logits(open_checkpoint(str(folder)), TOKENS, CONTEXT))
    )
    torch.testing.assert_close(found, reference_logits(folder, TOKENS), rtol=1e-5, atol=1e-5)


def test_no_layer_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer has numbers at a time."""
    folder = write(tmp_path, "Llama", {"num_hidden_layers": 6})
    held: list[int] = []
    opened: list[Any] = []
    open_skeleton = reference.open_skeleton

    def opening(checkpoint: Any) -> Any:
        opened.append(open_skeleton(checkpoint))
        return opened[0]

    def tell(_done: int, _of: int) -> None:
        layers = opened[0].model.model.layers
        held.append(sum(any(not p.is_meta for p in layer.parameters()) for layer in layers))

    monkeypatch.setattr(reference, "open_skeleton", opening)
    list(reference.reference_logits(open_checkpoint(str(folder)), TOKENS, CONTEXT, tell))
    assert held == [0] * 7
