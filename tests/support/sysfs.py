"""Machines that are not here: trees of files as the kernel shows them below /sys and /proc."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30


@dataclass(frozen=True)
class FakeNode:
    """A memory node: the physical cores on it, each as its hardware threads, and its memory."""

    cores: Sequence[Sequence[int]] = ()
    gib: int = 0


def write_machine(
    root: Path,
    nodes: Mapping[int, FakeNode],
    *,
    offline: Iterable[int] = (),
    memory_allowed: str = "",
    groups: Mapping[str, str] | None = None,
    own_groups: str = "0::/\n",
) -> Path:
    """The files of a machine below `root`. `groups`: path below /sys/fs/cgroup -> content;
    `own_groups`: what /proc/self/cgroup holds."""
    cpus = root / "sys/devices/system/cpu"
    threads = sorted(thread for node in nodes.values() for core in node.cores for thread in core)
    online = sorted(set(threads) - set(offline))
    write(cpus / "online", ",".join(map(str, online)))
    for number, node in nodes.items():
        folder = root / f"sys/devices/system/node/node{number}"
        write(
            folder / "cpulist", ",".join(str(t) for core in node.cores for t in core if t in online)
        )
        write(
            folder / "meminfo",
            f"Node {number} MemTotal:       {node.gib * GIB // 1024} kB\nNode {number} "
            "MemFree:        0 kB\n",
        )
        for core in node.cores:
            for thread in core:
                write(cpus / f"cpu{thread}/topology/thread_siblings_list", ",".join(map(str, core)))
    write(
        root / "proc/self/status",
        f"Name:\tpython\nMems_allowed_list:\t{memory_allowed or ','.join(map(str, nodes))}\n",
    )
    write(root / "proc/self/cgroup", own_groups)
    for path, text in (groups or {}).items():
        write(root / "sys/fs/cgroup" / path, text)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + ("" if text.endswith("\n") else "\n"), encoding="ascii")


def plain_cores(first: int, count: int) -> list[list[int]]:
    """`count` physical cores with one hardware thread each."""
    return [[number] for number in range(first, first + count)]


def twin_cores(first: int, count: int, *, apart: int) -> list[list[int]]:
    """`count` physical cores with two hardware threads each, whose numbers are `apart`."""
    return [[number, number + apart] for number in range(first, first + count)]


TWO_SOCKETS = {
    0: FakeNode(twin_cores(0, 4, apart=8), 64),
    1: FakeNode(twin_cores(4, 4, apart=8), 64),
}
"""Two nodes of four cores and eight hardware threads each, numbered as Linux does on two
sockets."""
EIGHT_NODES = {node: FakeNode(plain_cores(node * 6, 6), 32) for node in range(8)}
ONE_NODE = {0: FakeNode(plain_cores(0, 4), 16)}
SPARSE = {0: FakeNode(plain_cores(0, 2), 16), 8: FakeNode(plain_cores(64, 4), 32)}
"""Node numbers with a gap, as on POWER; the second node is the larger one."""
WITH_CXL = {
    0: FakeNode(plain_cores(0, 4), 32),
    1: FakeNode(plain_cores(4, 4), 32),
    2: FakeNode((), 128),
}
"""The third node is memory alone."""
