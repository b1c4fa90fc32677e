"""The findings of the doctor on machines of all kinds, and on this one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.launch.machine.cards import Card, read_cards
from dovetail.launch.machine.examination import (
    Check,
    Facts,
    Gpu,
    build_for,
    driver_for,
    examine,
    has_code_for,
    install_command,
    parse_capability,
    read_gpus,
    sizes_in,
)
from dovetail.launch.machine.others import Load, Look, Others, between
from dovetail.launch.machine.topology import Node, Topology, read_topology
from dovetail.launch.profiling.samplers import Absent, SysfsCards
from support.healthy import AMPERE, HEALTHY, VOLTA, inventory
from support.sysfs import GIB, TWO_SOCKETS, write, write_card, write_cards, write_machine


def check(name: str, **changes: Any) -> Check:
    """The check of that name on a healthy machine with some facts changed."""
    return next(c for c in examine(dataclasses.replace(HEALTHY, **changes)) if c.name == name)


def test_a_healthy_machine_has_nothing_to_change() -> None:
    assert [
        c for c in examine(dataclasses.replace(HEALTHY, gpus=[AMPERE])) if not c.ok or c.advice
    ] == []


def test_every_finding_has_a_remedy() -> None:
    sick = dataclasses.replace(
        HEALTHY,
        flags=frozenset({"sse2"}),
        topology=Topology((Node(0, ((0,),), GIB), Node(1, (), GIB)), 0.5),
        memory_refusal="Operation not permitted",
        inventory=inventory(
            kernels_missing="the C++ kernels are not built; with a C++ compiler: ..."
        ),
        gpus=[VOLTA],
        huge_pages="never",
        memory_bytes=GIB // 2,
        files=256,
        shared_bytes=0,
        environment={"OMP_PROC_BIND": "close", "MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"},
        profile_problem="cannot be written",
    )
    found = [c for c in examine(sick) if not c.ok]
    assert len(found) == 11
    assert all(c.advice for c in found)


def test_memory_is_enough_for_a_service_of_the_embedded_models() -> None:
    assert check("memory", memory_bytes=GIB).ok
    assert (
        "service of the embedded models takes 0." in check("memory", memory_bytes=GIB // 2).advice
    )


def test_it_reports_the_load_of_other_programs() -> None:
    found = check("other programs", others=Load("0-3", 0.4, 0.0, [("cc1plus", 12, 1.6)]))
    assert found.ok
    assert found.found.startswith("use 40% of cores 0-3: cc1plus (pid 12) 1.6 cores; measure")
    assert check("other programs", others=Load("0-3", 0.02, 0.0, [])).found == (
        "use 2% of cores 0-3"
    )


def test_it_says_what_lies_in_the_caches(tmp_path: Path) -> None:
    assert check("caches", cache=tmp_path).found == f"{tmp_path}: empty"
    (tmp_path / "int4" / "model").mkdir(parents=True)
    (tmp_path / "int4" / "model" / "blocks").write_bytes(bytes(3_000_000))
    (tmp_path / "profile.json").write_text("{}")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    sizes = sizes_in(tmp_path)
    assert set(sizes) == {"int4", "profile.json", "lost"}
    assert 3_000_000 <= sizes["int4"] < 3_050_000
    found = check("caches", cache=tmp_path, caches={"gguf": 40_000, "int4": 3_000_000}).found
    assert found.startswith(f"{tmp_path}: int4 3.0 MB, gguf 0.0 MB; any of these may be removed")
    assert sizes_in(tmp_path / "none") == {}


def test_a_card_that_torch_has_no_code_for_gets_the_build_that_fits() -> None:
    found = check("GPU 0", gpus=[VOLTA])
    assert not found.ok
    assert "no code for it, only for sm_75" in found.found
    assert "'torch==2.13.0' --index-url https://download.pytorch.org/whl/cu126" in found.advice


def test_a_build_for_cpus_beside_a_card_is_told() -> None:
    found = check(
        "GPU 0", gpus=[AMPERE], inventory=inventory(torch="2.13.0+cpu", cuda="", architectures=[])
    )
    assert (found.ok, "whl/cu130" in found.advice) == (False, True)


def test_it_is_told_whose_products_a_card_computes_and_why() -> None:
    said = ["cuda:0: torch's product multiplies int8 weights: 2, 2, 2 ms for 1, 4, 16 rows ..."]
    found = check(
        "GPU 0's products",
        gpus=[AMPERE],
        inventory=inventory(products=[{"missing": "", "said": said}]),
    )
    assert (found.ok, found.found) == (True, said[0])
    missing = inventory(products=[{"missing": "there is no NVRTC", "said": []}])
    found = check("GPU 0's products", gpus=[AMPERE], inventory=missing)
    assert not found.ok
    assert found.found.startswith("there is no NVRTC; torch's products alone are used")


def test_a_driver_that_is_too_old_for_torch_is_told() -> None:
    found = check("GPU 0", gpus=[dataclasses.replace(AMPERE, driver=550)])
    assert "update the driver to 580" in found.advice
    assert "whl/cu126" in found.advice


def test_a_card_that_no_build_has_code_for_is_left_to_the_cpu() -> None:
    assert "use device cpu" in check("GPU 0", gpus=[Gpu("Tesla K80", (3, 7), 470, 11441)]).advice
    assert "use device cpu" in check("GPU 0", gpus=[VOLTA], machine="aarch64").advice


def test_missing_kernels_say_what_is_lost_and_how_to_get_them() -> None:
    found = check(
        "kernels", inventory=inventory(kernels_missing="the C++ kernels are not built; ...")
    )
    assert "int8" in found.found
    assert found.advice.startswith("install a C++ compiler")
    assert check(
        "kernels", inventory=inventory(kernels_missing="not built"), compiler="/usr/bin/g++"
    ).advice.startswith("build them")


def test_the_instruction_set_of_the_kernels_is_named_and_plain_ones_are_to_change() -> None:
    found = check("kernels")
    assert (found.ok, found.found) == (True, "AVX2; this machine can use plain, avx2")
    slow = check("kernels", inventory=inventory(kernels="plain C++: no SSE4.1", isas=["plain"]))
    assert (slow.ok, "no SSE4.1" in slow.found, "-cpu host" in slow.advice) == (False, True, True)


def test_kernels_that_compute_wrong_are_told() -> None:
    found = check(
        "kernels' self-test",
        inventory=inventory(
            kernels_failures=["int8 on avx2: differs from the exact product by 3.1e-01"]
        ),
    )
    assert (found.ok, "differs" in found.found, "backend = library" in found.advice) == (
        False,
        True,
        True,
    )


def test_a_torch_that_cannot_be_imported_is_a_finding() -> None:
    checks = list(
        examine(
            dataclasses.replace(
                HEALTHY, inventory={"broken": "OSError: libgomp.so.1: cannot open"}, gpus=[AMPERE]
            )
        )
    )
    assert [
        (c.name, c.ok)
        for c in checks
        if "torch" in c.name or "kernels" in c.name or "GPU" in c.name
    ] == [("torch", False), ("GPU 0", True)]


def test_memory_that_may_not_be_bound_matters_on_several_nodes_only(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, TWO_SOCKETS), affinity=range(16))
    assert (
        "SYS_NICE"
        in check("memory nodes", topology=topology, memory_refusal="Operation not permitted").advice
    )
    assert "the target uses node 0" in check("memory nodes", topology=topology).found
    assert check("memory nodes", memory_refusal="Operation not permitted").ok


@pytest.mark.parametrize(("quota", "ok"), [(2.0, True), (1.5, False), (0.5, False)])
def test_a_quota_that_is_no_whole_number_is_told(quota: float, ok: bool) -> None:
    assert check("CPU quota", topology=dataclasses.replace(HEALTHY.topology, quota=quota)).ok is ok


@pytest.mark.parametrize(
    ("variables", "ok"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "4"}, True),
        ({"OMP_WAIT_POLICY": "passive"}, True),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, False),
        ({"GOMP_CPU_AFFINITY": "0-3"}, False),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, False),
        ({"LD_PRELOAD": "/usr/lib/libiomp5.so"}, False),
    ],
)
def test_variables_that_disturb_threads_are_named(variables: dict[str, str], ok: bool) -> None:
    found = check("environment", environment=variables)
    assert found.ok is ok
    assert all(name in found.advice for name in variables if not ok)


def write_tool(folder: Path, script: str) -> str:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


def test_gpus_are_read_from_the_drivers_tool(tmp_path: Path) -> None:
    tool = write_tool(
        tmp_path,
        'echo "Tesla V100-SXM2-16GB, 7.0, 580.65.06, 16384"; echo "NVIDIA RTX A2000, 8.6, '
        '580.65.06, 6138"; echo "junk"',
    )
    gpus = [
        Gpu("Tesla V100-SXM2-16GB", (7, 0), 580, 16384),
        Gpu("NVIDIA RTX A2000", (8, 6), 580, 6138),
    ]
    assert read_gpus(tool) == (gpus, "")


def test_a_driver_that_fails_is_told_and_one_that_is_not_there_is_not(tmp_path: Path) -> None:
    tool = write_tool(
        tmp_path, 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18'
    )
    assert read_gpus(tool) == (
        [],
        f"{tool} fails: Failed to initialize NVML: Driver/library version mismatch",
    )
    assert read_gpus(str(tmp_path / "missing")) == ([], "")


def test_this_machine_is_examined(
    run: Any, invoke: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    changed = {**environment, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_PROC_BIND": "close"}
    result = run("doctor", "--json", env=changed)
    report = json.loads(result.stdout)
    by_name = {c["name"]: c for c in report["checks"]}
    assert set(by_name["torch"]) == {"name", "ok", "found", "advice"}
    assert (result.returncode, report["ok"], by_name["environment"]["ok"]) == (1, False, False)
    assert by_name["torch"]["ok"]
    assert str(len(os.sched_getaffinity(0))) in by_name["cores"]["found"]
    table = invoke("doctor", env=changed)
    assert "LOOK  environment" in table.stdout
    assert "unset OMP_PROC_BIND" in table.stdout


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


def test_our_processes_and_ended_children_are_excluded_and_the_host_is_included() -> None:
    idle = Look(
        0.0, 0.0, 0.0, {7: ("ours", 1, 5.0), 8: ("other", 1, 0.0), 9: ("gone", 1, 50.0)}, {7: 5.0}
    )
    there = {7: ("ours", 1, 35.0), 8: ("other", 1, 40.0), 10: ("child", 7, 20.0)}
    busy = Look(120.0, 20.0, 200.0, there, {7: 15.0, 8: 30.0})
    assert between(idle, idle, (0, 1), lambda pid, _: pid == 7) is None, "no time has passed"
    load = between(idle, busy, (0, 1), lambda pid, _: pid == 7)
    assert load is not None
    assert (load.cores, load.share, load.stolen) == ("0-1", (120 - 30 - 20 - 10 + 20) / 200, 0.1)
    assert load.programs == [("other", 8, 0.4)]
    assert load.words == "use 40% of cores 0-1: other (pid 8) 0.4 cores, the host 10%"


def test_a_busy_program_is_seen_and_not_if_it_is_ours() -> None:
    with subprocess.Popen([sys.executable, "-c", "while 1: pass"]) as busy:
        others = Others()
        while (load := others.load(lambda *_: False)) is None or not load.share:
            pass
        assert load.share > 0.0
        looks = (others.load(lambda pid, _: pid == os.getpid()) for _ in range(10))
        named = {pid for look in looks if look is not None for _, pid, _ in look.programs}
        busy.kill()
    assert busy.pid not in named


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
