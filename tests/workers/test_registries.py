"""The tables of head kinds, drafters, policies and devices: one entry each, and nothing beside."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from dovetail.launch.settings.configure import configure
from dovetail.protocol.errors import SettingsError
from dovetail.protocol.policies import POLICIES
from dovetail.protocol.settings import DRAFT_KINDS, HEAD_KINDS
from dovetail.workers.devices import opening, registry
from dovetail.workers.devices.base import Device, DeviceKind, Transfer
from dovetail.workers.devices.cpu import CPU
from dovetail.workers.drafters import registry as drafters
from dovetail.workers.heads.registry import ENTRIES, KINDS, setting_of, trained_kind
from dovetail.workers.speculation import policies


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


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_kind_of_head_that_can_be_named_can_be_trained_and_planned_with(kind: str) -> None:
    entry, own = KINDS[kind], trained_kind(kind)
    assert own.name == kind
    assert entry.title
    assert entry.what.startswith(("a ", "an "))
    assert entry.figures is not None, "dovetail plan needs figures in its Entry"
    assert entry.figures.tokens == tuple(sorted(entry.figures.tokens))
    assert own.architecture.lower().endswith(kind)


def test_every_kind_of_head_has_a_name_in_the_settings() -> None:
    assert {setting_of(entry.name) for entry in ENTRIES} == set(HEAD_KINDS)
    assert all(entry.load().name == entry.name for entry in ENTRIES)


def test_the_table_of_heads_imports_no_torch() -> None:
    asked = "import sys, dovetail.workers.heads.registry; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def test_every_draft_and_every_policy_can_be_opened() -> None:
    assert set(drafters.OPENERS) == set(DRAFT_KINDS) - {"none"}
    assert set(policies.OPENERS) == set(POLICIES)
