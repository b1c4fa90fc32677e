"""The facts that `dovetail doctor` looks at, gathered from this machine."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.launch.console.terminal import counted
from dovetail.launch.files.directory import profile_path, writable_profile_path
from dovetail.launch.machine.binding import memory_refusal
from dovetail.launch.machine.cards import Card, read_cards
from dovetail.launch.machine.others import Load, Others
from dovetail.launch.machine.topology import Topology, read_topology
from dovetail.launch.machine.wheels import Capability, parse_capability
from dovetail.launch.processes.preflight import free_memory_bytes, memory_bytes
from dovetail.protocol.files import cache_folder
from dovetail.protocol.profile import ProfileError, cpu_flags, load_profile
from dovetail.workers.kernels.build import compiler


@dataclass(frozen=True)
class Check:
    """One thing that was checked; `advice` is what to do, empty if nothing."""

    name: str
    ok: bool
    found: str
    advice: str = ""


TIMEOUT_S = 120
WATCHED_S = 0.5
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CPUINFO = Path("/proc/cpuinfo")
SHARED_MEMORY = Path("/dev/shm")
LEAST_FILES = 1024
"""A coordinator takes a file for every client and worker, and may have as many as 1024."""
LEAST_SHARED = 64 << 20


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver describes it."""

    name: str
    capability: Capability
    driver: int | None
    memory_mib: int


@dataclass(frozen=True)
class Facts:
    """The facts about a machine."""

    machine: str
    flags: frozenset[str]
    topology: Topology
    online_cores: int
    memory_refusal: str  # why memory cannot be bound to a node; empty if it can
    inventory: Mapping[str, Any]
    """What `calibration/inventory.py` found in workers; `broken` alone if it could not run."""
    gpus: Sequence[Gpu] = ()
    cards: Sequence[Card] = ()  # the graphics cards of AMD and Intel
    driver_problem: str = ""
    huge_pages: str = "madvise"
    memory_bytes: int = 0
    free_bytes: int = 0
    files: int = LEAST_FILES
    shared_bytes: int = LEAST_SHARED
    environment: Mapping[str, str] = field(default_factory=dict)
    compiler: str = ""
    others: Load | None = None  # CPU time that other programs used while this process was idle
    profile: str = ""
    profile_problem: str = ""
    cache: Path = Path()  # the folder of this user's caches
    caches: Mapping[str, int] = field(default_factory=dict)
    """The bytes on disk of each folder and file in it."""


def gather() -> Facts:
    """Return the facts of this machine."""
    topology, watched = read_topology(), Others()
    time.sleep(WATCHED_S)
    others = watched.load(lambda pid, _: pid == os.getpid())
    profile, problem = _profile_state()
    gpus, driver_problem = read_gpus()
    return Facts(
        machine=platform.machine(),
        flags=cpu_flags(CPUINFO),
        topology=topology,
        online_cores=os.cpu_count() or len(topology.threads),
        memory_refusal=memory_refusal(
            tuple(node.number for node in topology.nodes if node.memory_bytes)[:1]
        )
        if len(topology.nodes) > 1
        else "",
        inventory=_inventory(),
        gpus=gpus,
        cards=read_cards(),
        driver_problem=driver_problem,
        huge_pages=_chosen(HUGE_PAGES),
        memory_bytes=memory_bytes(),
        free_bytes=free_memory_bytes(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free
        if os.access(SHARED_MEMORY, os.W_OK)
        else 0,
        environment=dict(os.environ),
        compiler=" ".join(compiler()),
        others=others,
        profile=profile,
        profile_problem=problem,
        cache=cache_folder(),
        caches=sizes_in(cache_folder()),
    )


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the disk usage of each folder and file in `folder`, by name; those that cannot be
    read, or vanish meanwhile, are left out."""
    if not folder.is_dir():
        return {}
    return {place.name: _size(place) for place in folder.iterdir()}


def _size(place: Path) -> int:
    total = 0
    for path in (place, *place.rglob("*")):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def read_gpus(command: str = "nvidia-smi") -> tuple[list[Gpu], str]:
    """The NVIDIA GPUs, as the driver's own tool describes them, and what is wrong with the driver;
    both empty without that tool."""
    query = [
        command,
        "--query-gpu=name,compute_cap,driver_version,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        result = subprocess.run(
            query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return [], ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"{command} does not answer ({error})"
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        return [], f"{command} fails: {said[-1] if said else f'exit code {result.returncode}'}"
    return [gpu for line in result.stdout.splitlines() if (gpu := _parse_gpu(line)) is not None], ""


def _parse_gpu(line: str) -> Gpu | None:
    name, _, rest = line.partition(",")
    fields = [part.strip() for part in rest.split(",")]
    capability = parse_capability(fields[0])
    if capability is None or len(fields) < 3:
        return None
    driver, memory = fields[1].partition(".")[0], fields[2]
    return Gpu(
        name.strip(),
        capability,
        int(driver) if driver.isdigit() else None,
        int(memory) if memory.isdigit() else 0,
    )


def _inventory() -> dict[str, Any]:
    """Return what torch and the kernels provide; a crash or a missing library is a finding, not an
    error."""
    command = [sys.executable, "-P", "-m", "dovetail.workers.calibration.inventory"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        found: dict[str, Any] = json.loads(result.stdout)
    except subprocess.TimeoutExpired:
        return {"broken": f"no answer within {TIMEOUT_S} s"}
    except json.JSONDecodeError:
        said = result.stderr.strip().splitlines()
        return {"broken": said[-1] if said else f"ended with exit code {result.returncode}"}
    return found


def _chosen(path: Path) -> str:
    """The word in brackets of a file such as "always [madvise] never"; empty if there is none."""
    try:
        return path.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _profile_state() -> tuple[str, str]:
    path = writable_profile_path()
    if path is None:
        return "", f"{profile_path()} cannot be written"
    try:
        entries = len(load_profile(path).entries)
    except ProfileError as error:
        return "", str(error)
    return (
        f"{path}: {counted(entries, 'measured combination') if entries else 'nothing measured yet'}",  # noqa: E501
        "",
    )
