"""The CPU time that other programs use, from the kernel's counters."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import psutil

from dovetail.launch.machine.topology import format_numbers

OTHERS = 0.1
"""Share of the cores' time that other programs may use before measurements are unreliable."""
MOST_NAMED = 3
LEAST_CORES = 0.05  # load in cores from which on a program is named


@dataclass(frozen=True)
class Load:
    """CPU time that other programs used in an interval."""

    cores: str
    share: float
    """Share of these cores' time, including that taken by a virtual machine's host (`stolen`)."""
    stolen: float
    programs: list[tuple[str, int, float]]  # name, pid and load in cores of the busiest

    @property
    def words(self) -> str:
        """Return the words after "other programs": which use how much."""
        named = [f"{name} (pid {pid}) {cores:.1f} cores" for name, pid, cores in self.programs]
        named += [f"the host {self.stolen:.0%}"] if self.stolen >= 0.01 else []
        who = f": {', '.join(named)}" if named else ""
        return f"use {self.share:.0%} of cores {self.cores}{who}"


@dataclass(frozen=True)
class Look:
    """CPU seconds of some cores; name, parent and CPU seconds of every process."""

    busy: float
    stolen: float
    every: float
    processes: Mapping[int, tuple[str, int, float]]
    ended: Mapping[int, float]  # CPU seconds of the descendants of each process that have ended

    def lineage(self, pid: int) -> list[int]:
        """Return a process and its ancestors."""
        line: list[int] = []
        while pid in self.processes and pid not in line:
            line.append(pid)
            pid = self.processes[pid][1]
        return line


Ours = Callable[[int, str], bool]
"""Returns whether a process (pid, name), with all its descendants, belongs to us."""


def between(before: Look, now: Look, cores: Collection[int], ours: Ours) -> Load | None:
    """Return the load of others between two readings; None if no time has passed."""
    if (every := now.every - before.every) <= 0.0:
        return None
    none = ("", 0, 0.0)
    taken = {p: one[2] - before.processes.get(p, none)[2] for p, one in now.processes.items()}
    own = {p for p in taken if any(ours(up, now.processes[up][0]) for up in now.lineage(p))}
    ended = sum(now.ended.get(pid, 0.0) - before.ended.get(pid, 0.0) for pid in own)
    stolen, each = now.stolen - before.stolen, every / len(cores)
    others = max(0.0, now.busy - before.busy - sum(taken[pid] for pid in own) - ended)
    most = sorted(taken.keys() - own, key=lambda pid: -taken[pid])[:MOST_NAMED]
    programs = [(now.processes[pid][0], pid, taken[pid] / each) for pid in most]
    named = [one for one in programs if one[2] >= LEAST_CORES]
    return Load(
        format_numbers(sorted(cores)), min(1.0, (others + stolen) / every), stolen / every, named
    )


class Others:
    """Measures other programs on some cores, by default all that this process may use."""

    def __init__(self, cores: Collection[int] = ()) -> None:
        self._cores = frozenset(cores or os.sched_getaffinity(0))
        self._last = self._look()

    def load(self, ours: Ours) -> Load | None:
        """Return their load since the last call."""
        before, self._last = self._last, self._look()
        return between(before, self._last, self._cores, ours)

    def _look(self) -> Look:
        every = [t for n, t in enumerate(psutil.cpu_times(percpu=True)) if n in self._cores]
        stolen = sum(t.steal for t in every)
        busy = sum(t.user + t.nice + t.system + t.irq + t.softirq for t in every)
        whole = busy + stolen + sum(t.idle + t.iowait for t in every)
        found, ended = {}, {}
        for process in psutil.process_iter(["name", "ppid", "cpu_times"]):
            name, parent, times = (process.info[key] for key in ("name", "ppid", "cpu_times"))
            if times is not None:
                found[process.pid] = (str(name), int(parent), times.user + times.system)
                ended[process.pid] = times.children_user + times.children_system
        return Look(busy, stolen, whole, found, ended)
