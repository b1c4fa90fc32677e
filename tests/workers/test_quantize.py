"""The codes that HQQ makes of a matrix: against hqq's own arithmetic, and back from the bytes of a
file."""

import pytest
import torch

from dovetail.protocol.errors import SettingsError
from dovetail.workers.models.substitutes import quantize
from dovetail.workers.models.substitutes.quantize import (
    check_installed,
    from_bytes,
    quantise,
    to_bytes,
)

ERRORS = {8: 0.01, 4: 0.1, 3: 0.2, 2: 0.45}
"""The largest relative errors of normal random weights: a little above what hqq reaches (0.005,
0.087, 0.185, 0.43)."""


def weight(rows: int = 48, inputs: int = 192) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(3)) * 0.05


@pytest.mark.parametrize("bits", ERRORS)
def test_codes_stand_for_what_hqq_dequantises(bits: int) -> None:
    from hqq.core.quantize import Quantizer  # and all of torch's compiler: three seconds

    codes = quantise(weight(), bits)
    found, meta = Quantizer.quantize(
        weight(),
        nbits=bits,
        channel_wise=True,
        group_size=64,
        optimize=True,
        round_zero=bits == 4,
        axis=1,
        bitpack=False,
        device="cpu",
    )
    theirs = ((found - meta["zero"]) * meta["scale"]).view(48, 192)
    assert float((codes.weight() - theirs).norm() / theirs.norm()) < 1e-3  # fp16 scales and offsets
    assert float((codes.weight() - weight()).norm() / weight().norm()) < ERRORS[bits]
    assert int(codes.codes.max()) < 1 << bits


def test_zeros_stay_zeros() -> None:
    assert not bool(quantise(torch.zeros(16, 128), 4).weight().any())


@pytest.mark.parametrize("bits", ERRORS)
def test_a_file_holds_every_code_in_its_bits(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 192), dtype=torch.uint8)
    content = to_bytes(codes, bits)
    assert content.shape == (5, 192 * bits // 8)
    assert torch.equal(from_bytes(content, bits), codes)


def test_a_last_group_that_is_not_whole_spans_what_its_inputs_do() -> None:
    codes, whole = quantise(weight(inputs=150), 4), quantise(weight(inputs=150)[:, :128], 4)
    assert (codes.shape, codes.codes.shape, codes.scales.shape) == ((48, 150), (48, 192), (48, 3))
    assert torch.equal(codes.scales[:, :2], whole.scales)
    assert (
        float((codes.weight() - weight(inputs=150)).norm() / weight(inputs=150).norm()) < ERRORS[4]
    )


def test_without_hqq_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install 'dovetail-llm\[subspec\]'"):
        check_installed()
