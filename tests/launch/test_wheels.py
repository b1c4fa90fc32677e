"""The build of torch that fits a card."""

import pytest

from dovetail.launch.machine.wheels import (
    build_for,
    driver_for,
    has_code_for,
    install_command,
    parse_capability,
)

CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (CU126, (6, 1), True),
        (CU126, (7, 0), True),
        (CU126, (8, 9), True),
        (CU126, (10, 0), False),
        (CU130, (6, 1), False),
        (CU130, (7, 0), False),
        (CU130, (7, 5), True),
        (CU130, (12, 1), True),
        (CU130, (13, 0), True),
        (("sm_86",), (8, 0), False),
        (("sm_90a",), (9, 0), True),
        (("sm_90a",), (9, 1), False),
        (("compute_60",), (8, 6), True),
        ((), (8, 0), False),
        (("gfx90a",), (9, 0), False),
    ],
)
def test_machine_code_runs_on_its_own_major_version_and_ptx_on_later_ones(
    architectures: tuple[str, ...], capability: tuple[int, int], runs: bool
) -> None:
    assert has_code_for(architectures, capability) is runs


@pytest.mark.parametrize(
    ("capability", "release", "driver", "build"),
    [
        ((5, 2), "2.13.0", 580, "cu126"),
        ((6, 1), "2.13.0+cpu", 535, "cu126"),
        ((7, 0), "2.13.0", 580, "cu126"),
        ((7, 0), "2.8.0", 550, "cu126"),
        ((7, 5), "2.13.0", 580, "cu130"),
        ((8, 6), "2.13.0", None, "cu130"),
        ((8, 6), "2.13.0", 550, "cu126"),
        ((8, 6), "2.8.0", 590, "cu126"),
        ((12, 0), "2.13.0", 590, "cu130"),
        ((12, 0), "2.13.0", 570, "cu128"),
        ((3, 5), "2.13.0", 470, ""),
        ((8, 0), "2.13.0", 470, ""),
    ],
)
def test_the_build_follows_from_the_card_and_its_driver(
    capability: tuple[int, int], release: str, driver: int | None, build: str
) -> None:
    assert build_for(capability, release=release, driver=driver) == build


def test_the_same_release_is_named_where_it_is_published_as_that_build() -> None:
    assert (
        install_command("cu126", release="2.13.0+cu130")
        == "pip install --force-reinstall 'torch==2.13.0' --index-url "
        "https://download.pytorch.org/whl/cu126"
    )
    assert "'torch>=2.8,<2.12'" in install_command("cu128", release="2.13.0")
    assert "'torch>=2.9,<2.14'" in install_command("cu130", release="2.8.0")


def test_versions_are_read() -> None:
    assert (driver_for("13.0"), driver_for("12.6"), driver_for(""), driver_for("11.8")) == (
        580,
        525,
        None,
        None,
    )
    assert (parse_capability(" 8.6 "), parse_capability("[N/A]")) == ((8, 6), None)
