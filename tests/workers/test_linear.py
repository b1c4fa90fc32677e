"""Packed linears compute what torch's own compute."""

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from dovetail.workers.models.linear import PackedLinear, pack_linears, packing_works

pytestmark = pytest.mark.skipif(not packing_works(), reason="this build of torch has no packed linear")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 17, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 96), (33, 17), (1, 5)])
def test_any_number_of_rows_gives_the_same_as_torch(rows: int, bias: bool, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight, offset, x = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None, torch.randn(rows, inputs)
    torch.testing.assert_close(PackedLinear(weight, offset)(x), linear(x, weight, offset), rtol=1e-5, atol=1e-5)


def test_leading_dimensions_are_kept() -> None:
    weight, x = torch.randn(8, 6), torch.randn(2, 3, 6)
    torch.testing.assert_close(PackedLinear(weight, None)(x), linear(x, weight), rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    packed, x = PackedLinear(torch.randn(64, 96), None), torch.randn(16, 96)
    other = torch.cat([x[:5], torch.randn(11, 96) * 100])
    assert torch.equal(packed(x)[:5], packed(other)[:5])


def test_every_large_linear_of_a_model_is_replaced_and_its_weight_dropped() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.Sequential(nn.ReLU(), nn.Linear(512, 256, bias=False)))
    x = torch.randn(5, 256)
    expected = model(x).detach()
    assert pack_linears(model) == "onednn-packed"
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert not list(model.parameters())
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kept", [nn.Linear(256, 512, dtype=torch.bfloat16), nn.Linear(256, 256)], ids=["sixteen bits", "small"])
def test_other_types_of_weights_and_small_ones_stay_as_they_are(kept: nn.Linear) -> None:
    model = nn.Sequential(kept)
    assert pack_linears(model) == "plain"
    assert model[0] is kept
