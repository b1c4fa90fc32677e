"""Reads from /sys and /proc the memory nodes, physical cores and container limits of this process;
and binds it to cores and the memory of their nodes ("full"), only to cores if the memory policy is
refused ("cores"), or to nothing ("none"), which must happen before torch is imported. Standard
library only; tests replace `System`."""

import ctypes
import errno
import math
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from dovetail.protocol.memory import ROOT, GroupFolders, read_text

MAX_NUMBER = 1 << 16  # the largest number of a core or a node, beyond that of any kernel


@dataclass(frozen=True)
class Node:
    """A memory node, and the part of it that this process may use. A memory-only node (CXL, HBM)
    has no cores; one without memory has no bytes."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    """Physical cores, each as the numbers of its hardware threads, lowest first."""
    memory_bytes: int  # 0 if we may not take memory here


@dataclass(frozen=True)
class Topology:
    """The nodes of a machine in the order of their numbers, which may have gaps, and our CPU
    quota."""

    nodes: tuple[Node, ...]
    quota: float | None = None  # the control group's CPU quota, in CPUs; None: no limit

    @property
    def computing(self) -> tuple[Node, ...]:
        """The nodes on which we may run."""
        return tuple(node for node in self.nodes if node.cores)

    @property
    def threads(self) -> tuple[int, ...]:
        """Every hardware thread that we may use, ascending."""
        cores = (core for node in self.nodes for core in node.cores)
        return tuple(sorted(thread for core in cores for thread in core))


def read_topology(root: Path = ROOT, *, affinity: Iterable[int] | None = None) -> Topology:
    """The topology below `root`. `affinity`: the cores of the process, by default of this one."""
    groups = ControlGroups(root)
    bound = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    cpus = root / "sys/devices/system/cpu"
    online = parse_numbers(read_text(cpus / "online")) or bound
    usable = (
        bound & online & (groups.cores() or bound) or bound
    )  # the affinity is the kernel's; a control group without any of these cores is not ours
    memory = allowed_memory(root)
    folders = sorted(
        (int(path.name[4:]), path)
        for path in (root / "sys/devices/system/node").glob("node*")
        if path.name[4:].isdigit()
    )
    if not folders:  # a kernel without NUMA
        only = Node(0, _cores(cpus, usable), _total(root / "proc/meminfo"))
        return Topology((only,), groups.quota())
    nodes = [
        Node(
            number,
            _cores(cpus, usable & parse_numbers(read_text(folder / "cpulist"))),
            _total(folder / "meminfo") if memory is None or number in memory else 0,
        )
        for number, folder in folders
    ]
    there = tuple(node for node in nodes if node.cores or node.memory_bytes)
    return Topology(there, groups.quota())


def allowed_memory(root: Path = ROOT) -> frozenset[int] | None:
    """The nodes whose memory this process may use, or None if there is no limit."""
    status = read_text(root / "proc/self/status")
    said = re.search(r"^Mems_allowed_list:\s*(\S+)$", status, re.MULTILINE)
    own = parse_numbers(said[1]) if said else frozenset[int]()
    limits = [limit for limit in (own, ControlGroups(root).nodes()) if limit]
    return frozenset.intersection(*limits) if limits else None


class ControlGroups(GroupFolders):
    """The limits of our control group and of those around it."""

    def cores(self) -> frozenset[int]:
        """The cores to which we are confined; empty: no limit."""
        return self._numbers("cpuset.cpus.effective", "cpuset.effective_cpus")

    def nodes(self) -> frozenset[int]:
        """The memory nodes to which we are confined; empty: no limit."""
        return self._numbers("cpuset.mems.effective", "cpuset.effective_mems")

    def quota(self) -> float | None:
        """The CPU quota in CPUs, the lowest of all levels."""
        unified = (folder / "cpu.max" for folder in self.folders(""))
        limits = [text.split() for path in unified if (text := read_text(path))]
        limits += [
            [read_text(f / "cpu.cfs_quota_us").strip(), read_text(f / "cpu.cfs_period_us").strip()]
            for f in self.folders("cpu")
        ]
        shares = [
            int(limit[0]) / int(limit[1])
            for limit in limits
            if len(limit) == 2 and limit[0].isdigit() and limit[1].isdigit() and int(limit[1]) > 0
        ]
        return min(shares, default=None)

    def _numbers(self, unified: str, first_kind: str) -> frozenset[int]:
        """The innermost group with a limit, which is within those of all outer groups."""
        files = [folder / unified for folder in self.folders("")]
        files += [folder / first_kind for folder in self.folders("cpuset")]
        return next(filter(None, (parse_numbers(read_text(file)) for file in files)), frozenset())


def parse_numbers(text: str) -> frozenset[int]:
    """The numbers in a list in the kernel's format, such as "0,2-3"; empty for an empty or invalid
    one."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        found = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip())
        if found is not None and int(found[2] or found[1]) < MAX_NUMBER:
            numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return frozenset(numbers)


