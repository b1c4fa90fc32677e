"""The cores that each process gets, and whose memory."""

import errno
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dovetail.launch.machine.cores import CoreLayout, lay_out, parse_cores, parse_nodes, parse_place
from dovetail.launch.machine.topology import (
    MPOL_BIND,
    MPOL_DEFAULT,
    MPOL_INTERLEAVE,
    Binding,
    Linux,
    Node,
    Place,
    Topology,
    bind,
    cpus_for,
    format_numbers,
    memory_refusal,
    parse_numbers,
    read_topology,
)
from dovetail.protocol.errors import UserError
from support.sysfs import (
    EIGHT_NODES,
    GIB,
    ONE_NODE,
    SPARSE,
    TWO_SOCKETS,
    WITH_CXL,
    FakeNode,
    plain_cores,
    twin_cores,
    write,
    write_machine,
)


def one_node(*cores: int, quota: float | None = None) -> Topology:
    return Topology((Node(0, tuple((core,) for core in cores), GIB),), quota)


def machine(root: Path, nodes: Mapping[int, FakeNode]) -> Topology:
    threads = [thread for node in nodes.values() for core in node.cores for thread in core]
    return read_topology(write_machine(root, nodes), affinity=threads)


def test_a_list_of_cores_is_read_as_it_is_written() -> None:
    known = tuple(sorted(os.sched_getaffinity(0)))
    assert parse_cores(format_numbers(known)) == known


@pytest.mark.parametrize("text", ["", "a", "1-", "3-1", "0,,1", "-1", "9999", "0-9999"])
def test_what_is_no_list_of_cores_of_ours_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--cores"):
        parse_cores(text)


def test_what_is_no_list_of_nodes_is_refused() -> None:
    assert parse_nodes("") == ()
    assert parse_nodes("0,2-3") == (0, 2, 3)
    with pytest.raises(UserError, match="--memory-nodes"):
        parse_nodes("one")


@pytest.mark.parametrize(
    ("cores", "threads", "layout"),
    [
        ((0, 1, 2, 3), "auto", ((0, 1, 2), (3,), (0, 1, 2, 3))),
        ((0, 1, 2), "auto", ((0, 1), (2,), (0, 1, 2))),
        ((0, 1), "auto", ((0, 1), (1,), (0, 1))),
        ((0, 1), 1, ((0,), (1,), (0, 1))),
        ((5,), "auto", ((5,), (5,), (5,))),
        ((0, 1, 2, 3), 2, ((0, 1), (3,), (0, 1, 2, 3))),
        ((0, 1, 2, 3), 4, ((0, 1, 2, 3), (3,), (0, 1, 2, 3))),
    ],
)
def test_on_one_node_the_target_gets_all_cores_but_the_last_and_both_of_two(
    cores: tuple[int, ...], threads: int | str, layout: tuple[tuple[int, ...], ...]
) -> None:
    assert lay_out(one_node(*cores), threads=threads) == CoreLayout(
        *(Place(cores) for cores in layout)
    )  # type: ignore[arg-type]


def test_a_small_target_and_its_draft_have_one_of_two_cores_each() -> None:
    apart = CoreLayout(Place((0,)), Place((1,)), Place((0, 1)))
    assert lay_out(one_node(0, 1), target_bytes=28_000_000) == apart
    assert not apart.shared
    assert lay_out(one_node(0, 1), target_bytes=400_000_000).shared == (1,)


def test_no_more_cores_are_used_than_the_quota_pays_for() -> None:
    layout = lay_out(one_node(0, 1, 2, 3, quota=2.5))
    assert layout == CoreLayout(Place((0, 1)), Place((2,)), Place((0, 1, 2)))


def test_one_thread_runs_on_a_physical_core(tmp_path: Path) -> None:
    layout = lay_out(machine(tmp_path, {0: FakeNode(twin_cores(0, 4, apart=4), 8)}))
    assert layout == CoreLayout(Place((0, 1, 2)), Place((3,)), Place(tuple(range(8))))


def test_more_threads_than_physical_cores_take_second_hardware_threads_last(tmp_path: Path) -> None:
    assert lay_out(
        machine(tmp_path, {0: FakeNode(twin_cores(0, 4, apart=4), 8)}), threads=6
    ).target == Place((0, 1, 2, 3, 4, 5))


def test_more_threads_than_there_are_hardware_threads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target.threads = 9 is more than .* \(0-7\), 8"):
        lay_out(machine(tmp_path, {0: FakeNode(twin_cores(0, 4, apart=4), 8)}), threads=9)
    with pytest.raises(UserError, match=r"threads = 4 is more than .* \(0-1\), 2"):
        lay_out(one_node(0, 1, 2, 3, quota=2.0), threads=4)


