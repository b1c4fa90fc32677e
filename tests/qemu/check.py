"""Checks that run inside the virtual machine: topology, layout, binding and the kernels' shards
against a kernel that has two memory nodes. Standard library only.

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

from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.topology import (
    MPOL_DEFAULT,
    Linux,
    Place,
    bind,
    format_numbers,
    memory_refusal,
    read_topology,
)
from dovetail.workers import kernels
from dovetail.workers.kernels import HUGE_PAGE, Kind, PackedMatrix, shards
from dovetail.workers.kernels.shards import Shard

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
    return nodes_of_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)), count)


def nodes_of_pages(start: int, count: int) -> list[int]:
    """The nodes on which pages lie, the kernel's error where one is not there."""
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
    """with a quota of one and a half CPUs, two cores are laid out, one of them for the draft too"""
    group = Path("/sys/fs/cgroup/thrift")
    group.mkdir(exist_ok=True)
    (group / "cpu.max").write_text("150000 100000")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    layout = lay_out(read_topology())
    expect((layout.target.cores, layout.draft.cores), ((4, 6), (6,)))


def an_offline_core_is_left_out() -> None:
    """a core that was taken offline is laid out for nobody"""
    Path("/sys/devices/system/cpu/cpu4/online").write_text("0")
    try:
        expect(read_topology().nodes[1].cores, ((5,), (6, 7)))
        expect(lay_out(read_topology()).target, Place((5, 6), (1,)))
    finally:
        Path("/sys/devices/system/cpu/cpu4/online").write_text("1")


class Rows:
    """float32 [rows, width], as much of an array as the kernels ask for."""

    dtype = "float32"

    def __init__(self, rows: int, width: int, numbers: list[float] | None = None) -> None:
        self.shape = (rows, width)
        self.memory = (ctypes.c_float * (rows * width))(*(numbers or ()))

    def is_contiguous(self) -> bool:
        return True

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def new_empty(self, shape: tuple[int, int]) -> "Rows":
        return Rows(*shape)


def numbers(rows: int, width: int) -> Rows:
    return Rows(rows, width, [(at * 37 % 101 - 50) / 50 for at in range(rows * width)])


def over_both_nodes() -> None:
    bind(Place((0, 2, 4, 6), (0, 1), ((0, 2), (4, 6))))
    kernels.set_threads(4)
    shards.set_shards([Shard((0, 2), 0), Shard((4, 6), 1)])


def a_target_is_spread_over_both_nodes() -> None:
    """target.numa shard: cores 0 and 2 with node 0, core 4 with node 1, and the draft on core 6"""
    layout = lay_out(read_topology(), numa="shard")
    expect(layout.target, Place((0, 2, 4), (0, 1), ((0, 2), (4,))))
    expect(layout.draft, Place((6,), (1,)))
    expect(str(bind(layout.target)), "full: cores 0,2/4 in 2 shards, memory of node 0-1")


def weights_lie_on_the_node_of_the_cores_that_read_them() -> None:
    """of 20 panels of a matrix the first ten lie on node 0 and the others on node 1, to the page"""
    over_both_nodes()
    matrix = PackedMatrix(Kind.FP32, 960, 256)
    start, pages = matrix.struct.packed, 960 * 256 * 4 // mmap.PAGESIZE
    expect(nodes_of_pages(start, pages), [0] * (pages // 2) + [1] * (pages // 2))
    for _ in range(20):  # whoever writes now, they stay, also where the kernel balances nodes
        matrix.pack(numbers(960, 256))
        expect(nodes_of_pages(start, pages), [0] * (pages // 2) + [1] * (pages // 2))
    placed = shards.placed()
    expect((placed.looked > 0, placed.home, placed.refused), (True, placed.looked, ""))


def a_large_matrix_lies_in_huge_pages_on_its_nodes() -> None:
    """of 36 MB in huge pages at most half a page, at the border, lies on the wrong node"""
    over_both_nodes()
    matrix = PackedMatrix(Kind.FP32, 9600, 960)
    start, pages = matrix.struct.packed, 9600 * 960 * 4 // mmap.PAGESIZE
    found = nodes_of_pages(start, pages)
    wrong = sum(node != (at >= pages // 2) for at, node in enumerate(found))
    expect((start % HUGE_PAGE, wrong <= HUGE_PAGE // 2 // mmap.PAGESIZE), (0, True))


def experts_lie_on_both_nodes_each() -> None:
    """of each of eight experts in one memory a half lies on each node"""
    over_both_nodes()
    one = PackedMatrix(Kind.FP32, 96, 1024)
    memory, start = kernels.fresh_memory(8 * one.nbytes, 8)
    first = one.at(memory, start)
    first.spread(8, one.nbytes)
    half = one.nbytes // 2 // mmap.PAGESIZE
    expect(nodes_of_pages(start, 16 * half), 8 * ([0] * half + [1] * half))


def rows_of_heads_lie_on_the_node_of_the_head() -> None:
    """of two layers of four heads the first rows of heads 0 and 1 lie on node 0, of the others on
    node 1, and no memory is taken for the rest"""
    over_both_nodes()
    head, used = 16 * mmap.PAGESIZE, 4 * mmap.PAGESIZE
    memory, start = kernels.fresh_memory(8 * head, huge=False)
    shards.spread_heads(start, (2, 4), head, used)
    found = nodes_of_pages(start, 8 * 16)
    for index in range(8):
        expect(found[16 * index : 16 * index + 4], [index % 4 // 2] * 4)
        expect(max(found[16 * index + 4 : 16 * index + 16]) < 0, True)
    del memory


def threads_run_on_the_nodes_of_their_shards() -> None:
    """the kernels' threads and their caller are on the cores of their shards, and a product has the
    bytes that it has undivided"""
    matrix, x = PackedMatrix(Kind.FP32, 960, 256), numbers(5, 256)
    matrix.pack(numbers(960, 256))
    expected = bytes(matrix.linear(x).memory)
    others = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    over_both_nodes()
    shards.settle()
    threads = {int(task.name) for task in Path("/proc/self/task").iterdir()} - others
    for _ in range(20):
        expect(bytes(matrix.linear(x).memory) == expected, True)
    found = sorted(sorted(os.sched_getaffinity(thread)) for thread in threads)
    expect(found, [[0, 2], [4, 6], [4, 6]])
    expect(os.sched_getaffinity(0), {0, 2})
    for thread in threads:
        core = int(Path(f"/proc/self/task/{thread}/stat").read_text().rsplit(")")[1].split()[36])
        expect(core in os.sched_getaffinity(thread), True)


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
    a_target_is_spread_over_both_nodes,
    weights_lie_on_the_node_of_the_cores_that_read_them,
    a_large_matrix_lies_in_huge_pages_on_its_nodes,
    experts_lie_on_both_nodes_each,
    rows_of_heads_lie_on_the_node_of_the_head,
    threads_run_on_the_nodes_of_their_shards,
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
