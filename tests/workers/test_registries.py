"""The tables of head kinds, drafters, policies and devices: one entry each, and nothing beside."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.policies import POLICIES
from dovetail.protocol.settings import DRAFT_KINDS, DraftSettings
from dovetail.workers.devices import opening, registry
from dovetail.workers.devices.base import Device, DeviceKind, Transfer
from dovetail.workers.devices.cpu import CPU
from dovetail.workers.drafters import registry as drafters
from dovetail.workers.drafters.head import HeadDrafter
from dovetail.workers.drafters.registry import open_draft_worker
from dovetail.workers.heads.config import HeadConfig
from dovetail.workers.heads.kind import HeadKind
from dovetail.workers.heads.parts import Body, HeadParts
from dovetail.workers.heads.registry import KINDS
from dovetail.workers.heads.spec import Group, HeadSpec, Shapes, common_fields
from dovetail.workers.speculation import policies
from support.heads import VARIANTS, head_config, head_tensors, write_files
from support.levels import levels_of


class Board(DeviceKind):
    """A device that is the CPU by another name."""

    type = "cpu"

    def open(self, name: str) -> Device | None:
        return Device(self, name, torch.device("cpu"), "board", "fp16") if name == "board" else None

    def best(self) -> str | None:
        return "board"

    def free_bytes(self, device: torch.device) -> int:
        return 7

    def transfer(self, device: torch.device) -> Transfer:
        return CPU.transfer(device)


BOARD = Board()
ENTRY = registry.Entry(lambda: BOARD, "board", "board", registry.Memory.OWN)


@pytest.fixture
def adding(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Set the variable that adds devices for this process, and have it read again."""

    def add(paths: str) -> None:
        monkeypatch.setenv("DOVETAIL_DEVICES", paths)
        registry.entries.cache_clear()

    yield add
    registry.entries.cache_clear()


def test_a_device_is_added_by_its_import_path(
    adding: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    adding(f"{__name__}:ENTRY")
    monkeypatch.setattr(opening, "KINDS", tuple(one.load() for one in registry.entries()))
    opened = opening.open_device("auto", torch.get_num_threads())
    assert (opened.name, opened.free_bytes()) == ("board", 7)
    with pytest.raises(SettingsError, match="write board, cuda:N"):
        opening.open_device("bord", torch.get_num_threads())
    found = configure(flags={"target.device": "board", "draft.device": "board"}, environment={})
    assert found.settings.draft.device == "board"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no.such:ENTRY", "cannot import 'no.such:ENTRY': No module named 'no'"),
        ("json:ENTRY", "cannot import 'json:ENTRY': module 'json' has no attribute 'ENTRY'"),
        ("json", "cannot import 'json': module 'json' has no attribute ''"),
        ("json:loads", "'json:loads' is not an Entry"),
    ],
)
def test_an_import_path_that_leads_to_no_device_is_refused(
    path: str, why: str, adding: Callable[[str], None]
) -> None:
    adding(path)
    with pytest.raises(SettingsError, match=re.escape(f"DOVETAIL_DEVICES: {why}")):
        configure(flags={"draft.device": "cpu"}, environment={})


class Sum(HeadKind):
    name = "sum"

    def recognises(self, shapes: Shapes) -> bool:
        return "fc.weight" not in shapes and "layers.0.self_attn.q_proj.weight" in shapes

    def read_spec(self, *given: Any) -> HeadSpec:
        return HeadSpec(**common_fields(self.name, *given, mlp="mlp.gate_proj"))

    def fusion_groups(self, spec: HeadSpec, config: HeadConfig) -> list[Group]:
        return []

    def body(self, parts: HeadParts) -> Body:
        return parts.layered(torch.add)


def test_a_kind_of_head_is_added_by_the_table_alone(
    tmp_path: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "sum", Sum())
    tensors, config = head_tensors(VARIANTS["eagle-llama3"]), head_config(VARIANTS["eagle-llama3"])
    tensors["fc.weight"] = torch.eye(64).repeat(1, 2)  # EAGLE's fusion as a sum
    write_files(tmp_path / "eagle", tensors, config)
    del tensors["fc.weight"]
    write_files(tmp_path / "sum", tensors, config)
    found = []
    for kind in ("eagle", "sum"):
        settings = DraftSettings(model=str(tmp_path / kind), device="cpu", weights="fp32")
        worker = open_draft_worker(settings, name=kind, threads=1, target=str(llama_folder))
        assert isinstance(worker.engine, HeadDrafter)
        assert worker.engine.head.spec.kind == kind
        found.append(levels_of(worker.engine.head, None))
    torch.testing.assert_close(found[0], found[1])


def test_every_draft_and_every_policy_can_be_opened() -> None:
    assert set(drafters.OPENERS) == set(DRAFT_KINDS) - {"none"}
    assert set(policies.OPENERS) == set(POLICIES)