def test_on_two_nodes_the_target_gets_one_whole_and_the_others_go_to_the_other(
    tmp_path: Path,
) -> None:
    assert lay_out(machine(tmp_path, TWO_SOCKETS)) == CoreLayout(
        Place((0, 1, 2, 3), (0,)), Place((4, 5, 6, 7), (1,)), Place((4, 5, 6, 7))
    )


def test_the_target_gets_the_node_with_most_cores(tmp_path: Path) -> None:
    assert lay_out(machine(tmp_path, SPARSE)) == CoreLayout(
        Place((64, 65, 66, 67), (8,)), Place((0, 1), (0,)), Place((0, 1))
    )


def test_of_equal_nodes_the_one_with_most_memory_is_the_best(tmp_path: Path) -> None:
    nodes = {0: FakeNode(plain_cores(0, 4), 16), 1: FakeNode(plain_cores(4, 4), 48)}
    assert lay_out(machine(tmp_path, nodes)).target == Place((4, 5, 6, 7), (1,))


def test_a_node_without_memory_comes_last(tmp_path: Path) -> None:
    nodes = {0: FakeNode(plain_cores(0, 8), 0), 1: FakeNode(plain_cores(8, 2), 16)}
    layout = lay_out(machine(tmp_path, nodes))
    assert layout.target == Place((8, 9), (1,))
    assert layout.draft == Place(tuple(range(8)))


def test_memory_alone_is_no_place_for_a_process(tmp_path: Path) -> None:
    layout = lay_out(machine(tmp_path, WITH_CXL))
    assert (layout.target, layout.draft) == (Place((0, 1, 2, 3), (0,)), Place((4, 5, 6, 7), (1,)))


def test_memory_is_bound_beside_a_node_of_memory_alone(tmp_path: Path) -> None:
    nodes = {0: FakeNode(plain_cores(0, 4), 32), 1: FakeNode((), 128)}
    assert lay_out(machine(tmp_path, nodes)) == CoreLayout(
        Place((0, 1, 2), (0,)), Place((3,), (0,)), Place((0, 1, 2, 3))
    )


def test_a_target_that_does_not_fit_into_a_node_gets_as_many_as_it_needs(tmp_path: Path) -> None:
    topology = machine(tmp_path, EIGHT_NODES)
    assert lay_out(topology, target_bytes=30 * GIB).target.nodes == (0,)
    assert lay_out(topology, target_bytes=70 * GIB).target == Place(tuple(range(18)), (0, 1, 2))
    assert lay_out(topology, target_bytes=70 * GIB).draft == Place(tuple(range(18, 24)), (3,))


def test_a_target_on_all_nodes_leaves_the_last_core_to_the_draft(tmp_path: Path) -> None:
    layout = lay_out(machine(tmp_path, TWO_SOCKETS), target_bytes=100 * GIB)
    assert layout == CoreLayout(
        Place((0, 1, 2, 3, 4, 5, 6), (0, 1)), Place((7,), (0, 1)), Place(tuple(range(16)))
    )


def test_a_quota_within_the_targets_node_leaves_the_last_core_there_to_the_draft(
    tmp_path: Path,
) -> None:
    topology = machine(tmp_path, TWO_SOCKETS)
    assert lay_out(Topology(topology.nodes, 3.0)).target == Place((0, 1), (0,))
    assert lay_out(Topology(topology.nodes, 3.0)).draft == Place((2,), (0,))


def test_a_quota_beyond_the_targets_node_gives_the_rest_to_the_draft(tmp_path: Path) -> None:
    layout = lay_out(Topology(machine(tmp_path, TWO_SOCKETS).nodes, 5.0))
    assert (layout.target, layout.draft) == (Place((0, 1, 2, 3), (0,)), Place((4,), (1,)))


def test_without_numa_no_node_is_told_from_another(tmp_path: Path) -> None:
    layout = lay_out(machine(tmp_path, TWO_SOCKETS), numa="off")
    assert layout == CoreLayout(Place((0, 1, 2, 3, 4, 5, 6)), Place((7,)), Place(tuple(range(16))))


def test_the_nodes_of_the_target_can_be_named(tmp_path: Path) -> None:
    topology = machine(tmp_path, WITH_CXL)
    assert lay_out(topology, numa="1") == CoreLayout(
        Place((4, 5, 6, 7), (1,)), Place((0, 1, 2, 3), (0,)), Place((0, 1, 2, 3))
    )
    assert lay_out(topology, numa="0,2").target == Place((0, 1, 2, 3), (0, 2))
    assert lay_out(topology, numa="0-1").target == Place(tuple(range(7)), (0, 1))


