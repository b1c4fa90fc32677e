"""Reads from /sys and /proc what this process may compute on: memory nodes, physical cores, and a
container's limits. Standard library only."""

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dovetail.protocol.groups import ROOT, GroupFolders, read_text

MAX_NUMBER = 1 << 16  # the largest number of a core or a node, beyond what any kernel counts to


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
    """The nodes of a machine, in the order of their numbers, which may have gaps; and how many
    CPUs' worth of time we are given."""

    nodes: tuple[Node, ...]
    quota: float | None = None  # CPUs' worth of time that the control group may use; None: no limit

    @property
    def computing(self) -> tuple[Node, ...]:
        """The nodes on which we may run."""
        return tuple(node for node in self.nodes if node.cores)

    @property
    def threads(self) -> tuple[int, ...]:
        """Every hardware thread that we may use, ascending."""
        return tuple(
            sorted(thread for node in self.nodes for core in node.cores for thread in core)
        )


def read_topology(root: Path = ROOT, *, affinity: Iterable[int] | None = None) -> Topology:
    """The topology below `root`. `affinity`: the cores of the process, by default of this one."""
    groups = ControlGroups(root)
    bound = frozenset(os.sched_getaffinity(0) if affinity is None else affinity)
    cpus = root / "sys/devices/system/cpu"
    online = parse_numbers(read_text(cpus / "online")) or bound
    usable = (
        bound & online & (groups.cores() or bound) or bound
    )  # the affinity is the kernel's own word; a control group that knows none of it is another's
    memory = allowed_memory(root)
    folders = sorted(
        (int(path.name[4:]), path)
        for path in (root / "sys/devices/system/node").glob("node*")
        if path.name[4:].isdigit()
    )
    if not folders:  # a kernel without NUMA
        return Topology(
            (Node(0, _cores(cpus, usable), _total(root / "proc/meminfo")),), groups.quota()
        )
    nodes = [
        Node(
            number,
            _cores(cpus, usable & parse_numbers(read_text(folder / "cpulist"))),
            _total(folder / "meminfo") if memory is None or number in memory else 0,
        )
        for number, folder in folders
    ]
    return Topology(
        tuple(node for node in nodes if node.cores or node.memory_bytes), groups.quota()
    )


def allowed_memory(root: Path = ROOT) -> frozenset[int] | None:
    """The nodes whose memory this process may use, or None if there is no limit."""
    said = re.search(
        r"^Mems_allowed_list:\s*(\S+)$", read_text(root / "proc/self/status"), re.MULTILINE
    )
    limits = [
        limit
        for limit in (parse_numbers(said[1]) if said else None, ControlGroups(root).nodes())
        if limit
    ]
    return frozenset.intersection(*limits) if limits else None


class ControlGroups(GroupFolders):
    """The limits of our control group and of those around it."""

    def cores(self) -> frozenset[int]:
        """The cores that we are confined to; empty: nothing confines us."""
        return self._numbers("cpuset.cpus.effective", "cpuset.effective_cpus")

    def nodes(self) -> frozenset[int]:
        """The memory nodes that we are confined to; empty: nothing confines us."""
        return self._numbers("cpuset.mems.effective", "cpuset.effective_mems")

    def quota(self) -> float | None:
        """CPUs' worth of time, the least of all levels."""
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
        files = [
            *(f / unified for f in self.folders("")),
            *(f / first_kind for f in self.folders("cpuset")),
        ]
        return next(
            (numbers for file in files if (numbers := parse_numbers(read_text(file)))), frozenset()
        )


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
    """Return how many CPUs a quota keeps busy: a broken one counts as a whole."""
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
