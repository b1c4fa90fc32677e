"""Heads whose levels OpenVINO computes, on its CPU: every kind, in every shape, computes what torch
does; what OpenVINO does not have is refused in a sentence."""

import logging
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.protocol.errors import CheckpointError, SettingsError
from dovetail.protocol.settings import DraftSettings
from dovetail.workers.devices import openvino
from dovetail.workers.devices.base import Device
from dovetail.workers.devices.opening import open_device
from dovetail.workers.drafters.converted_head import ConvertedHead, open_converted_head
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.drafters.trial import try_out
from dovetail.workers.heads.head import Head
from support.cases import everyday
from support.heads import VARIANTS, write_head
from support.models import tiny_llama

EVERYDAY = ("dovetail-3", "jakiro-4", "jakiro-star", "eagle3-normed")
CASES = [(kind, grows) for kind in VARIANTS for grows in (True, False)]
"""`grows`: as on a CPU or GPU; else each shape is converted by itself, as for an NPU."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    if find_spec("openvino") is None:
        pytest.skip("pip install 'dovetail[openvino]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return open_device("openvino:CPU", 1, for_head=True)


def opened(folder: Path, kind: str, place: Device) -> ConvertedHead:
    target, head = tiny_llama(folder / "target"), write_head(folder / "head", kind)
    return open_converted_head(str(head), target=str(target), weights="auto", device=place)


def level(head: Head, rows: int, slots: int, *, true: bool, contrast: bool) -> tuple[Any, ...]:
    """Return the arguments of a level of random rows behind some others."""
    generator, spec = torch.Generator().manual_seed(rows), head.spec
    behind = slots - rows - 3
    mask = torch.zeros(rows, slots)
    mask[:, behind:] = -torch.inf
    mask[torch.arange(rows), torch.arange(behind, behind + rows)] = 0.0
    return (
        torch.randint(0, head.vocabulary_size, (rows,), generator=generator),
        torch.randn(rows, spec.feature_width if true else spec.hidden, generator=generator),
        torch.arange(behind, behind + rows),
        torch.arange(behind, behind + rows),
        mask,
        torch.randn(spec.blocks, 2, spec.kv_heads, slots, spec.head_dim, generator=generator),
    )


def far(found: Tensor, expected: Tensor) -> float:
    known = expected.isfinite()
    assert torch.equal(known, found.isfinite())
    return float((found[known] - expected[known]).abs().max() / expected[known].abs().max())


@pytest.mark.parametrize(
    ("kind", "grows"),
    everyday(CASES, *((kind, True) for kind in EVERYDAY), ("jakiro-4", False)),
)
def test_levels_of_all_shapes_are_what_torch_computes(
    kind: str, grows: bool, tmp_path: Path, place: Device
) -> None:
    assert place.conversion is not None
    head = opened(tmp_path, kind, replace(place, conversion=replace(place.conversion, grows=grows)))
    for rows, slots, true in ((1, 512, False), (3, 1024, True), (20, 512, False)):
        contrast = head.spec.contrast and not true
        given = level(head, rows, slots, true=true, contrast=contrast)
        wanted = torch.tensor([rows - 1]) if true else None
        how: dict[str, Any] = {"true": true, "rows": wanted, "contrast": contrast}
        expected = Head.step(head, *given[:5], memory := given[5].clone(), **how)
        found = head.step(*given, **how)
        pairs = [(found.logits, expected.logits), (found.states, expected.states)]
        pairs.append((given[5], memory))
        if contrast:
            assert found.contrast is not None
            assert expected.contrast is not None
            pairs.append((found.contrast, expected.contrast))
        assert max(far(*pair) for pair in pairs) < openvino.EXACT


def test_a_head_drafts_with_converted_levels_and_says_where(tmp_path: Path, place: Device) -> None:
    target, head = tiny_llama(tmp_path / "target"), write_head(tmp_path / "head", "jakiro")
    settings = DraftSettings(model=str(head), device=place.name)
    worker = open_draft_worker(settings, name="draft", threads=1, target=str(target))
    assert worker.hello(1).device == "openvino:CPU"
    assert isinstance(worker.engine.head, ConvertedHead)
    try_out(worker)


def test_a_device_that_computes_wrong_levels_is_refused(tmp_path: Path, place: Device) -> None:
    assert place.conversion is not None
    right = place.conversion.convert

    def wrong(*given: Any) -> Any:
        compute = right(*given)
        return lambda tensors: [part * 1.001 for part in compute(tensors)]

    broken = replace(place, conversion=replace(place.conversion, convert=wrong))
    with pytest.raises(CheckpointError, match=r"differ by 1\.0e-03 of the largest"):
        opened(tmp_path, "eagle", broken)


def test_what_it_cannot_convert_is_refused_in_a_sentence(place: Device) -> None:
    class Strange(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no such thing")

    assert place.conversion is not None
    before = logging.getLogger().level, [*logging.getLogger().filters]
    with pytest.raises(SettingsError, match=r"cannot compute this head: .*; use draft.device cpu"):
        place.conversion.convert(Strange(), [torch.ones(2)], [[0]])
    assert (logging.getLogger().level, logging.getLogger().filters) == before


def test_what_openvino_does_not_have_is_refused(tmp_path: Path, place: Device) -> None:
    for name in ("openvino:TPU", "openvino", "openvino:"):
        with pytest.raises(SettingsError, match=r"finds openvino:CPU \(.*; use one of these"):
            open_device(name, 1, for_head=True)
    with pytest.raises(SettingsError, match="computes draft heads alone"):
        open_device(place.name, 1)
    target, head = tiny_llama(tmp_path / "target"), write_head(tmp_path / "head", "eagle")
    for model, weights, said in (
        (target, "auto", "computes draft heads alone"),
        (head, "int4", "use fp32, fp16 or bf16"),
    ):
        settings = DraftSettings(model=str(model), device=place.name, weights=weights)
        with pytest.raises((SettingsError, CheckpointError), match=said):
            open_draft_worker(settings, name="draft", threads=1, target=str(target))


def test_a_name_of_no_device_is_answered_with_openvinos_for_a_head_alone() -> None:
    for for_head in (False, True):
        with pytest.raises(SettingsError, match="there is no device 'rocm'; write cuda:N") as said:
            open_device("rocm", 1, for_head=for_head)
        assert ("openvino:CPU|GPU|NPU" in str(said.value)) is for_head


def test_without_the_package_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    openvino._package.cache_clear()
    openvino._core.cache_clear()
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(SettingsError, match=r"pip install 'dovetail\[openvino\]', or use device"):
        open_device("openvino:CPU", 1, for_head=True)


class Raising:
    """A package of which one part fails, as with a driver that is broken."""

    __version__ = "2026.4.1-0"

    def __init__(self, part: str) -> None:
        self._part = part

    def Core(self) -> "Raising":
        return self._or_fail("core", self)

    @property
    def available_devices(self) -> list[str]:
        return self._or_fail("devices", ["CPU"])

    def get_property(self, _: str, name: str) -> str:
        return self._or_fail(name, "a chip")

    def _or_fail(self, part: str, answer: Any) -> Any:
        if part == self._part:
            raise RuntimeError("Exception from core.cpp:103:\nzeInit failed")
        return answer


@pytest.mark.parametrize(
    "part", ["core", "devices", "FULL_DEVICE_NAME", "OPTIMIZATION_CAPABILITIES"]
)
def test_a_package_that_fails_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    openvino._core.cache_clear()
    monkeypatch.setattr(openvino, "_package", lambda: Raising(part))
    with pytest.raises(SettingsError) as refusal:
        open_device("openvino:CPU", 1, for_head=True)
    openvino._core.cache_clear()
    assert str(refusal.value) == (
        "OpenVINO fails here (Exception from core.cpp:103: zeInit failed): "
        "pip install --force-reinstall openvino, or use device cpu"
    )


def test_openvinos_telemetry_is_not_imported(tmp_path: Path, place: Device) -> None:
    opened(tmp_path, "eagle", place)
    assert sys.modules["openvino_telemetry"] is None
