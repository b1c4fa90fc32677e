"""Which cores there are for us, and which process gets which of them.

The target is bound by arithmetic and memory bandwidth and gets all cores but the last; the last one is for a draft on the CPU, or for the host side of a
draft on a GPU. That holds for the target alone too, whose output then is the same to the last rounding. The coordinator may run on any core: its few
microseconds a round fall where a worker waits for it. A core that two busy processes share costs the target far more than it brings: its threads wait
for each other at every layer. Knows cores by number only; memory nodes and hyper-threads are not told apart.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dovetail.protocol.errors import UserError

CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class CoreLayout:
    """The cores of the processes of one machine."""

    target: tuple[int, ...]
    draft: tuple[int, ...]
    coordinator: tuple[int, ...]


def allowed_cores() -> tuple[int, ...]:
    """The cores that this process may use: those it is bound to, no more than a container's CPU quota pays for."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return cores[: max(1, math.ceil(_quota(len(cores))))]


def lay_out(cores: Sequence[int], *, threads: int | Literal["auto"] = "auto") -> CoreLayout:
    """Target on all cores but the last, draft on the last, coordinator on any; a single core is shared by all.

    `threads` is how many the target was told to take, from the first on. Nothing here depends on the draft: the number of threads can change a rounding,
    and with it stands the promise that the output is the same with any draft and with none.
    """
    target = cores[: max(1, len(cores) - 1)] if threads == "auto" else cores[:threads]
    return CoreLayout(target=tuple(target), draft=(cores[-1],), coordinator=tuple(cores))


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers in "0,2-3"; `UserError` if it is no such list or names a core that this process may not use."""
    parts = [re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part) for part in text.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part is not None]
    if not all(ranges) or len(ranges) < len(parts):
        raise UserError(f"--cores {text!r} is no list of cores: write numbers and ranges, such as 0,2-3")
    cores = tuple(dict.fromkeys(core for numbers in ranges for core in numbers))
    known = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - known):
        raise UserError(f"--cores {text}: there is no core {missing[0]} for this process; it may use {format_cores(sorted(known))}")
    return cores


def format_cores(cores: Sequence[int]) -> str:
    """The list that `parse_cores` reads: "0,2-3"."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def bind(cores: Sequence[int]) -> None:
    """Bind this thread, and the threads and processes that it starts, to these cores."""
    os.sched_setaffinity(0, cores)


def _quota(most: float, root: Path = CGROUPS) -> float:
    """CPUs' worth of time that this process's control group may use, at most `most`."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        limit, period = next(path for path in (root / own / "cpu.max", root / "cpu.max") if path.is_file()).read_text().split()
    except (OSError, StopIteration):
        return most
    return most if limit == "max" else min(most, int(limit) / int(period))