def format_numbers(numbers: Iterable[int]) -> str:
    """The list that `parse_numbers` reads: "0,2-3"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cpus_for(quota: float) -> int:
    """Return how many CPUs a quota keeps busy, rounded up."""
    return max(1, math.ceil(quota))


def _cores(cpus: Path, usable: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    left = sorted(usable)
    groups = []
    while left:
        topology = cpus / f"cpu{left[0]}" / "topology"
        siblings = parse_numbers(
            read_text(topology / "core_cpus_list") or read_text(topology / "thread_siblings_list")
        )
        core = tuple(thread for thread in left if thread == left[0] or thread in siblings)
        groups.append(core)
        left = [thread for thread in left if thread not in core]
    return tuple(groups)


def _total(meminfo: Path) -> int:
    """Bytes of memory, of the machine or of a node, whose lines begin with its name."""
    found = re.search(r"MemTotal:\s*(\d+) kB", read_text(meminfo))
    return int(found[1]) * 1024 if found else 0


MPOL_DEFAULT, MPOL_BIND, MPOL_INTERLEAVE = 0, 2, 3
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Machine -> number of set_mempolicy(2): asm/unistd_64.h; asm-generic/unistd.h for aarch64."""
LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


@dataclass(frozen=True)
class Place:
    """The place of a process: cores, and the nodes of its memory (none: the kernel's choice)."""

    cores: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    shards: tuple[tuple[int, ...], ...] = ()
    """The cores of each shard of a target, whose memory comes from the node at the same position in
    `nodes`, if there are any. Empty: the target is not spread."""

    @property
    def shards_at_nodes(self) -> tuple[tuple[tuple[int, ...], int | None], ...]:
        """Return the cores of each shard, and its node if known."""
        nodes = self.nodes or (None,) * len(self.shards)
        return tuple(zip(self.shards, nodes, strict=True)) if self.shards else ()

    @property
    def cores_text(self) -> str:
        """Return the cores as --cores takes them: "0-3", or "0-3/4-7" for two shards."""
        return "/".join(map(format_numbers, self.shards or (self.cores,)))


@dataclass(frozen=True)
class Binding:
    """The part of a placement that is in force, and why the rest is not."""

    level: Literal["full", "cores", "none"]
    place: Place
    reason: str = ""

    def __str__(self) -> str:
        """Format it for `status`: "full: cores 0-7, memory of node 1", "full: cores 0-3/4-7 in 2
        shards, memory of node 0-1", "cores 0-7, memory not bound (why)", "none (why)"."""
        because = f" ({self.reason})" if self.reason else ""
        if self.level == "none":
            return f"none{because}"
        shards = len(self.place.shards)
        cores = self.place.cores_text + (f" in {shards} shards" if shards else "")
        if self.level == "full":
            return f"full: cores {cores}, memory of node {format_numbers(self.place.nodes)}"
        return f"cores {cores}, memory not bound{because}"


class System(Protocol):
    """The calls to the kernel."""

    def set_affinity(self, cores: Sequence[int]) -> None:
        """Confine the calling thread and its children to these cores; `OSError` if it is
        refused."""

    def set_memory_policy(self, mode: int, nodes: Sequence[int]) -> None:
        """Take memory for the calling thread, and for the threads that it starts, from these nodes;
        `OSError` if it is refused."""


class Linux:
    """The kernel that we run on."""

    def set_affinity(self, cores: Sequence[int]) -> None:
        os.sched_setaffinity(0, cores)

    def set_memory_policy(self, mode: int, nodes: Sequence[int]) -> None:
        """Set this thread's policy; `OSError` if the kernel refuses it. Each of several nodes is
        tried alone first, since Linux ignores nodes of a list that do not exist."""
        try:
            for node in nodes if len(nodes) > 1 else ():
                self._call(MPOL_BIND, (node,))
        except OSError:
            self._call(MPOL_DEFAULT, ())
            raise
        self._call(mode, nodes)

    def _call(self, mode: int, nodes: Sequence[int]) -> None:
        number = SET_MEMPOLICY.get(platform.machine())
        if number is None or LONG_BITS != 64:
            why = f"the system call's number on {platform.machine()} is not known"
            raise OSError(errno.ENOSYS, why)
        mask, bits = _mask(nodes)
        if ctypes.CDLL(None, use_errno=True).syscall(number, mode, mask, bits) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def bind(place: Place, system: System | None = None) -> Binding:
    """Bind this process to a place as far as permitted. Memory of several nodes is interleaved;
    memory of shards is bound to their nodes, and allocated where it is first written."""
    system = system or Linux()
    try:
        system.set_affinity(place.cores)
    except OSError as error:
        return Binding("none", place, f"sched_setaffinity refused: {error.strerror}")
    if not place.nodes:
        return Binding("cores", place)
    one_each = len(place.nodes) == 1 or place.shards
    try:
        system.set_memory_policy(MPOL_BIND if one_each else MPOL_INTERLEAVE, place.nodes)
    except OSError as error:
        why = f"set_mempolicy refused node {format_numbers(place.nodes)}: {error.strerror}"
        return Binding("cores", place, why)
    return Binding("full", place)


def memory_refusal(nodes: Sequence[int], system: System | None = None) -> str:
    """Why this process may not bind its memory to these nodes; empty if it may. Tries it, and
    restores the kernel's default."""
    system = system or Linux()
    try:
        system.set_memory_policy(MPOL_BIND, nodes)
        system.set_memory_policy(MPOL_DEFAULT, ())
    except OSError as error:
        return error.strerror or "refused"
    return ""


def _mask(nodes: Sequence[int]) -> tuple[ctypes.Array[ctypes.c_ulong], int]:
    """The node mask that the kernel reads, and its length in bits: one more than it uses, since it
    subtracts one (set_mempolicy(2), Notes)."""
    words = max(nodes, default=0) // LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    for node in nodes:
        mask[node // LONG_BITS] |= 1 << node % LONG_BITS
    return mask, words * LONG_BITS + 1