@pytest.mark.parametrize(
    ("numa", "words"),
    [("3", "no node 3"), ("2", "no cores"), ("0-", "'0-': write auto,"), ("9-12", "no node 9")],
)
def test_a_node_that_is_not_there_is_refused(tmp_path: Path, numa: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"target.numa.*{words}"):
        lay_out(machine(tmp_path, WITH_CXL), numa=numa)


def test_a_target_is_spread_over_all_nodes_but_for_the_last_core(tmp_path: Path) -> None:
    every = tuple(range(16))
    assert lay_out(machine(tmp_path, TWO_SOCKETS), numa="shard") == CoreLayout(
        Place((0, 1, 2, 3, 4, 5, 6), (0, 1), ((0, 1, 2, 3), (4, 5, 6))),
        Place((7,), (1,)),
        Place(every),
    )


def test_shards_have_as_many_threads_as_they_are_given_in_turn(tmp_path: Path) -> None:
    topology = machine(tmp_path / "two", TWO_SOCKETS)
    layout = lay_out(topology, numa="shard", threads=5)
    assert layout.target == Place((0, 1, 2, 4, 5), (0, 1), ((0, 1, 2), (4, 5)))
    assert lay_out(topology, numa="shard", threads=16).target.shards == (
        (0, 1, 2, 3, 8, 9, 10, 11),
        (4, 5, 6, 7, 12, 13, 14, 15),
    )
    assert lay_out(Topology(topology.nodes, 3.0), numa="shard").target.shards == ((0,), (4,))
    eight = lay_out(machine(tmp_path / "eight", EIGHT_NODES), numa="shard").target
    assert [len(cores) for cores in eight.shards] == [6] * 7 + [5]
    with_cxl = lay_out(machine(tmp_path / "cxl", WITH_CXL), numa="shard")
    assert with_cxl.target.nodes == (0, 1)


