"""The linears of the library: every candidate computes what torch's own linear computes, and the
measured choice is remembered."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from dovetail.protocol.profile import LinearChoice, update_profile
from dovetail.workers.models.backends.library import Library
from dovetail.workers.models.backends.linear import (
    CANDIDATES,
    ROW_CLASSES,
    Candidate,
    PackedLinear,
    Selection,
    profile_key,
    reason_against,
    select,
)

USABLE = [
    pytest.param(c, id=c.name)
    for of_type in CANDIDATES.values()
    for c in of_type
    if not reason_against(c)
]
EVERY_ROW = 1 << 20


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("candidate", USABLE)
def test_any_number_of_rows_gives_the_same_as_torch(candidate: Candidate, bias: bool) -> None:
    for outputs, inputs in ((64, 96), (33, 17), (1, 5)):
        for rows in (1, 2, 3, 4, 5, 16, 17, 64):
            torch.manual_seed(0)
            weight, offset = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
            x = torch.randn(rows, inputs)
            expected = linear(x, weight.to(candidate.stored).float(), offset)
            most = 2 * candidate.tolerance * float(expected.abs().max())
            found = PackedLinear(weight, offset, [(EVERY_ROW, candidate)])(x)
            assert float((found - expected).abs().max()) <= most, (outputs, inputs, rows)


def test_leading_dimensions_are_kept() -> None:
    weight, x = torch.randn(8, 6), torch.randn(2, 3, 6)
    packed = PackedLinear(weight, None, [(EVERY_ROW, CANDIDATES["fp32"][-1])])
    torch.testing.assert_close(packed(x), linear(x, weight))


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
def test_a_row_does_not_depend_on_its_neighbours(weights: str) -> None:
    torch.manual_seed(0)
    packed = PackedLinear(torch.randn(64, 96), None, [(EVERY_ROW, CANDIDATES[weights][0])])
    x = torch.randn(16, 96)
    other = torch.cat([x[:5], torch.randn(11, 96) * 100])
    assert torch.equal(packed(x)[:5], packed(other)[:5])


def test_one_scale_for_all_rows_makes_a_row_depend_on_its_neighbours() -> None:
    """This is why int8-per-tensor is not lossless."""
    torch.manual_seed(0)
    packed = PackedLinear(
        torch.randn(64, 96), None, [(EVERY_ROW, CANDIDATES["int8-per-tensor"][0])]
    )
    x = torch.randn(16, 96)
    assert not torch.equal(packed(x)[:5], packed(torch.cat([x[:5], torch.randn(11, 96) * 100]))[:5])


def test_each_class_of_rows_goes_its_own_way() -> None:
    calls: list[str] = []

    def noting(name: str) -> Candidate:
        def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> "object":
            return lambda x: (calls.append(name), linear(x, weight, bias))[1]

        return Candidate(name, torch.float32, 0.0, 1, pack)  # type: ignore[arg-type]

    packed = PackedLinear(
        torch.randn(8, 6),
        None,
        [(3, noting("few")), (64, noting("tree")), (EVERY_ROW, noting("few"))],
    )
    for rows in (1, 3, 4, 64, 65):
        packed(torch.randn(rows, 6))
    assert calls == ["few", "few", "tree", "tree", "few"]


def test_every_linear_of_a_model_is_replaced_and_its_weight_dropped() -> None:
    model = nn.Sequential(
        nn.Linear(64, 96), nn.Sequential(nn.ReLU(), nn.Linear(96, 64, bias=False))
    )
    first = model[0].weight
    x = torch.randn(5, 64)
    expected = model(x).detach()
    selection = select([(96, 64), (64, 96)], weights="fp32", profile=None)
    taken = Library(selection, device=torch.device("cpu")).take_layer(model, 0)
    assert not any(isinstance(module, nn.Linear) for module in taken.modules())
    assert not list(taken.parameters())
    torch.testing.assert_close(taken(x), expected, rtol=1e-5, atol=1e-5)
    assert first.shape == (96, 64), "only the module forgets its weight"


def test_a_choice_is_measured_for_every_shape_and_class_of_rows() -> None:
    selection = select([(96, 64), (64, 96), (96, 64)], weights="fp32", profile=None)
    assert [(c.n, c.k, c.rows) for c in selection.choices] == [
        (n, k, rows) for n, k in ((64, 96), (96, 64)) for rows in ROW_CLASSES
    ]
    for choice in selection.choices:
        assert choice.chosen in choice.seconds
        assert all(seconds > 0 for seconds in choice.seconds.values())


def test_what_was_chosen_is_remembered_and_not_measured_again(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    select([(96, 64)], weights="fp32", profile=profile)
    slow = [
        LinearChoice(n=96, k=64, rows=rows, chosen="plain", seconds={"plain": 9.0})
        for rows in ROW_CLASSES
    ]
    update_profile(
        profile, profile_key([(96, 64)], weights="fp32"), lambda entry: entry.with_linears(slow)
    )
    assert select([(96, 64)], weights="fp32", profile=profile).choices == tuple(slow)


def test_a_remembered_candidate_that_no_longer_works_is_replaced(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    gone = [
        LinearChoice(n=96, k=64, rows=rows, chosen="abacus", seconds={"abacus": 9.0})
        for rows in ROW_CLASSES
    ]
    update_profile(
        profile, profile_key([(96, 64)], weights="fp32"), lambda entry: entry.with_linears(gone)
    )
    chosen = select([(96, 64)], weights="fp32", profile=profile).choices
    assert all(choice.chosen != "abacus" for choice in chosen)
    assert "abacus" not in json.dumps(
        [entry["linears"] for entry in json.loads(profile.read_text())["entries"]]
    )


def test_a_selection_is_named_after_what_it_uses_and_where() -> None:
    candidates = {c.name: c for c in CANDIDATES["fp32"]}

    def of(*chosen: str) -> str:
        return Selection(
            tuple(
                LinearChoice(n=8, k=8, rows=r, chosen=c, seconds={})
                for r, c in zip(ROW_CLASSES, chosen, strict=True)
            ),
            candidates,
        ).name

    assert of("plain", "plain", "plain") == "plain"
    assert of("plain", "onednn", "onednn").startswith("onednn+plain-")
    assert of("plain", "onednn", "onednn") != of("plain", "plain", "onednn")
