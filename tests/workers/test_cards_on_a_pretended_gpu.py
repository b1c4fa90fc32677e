"""A pretended GPU refuses what a card of its compute capability lacks, and a draft that needs that
is refused in a sentence."""

from pathlib import Path

import pytest
import torch

from dovetail.protocol.errors import CheckpointError
from dovetail.workers.devices.opening import kind_of
from dovetail.workers.heads.head import open_head
from dovetail.workers.models.backends.device.choice import products_on
from dovetail.workers.models.substitutes.coded import against_codes
from pretended.device import POSSIBLE, capable, device
from support.heads import write_head
from support.kernels import needs_kernels
from support.models import tiny_llama

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not POSSIBLE, reason="torch cannot be told of a device from Python"),
]


@pytest.mark.parametrize(("capability", "refused"), [(5.2, True), (7.5, True), (8.0, False)])
def test_torchs_int4_products_are_those_of_newer_cards(capability: float, refused: bool) -> None:
    nibbles = torch.zeros(8, 16, dtype=torch.uint8).to(device())
    with capable(capability):
        assert bool(kind_of(device()).against_int4(device())) is refused
        if refused:
            with pytest.raises(RuntimeError, match="no kernel image"):
                torch.ops.aten._convert_weight_to_int4pack(nibbles, 2)
        else:
            torch.ops.aten._convert_weight_to_int4pack(nibbles, 2)


def test_a_draft_of_4_bits_on_an_old_card_is_refused_in_a_sentence_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    target, folder = tiny_llama(tmp_path / "target"), write_head(tmp_path / "head", "eagle")
    products_on.cache_clear()
    with capable(6.1):
        assert "has 6.1" in against_codes(device(), "int4")
        with pytest.raises(CheckpointError, match=r"has 6\.1; .*; use fp16"):
            open_head(str(folder), target=str(target), weights="int4", device=str(device()))
        open_head(str(folder), target=str(target), weights="fp16", device=str(device()))
    products_on.cache_clear()
