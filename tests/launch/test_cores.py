"""The cores that each process gets, and whose memory."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dovetail.launch.machine.binding import Place
from dovetail.launch.machine.cores import CoreLayout, lay_out, parse_cores, parse_nodes, parse_place
from dovetail.launch.machine.topology import Node, Topology, format_numbers, read_topology
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
