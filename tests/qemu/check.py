"""What runs inside the virtual machine: topology, layout and binding against a kernel that has two
memory nodes. Standard library only.

Where a page really lies, the kernel is asked with move_pages(2), by another call than the one that
put it there.
"""

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from dovetail.launch.machine.binding import MPOL_DEFAULT, Linux, Place, bind, memory_refusal
from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.topology import format_numbers, read_topology

MOVE_PAGES = 279  # x86-64
PAGES = 256
CALLS = ctypes.CDLL(None, use_errno=True)


def in_a_child(check: Callable[[], None]) -> bool:
    """A binding is for life, so each check has a process of its own."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException as error:  # whatever it is, it is told and counts
            print(f"FAILED {check.__name__}: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        print(f"ok     {(check.__doc__ or '').strip()}", flush=True)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def nodes_of_fresh_pages(count: int = PAGES) -> list[int]:
    """The nodes on which pages lie that this thread takes now."""
    memory = mmap.mmap(-1, count * mmap.PAGESIZE)
    for page in range(count):
        memory[page * mmap.PAGESIZE] = 1
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    addresses = (ctypes.c_void_p * count)(*(start + page * mmap.PAGESIZE for page in range(count)))
    found = (ctypes.c_int * count)()
    if CALLS.syscall(MOVE_PAGES, 0, ctypes.c_ulong(count), addresses, None, found, 0) != 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return list(found)


def expect(found: object, expected: object) -> None:
    if found != expected:
        raise AssertionError(f"expected {expected}, got {found}")


def two_nodes_are_found() -> None:
    """two nodes with two cores of two hardware threads each; the second has more memory"""
    first, second = read_topology().nodes
    expect(
        (first.number, first.cores, second.number, second.cores),
        (0, ((0, 1), (2, 3)), 1, ((4, 5), (6, 7))),
    )
    expect(0 < first.memory_bytes < second.memory_bytes, True)


def the_layout_is_as_on_paper() -> None:
    """the target gets the larger node whole, one thread a core; draft and coordinator the other
    one"""
    layout = lay_out(read_topology())
    expect(
        (layout.target, layout.draft, layout.coordinator),
        (Place((4, 6), (1,)), Place((0, 2), (0,)), Place((0, 2))),
    )


def memory_lies_on_the_node_that_is_bound() -> None:
    """bound to node 1: cores 4 and 6, and 256 of 256 fresh pages lie on node 1"""
    place = lay_out(read_topology()).target
    expect(str(bind(place)), "full: cores 4,6, memory of node 1")
    expect(os.sched_getaffinity(0), {4, 6})
    expect(set(nodes_of_fresh_pages()), {1})


def memory_lies_there_whatever_core_takes_it() -> None:
    """bound to the memory of node 1 and the cores of node 0: first touch does not decide, the
    policy does"""
    expect(bind(Place((0, 2), (1,))).level, "full")
    expect(set(nodes_of_fresh_pages()), {1})


def threads_inherit_both() -> None:
    """a thread started afterwards has the same cores, and its memory lies on the same node"""
    bind(Place((4, 6), (1,)))
    seen: list[object] = []
    thread = threading.Thread(
        target=lambda: seen.extend((os.sched_getaffinity(0), set(nodes_of_fresh_pages())))
    )
    thread.start()
    thread.join()
    expect(seen, [{4, 6}, {1}])


def processes_inherit_both() -> None:
    """so has a process started afterwards"""
    bind(Place((4, 6), (1,)))
    child = os.fork()
    if child == 0:
        os._exit(
            0 if (os.sched_getaffinity(0), set(nodes_of_fresh_pages())) == ({4, 6}, {1}) else 1
        )
    expect(os.waitpid(child, 0)[1], 0)


def two_nodes_are_used_in_turn() -> None:
    """bound to both nodes: fresh pages lie on them half and half"""
    bind(Place((0, 2, 4, 6), (0, 1)))
    found = nodes_of_fresh_pages()
    expect((found.count(0), found.count(1)), (PAGES // 2, PAGES // 2))


def a_node_that_is_not_there_is_refused_and_told() -> None:
    """memory of node 7, which is not there: the cores are bound, and the reason stands in the
    binding"""
    binding = bind(Place((4, 6), (7,)))
    expect(
        str(binding), "cores 4,6, memory not bound (set_mempolicy refused node 7: Invalid argument)"
    )


def cores_that_are_not_there_are_refused_and_told() -> None:
    """cores that are not there: nothing is bound, and the reason stands in the binding"""
    expect(str(bind(Place((40, 41), (1,)))), "none (sched_setaffinity refused: Invalid argument)")


def trying_changes_nothing() -> None:
    """whether memory may be bound is tried, and leaves the policy as it was"""
    os.sched_setaffinity(0, {0})
    expect(memory_refusal((1,)), "")
    expect(set(nodes_of_fresh_pages()), {0})


def a_cpuset_is_obeyed() -> None:
    """in a cpuset of node 0 alone, the target is laid out within it, and its memory lies there"""
    group = Path("/sys/fs/cgroup/box")
    Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+cpuset +cpu")
    group.mkdir(exist_ok=True)
    (group / "cpuset.cpus").write_text("0-3")
    (group / "cpuset.mems").write_text("0")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    topology = read_topology()
    expect(topology.threads, (0, 1, 2, 3))
    expect([(node.number, node.memory_bytes > 0) for node in topology.nodes], [(0, True)])
    expect(
        bind(lay_out(topology).target).level, "cores"
    )  # a single node is left: its memory need not be bound
    expect(set(nodes_of_fresh_pages()), {0})
    expect(
        str(bind(Place((0,), (1,)))),
        "cores 0, memory not bound (set_mempolicy refused node 1: Invalid argument)",
    )


def a_quota_is_obeyed() -> None:
    """with a quota of one and a half CPUs, two cores are laid out"""
    group = Path("/sys/fs/cgroup/thrift")
    group.mkdir(exist_ok=True)
    (group / "cpu.max").write_text("150000 100000")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    layout = lay_out(read_topology())
    expect((layout.target.cores, layout.draft.cores), ((4,), (6,)))


def an_offline_core_is_left_out() -> None:
    """a core that was taken offline is laid out for nobody"""
    Path("/sys/devices/system/cpu/cpu4/online").write_text("0")
    try:
        expect(read_topology().nodes[1].cores, ((5,), (6, 7)))
        expect(lay_out(read_topology()).target, Place((5, 6), (1,)))
    finally:
        Path("/sys/devices/system/cpu/cpu4/online").write_text("1")


CHECKS = (
    two_nodes_are_found,
    the_layout_is_as_on_paper,
    memory_lies_on_the_node_that_is_bound,
    memory_lies_there_whatever_core_takes_it,
    threads_inherit_both,
    processes_inherit_both,
    two_nodes_are_used_in_turn,
    a_node_that_is_not_there_is_refused_and_told,
    cores_that_are_not_there_are_refused_and_told,
    trying_changes_nothing,
    a_cpuset_is_obeyed,
    a_quota_is_obeyed,
    an_offline_core_is_left_out,
)

if __name__ == "__main__":
    print(
        f"Linux {os.uname().release}, Python {sys.version.split()[0]}, nodes "
        f"{format_numbers(n.number for n in read_topology().nodes)}",
        flush=True,
    )
    Linux().set_memory_policy(MPOL_DEFAULT, ())
    good = [in_a_child(check) for check in CHECKS]
    print("all checks passed" if all(good) else f"{good.count(False)} checks failed", flush=True)
