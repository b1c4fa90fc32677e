"""Graphics cards of AMD and Intel, on trees of files as the kernel shows them: what they are, what
is read of them, and what the doctor says of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.machine.cards import Card, read_cards
from dovetail.launch.machine.examination import Check, Facts, examine
from dovetail.launch.profiling.samplers import Absent, SysfsCards
from support.healthy import AMPERE, HEALTHY, inventory
from support.sysfs import write, write_card, write_cards

CPU_BUILD = {"torch": "2.13.0+cpu", "cuda": "", "architectures": []}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_cards(tmp_path)


@pytest.fixture
def cards(root: Path) -> dict[str, Card]:
    return {card.folder.name[5:7]: card for card in read_cards(root)}


def test_cards_are_named_with_their_memory_and_drivers(cards: dict[str, Card]) -> None:
    amd, arc, own = cards["03"], cards["04"], cards["00"]
    assert (amd.maker, amd.driver, amd.target, amd.integrated) == (
        "AMD",
        "amdgpu",
        "gfx1031",
        False,
    )
    assert amd.name.startswith("AMD Radeon RX 6700/6700 XT")
    assert (amd.memory_bytes, amd.used_bytes(), amd.busy()) == (10 << 30, 1 << 30, 0.4)
    assert amd.link_gb_s == pytest.approx(16 * 1.969)
    assert (arc.name, arc.driver, arc.memory_bytes) == ("Intel Arc A380", "xe", 6 << 30)
    assert (arc.busy(), arc.used_bytes(), arc.idle_s(), arc.integrated) == (None, None, 9.0, False)
    assert (own.name, own.integrated) == ("Intel UHD Graphics 730", True)
    assert own.memory_bytes is None


def test_a_card_without_a_driver_or_a_list_of_names_is_known_by_its_numbers(tmp_path: Path) -> None:
    write_card(tmp_path, "0000:09:00.0", 0x1002, 0x7550)
    write_card(tmp_path, "0000:0a:00.0", 0x10DE, 0x2684, driver="nvidia")
    write_card(tmp_path, "0000:0b:00.0", 0x1002, 0xAB30, **{"class": "0x040300"})  # its sound
    (card,) = read_cards(tmp_path)
    assert (card.name, card.driver) == ("AMD card 1002:7550", "")
    with pytest.raises(Absent):
        SysfsCards(tmp_path)


def test_samples_have_the_names_that_torch_has_for_cards(root: Path) -> None:
    sampler = SysfsCards(root)
    first = sampler.read()
    assert set(first) == {"cuda:0", "xpu:0", "xpu:1"}
    assert (first["cuda:0"].busy, first["cuda:0"].used_bytes) == (0.4, 1 << 30)
    assert [first[name].integrated for name in ("xpu:0", "xpu:1")] == [False, True]
    assert first["xpu:0"].busy is None
    idle = root / "sys/devices/0000:04:00.0/tile0/gt0/gtidle/idle_residency_ms"
    write(idle, "9000")
    assert sampler.read()["xpu:0"].busy == 1.0  # powered down for none of the time since
    write(idle, str(1 << 40))
    write(root / "sys/devices/0000:04:00.0/tile0/gt1/gtidle/idle_residency_ms", str(1 << 40))
    assert sampler.read()["xpu:0"].busy == 0.0
    assert set(SysfsCards(root, beside_nvidia=True).read()) == {"amd:0", "xpu:0", "xpu:1"}


def told(cards: list[Card], *, gpus: Any = (), **changes: Any) -> Check:
    """Return what the doctor says of the first of some cards."""
    facts: Facts = dataclasses.replace(
        HEALTHY, cards=cards, gpus=gpus, inventory=inventory(**changes)
    )
    return next(check for check in examine(facts) if " card 0" in check.name)


def test_a_user_with_an_rx_6700_is_told_what_to_install_and_what_it_lacks(
    cards: dict[str, Card],
) -> None:
    amd = [cards["03"]]
    found = told(amd, **CPU_BUILD)
    assert not found.ok
    assert "(gfx1031), 10240 MiB, driver amdgpu; this build of torch is for CPUs" in found.found
    assert "'torch==2.13.0' --index-url https://download.pytorch.org/whl/rocm7.1" in found.advice
    assert "HSA_OVERRIDE_GFX_VERSION=10.3.0" in found.advice
    assert "whl/rocm6.4" in told(amd, **CPU_BUILD | {"torch": "2.8.0+cpu"}).advice
    beside = told(amd, gpus=[AMPERE])
    assert (beside.ok, "does not use it" in beside.found) == (True, True)
    rocm = {"torch": "2.13.0+rocm7.1", "cuda": "", "hip": "7.1.2", "architectures": ["gfx1030"]}
    hidden = told(amd, **rocm)
    assert (hidden.ok, "/dev/kfd" in hidden.advice) == (False, True)
    seen = [
        {"name": "cuda:0", "chip": "AMD Radeon RX 6700", "unproved": "has never been run on one"}
    ]
    foreign = told(amd, **rocm, found=seen)
    assert "no code for gfx1031, only for gfx1030" in foreign.found
    assert "10.3.0" in foreign.advice
    fine = told(amd, **rocm | {"architectures": ["gfx1030", "gfx1031"]}, found=seen)
    assert (fine.ok, fine.advice) == (True, "")


def test_a_user_with_an_arc_a380_is_told_what_to_install(cards: dict[str, Card]) -> None:
    found = told([cards["04"]], **CPU_BUILD)
    assert not found.ok
    assert found.found.startswith("Intel Arc A380, 6144 MiB, driver xe; this build of torch")
    assert "--index-url https://download.pytorch.org/whl/xpu" in found.advice
    xpu = {"torch": "2.13.0+xpu", "cuda": "", "xpu": "20250302", "architectures": []}
    hidden = told([cards["04"]], **xpu)
    assert (hidden.ok, "compute runtime" in hidden.advice) == (False, True)
    assert told([cards["00"]], **CPU_BUILD).ok


def test_the_doctor_says_on_which_gpus_dovetail_has_never_been_run() -> None:
    seen = [
        {"name": "mps", "chip": "an Apple GPU", "unproved": "dovetail has never been run on one"}
    ]
    facts = dataclasses.replace(HEALTHY, inventory=inventory(**CPU_BUILD, found=seen))
    checks = {check.name: check for check in examine(facts)}
    assert (checks["mps"].ok, "has never been run on one" in checks["mps"].found) == (True, True)
    assert "GPU" not in checks
