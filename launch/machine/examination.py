"""The facts and checks of `dovetail doctor`, each with a finding and, if needed, a remedy. Which
build of PyTorch has code for which GPU, and the driver that it needs: from RELEASE.md of
pytorch/pytorch (releases 2.8 to 2.13, x86-64) and its lists of ROCm and XPU wheels. Only builds for
CUDA 12.6 have code for Maxwell and Pascal, and from 2.11 for Volta."""

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dovetail.launch.cli import DISTRIBUTION, NOT_INSTALLED, installed_version
from dovetail.launch.console.terminal import counted
from dovetail.launch.files.directory import profile_path, writable_profile_path
from dovetail.launch.machine.cards import Card, read_cards
from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.fit import HUBS, needs_of
from dovetail.launch.machine.others import OTHERS, Load, Others
from dovetail.launch.machine.topology import (
    Topology,
    cpus_for,
    format_numbers,
    memory_refusal,
    read_topology,
)
from dovetail.launch.processes.preflight import free_memory_bytes, memory_bytes
from dovetail.protocol.files import cache_folder
from dovetail.protocol.profile import ProfileError, cpu_flags, load_profile
from dovetail.protocol.settings import Settings
from dovetail.workers.kernels.build import compiler

Capability = tuple[int, int]


@dataclass(frozen=True)
class Check:
    """One check; `advice` is the remedy if it is not `ok`."""

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
"""A coordinator needs an open file for every client and worker, up to 1024."""
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
    """The result of `calibration/inventory.py` in workers; only `broken` if it could not run."""
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
    rival: str = ""
    """The version of an installed distribution called dovetail, which has our import name."""
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
    nodes = tuple(node.number for node in topology.nodes if node.memory_bytes)
    shared = os.access(SHARED_MEMORY, os.W_OK)
    return Facts(
        machine=platform.machine(),
        flags=cpu_flags(CPUINFO),
        topology=topology,
        online_cores=os.cpu_count() or len(topology.threads),
        memory_refusal=memory_refusal(nodes[:1]) if len(topology.nodes) > 1 else "",
        inventory=_inventory(),
        gpus=gpus,
        cards=read_cards(),
        driver_problem=driver_problem,
        huge_pages=_chosen(HUGE_PAGES),
        memory_bytes=memory_bytes(),
        free_bytes=free_memory_bytes(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_bytes=shutil.disk_usage(SHARED_MEMORY).free if shared else 0,
        environment=dict(os.environ),
        compiler=" ".join(compiler()),
        others=others,
        rival=_rival(),
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
    """The NVIDIA GPUs reported by the driver's tool, and any problem of the driver; both empty
    without that tool."""
    wanted = "--query-gpu=name,compute_cap,driver_version,memory.total"
    try:
        result = _run([command, wanted, "--format=csv,noheader,nounits"])
    except FileNotFoundError:
        return [], ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"{command} does not answer ({error})"
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        return [], f"{command} fails: {said[-1] if said else f'exit code {result.returncode}'}"
    return [gpu for line in result.stdout.splitlines() if (gpu := _parse_gpu(line)) is not None], ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def _parse_gpu(line: str) -> Gpu | None:
    name, _, rest = line.partition(",")
    fields = [part.strip() for part in rest.split(",")]
    capability = parse_capability(fields[0])
    if capability is None or len(fields) < 3:
        return None
    driver, memory = fields[1].partition(".")[0], fields[2]
    major, mib = int(driver) if driver.isdigit() else None, int(memory) if memory.isdigit() else 0
    return Gpu(name.strip(), capability, major, mib)


def _inventory() -> dict[str, Any]:
    """Return what torch and the kernels provide; a crash or a missing library is a finding, not an
    error."""
    command = [sys.executable, "-P", "-m", "dovetail.workers.calibration.inventory"]
    try:
        result = _run(command)
        found: dict[str, Any] = json.loads(result.stdout)
    except subprocess.TimeoutExpired:
        return {"broken": f"no answer within {TIMEOUT_S} s"}
    except json.JSONDecodeError:
        said = result.stderr.strip().splitlines()
        return {"broken": said[-1] if said else f"ended with exit code {result.returncode}"}
    return found


def _chosen(path: Path) -> str:
    """The word in brackets in a file such as "always [madvise] never"; empty if there is none."""
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
    found = counted(entries, "measured combination") if entries else "nothing measured yet"
    return f"{path}: {found}", ""


MAXWELL, TURING, BLACKWELL = (5, 0), (7, 5), (10, 0)
"""CUDA 12.6 builds: Maxwell to Hopper (9.0); 13.0: Turing on; Blackwell needs 13.0, or 12.8."""
RELEASES = {
    "cu126": ((2, 8), (2, 13)),
    "cu128": ((2, 8), (2, 11)),
    "cu130": ((2, 9), (2, 13)),
    "rocm6.4": ((2, 8), (2, 9)),
    "rocm7.1": ((2, 10), (2, 13)),
    "xpu": ((2, 8), (2, 13)),
}
"""Build -> the first and the last supported release for which it is published."""
LEAST_DRIVER = {12: 525, 13: 580}
"""CUDA's major version -> least driver (NVIDIA, CUDA Compatibility, minor versions)."""
ROCM = ("rocm6.4", "rocm7.1")  # the builds for AMD's GPUs
LIKE_GFX1030 = ("gfx1031", "gfx1032", "gfx1033", "gfx1034", "gfx1035", "gfx1036")
"""AMD chips without code in any build, with gfx1030's instructions (LLVM, AMDGPU Backend)."""
INDEX = "https://download.pytorch.org/whl"


def has_code_for(architectures: Sequence[str], capability: Capability) -> bool:
    """Return whether a build with these architectures runs on a GPU: machine code for the same
    major version and no later minor one, or PTX of an earlier one."""
    return any(_fits(name, capability) for name in architectures)


def _fits(architecture: str, capability: Capability) -> bool:
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
    if found is None:
        return False
    code = (int(found[2]), int(found[3]))
    if found[4]:  # for one architecture only, such as sm_90a
        return code == capability
    return code <= capability and (found[1] == "compute" or code[0] == capability[0])


def build_for(capability: Capability, *, release: str, driver: int | None) -> str:
    """Return the build for a GPU and its driver, such as cu126; empty if there is none. `release`:
    of torch, such as 2.13.0; `driver`: its major version, or None."""
    if capability < MAXWELL or (driver is not None and driver < LEAST_DRIVER[12]):
        return ""
    if capability < TURING:
        return "cu126"
    able = driver is None or driver >= LEAST_DRIVER[13]
    newest = able and _release(release) >= RELEASES["cu130"][0]
    return "cu130" if newest else "cu128" if capability >= BLACKWELL else "cu126"


def fits(build: str, release: str) -> bool:
    """Return whether a build is published for a release of torch, such as 2.13.0."""
    first, last = RELEASES[build]
    return first <= _release(release) <= last


def install_command(build: str, *, release: str) -> str:
    """Return the command that installs a build: of the installed release if it exists, else of any
    that fits."""
    first, last = RELEASES[build]
    wanted = f"torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    if fits(build, release):
        wanted = f"torch=={release.partition('+')[0]}"
    return f"pip install --force-reinstall '{wanted}' --index-url {INDEX}/{build}"


def driver_for(cuda: str) -> int | None:
    """The minimum driver for a build for this version of CUDA, such as 13.0; None if unknown."""
    major = cuda.partition(".")[0]
    return LEAST_DRIVER.get(int(major)) if major.isdigit() else None


def parse_capability(text: str) -> Capability | None:
    """(8, 6) of "8.6"."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text.strip())
    return None if found is None else (int(found[1]), int(found[2]))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:2])


OVERRIDE = (
    "start dovetail with HSA_OVERRIDE_GFX_VERSION=10.3.0, so that it runs the code for gfx1030 "
    "(AMD does not support that)"
)
ACCESS = {
    "AMD": "let this user open /dev/kfd and /dev/dri (groups render and video; in a container "
    "--device /dev/kfd --device /dev/dri), and load the driver amdgpu",
    "Intel": "install Intel's compute runtime (libze-intel-gpu1, or intel-level-zero-gpu) and let "
    "this user open /dev/dri (group render; in a container --device /dev/dri)",
}


def build_of(inventory: Mapping[str, Any]) -> str:
    """Return the purpose of a build of torch, in words."""
    named = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel's XPU"}
    return next(
        (f"for {name} {inventory[key]}" for key, name in named.items() if inventory[key]),
        "for CPUs",
    )


def examine_gpus(facts: Facts) -> Iterator[Check]:
    if facts.driver_problem:
        remedy = "reinstall the NVIDIA driver, or restart after an update of it; in a container "
        remedy += "pass the GPU on (--gpus all)"
        yield Check("GPU driver", False, facts.driver_problem, remedy)
    for index, gpu in enumerate(facts.gpus):
        yield _gpu(facts, index, gpu)
    for index, products in enumerate(facts.inventory.get("products", ())):
        yield _products(index, products)
    for index, card in enumerate(facts.cards):
        yield _card(facts, f"{card.maker} card {index}", card)
    yield from _unproved(facts)
    if not (facts.gpus or facts.cards or facts.driver_problem or facts.inventory.get("found")):
        yield Check("GPU", True, "none: target and draft share the CPU")


def _unproved(facts: Facts) -> Iterator[Check]:
    for device in facts.inventory.get("found", ()):
        if device["unproved"]:
            said = f"torch finds {device['chip']}; {device['unproved']}"
            yield Check(device["name"], True, f"{said}, and checks its results at each start")


def _card(facts: Facts, name: str, card: Card) -> Check:
    memory = f", {card.memory_bytes >> 20} MiB" if card.memory_bytes else ""
    target = f" ({card.target})" if card.target else ""
    found = f"{card.name}{target}{memory}, driver {card.driver or 'none'}"
    if "broken" in facts.inventory:
        return Check(name, True, found)
    release, used = str(facts.inventory["torch"]), facts.inventory["found"]
    own = "hip" if card.maker == "AMD" else "xpu"
    if not facts.inventory[own]:
        if card.integrated or facts.gpus:
            said = "a part of the processor" if card.integrated else "there is an NVIDIA GPU, too"
            alone = f"this build of torch, {build_of(facts.inventory)}, does not use it"
            return Check(name, True, f"{found}; {said}: {alone}")
        said = f"{found}; this build of torch is {build_of(facts.inventory)} and cannot use it"
        return Check(name, False, said, _install(card, release))
    if not used:
        return Check(name, False, f"{found}; torch {release} does not find it", ACCESS[card.maker])
    have = facts.inventory["architectures"]
    if card.target and card.target not in have:
        remedy = f"{OVERRIDE}, or " if card.target in LIKE_GFX1030 else ""
        remedy += "use device cpu"
        said = f"torch {release} has no code for {card.target}, only for {' '.join(have)}"
        return Check(name, False, f"{found}; {said}", remedy)
    return Check(name, True, f"{found}; torch {release} finds it")


def _install(card: Card, release: str) -> str:
    if card.maker == "Intel":
        return install_command("xpu", release=release)
    of = next(build for build in ROCM if fits(build, release))
    like = f"; then {OVERRIDE}" if card.target in LIKE_GFX1030 else ""
    return f"{install_command(of, release=release)}{like}"


def _products(index: int, products: Mapping[str, Any]) -> Check:
    name = f"GPU {index}'s products"
    if missing := products["missing"]:
        lost = "torch's products alone are used, which widen 16-bit weights in memory"
        remedy = "fix it for speed; everything works without it"
        return Check(name, False, f"{missing}; {lost}", remedy)
    return Check(name, True, "; ".join(products["said"]))


def _gpu(facts: Facts, index: int, gpu: Gpu) -> Check:
    release, cuda = str(facts.inventory.get("torch", "")), str(facts.inventory.get("cuda", ""))
    major, minor = gpu.capability
    found = f"{gpu.name}, compute capability {major}.{minor}, {gpu.memory_mib} MiB"
    found += f", driver {gpu.driver or 'unknown'}"
    build = build_for(gpu.capability, release=release, driver=gpu.driver)
    build = build if facts.machine == "x86_64" else ""
    remedy = "no build of torch that dovetail runs with has code for this card: use device cpu"
    remedy = install_command(build, release=release) if build else remedy
    least, wrong = driver_for(cuda), ""
    if "broken" in facts.inventory:
        return Check(f"GPU {index}", True, found)
    if not cuda:
        wrong = "this build of torch is for CPUs and cannot use it"
    elif not has_code_for(facts.inventory["architectures"], gpu.capability):
        have = " ".join(facts.inventory["architectures"])
        wrong = f"torch {release} has no code for it, only for {have}"
    elif least is not None and gpu.driver is not None and gpu.driver < least:
        wrong = f"torch {release} needs driver {least} or newer"
        other = f", or use another build: {remedy}" if build else ""
        remedy = f"update the driver to {least} or newer{other}"
    return Check(f"GPU {index}", not wrong, f"{found}; {wrong or 'torch has code for it'}", remedy)


INSTRUCTIONS = (
    *("sse4_1", "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni"),
    *("avx512_bf16", "amx_tile", "asimd", "asimddp", "i8mm", "bf16"),
)
"""Relevant flags of /proc/cpuinfo, on x86-64 and aarch64."""
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""They bind the main thread to a core when torch is imported, which later threads inherit."""
CAPS = (
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "FBGEMM_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
)
SPINNING = {"OMP_WAIT_POLICY": "active", "KMP_BLOCKTIME": "infinite"}
LOST = (
    "int8, int4 and file weights, half weights of BF16 checkpoints, keys and values in 16 bits, "
    "targets on a GPU, a third of the speed, and that a token has the same bytes in every pass and "
    "on every processor"
)


def examine(facts: Facts) -> Iterator[Check]:
    for check in CHECKS:
        for found in check(facts):
            yield replace(found, advice="") if found.ok else found


def _rival() -> str:
    """Return `Facts.rival`; empty: none."""
    ours, found = installed_version(), installed_version("dovetail")
    return "" if NOT_INSTALLED in (ours, found) else found


def _package(facts: Facts) -> Iterator[Check]:
    if facts.rival:
        found = f"the distribution dovetail {facts.rival} is installed as well as {DISTRIBUTION}"
        remedy = f"both have the folder dovetail: pip uninstall dovetail {DISTRIBUTION}, then "
        yield Check("package", False, found, f"{remedy}pip install {DISTRIBUTION}")


def _processor(facts: Facts) -> Iterator[Check]:
    found = " ".join(name for name in INSTRUCTIONS if name in facts.flags) or "none that matter"
    yield Check("processor", True, f"{facts.machine}: {found}")


def _kernels(facts: Facts) -> Iterator[Check]:
    if "broken" in facts.inventory:
        return
    missing, failures = facts.inventory["kernels_missing"], facts.inventory["kernels_failures"]
    if missing:
        install = "" if facts.compiler else "install a C++ compiler (apt-get install g++), then "
        remedy = (
            f"{install}build them: {sys.executable} -m dovetail.workers.kernels.build, or "
            "reinstall dovetail"
        )
        yield Check("kernels", False, f"{missing.partition(';')[0]}; lost: {LOST}", remedy)
        return
    used, slow = facts.inventory["kernels"], ":" in facts.inventory["kernels"]
    found = f"{used}; this machine can use {', '.join(facts.inventory['isas'])}"
    remedy = "use a newer machine; a virtual machine needs the host's processor (qemu: -cpu host)"
    yield Check("kernels", not slow, found, remedy)
    advice = (
        f"set target.backend = library, which loses {LOST}; rebuild the kernels ({sys.executable} "
        "-m dovetail.workers.kernels.build) with another compiler"
    )
    right = "products are right, with the same bytes, for every kind of weights and instruction set"
    yield Check("kernels' self-test", not failures, "; ".join(failures) or right, advice)


def _torch(facts: Facts) -> Iterator[Check]:
    if "broken" in facts.inventory:
        remedy = "reinstall it: pip install --force-reinstall 'torch>=2.8,<2.14'"
        yield Check("torch", False, f"cannot be imported: {facts.inventory['broken']}", remedy)
        return
    uses = f"{build_of(facts.inventory)}, uses {facts.inventory['cpu_capability']}"
    yield Check("torch", True, f"{facts.inventory['torch']}, {uses}")


def _cores(facts: Facts) -> Iterator[Check]:
    topology, usable = facts.topology, len(facts.topology.threads)
    layout = lay_out(topology)
    physical = sum(len(node.cores) for node in topology.nodes)
    threads = f"{counted(facts.online_cores, 'hardware thread')} usable"
    found = f"{physical} physical, {usable} of {threads} ({format_numbers(topology.threads)})"
    target, draft = format_numbers(layout.target.cores), format_numbers(layout.draft.cores)
    places = f"target on {target}, draft on {draft}"
    if layout.shared:
        places += ", which they share"
    alone = layout.shared == layout.target.cores
    advice = "give this process a second core: draft and target share one"
    yield Check("cores", not alone, f"{found}; {places}", advice)
    if topology.quota is not None:
        whole = topology.quota >= 1 and topology.quota == int(topology.quota)
        cores = counted(cpus_for(topology.quota), "core")
        given = f"{topology.quota:g} CPUs' worth of time, laid out as {cores}"
        advice = "a quota that is not whole stops all threads for a part of each period: "
        yield Check("CPU quota", whole, given, f"{advice}make it whole, or use a cpuset")


def _memory_nodes(facts: Facts) -> Iterator[Check]:
    nodes = facts.topology.nodes
    said = "; ".join(
        f"node {n.number}: {counted(sum(map(len, n.cores)), 'thread')}, "
        f"{n.memory_bytes / 2**30:.1f} GiB"
        for n in nodes
    )
    if len(nodes) < 2:
        yield Check("memory nodes", True, f"{said}; one node: only cores are bound")
    elif facts.memory_refusal:
        remedy = (
            "let this container bind memory (--cap-add SYS_NICE), or start it bound from "
            "outside (--cpuset-cpus and --cpuset-mems, or numactl)"
        )
        found = f"{said}; memory cannot be bound ({facts.memory_refusal}): cores only"
        yield Check("memory nodes", False, found, remedy)
    else:
        place = lay_out(facts.topology).target
        several = sum(node.memory_bytes > 0 for node in facts.topology.computing) > 1
        more = ", or all nodes with cores by --target.numa shard" if several else ""
        uses = f"the target uses node {format_numbers(place.nodes)}{more}"
        yield Check("memory nodes", True, f"{said}; memory can be bound; {uses}")


def _huge_pages(facts: Facts) -> Iterator[Check]:
    fine = facts.huge_pages in ("always", "madvise")
    found = f"transparent huge pages: {facts.huge_pages or 'not in this kernel'}"
    why = "a pass reads all weights, and with small pages every 4 KB need a TLB entry"
    yield Check("huge pages", fine, found, f"echo madvise | sudo tee {HUGE_PAGES}: {why}")


def _others(facts: Facts) -> Iterator[Check]:
    if (load := facts.others) is not None:
        busy = "; measurements are valid only under the same load"
        yield Check("other programs", True, load.words + (busy if load.share > OTHERS else ""))


def _memory(facts: Facts) -> Iterator[Check]:
    least = sum(need.size for need in needs_of(Settings(), (*HUBS, "target", "draft")))
    fine = facts.memory_bytes >= least
    found = (
        f"{facts.memory_bytes / 2**30:.1f} GiB for this process by machine and control "
        f"group, {facts.free_bytes / 2**30:.1f} GiB free"
    )
    advice = f"a service of the embedded models takes {least / 2**30:.1f} GiB: raise the limit"
    yield Check("memory", fine, found, advice)


def _limits(facts: Facts) -> Iterator[Check]:
    raised = f"ulimit -n {4 * LEAST_FILES} (LimitNOFILE= in a unit)"
    advice = f"{raised}: a coordinator takes one for each client"
    yield Check("open files", facts.files >= LEAST_FILES, str(facts.files), advice)
    there = f"{facts.shared_bytes / 2**20:.0f} MiB free in {SHARED_MEMORY}"
    found = there if facts.shared_bytes else f"{SHARED_MEMORY} cannot be used"
    advice = "torch may ask for it: --shm-size=1g for a container"
    yield Check("shared memory", facts.shared_bytes >= LEAST_SHARED, found, advice)


def _environment(facts: Facts) -> Iterator[Check]:
    there = facts.environment
    disturbing = [name for name in (*PINNING, *CAPS) if there.get(name)]
    disturbing += [name for name, value in SPINNING.items() if there.get(name, "").lower() == value]
    libraries = there.get("LD_PRELOAD", "").split(":")
    preloaded = [name for name in libraries if "iomp" in name or "mkl" in name]
    values = {name: there[name] for name in disturbing}
    values |= {"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}
    found, names = ", ".join(f"{name}={value}" for name, value in values.items()), " ".join(values)
    advice = (
        f"unset {names}: dovetail binds and counts threads itself, and what caps instructions "
        "or makes threads spin slows it down"
    )
    found = found or "no variable that binds, caps or spins torch's threads"
    yield Check("environment", not names, found, advice)


def _profile(facts: Facts) -> Iterator[Check]:
    problem = facts.profile_problem
    advice = "measurements are not saved: make that folder writable, or set XDG_CACHE_HOME to one "
    advice += "that is; remove a damaged file"
    yield Check("profile file", not problem, problem or facts.profile, advice)


def _caches(facts: Facts) -> Iterator[Check]:
    sizes = sorted(facts.caches.items(), key=lambda one: (-one[1], one[0]))
    parts = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes)
    kept = f"{facts.cache}: {parts}; any of these may be removed and will be rebuilt when needed"
    yield Check("caches", True, kept if sizes else f"{facts.cache}: empty")


CHECKS: Sequence[Callable[[Facts], Iterable[Check]]] = (
    *(
        _package,
        _processor,
        _kernels,
        _torch,
        examine_gpus,
        _cores,
        _memory_nodes,
        _huge_pages,
        _others,
    ),
    *(_memory, _limits, _environment, _profile, _caches),
)