@pytest.mark.parametrize(
    ("nodes", "threads", "words"),
    [
        (ONE_NODE, "auto", r"this process may use node 0"),
        (TWO_SOCKETS, 1, r"1 threads for 2 memory nodes"),
        (TWO_SOCKETS, 17, r"target.threads = 17 is more than .* \(0-15\), 16"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    tmp_path: Path, nodes: dict[int, FakeNode], threads: int, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        lay_out(machine(tmp_path, nodes), numa="shard", threads=threads)


def test_a_place_of_shards_is_read_as_it_is_written() -> None:
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    place = Place((first, last), (0, 1), ((first,), (last,)))
    assert parse_place(place.cores_text, "0-1") == place
    assert parse_place(f"{first}/{last}", "").shards_at_nodes == (((first,), None), ((last,), None))
    assert parse_place(str(first), "3") == Place((first,), (3,))
    for cores, nodes, words in (
        (f"{first}/{first}", "", "in two shards"),
        (f"{first}/{last}", "0", "of them, or none"),
        (f"{first}/", "", "not a list of cores"),
    ):
        with pytest.raises(UserError, match=words):
            parse_place(cores, nodes)


def test_processes_share_no_core_where_there_are_more_than_two(tmp_path: Path) -> None:
    for number, nodes in enumerate((ONE_NODE, TWO_SOCKETS, EIGHT_NODES, SPARSE, WITH_CXL)):
        layout = lay_out(machine(tmp_path / str(number), nodes))
        assert not layout.shared


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


class Recorder:
    """Notes the calls; those named in `refused` fail as in a container."""

    def __init__(self, *refused: str) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._refused = refused

    def set_affinity(self, cores: Sequence[int]) -> None:
        self._note("affinity", tuple(cores))

    def set_memory_policy(self, mode: int, nodes: Sequence[int]) -> None:
        self._note("memory", mode, tuple(nodes))

    def _note(self, name: str, *arguments: object) -> None:
        if name in self._refused:
            raise OSError(errno.EPERM, "Operation not permitted")
        self.calls.append((name, *arguments))


def test_cores_come_first_and_memory_of_one_node_is_bound() -> None:
    system = Recorder()
    binding = bind(Place((4, 5, 6), (1,)), system)
    assert system.calls == [("affinity", (4, 5, 6)), ("memory", MPOL_BIND, (1,))]
    assert (binding.level, str(binding)) == ("full", "full: cores 4-6, memory of node 1")


def test_memory_of_several_nodes_is_taken_in_turn() -> None:
    system = Recorder()
    assert str(bind(Place((0, 1, 8), (0, 2)), system)) == "full: cores 0-1,8, memory of node 0,2"
    assert system.calls[1] == ("memory", MPOL_INTERLEAVE, (0, 2))


def test_memory_of_shards_stays_on_the_node_where_it_is_written_first() -> None:
    place = Place((0, 1, 4, 5), (0, 1), ((0, 1), (4, 5)))
    system = Recorder()
    words = "cores 0-1/4-5 in 2 shards, memory"
    assert str(bind(place, system)) == f"full: {words} of node 0-1"
    assert system.calls == [("affinity", (0, 1, 4, 5)), ("memory", MPOL_BIND, (0, 1))]
    refused = "(set_mempolicy refused node 0-1: Operation not permitted)"
    assert str(bind(place, Recorder("memory"))) == f"{words} not bound {refused}"


def test_where_memory_is_refused_the_cores_stay_bound() -> None:
    system = Recorder("memory")
    binding = bind(Place((0,), (0,)), system)
    assert system.calls == [("affinity", (0,))]
    assert (
        str(binding)
        == "cores 0, memory not bound (set_mempolicy refused node 0: Operation not permitted)"
    )


def test_where_cores_are_refused_nothing_is_bound() -> None:
    system = Recorder("affinity")
    binding = bind(Place((0,), (0,)), system)
    assert system.calls == []
    assert str(binding) == "none (sched_setaffinity refused: Operation not permitted)"


def test_a_place_without_nodes_leaves_the_memory_alone() -> None:
    system = Recorder()
    assert bind(Place((3,)), system) == Binding("cores", Place((3,)))
    assert system.calls == [("affinity", (3,))]


def test_whether_memory_may_be_bound_is_tried_and_undone() -> None:
    system = Recorder()
    assert memory_refusal((0,), system) == ""
    assert system.calls == [("memory", MPOL_BIND, (0,)), ("memory", MPOL_DEFAULT, ())]
    assert memory_refusal((0,), Recorder("memory")) == "Operation not permitted"


def test_the_kernel_refuses_a_node_that_is_not_there() -> None:
    """EINVAL where policies are permitted, EPERM where a container forbids them; never a silent
    success."""
    there = read_topology().computing[0].number
    for nodes in ((63,), (there, 63)):
        with pytest.raises(OSError, match=r"Invalid argument|not permitted|not implemented"):
            Linux().set_memory_policy(MPOL_BIND, nodes)


def test_a_process_that_binds_itself_is_bound_and_so_is_what_it_starts() -> None:
    code = """
import os, threading
from dovetail.launch.machine.topology import Place, bind
from dovetail.launch.machine.topology import read_topology
node = read_topology().computing[0]
place = Place(node.cores[-1][:1], (node.number,))
print(bind(place).level)
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start(); thread.join()
print(seen[0] == set(place.cores) == os.sched_getaffinity(0))
import sys
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "pydantic", "click"}))
"""  # noqa: E501
    level, inherited, heavy = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert level in ("full", "cores")
    assert inherited == "True"
    assert heavy == "[]"


def test_binding_here_leaves_this_test_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    memory_refusal((read_topology().computing[0].number,))
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the filter below is written with the numbers of x86-64"
)
def test_in_a_container_that_forbids_memory_policies_the_cores_are_bound() -> None:
    """A seccomp filter answers set_mempolicy with EPERM here, as Docker's default profile does."""
    code = """
import ctypes, struct
from dovetail.launch.machine.topology import SET_MEMPOLICY, Place, bind, memory_refusal
from dovetail.launch.machine.topology import read_topology
LOAD_NUMBER, EQUAL, ANSWER = 0x20, 0x15, 0x06
EPERM, ALLOW = 0x00050001, 0x7FFF0000
lines = [(LOAD_NUMBER, 0, 0, 0), (EQUAL, 0, 1, SET_MEMPOLICY["x86_64"]), (ANSWER, 0, 0, EPERM), (ANSWER, 0, 0, ALLOW)]
filter_ = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(filter_)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
node = read_topology().computing[0]
print(memory_refusal((node.number,)))
print(bind(Place(node.cores[0][:1], (node.number,))))
"""  # noqa: E501
    refusal, binding = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert refusal == "Operation not permitted"
    assert binding.startswith("cores ")
    assert "memory not bound (set_mempolicy refused node " in binding
    assert binding.endswith(": Operation not permitted)")
