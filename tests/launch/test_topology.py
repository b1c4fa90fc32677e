"""The kernel's account of a machine, read from trees of files like its own."""

import os
from pathlib import Path

import pytest

from dovetail.launch.machine.topology import (
    Node,
    Topology,
    cpus_for,
    format_numbers,
    parse_numbers,
    read_topology,
)
from support.sysfs import (
    EIGHT_NODES,
    GIB,
    ONE_NODE,
    SPARSE,
    TWO_SOCKETS,
    WITH_CXL,
    FakeNode,
    plain_cores,
    write,
    write_machine,
)

CGROUP_V1 = "9:name=systemd:/\n3:cpuset:/box\n1:cpu,cpuacct:/box/inner\n0::/\n"


def test_a_machine_of_one_node_is_read(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, ONE_NODE), affinity=range(4))
    assert topology == Topology((Node(0, ((0,), (1,), (2,), (3,)), 16 * GIB),), None)


def test_hardware_threads_of_a_core_stand_together(tmp_path: Path) -> None:
    first, second = read_topology(write_machine(tmp_path, TWO_SOCKETS), affinity=range(16)).nodes
    assert first.cores == ((0, 8), (1, 9), (2, 10), (3, 11))
    assert second.cores == ((4, 12), (5, 13), (6, 14), (7, 15))


def test_the_newer_name_of_the_siblings_is_read_too(tmp_path: Path) -> None:
    write_machine(tmp_path, {0: FakeNode([[0], [1]], 1)})
    for thread in (0, 1):
        write(tmp_path / f"sys/devices/system/cpu/cpu{thread}/topology/core_cpus_list", "0-1")
    assert read_topology(tmp_path, affinity=(0, 1)).nodes[0].cores == ((0, 1),)


def test_eight_nodes_are_read_in_order(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, EIGHT_NODES), affinity=range(48))
    assert [node.number for node in topology.nodes] == list(range(8))
    assert {len(node.cores) for node in topology.nodes} == {6}


def test_numbers_of_nodes_may_have_gaps(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, SPARSE), affinity=[0, 1, 64, 65, 66, 67])
    assert [(node.number, len(node.cores)) for node in topology.nodes] == [(0, 2), (8, 4)]


def test_a_node_of_memory_alone_has_no_cores(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, WITH_CXL), affinity=range(8))
    assert topology.nodes[2] == Node(2, (), 128 * GIB)
    assert [node.number for node in topology.computing] == [0, 1]


def test_cores_that_are_offline_are_left_out(tmp_path: Path) -> None:
    root = write_machine(tmp_path, TWO_SOCKETS, offline=(1, 9, 12))
    assert read_topology(root, affinity=range(16)).nodes[0].cores == ((0, 8), (2, 10), (3, 11))
    assert read_topology(root, affinity=range(16)).nodes[1].cores == (
        (4,),
        (5, 13),
        (6, 14),
        (7, 15),
    )


def test_only_cores_that_the_process_is_bound_to_count(tmp_path: Path) -> None:
    topology = read_topology(write_machine(tmp_path, TWO_SOCKETS), affinity=(5, 6, 13))
    assert [node.cores for node in topology.nodes] == [(), ((5, 13), (6,))]
    assert topology.threads == (5, 6, 13)


def test_memory_that_may_not_be_used_counts_as_none(tmp_path: Path) -> None:
    topology = read_topology(
        write_machine(tmp_path, TWO_SOCKETS, memory_allowed="1"), affinity=range(16)
    )
    assert [node.memory_bytes for node in topology.nodes] == [0, 64 * GIB]


def test_a_cpuset_confines_cores_and_memory(tmp_path: Path) -> None:
    groups = {"box/cpuset.cpus.effective": "4-7", "box/cpuset.mems.effective": "1"}
    topology = read_topology(
        write_machine(tmp_path, TWO_SOCKETS, groups=groups, own_groups="0::/box/inner\n"),
        affinity=range(16),
    )
    assert topology.nodes == (Node(1, ((4,), (5,), (6,), (7,)), 64 * GIB),)


def test_a_cpuset_of_the_first_kind_confines_too(tmp_path: Path) -> None:
    groups = {"cpuset/box/cpuset.effective_cpus": "0-2", "cpuset/box/cpuset.effective_mems": "0"}
    topology = read_topology(
        write_machine(tmp_path, TWO_SOCKETS, groups=groups, own_groups=CGROUP_V1),
        affinity=range(16),
    )
    assert topology.threads == (0, 1, 2)


def test_a_cpuset_that_knows_none_of_our_cores_is_not_ours(tmp_path: Path) -> None:
    topology = read_topology(
        write_machine(tmp_path, ONE_NODE, groups={"cpuset.cpus.effective": "40-47"}),
        affinity=(2, 3),
    )
    assert topology.threads == (2, 3)


@pytest.mark.parametrize(
    ("own", "groups", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/a/b\n", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/docker/1234\n", {"cpu.max": "300000 100000"}, 3.0),
        (
            CGROUP_V1,
            {"cpu/box/cpu.cfs_quota_us": "150000", "cpu/box/cpu.cfs_period_us": "50000"},
            3.0,
        ),
        (
            CGROUP_V1,
            {"cpu/box/inner/cpu.cfs_quota_us": "-1", "cpu/box/inner/cpu.cfs_period_us": "100000"},
            None,
        ),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
    ],
)
def test_the_least_quota_of_all_levels_holds(
    tmp_path: Path, own: str, groups: dict[str, str], quota: float | None
) -> None:
    assert (
        read_topology(
            write_machine(tmp_path, ONE_NODE, groups=groups, own_groups=own), affinity=range(4)
        ).quota
        == quota
    )


def test_a_quota_of_a_part_of_a_core_takes_a_whole_one() -> None:
    assert [cpus_for(quota) for quota in (0.2, 1.0, 1.5, 4.0)] == [1, 1, 2, 4]


def test_a_kernel_without_nodes_is_one_node(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", "MemTotal:       2048 kB\n")
    assert read_topology(tmp_path, affinity=(0, 1)).nodes == (Node(0, ((0,), (1,)), 2 << 20),)


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert set(topology.threads) <= os.sched_getaffinity(0)
    assert topology.computing[0].cores
    assert sum(node.memory_bytes for node in topology.nodes) > 0


@pytest.mark.parametrize(
    ("numbers", "text"), [((0,), "0"), ((0, 1, 2), "0-2"), ((0, 2, 3, 7), "0,2-3,7"), ((), "")]
)
def test_a_list_is_read_as_it_is_written(numbers: tuple[int, ...], text: str) -> None:
    assert format_numbers(numbers) == text
    assert parse_numbers(text + "\n") == set(numbers)


def test_what_is_no_list_of_the_kernels_holds_no_numbers() -> None:
    assert parse_numbers("(null)") == set()


def test_a_core_without_siblings_listed_stands_alone(tmp_path: Path) -> None:
    write_machine(tmp_path, {0: FakeNode(plain_cores(0, 2), 1)})
    (tmp_path / "sys/devices/system/cpu/cpu1/topology/thread_siblings_list").unlink()
    assert read_topology(tmp_path, affinity=(0, 1)).nodes[0].cores == ((0,), (1,))
