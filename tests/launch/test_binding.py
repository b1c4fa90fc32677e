"""Binding goes as far as it is let, and says how far."""

import errno
import os
import platform
import subprocess
import sys
from collections.abc import Sequence

import pytest

from dovetail.launch.machine.binding import (
    MPOL_BIND,
    MPOL_DEFAULT,
    MPOL_INTERLEAVE,
    Binding,
    Linux,
    Place,
    bind,
    memory_refusal,
)
from dovetail.launch.machine.topology import read_topology


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
from dovetail.launch.machine.binding import Place, bind
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
from dovetail.launch.machine.binding import SET_MEMPOLICY, Place, bind, memory_refusal
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
