"""Cores that processes claim from each other."""

from pathlib import Path

import pytest

from dovetail.launch.machine.topology import Node, Topology
from dovetail.launch.processes.ray.seat import claim
from dovetail.protocol.errors import UserError

TWO_SOCKETS = Topology((Node(0, ((0, 4), (1, 5)), 1 << 30), Node(1, ((2, 6), (3, 7)), 1 << 30)))


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_each_core_is_claimed_once_with_the_memory_of_its_node_and_let_go_again() -> None:
    first = claim(2, topology=TWO_SOCKETS)
    assert (first.place.cores, first.place.nodes) == ((0, 1), (0,))
    draft = claim(1, last=True, topology=TWO_SOCKETS)
    assert (draft.place.cores, draft.place.nodes) == ((3,), (1,))
    second = claim(2, topology=TWO_SOCKETS)  # second hardware threads of one node, before two nodes
    assert (second.place.cores, second.place.nodes) == ((4, 5), (0,))
    first.close()
    assert claim(2, topology=TWO_SOCKETS).place.cores == (0, 1)


def test_cores_of_several_nodes_are_claimed_where_none_has_enough() -> None:
    assert claim(6, topology=TWO_SOCKETS).place.nodes == (0, 1)


def test_fewer_cores_than_asked_for_are_an_error_that_takes_none() -> None:
    kept = claim(7, topology=TWO_SOCKETS)
    with pytest.raises(UserError, match=r"2 cores were asked for, and 1 of"):
        claim(2, topology=TWO_SOCKETS)
    assert len(claim(1, topology=TWO_SOCKETS).place.cores) == 1
    with pytest.raises(UserError, match="1 cores were asked for, and 0 of"):
        claim(1, topology=TWO_SOCKETS)
    kept.close()
