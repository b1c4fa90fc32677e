"""Memory available to a process, memory that a process uses, and processes killed because memory
ran out.

The limits are the machine's available memory, the control groups around the process (version 1 and
2), the memory nodes it is bound to, and its own limits of address space. Standard library only; the
file system root can be replaced for tests. Knows nothing of models."""

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

ROOT = Path("/")


class GroupFolders:
    """The folders of this process's control groups.

    In a container the own group is often the root while /proc gives the path on the host, so paths
    that do not exist are skipped."""

    def __init__(self, root: Path = ROOT) -> None:
        self._mount = root / "sys/fs/cgroup"
        self._paths: dict[str, str] = {}
        for line in read_text(root / "proc/self/cgroup").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            self._paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))

    def folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of our groups, innermost first; controller "": version 2."""
        if controller not in self._paths:
            return
        for mount in (
            [self._mount / controller] if controller else [self._mount, self._mount / "unified"]
        ):
            group = mount / self._paths[controller]
            yield from (
                folder
                for folder in (group, *group.parents)
                if folder.is_relative_to(mount) and folder.is_dir()
            )


def read_text(path: Path) -> str:
    """Return the content of a kernel file; empty if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


NO_LIMIT = 1 << 60
"""In version 1 control groups, a limit above this number is not set."""
KILLED = re.compile(r"^\d+,\d+,(\d+),[^;]*;.*Killed process (\d+) ", re.MULTILINE)
"""Matches the kernel's log of a process killed for lack of memory: time and process id."""
LOG_BYTES = 8192  # a record of /dev/kmsg is never longer


def release_memory() -> None:
    """Return freed memory to the system. glibc keeps freed blocks of up to 32 MiB, many of them
    after packing a model's layers or parsing a large tokenizer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspend garbage collection within a block that creates many objects and few cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Room:
    """Memory that can still be allocated."""

    size: int  # the size in bytes
    bound: str
    """Describes the bound, after "there are 3 GB": "available on this machine", "left in the
    control group /a (limit 4 GB)"."""
    swap: int = 0  # bytes of swap in addition; processes run slowly there, but are not killed


def read_room(root: Path = ROOT) -> Room | None:
    """Return the least available memory among the machine and the control groups; None if
    unknown."""
    return min(_rooms(root), key=lambda room: room.size + room.swap, default=None)


def node_room(node: int, root: Path = ROOT) -> Room | None:
    """Return the available memory of a memory node, for a process bound to it; None if unknown."""
    found = _fields(read_text(root / f"sys/devices/system/node/node{node}/meminfo"))
    if "MemFree" not in found:
        return None
    size = sum(
        found.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    )
    return Room(size, f"available on memory node {node}")


def process_load(pid: int) -> tuple[float, int]:
    """Return a process's CPU time in seconds and resident bytes; `OSError` if it does not exist."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * resource.getpagesize()


def process_room() -> Room | None:
    """Return the lower of this process's own limits (RLIMIT_AS, RLIMIT_DATA), regardless of what it
    has used; None if there is none."""
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
    """Return the machine's memory, or the lowest limit of our groups if that is less; None if
    unknown."""
    machine = _fields(read_text(root / "proc/meminfo")).get("MemTotal")
    return min(
        [*([] if machine is None else [machine]), *(limit for _, limit, _ in _limits(root))],
        default=None,
    )


def _rooms(root: Path) -> Iterator[Room]:
    found = _fields(read_text(root / "proc/meminfo"))
    # the kernel's own estimate (since 3.14), else about that: free pages, and those that are also
    # on disk
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
    """Yield each control group around us with a limit, or memory.high, where the kernel slows it
    down: its folder, that limit, and the memory in use that cannot be reclaimed."""
    groups = GroupFolders(root)
    for controller, names, prefix in (
        ("", ("memory.max", "memory.high", "memory.current"), ""),
        ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"),
    ):
        for folder in groups.folders(controller):
            *given, used = (read_text(folder / name).strip() for name in names)
            stat = dict(
                re.findall(r"^(\S+) (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            )
            limits = [
                int(text)
                for text in (*given, stat.get("hierarchical_memory_limit", ""))
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
    """Return the bytes in each line of a meminfo file, of the machine or a node."""
    return {
        name: int(size) * 1024
        for name, size in re.findall(r"^(?:Node \d+ )?(\S+):\s+(\d+) kB$", text, re.MULTILINE)
    }


@dataclass(frozen=True)
class Kills:
    """The number of processes that the kernel had killed for lack of memory at some moment."""

    groups: tuple[tuple[Path, int], ...]
    """Counts by file of each control group around a process, innermost first."""
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
    """Return a sentence if the kernel killed a process for lack of memory, with the evidence; empty
    if there is none. `before`: the counters when the process was started. Counts of its control
    groups and the log concern this process; the machine's count may concern another one."""
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
    """Return the kernel's log, one record per line; empty if it may not be read."""
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
