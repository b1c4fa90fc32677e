"""What other programs take of the processors, by the counters of the kernel."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.launch.machine.topology import format_numbers

PROC = Path("/proc")
OTHERS = 0.1
"""Share of the cores' time that other programs may take before figures are not to be trusted."""
MOST_NAMED = 3
LEAST_CORES = 0.05
"""Cores' worth of time from which on a program is named."""


@dataclass(frozen=True)
class Load:
    """Processor time that other programs took over a while."""

    cores: str
    share: float
    """Of the time of these cores, with what the host of a virtual machine took."""
    stolen: float
    """The part of `share` that the host took."""
    programs: list[tuple[str, int, float]]
    """Name, process number and cores' worth of time of those that took most."""

    @property
    def words(self) -> str:
        """Return who takes how much, in words that follow "other programs"."""
        named = [f"{name} (pid {pid}) {cores:.1f} cores" for name, pid, cores in self.programs]
        host = [f"the host {self.stolen:.0%}"] if self.stolen >= 0.01 else []
        rest = f": {', '.join([*named, *host])}" if named or host else ""
        return f"take {self.share:.0%} of cores {self.cores}{rest}"


@dataclass(frozen=True)
class _Process:
    name: str
    parent: int
    ticks: int


@dataclass(frozen=True)
class _Look:
    busy: int
    stolen: int
    every: int
    processes: Mapping[int, _Process]


class Others:
    """Compares the counters of the kernel now with those of the last time."""

    def __init__(self, cores: Collection[int] = (), proc: Path = PROC) -> None:
        """`cores`: those that are looked at; none: all that this process may use."""
        self._cores, self._proc = frozenset(cores or os.sched_getaffinity(0)), proc
        self._last = self._look()

    def load(self, ours: Callable[[int], bool]) -> Load | None:
        """Return what others took since the last call; None where no time has passed. `ours` says
        of a process number whether it, and so all that it started, is not another program's."""
        before, self._last = self._last, self._look()
        now, every = self._last, self._last.every - before.every
        if every <= 0:
            return None
        ticks = {
            pid: process.ticks - known.ticks
            if (known := before.processes.get(pid)) is not None
            else process.ticks
            for pid, process in now.processes.items()
        }
        own = {pid for pid, taken in ticks.items() if taken and any(map(ours, _lineage(now, pid)))}
        stolen = now.stolen - before.stolen
        others = now.busy - before.busy - sum(ticks[pid] for pid in own)
        each = every / len(self._cores)
        most = sorted(ticks.keys() - own, key=lambda pid: -ticks[pid])[:MOST_NAMED]
        return Load(
            format_numbers(sorted(self._cores)),
            max(0, others + stolen) / every,
            stolen / every,
            [
                (now.processes[pid].name, pid, ticks[pid] / each)
                for pid in most
                if ticks[pid] >= LEAST_CORES * each
            ],
        )

    def _look(self) -> _Look:
        busy = stolen = every = 0
        for line in (self._proc / "stat").read_text(encoding="ascii").splitlines():
            name, _, rest = line.partition(" ")
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                user, nice, system, idle, waiting, irq, soft, steal = map(int, rest.split()[:8])
                working = user + nice + system + irq + soft
                busy, stolen = busy + working, stolen + steal
                every += working + steal + idle + waiting
        return _Look(busy, stolen, every, dict(self._processes()))

    def _processes(self) -> Iterator[tuple[int, _Process]]:
        for folder in self._proc.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            name, _, rest = text.partition("(")[2].rpartition(")")
            fields = rest.split()
            yield (
                int(folder.name),
                _Process(name, int(fields[1]), int(fields[11]) + int(fields[12])),
            )


def _lineage(look: _Look, pid: int) -> list[int]:
    """Return a process and those that started it, itself first."""
    line = []
    while pid in look.processes and pid not in line:
        line.append(pid)
        pid = look.processes[pid].parent
    return line


def is_dovetail(pid: int) -> bool:
    """Return whether a process is one of a dovetail service, whoever started it."""
    try:
        arguments = (PROC / str(pid) / "cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return False
    return any(
        argument.rpartition("/")[2] == "dovetail" or argument.startswith(("dovetail ", "dovetail."))
        for argument in arguments
    )
