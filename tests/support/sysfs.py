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


def write_card(
    root: Path, place: str, vendor: int, device: int, *, driver: str = "", **files: str
) -> Path:
    """Write the files of a graphics card at a place on the bus, such as 0000:03:00.0, and return
    its folder. `files`: their contents by name, with `__` for a slash."""
    folder = root / "sys/devices" / place
    write(folder / "vendor", f"0x{vendor:04x}")
    write(folder / "device", f"0x{device:04x}")
    write(folder / "class", "0x030000")
    for name, text in files.items():
        write(folder / name.replace("__", "/"), text)
    for link, target in (
        (root / "sys/bus/pci/devices" / place, folder),
        *([(folder / "driver", root / "sys/bus/pci/drivers" / driver)] if driver else []),
        *([(root / f"sys/class/drm/card{place[5:7]}/device", folder)] if driver else []),
    ):
        link.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)
    return folder


RX_6700 = {
    "driver": "amdgpu",
    "mem_info_vram_total": str(10 << 30),
    "mem_info_vram_used": str(1 << 30),
    "gpu_busy_percent": "40",
    "max_link_speed": "16.0 GT/s PCIe",
    "max_link_width": "16",
}
ARC_A380 = {"driver": "xe", "tile0__physical_vram_size_bytes": str(6 << 30)}
PCI_IDS = """# a comment
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t73df  Navi 22 [Radeon RX 6700/6700 XT/6750 XT / 6800M/6850M XT]
\t\t1002 0e36  Radeon RX 6700 XT
8086  Intel Corporation
\t4692  Alder Lake-S GT1 [UHD Graphics 730]
\t56a5  DG2 [Arc A380]
"""


def write_cards(root: Path) -> Path:
    """Write the files of a machine with an RX 6700, an Arc A380 and a processor's own graphics;
    return `root`."""
    write(root / "usr/share/misc/pci.ids", PCI_IDS)
    write_card(root, "0000:03:00.0", 0x1002, 0x73DF, **RX_6700)
    write(
        root / "sys/class/kfd/kfd/topology/nodes/1/properties",
        f"cpu_cores_count 0\ngfx_target_version 100301\nlocation_id {3 << 8}\n",
    )
    arc = write_card(root, "0000:04:00.0", 0x8086, 0x56A5, **ARC_A380)
    for part, idle_ms in (("gt0", 9_000), ("gt1", 10_000)):
        write(arc / f"tile0/{part}/gtidle/idle_residency_ms", str(idle_ms))
    write_card(root, "0000:00:02.0", 0x8086, 0x4692, driver="i915")
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
