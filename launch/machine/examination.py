"""Checks of this machine: each has a finding and, if needed, a remedy."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from dovetail.launch.console.terminal import counted
from dovetail.launch.machine.cores import lay_out
from dovetail.launch.machine.facts import (
    HUGE_PAGES,
    LEAST_FILES,
    LEAST_SHARED,
    SHARED_MEMORY,
    Check,
    Facts,
)
from dovetail.launch.machine.fit import HUBS, needs_of
from dovetail.launch.machine.gpu_checks import build_of, examine_gpus
from dovetail.launch.machine.others import OTHERS
from dovetail.launch.machine.topology import cpus_for, format_numbers
from dovetail.protocol.settings import Settings

INSTRUCTIONS = (
    "sse4_1",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
)
"""Flags of /proc/cpuinfo that matter here, on x86-64 and aarch64."""
PINNING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""They bind the main thread to a core when torch is imported; later threads inherit that."""
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
        yield from check(facts)


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
    yield Check("kernels", not slow, found, remedy if slow else "")
    advice = (
        f"set target.backend = library, which loses {LOST}; rebuild the kernels ({sys.executable} "
        "-m dovetail.workers.kernels.build) with another compiler"
    )
    found = (
        "; ".join(failures)
        or "products are right, with the same bytes, for every kind of weights and instruction set"
    )
    yield Check("kernels' self-test", not failures, found, advice if failures else "")


def _torch(facts: Facts) -> Iterator[Check]:
    if "broken" in facts.inventory:
        yield Check(
            "torch",
            False,
            f"cannot be imported: {facts.inventory['broken']}",
            "reinstall it: pip install --force-reinstall 'torch>=2.8,<2.14'",
        )
        return
    yield Check(
        "torch",
        True,
        f"{facts.inventory['torch']}, {build_of(facts.inventory)}, uses "
        f"{facts.inventory['cpu_capability']}",
    )


def _cores(facts: Facts) -> Iterator[Check]:
    topology, usable = facts.topology, len(facts.topology.threads)
    layout = lay_out(topology)
    physical = sum(len(node.cores) for node in topology.nodes)
    found = (
        f"{physical} physical, {usable} of "
        f"{counted(facts.online_cores, 'hardware thread')} usable "
        f"({format_numbers(topology.threads)})"
    )
    places = (
        f"target on {format_numbers(layout.target.cores)}, draft on "
        f"{format_numbers(layout.draft.cores)}"
    )
    if layout.shared:
        places += ", which they share"
    alone = layout.shared == layout.target.cores
    advice = "give this process a second core: draft and target share one" if alone else ""
    yield Check("cores", not alone, f"{found}; {places}", advice)
    if topology.quota is not None:
        whole = topology.quota >= 1 and topology.quota == int(topology.quota)
        given = (
            f"{topology.quota:g} CPUs' worth of time, laid out as "
            f"{counted(cpus_for(topology.quota), 'core')}"
        )
        yield Check(
            "CPU quota",
            whole,
            given,
            ""
            if whole
            else "a quota that is not a whole number stops all threads for a part of each period: "
            "make it whole, or use a cpuset",
        )


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
        yield Check(
            "memory nodes",
            False,
            f"{said}; memory cannot be bound ({facts.memory_refusal}): cores only",
            remedy,
        )
    else:
        place = lay_out(facts.topology).target
        several = sum(node.memory_bytes > 0 for node in facts.topology.computing) > 1
        yield Check(
            "memory nodes",
            True,
            f"{said}; memory can be bound; the target uses node {format_numbers(place.nodes)}"
            + (", or all nodes with cores by --target.numa shard" if several else ""),
        )


def _huge_pages(facts: Facts) -> Iterator[Check]:
    fine = facts.huge_pages in ("always", "madvise")
    advice = (
        ""
        if fine
        else f"echo madvise | sudo tee {HUGE_PAGES}: a pass reads all weights, and with small "
        "pages every 4 KB need a TLB entry"
    )
    yield Check(
        "huge pages",
        fine,
        f"transparent huge pages: {facts.huge_pages or 'not in this kernel'}",
        advice,
    )


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
    yield Check(
        "memory",
        fine,
        found,
        ""
        if fine
        else f"a service of the embedded models takes {least / 2**30:.1f} GiB: raise the limit",
    )


def _limits(facts: Facts) -> Iterator[Check]:
    fine = facts.files >= LEAST_FILES
    yield Check(
        "open files",
        fine,
        str(facts.files),
        ""
        if fine
        else f"ulimit -n {4 * LEAST_FILES} (LimitNOFILE= in a unit): a coordinator takes one "
        "for each client",
    )
    fine = facts.shared_bytes >= LEAST_SHARED
    found = (
        f"{facts.shared_bytes / 2**20:.0f} MiB free in {SHARED_MEMORY}"
        if facts.shared_bytes
        else f"{SHARED_MEMORY} cannot be used"
    )
    yield Check(
        "shared memory",
        fine,
        found,
        "" if fine else "torch may ask for it: --shm-size=1g for a container",
    )


def _environment(facts: Facts) -> Iterator[Check]:
    there = facts.environment
    disturbing = [name for name in (*PINNING, *CAPS) if there.get(name)]
    disturbing += [name for name, value in SPINNING.items() if there.get(name, "").lower() == value]
    preloaded = [
        name for name in there.get("LD_PRELOAD", "").split(":") if "iomp" in name or "mkl" in name
    ]
    values = {
        **{name: there[name] for name in disturbing},
        **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
    }
    found, names = ", ".join(f"{name}={value}" for name, value in values.items()), " ".join(values)
    advice = (
        f"unset {names}: dovetail binds and counts threads itself, and what caps instructions "
        "or makes threads spin slows it down"
        if names
        else ""
    )
    yield Check(
        "environment",
        not names,
        found or "no variable that binds, caps or spins torch's threads",
        advice,
    )


def _profile(facts: Facts) -> Iterator[Check]:
    advice = (
        facts.profile_problem
        and "measurements are not saved: make that folder writable, or set XDG_CACHE_HOME to "
        "one that is; remove a damaged file"
    )
    yield Check(
        "profile file", not facts.profile_problem, facts.profile_problem or facts.profile, advice
    )


def _caches(facts: Facts) -> Iterator[Check]:
    sizes = sorted(facts.caches.items(), key=lambda one: (-one[1], one[0]))
    parts = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes)
    kept = f"{facts.cache}: {parts}; any of it may be removed and is rebuilt when needed"
    yield Check("caches", True, kept if sizes else f"{facts.cache}: empty")


CHECKS: Sequence[Callable[[Facts], Iterable[Check]]] = (
    _processor,
    _kernels,
    _torch,
    examine_gpus,
    _cores,
    _memory_nodes,
    _huge_pages,
    _others,
    _memory,
    _limits,
    _environment,
    _profile,
    _caches,
)
