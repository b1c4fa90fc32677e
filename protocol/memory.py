"""The memory that is still available to a process, what a process uses, and processes that the
kernel has killed because memory ran out.

Counted are the machine's available memory, the limits of the control groups around the process (of
the first kind and the second), the nodes that it is bound to, and its own limits of address space.
Read under a root that can be another one; standard library only. Knows nothing of models.
"""

import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dovetail.protocol.groups import ROOT, GroupFolders, read_text

NO_LIMIT = 1 << 60
"""A limit of the first kind of control groups that is not set is a number beyond this."""
KILLED = re.compile(r"^\d+,\d+,(\d+),[^;]*;.*Killed process (\d+) ", re.MULTILINE)
"""Matches the kernel's log of a process killed for lack of memory: when, and which."""
LOG_BYTES = 8192  # a record of /dev/kmsg is never longer


def release_memory() -> None:
    """Give back what has been freed. glibc keeps freed blocks of up to 32 MiB, and the layers of a
    model leave many behind as they are packed, as does a large tokenizer as it is read."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
    if trim is not None:
        trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection within the block, which makes very many objects and few cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Room:
    """Memory that may still be taken."""

    size: int  # the size in bytes
    bound: str
    """The name of the bound, in words that follow "there are 3 GB": "available on this machine",
    "left in the control group /a (limit 4 GB)"."""
    swap: int = 0  # bytes of swap in addition; processes run slowly there, but are not killed


def read_room(root: Path = ROOT) -> Room | None:
    """Return the least room of the machine and the control groups; None if unknown."""
    return min(_rooms(root), key=lambda room: room.size + room.swap, default=None)


def node_room(node: int, root: Path = ROOT) -> Room | None:
    """Return the room on a memory node for a process that is bound to it; None if unknown."""
    found = _fields(read_text(root / f"sys/devices/system/node/node{node}/meminfo"))
    if "MemFree" not in found:
        return None
    size = sum(
        found.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    )
    return Room(size, f"available on memory node {node}")


def process_load(pid: int) -> tuple[float, int]:
    """Return a process's CPU time in seconds and its resident bytes; `OSError` if there is none."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * resource.getpagesize()


def process_room() -> Room | None:
    """Return the least limit that each process has for itself (RLIMIT_AS, RLIMIT_DATA), whatever it
    has taken of it; None if there is none."""
    limits = {
        "address space (ulimit -v)": resource.RLIMIT_AS,
        "data (ulimit -d)": resource.RLIMIT_DATA,
    }
    rooms = [
        Room(resource.getrlimit(number)[0], f"allowed to a process as {words}")
        for words, number in limits.items()
    ]
    return min(
        (room for room in rooms if room.size not in (-1, resource.RLIM_INFINITY)),
        key=lambda room: room.size,
        default=None,
    )


def total_bytes(root: Path = ROOT) -> int | None:
    """Return the machine's memory or our groups' least limit, if less; None if unknown."""
    machine = _fields(read_text(root / "proc/meminfo")).get("MemTotal")
    return min(
        [*([] if machine is None else [machine]), *(limit for _, limit, _ in _limits(root))],
        default=None,
    )


def _rooms(root: Path) -> Iterator[Room]:
    found = _fields(read_text(root / "proc/meminfo"))
    # what the kernel itself says (since 3.14), else what it is about: free, or full of what lies on
    # a disk too
    cached = (
        found.get("Cached", 0)
        + found.get("Buffers", 0)
        + found.get("SReclaimable", 0)
        - found.get("Shmem", 0)
    )
    if "MemAvailable" in found or "MemFree" in found:
        yield Room(
            found.get("MemAvailable", found.get("MemFree", 0) + cached),
            "available on this machine",
            found.get("SwapFree", 0),
        )
    for folder, limit, used in _limits(root):
        yield Room(max(0, limit - used), f"left of the {_gb(limit)} of the control group {folder}")


def _limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield each control group around us that has a limit: its folder, the limit, and what is taken
    of it for good; files on a disk can be read again."""
    groups = GroupFolders(root)
    for controller, names, prefix in (
        ("", ("memory.max", "memory.current"), ""),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ):
        for folder in groups.folders(controller):
            limit, used = (read_text(folder / name).strip() for name in names)
            stat = dict(
                re.findall(r"^(\S+) (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            )
            limits = [
                int(text)
                for text in (limit, stat.get("hierarchical_memory_limit", ""))
                if text.isdigit() and int(text) < NO_LIMIT
            ]
            if limits:
                reclaimable = sum(
                    int(stat.get(f"{prefix}{name}", 0))
                    for name in ("active_file", "inactive_file", "slab_reclaimable")
                )
                taken = int(used) if used.isdigit() else 0
                yield folder, min(limits), max(0, taken - reclaimable)


def _fields(text: str) -> dict[str, int]:
    """Return the bytes of each line of a meminfo, the machine's or a node's."""
    return {
        name: int(size) * 1024
        for name, size in re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+) kB$", text, re.MULTILINE)
    }


@dataclass(frozen=True)
class Kills:
    """The numbers of processes that the kernel had killed for want of memory at a moment."""

    groups: tuple[tuple[Path, int], ...]
    """Counts by file of a control group around a process, innermost first."""
    machine: int
    at_us: int  # the moment, on the clock of the kernel's log


def count_kills(root: Path = ROOT) -> Kills:
    """Return the kernel's counts for the control groups of this process and for the machine."""
    groups = GroupFolders(root)
    files = [
        *(folder / "memory.events" for folder in groups.folders("")),
        *(folder / "memory.oom_control" for folder in groups.folders("memory")),
    ]
    counts = tuple((file, count) for file in files if (count := _oom_kills(file)) is not None)
    return Kills(counts, _oom_kills(root / "proc/vmstat") or 0, time.monotonic_ns() // 1000)


def why_killed(pid: int, before: Kills, root: Path = ROOT) -> str:
    """Return in words that the kernel killed a process for want of memory, and how that is known;
    empty if it is not. `before`: the counters when the process was started. Those of its control
    groups and the log are about this process; the machine's may be about another one.
    """
    if any(
        int(killed) == pid and int(at_us) >= before.at_us
        for at_us, killed in KILLED.findall(_kernel_log(root / "dev/kmsg"))
    ):
        return "memory ran out: the kernel ended it, according to its log"
    for file, count in before.groups:
        if (_oom_kills(file) or 0) > count:
            limits = (
                read_text(file.parent / name).strip()
                for name in ("memory.max", "memory.limit_in_bytes")
            )
            size = next(
                (
                    f" of {_gb(int(limit))}"
                    for limit in limits
                    if limit.isdigit() and int(limit) < NO_LIMIT
                ),
                "",
            )
            return (
                f"memory ran out: the kernel ends processes at the limit{size} of the "
                f"control group {file.parent}"
            )
    if (_oom_kills(root / "proc/vmstat") or 0) > before.machine:
        return "memory ran out on this machine meanwhile: the kernel ended a process for it"
    return ""


def _oom_kills(file: Path) -> int | None:
    found = re.search(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE)
    return int(found[1]) if found else None


def _kernel_log(device: Path) -> str:
    """Return what the kernel has logged, a record a line; nothing where that may not be read."""
    text = ""
    try:
        descriptor = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while record := os.read(descriptor, LOG_BYTES):
            text += record.decode(errors="replace")
    except OSError:  # all is read, or the oldest records were overwritten meanwhile
        pass
    finally:
        os.close(descriptor)
    return text


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"
